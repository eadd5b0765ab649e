# Everything that a newcomer, a developer and CI run. Needs only make and a Python >= 3.11 that has pip and venv.
# Each target makes the virtual environment and installs what it needs, once: a second run starts at once.
#
#   make demo EXTRAS=cuda13        install with extras of pyproject.toml, here for an NVIDIA GPU
#   make test PYTHON=python3.12 VENV=.venv312 JAX=jax==0.11.2 TESTS=tests/kernels
#   make test PYTEST_FLAGS="-x -k decode"

VENV ?= .venv
PYTHON ?=
EXTRAS ?=
# A pip requirement that overrides the JAX that pip would choose.
JAX ?=
# The default is a version for which some machines hold a small CPU build; elsewhere PyPI's wheel brings CUDA, several GB.
# Have pip look where CPU builds are (PIP_EXTRA_INDEX_URL) or name another version: TORCH=torch==...
TORCH ?= torch==2.13.0
TESTS ?=
# Processes that share the tests, a file each at a time. Most of the time is compiling, which takes one core and up to 4 GB of memory a process.
TEST_WORKERS ?= 2
PYTEST_FLAGS ?=
# pip draws its progress bars for people and is quiet for CI.
PIP_FLAGS ?= $(if $(CI),--quiet,)

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check $(PIP_FLAGS)
comma := ,
space := $(subst ,, )
# $(call project,test dev) is the requirement ".[test,dev]", with EXTRAS added.
extras_of = $(strip $(1) $(subst $(comma),$(space),$(EXTRAS)))
project = .$(if $(call extras_of,$(1)),[$(subst $(space),$(comma),$(call extras_of,$(1)))])

.PHONY: help demo test test-slow parity lint format types clean
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

help:
	@echo "make demo       install, get the demo model (93 MB, once) and watch it complete a sentence and answer a question"
	@echo "make test       install and run the tests"
	@echo "make test-slow  the tests that take minutes or GiBs"
	@echo "make parity     install torch and transformers and compare with them live"
	@echo "make lint       ruff: rules and formatting         make format  apply both"
	@echo "make types      mypy"
	@echo "make clean      remove $(VENV) and caches (a downloaded model stays in your cache folder)"

demo: $(VENV)/.stamp-run
	@$(BIN)/pagedjax demo

test: $(VENV)/.stamp-test
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile $(PYTEST_FLAGS) $(TESTS)

test-slow: $(VENV)/.stamp-test
	$(BIN)/python -m pytest --slow -m slow $(PYTEST_FLAGS) $(TESTS)

parity: $(VENV)/.stamp-parity
	$(BIN)/python -m pytest --parity -m parity $(PYTEST_FLAGS) $(TESTS)

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.stamp-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.stamp-dev
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -not -path './.git/*' -exec rm -rf {} +

# A name on PATH may be a shim that fails, so each candidate is run.
$(VENV)/.stamp-venv:
	@set -e; chosen=; \
	for candidate in $(if $(PYTHON),"$(PYTHON)",python3 python3.13 python3.12 python3.11); do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then chosen="$$candidate"; break; fi; \
	done; \
	if [ -z "$$chosen" ]; then \
	  echo "pagedjax needs Python 3.11 or newer: $(if $(PYTHON),'$(PYTHON)' is not one,found none as python3$(comma) python3.13$(comma) python3.12 or python3.11). Say make PYTHON=/path/to/python." >&2; exit 1; \
	fi; \
	echo "--- making $(VENV) with $$chosen ($$("$$chosen" --version))"; \
	"$$chosen" -m venv $(VENV)
	@touch $@

$(VENV)/.stamp-run: $(VENV)/.stamp-venv pyproject.toml
	@echo "--- installing pagedjax into $(VENV) (some 600 MB, once)"
	$(PIP) -e "$(call project,)" $(JAX)
	@touch $@

$(VENV)/.stamp-test: $(VENV)/.stamp-venv pyproject.toml
	@echo "--- installing pagedjax and what its tests need into $(VENV) (some 600 MB, once)"
	$(PIP) -e "$(call project,test)" $(JAX)
	@touch $@ $(VENV)/.stamp-run

$(VENV)/.stamp-dev: $(VENV)/.stamp-venv pyproject.toml
	@echo "--- installing pagedjax and its development tools into $(VENV)"
	$(PIP) -e "$(call project,test dev)" $(JAX)
	@touch $@ $(VENV)/.stamp-test $(VENV)/.stamp-run

# torch goes first: on its own, so that the parity extra's range cannot choose another build.
$(VENV)/.stamp-parity: $(VENV)/.stamp-test pyproject.toml
	@echo "--- installing torch ($(TORCH)) and transformers into $(VENV)"
	$(PIP) "$(TORCH)"
	$(PIP) -e "$(call project,test parity)" $(JAX)
	@touch $@
