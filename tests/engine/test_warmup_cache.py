"""Compiled steps outlive the process: the second warm-up reads them from disk."""

import os
import pathlib
import subprocess
import sys
import textwrap

ROOT = pathlib.Path(__file__).parents[2]
CODE = """
    import jax
    from jax import monitoring
    from pagedjax import Engine, EngineConfig, init_params
    from tests.helpers import variant

    seen = []
    monitoring.register_event_listener(lambda event, **_: seen.append(event))
    model = variant(num_layers=1)
    params = init_params(model, jax.random.key(0))
    sizes = dict(row_buckets=(4,), mixed_row_buckets=(4,), token_buckets=(16,), width_buckets=(16,))
    engine = Engine(params, model, EngineConfig(max_num_seqs=4, num_kv_blocks=20, token_budget=16, **sizes))
    seen.clear()
    engine.warmup(use_tqdm=False)
    print(engine.buckets.num_executables, engine.stats().num_compilations, seen.count("/jax/compilation_cache/cache_hits"))
"""


def test_the_second_start_reads_what_the_first_compiled(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    environment["PAGEDJAX_CACHE"] = str(tmp_path)

    def start():
        ran = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(CODE)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        return [int(word) for word in ran.stdout.split()]

    assert start() == [4, 4, 0]  # a mixed step, a window, log-probabilities of prompts, and tables
    assert any((tmp_path / "xla").iterdir())
    executables, traced, hits = start()
    assert (executables, traced) == (4, 4)
    assert hits >= 4
