"""The support matrix lists what tests ran, with the results that they had."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import support_matrix

ROOT = Path(__file__).parents[1]
CONFTEST = "from support_records import pytest_addoption, pytest_runtest_makereport, support_record\n"
TESTS = """
import pytest
from support_records import listed, supports

ROW = {"architecture": "Qwen3", "source": "TP2", "target": "TP1"}

def test_works(support_record):
    support_record(**ROW)
    support_record(**ROW, shard_to_shard=0.99999, proof="bit-exact")

def test_fails(support_record):
    support_record(**ROW | {"target": "TP16"})
    raise AssertionError

@pytest.mark.nightly
@pytest.mark.parametrize("target", ["TP4", "TP2"])
def test_full_size(support_record, target):
    support_record(**ROW | {"target": target}, level="planned", shard_to_shard=1, proof="complete")

def test_skips(support_record):
    support_record(**ROW)
    pytest.skip("not here")

@pytest.fixture
def machine():
    raise AssertionError

@listed(supports(**ROW | {"source": "PP2"}), supports(**ROW | {"source": "PP4"}))
def test_never_begins(machine, support_record):
    support_record(shard_to_shard=1, proof="bit-exact")

@pytest.mark.parametrize("target", [pytest.param("TP2", marks=supports(**ROW | {"source": "EP2"}))])
def test_marked(support_record, target):
    support_record(shard_to_shard=1, proof="bit-exact")

def test_records_nothing(support_record):
    pass

def test_a_share_is_no_percentage(support_record):
    with pytest.raises(ValueError, match="got 95"):
        support_record(**ROW, shard_to_shard=95)
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    root = tmp_path_factory.mktemp("project")
    (root / "conftest.py").write_text(CONFTEST)
    (root / "test_rows.py").write_text(TESTS)
    (root / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT / 'tests'}\nmarkers =\n  nightly\n  supports\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--support-records", "records"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert "1 failed, 6 passed, 1 skipped, 1 error" in done.stdout, done.stdout + done.stderr
    return root


def test_the_page_has_each_result_and_nothing_else(recorded):
    page = support_matrix.render(support_matrix.read_records(recorded / "records", root=recorded))
    rows = [line for line in page.splitlines() if line.startswith("| Qwen3 ")]
    assert rows == [
        "| Qwen3 | EP2 | TP1 | 100 % | bit-exact | CI | passed |",
        "| Qwen3 | PP2 | TP1 |  |  | CI | **failed** |",
        "| Qwen3 | PP4 | TP1 |  |  | CI | **failed** |",
        "| Qwen3 | TP2 | TP1 | 99.99 % | bit-exact | CI | passed |",
        "| Qwen3 | TP2 | TP16 |  |  | CI | **failed** |",
        "| Qwen3 | TP2 | TP2 | 100 % | complete | nightly | passed |",
        "| Qwen3 | TP2 | TP4 | 100 % | complete | nightly | passed |",
    ]
    assert page.index("## Moved") < page.index(rows[0]) < page.index("## Planned at full size") < page.index(rows[5])


def test_a_record_whose_test_is_gone_is_refused(recorded):
    (recorded / "other").mkdir()
    row = json.loads(next((recorded / "records").glob("*works*")).read_text())[0]
    (recorded / "other/row.json").write_text(json.dumps([row | {"test": "test_rows.py::test_gone[a]"}]))
    with pytest.raises(SystemExit, match="test_gone"):
        support_matrix.read_records(recorded / "other", root=recorded)


@pytest.mark.parametrize(
    "family",
    [
        *("Llama", "Qwen2", "Qwen3", "Qwen3-MoE", "Mixtral", "DeepSeek-V2", "DeepSeek-V3", "GLM-4.5", "gpt-oss"),
        *("Nemotron-H", "Nemotron-H with experts", "Qwen3-Next", "Gemma 1"),
    ],
)
def test_each_architecture_was_moved_between_four_pairs_of_layouts(family):
    rows = [
        row
        for row in support_matrix.read_records(ROOT / "tests/results/support")
        if row["architecture"].partition(",")[0] == family and row["level"] == "moved"
    ]
    assert {row["result"] for row in rows} == {"passed"}
    assert len({(row["source"], row["target"]) for row in rows}) >= 4
    assert any(not row["nightly"] for row in rows)


def test_the_committed_page_is_that_of_the_committed_records():
    page = support_matrix.render(support_matrix.read_records(ROOT / "tests/results/support"))
    assert (ROOT / "docs/support.md").read_text() == page
