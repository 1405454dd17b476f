"""A folder for a run's temporary files: Ray's session and the sockets of its workers."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import psutil

_PREFIX = "refit-"
_IN_USE = "in-use"
# Ray's own processes look for their parent about once a second.
_LAST_WRITES_S = 15.0


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder that goes with the block. Those of runs that were killed go first.

    Whoever uses a folder holds a lock on a file in it, which ends with its process, however that ends.
    """
    _sweep(Path(tempfile.gettempdir()))
    # A short name: sockets lie in it, whose paths have 107 bytes at most.
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        with (folder / f".{_IN_USE}").open("w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Nobody sees the file unlocked.
            Path(lock.name).rename(folder / _IN_USE)
            yield folder
    finally:
        _remove(folder)


def _sweep(parent: Path) -> None:
    for marker in parent.glob(f"{_PREFIX}*/{_IN_USE}"):
        with contextlib.suppress(OSError), marker.open("r+", encoding="utf-8") as lock:
            if _is_free(lock):
                shutil.rmtree(marker.parent, ignore_errors=True)


def _is_free(lock: TextIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove(folder: Path) -> None:
    """Ray's processes end in the background; one that has only just started makes the folder anew."""
    end = time.monotonic() + _LAST_WRITES_S
    while (folder.exists() or _is_wanted(folder)) and time.monotonic() < end:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


def _is_wanted(folder: Path) -> bool:
    """Whether a process was told to work in the folder."""
    return any(
        str(folder) in argument
        for process in psutil.process_iter(["cmdline"])
        for argument in process.info["cmdline"] or ()
    )
