"""The fixture `support_record`: what tests ran, as records from which `support_matrix.py` makes docs/support.md."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import pytest

# What a run on real ranks stands on; a planned row needs none of them.
_PACKAGES = ("megatron-core", "torch", "transformers", "vllm")
_REPORT = pytest.StashKey[pytest.TestReport]()


class SupportRecord:
    """What one test says that it ran. Rows are told apart by architecture, layouts and level."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str, str, str], dict[str, Any]] = {}

    def __call__(
        self,
        *,
        architecture: str,
        source: str,
        target: str,
        level: Literal["moved", "held", "planned"] = "moved",
        shard_to_shard: float | None = None,
        proof: str = "",
    ) -> None:
        """See the fixture `support_record`."""
        if shard_to_shard is not None and not 0 <= shard_to_shard <= 1:
            raise ValueError(f"shard_to_shard is a share between 0 and 1 (got {shard_to_shard})")
        row = self.rows.setdefault((architecture, source, target, level), {"shard_to_shard": None, "proof": ""})
        if shard_to_shard is not None:
            row["shard_to_shard"] = shard_to_shard
        if proof:
            row["proof"] = proof


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--support-records",
        metavar="DIR",
        type=Path,
        help="write what the tests ran into this folder; `python tests/support_matrix.py DIR docs/support.md` lists it",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.when == "call":
        item.stash[_REPORT] = report
    return report


@pytest.fixture
def support_record(request: pytest.FixtureRequest) -> Iterator[SupportRecord]:
    """Records what this test ran for the support matrix, docs/support.md.

    Call it first with the layouts, so that a test that fails is listed as failed, and again with the figures:

        support_record(architecture="Qwen3-MoE", source="TP2 EP2 ETP1", target="TP2")
        ...
        support_record(
            architecture="Qwen3-MoE", source="TP2 EP2 ETP1", target="TP2",
            shard_to_shard=report.summary.shard_to_shard, proof="bit-exact, A-B-A-B, log-probabilities of Hugging Face",
        )

    architecture: the family's name as in README, such as "DeepSeek-V3". source, target: layouts for people, such as
    "FSDP2 x 4" or "TP4, 2 engines". level: "moved" (default) where real ranks served the weights, "held" where
    real training ranks were compared and plans from them proved, "planned" where a model of full size was planned from
    names and shapes alone. shard_to_shard: the share of the model's bytes, 0 to 1,
    as `PlanSummary.shard_to_shard`. proof: what the test compared. The result is the test's own: nobody states it.

    Without the option `--support-records DIR` nothing is written. A test may record several rows.
    """
    record = SupportRecord()
    yield record
    folder: Path | None = request.config.getoption("--support-records")
    report = request.node.stash.get(_REPORT, None)
    if folder is None or report is None or report.skipped or not record.rows:
        return
    shared = {
        "result": report.outcome,
        "test": request.node.nodeid,
        "nightly": request.node.get_closest_marker("nightly") is not None,
    }
    keys = ("architecture", "source", "target", "level")
    rows = [dict(zip(keys, key, strict=True)) | row | shared | _versions(key[-1]) for key, row in record.rows.items()]
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^A-Za-z0-9]+", "-", request.node.nodeid).strip("-")
    (folder / f"{name}.json").write_text(json.dumps(rows, indent=2, sort_keys=True) + "\n")


def _versions(level: str) -> dict[str, dict[str, str]]:
    found: dict[str, str] = {}
    for package in _PACKAGES if level == "moved" else ():
        for spelling in (package, f"{package}-cpu"):
            try:
                found[package] = version(spelling).partition("+")[0]
            except PackageNotFoundError:
                continue
    return {"versions": found}
