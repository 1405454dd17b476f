"""The examples of the README run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rank_pool import free_port

README = Path(__file__).parents[1] / "README.md"


def example(first_line: str) -> str:
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), flags=re.MULTILINE | re.DOTALL)
    (found,) = (block for block in blocks if block.startswith(first_line))
    return found


def run(script: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, script],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture
def finished():
    """Output of started processes, which end with the test."""
    started: list[subprocess.Popen[str]] = []

    def outputs(*processes: subprocess.Popen[str]) -> list[str]:
        started.extend(processes)
        found = [process.communicate(timeout=120)[0] for process in processes]
        assert [process.returncode for process in processes] == [0] * len(processes), found
        return found

    yield outputs
    for process in started:
        process.kill()


def test_the_example_of_reshard_runs_under_torchruns_variables(tmp_path, finished):
    script = tmp_path / "example.py"
    script.write_text(example("# torchrun --nproc-per-node 4"))
    place = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    outputs = finished(*(run(script, RANK=str(rank), LOCAL_RANK=str(rank), **place) for rank in range(4)))
    assert [output.strip() for output in outputs] == ["", *(f"rank {rank} has its columns" for rank in (1, 2, 3))]


def test_the_example_of_planning_prints_what_it_says(tmp_path, finished):
    text = example("# What would it cost?")
    script = tmp_path / "example.py"
    script.write_text(text)
    (output,) = finished(run(script))
    assert output.splitlines() == re.findall(r"print\(.*\)  # (.*)", text)
