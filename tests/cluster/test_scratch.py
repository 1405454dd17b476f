"""Temporary files go with their run, or with the next one where it was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from refit_transport.cluster.scratch import scratch_folder

RUN = """
import time
from refit_transport.cluster.scratch import scratch_folder
with scratch_folder() as folder:
    (folder / "session").mkdir()
    print(folder, flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def start() -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen([sys.executable, "-c", RUN], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def end(process: subprocess.Popen[str]) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()


def test_the_folder_goes_with_the_block(tmp_path: Path) -> None:
    def fail() -> None:
        with scratch_folder() as folder:
            (folder / "file").touch()
            assert folder.parent == tmp_path
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_runs_folder_goes_with_the_next_run_and_a_living_ones_stays(tmp_path: Path) -> None:
    (tmp_path / "refit-somebody-elses").mkdir()
    (killed, left), (living, used) = start(), start()
    try:
        end(killed)
        assert (left / "session").is_dir()
        with scratch_folder():
            assert not left.exists()
            assert (used / "session").is_dir()
    finally:
        end(living)
    with scratch_folder():
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["refit-somebody-elses"]


LATE = """
import pathlib, sys, time
time.sleep(2)
pathlib.Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
"""


def test_a_process_that_was_only_starting_leaves_nothing(tmp_path: Path) -> None:
    with scratch_folder() as folder:
        late = subprocess.Popen([sys.executable, "-c", LATE, str(folder / "session" / "logs")])
    assert late.wait(timeout=20.0) == 0
    assert list(tmp_path.iterdir()) == []
