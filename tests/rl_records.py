"""The fixture `rl_record`: what whole GRPO and PPO jobs reached, as records for docs/rl-figures.md.

`rl_figures.py` makes the page from them.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

_ENDS = 5
_RECORD = pytest.StashKey[dict[str, Any]]()


def figures(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a job's `steps.jsonl` comes to."""
    rewards = [step["reward"] for step in steps]
    total = sum(step["seconds/total"] for step in steps)
    found = {
        "steps": len(steps),
        "first": statistics.mean(rewards[:_ENDS]),
        "last": statistics.mean(rewards[-_ENDS:]),
        "curve": [round(reward, 3) for reward in rewards[::10]],
        "error": max(step["logprob_error"] for step in steps),
        "refit_share": sum(step["seconds/refit"] for step in steps) / total,
        "seconds_per_step": total / len(steps),
    }
    if "overlap/share" in steps[-1]:
        found["overlap"] = sum(step["overlap/both_s"] for step in steps) / total
    return found


@pytest.fixture
def rl_record(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Records what a job reached: put `run` and `bars` in before it starts, and `figures` of its steps afterwards.

    `run` names the row, such as "GRPO, dense, fp32"; runs of several seeds are one row. `bars` has the limits of
    `first`, `last`, `error` and others that the test holds the job to. The result is the test's own. Without the option
    `--rl-records DIR` nothing is written.
    """
    return request.node.stash.setdefault(_RECORD, {})


def write_rl_record(item: pytest.Item, *, result: str) -> None:
    """Writes the record of a test that has one."""
    folder: Path | None = item.config.getoption("--rl-records")
    if folder is None or not (record := item.stash.get(_RECORD, {})):
        return
    folder.mkdir(parents=True, exist_ok=True)
    row = {**record, "result": result, "test": item.nodeid}
    name = re.sub(r"[^A-Za-z0-9]+", "-", item.nodeid).strip("-")
    (folder / f"{name}.json").write_text(json.dumps(row, indent=2, sort_keys=True) + "\n")
