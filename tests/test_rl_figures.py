"""The page of figures says what was recorded, and what failed."""

from __future__ import annotations

import json

import pytest
import rl_figures
from rl_records import figures

TEST = "tests/e2e/test_rl_recipes.py::test_grpo_learns_in_fp32[GRPO, dense, fp32-dense-42]"


def step(number, *, error=1e-7, **more):
    return {
        "step": number,
        "reward": number / 20,
        "logprob_error": error,
        "seconds/total": 2.0,
        "seconds/refit": 0.1,
        **more,
    }


def record(**changes):
    bars = {"first": 0.12, "last": 0.9, "error": 1e-5, "refit_share": 0.1}
    return {"kind": "learns", "run": "GRPO", "bars": bars, "result": "passed", "test": TEST, **changes}


def test_figures_are_those_of_the_steps():
    found = figures([step(number) for number in range(19)] + [step(19, error=3e-6)])
    assert found["first"] == pytest.approx(0.1)
    assert found["last"] == pytest.approx(0.85)
    assert (found["steps"], found["error"], found["refit_share"]) == (20, 3e-6, pytest.approx(0.05))
    assert found["curve"] == [0.0, 0.5]
    assert "overlap" not in found
    ahead = figures([step(1, **{"overlap/share": 0.4, "overlap/both_s": 0.8})])
    assert ahead["overlap"] == pytest.approx(0.4)


def test_a_row_has_every_seed_and_says_what_failed(tmp_path):
    good = figures([step(number) for number in range(20)])
    worse = {**good, "last": 0.1234}
    for name, found in (("a", record(figures=good)), ("b", record(figures=worse, result="failed")), ("c", record())):
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    page = rl_figures.render(rl_figures.read_records(tmp_path))
    [row] = [line for line in page.splitlines() if line.startswith("| GRPO")]
    assert "| 0.850, 0.123, - | >= 0.90 |" in row
    assert "**failed: 1 of 3**" in row
    assert "Wrong refits" not in page


def test_nothing_is_listed_that_no_test_ran(tmp_path):
    with pytest.raises(SystemExit, match="no records"):
        rl_figures.read_records(tmp_path)
    (tmp_path / "a.json").write_text(json.dumps(record(test="tests/e2e/test_rl_recipes.py::test_that_is_gone")))
    with pytest.raises(SystemExit, match="test_that_is_gone"):
        rl_figures.read_records(tmp_path)


def test_the_committed_page_is_that_of_the_committed_records():
    records = rl_figures.read_records(rl_figures.ROOT / "tests" / "results" / "rl")
    assert (rl_figures.ROOT / "docs" / "rl-figures.md").read_text() == rl_figures.render(records)
