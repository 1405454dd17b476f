"""The mark `supports` and the fixture `support_record`: what tests ran, as records for docs/support.md.

`support_matrix.py` makes the page from them. A test that fails before it begins is listed too if it has the mark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import pytest
from rl_records import write_rl_record

# What a run on real ranks stands on; a planned row needs none of them.
_PACKAGES = ("megatron-core", "torch", "transformers", "vllm")


def supports(
    *, architecture: str, source: str, target: str, level: Literal["moved", "held", "planned"] = "moved"
) -> pytest.MarkDecorator:
    """Marks a test with a row of the support matrix, before it runs. Several marks are several rows.

    architecture: the family's name as in README, such as "DeepSeek-V3", and what is unusual: "Llama, 5 layers".
    source, target: layouts for people, such as "FSDP2 x 4" or "TP4, 2 engines". level: "moved" (default) where real
    ranks served the weights, "held" where real training ranks were compared and plans from them proved, "planned" where
    a model of full size was planned from names and shapes alone.
    """
    return pytest.mark.supports(architecture=architecture, source=source, target=target, level=level)


def listed(*rows: pytest.MarkDecorator) -> Callable[[Any], Any]:
    """Several rows of `supports` for one test."""
    return lambda test: reduce(lambda marked, row: row(marked), rows, test)


class SupportRecord:
    """The rows of one test. They are told apart by architecture, layouts and level."""

    def __init__(self, declared: Iterable[Mapping[str, Any]] = ()) -> None:
        self.rows: dict[tuple[str, str, str, str], dict[str, Any]] = {}
        for row in declared:
            self(**row)

    def __call__(
        self,
        *,
        architecture: str = "",
        source: str = "",
        target: str = "",
        level: Literal["moved", "held", "planned"] = "moved",
        shard_to_shard: float | None = None,
        proof: str = "",
    ) -> None:
        """See the fixture `support_record`."""
        if shard_to_shard is not None and not 0 <= shard_to_shard <= 1:
            raise ValueError(f"shard_to_shard is a share between 0 and 1 (got {shard_to_shard})")
        if architecture:
            rows = [self.rows.setdefault((architecture, source, target, level), {"shard_to_shard": None, "proof": ""})]
        else:
            rows = [*self.rows.values()]
        for row in rows:
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
    parser.addoption(
        "--rl-records",
        metavar="DIR",
        type=Path,
        help="write what jobs reached into this folder; `python tests/rl_figures.py DIR docs/rl-figures.md` lists it",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if (report.when == "call" and not report.skipped) or (report.when == "setup" and report.failed):
        _write(item, result=report.outcome)
        write_rl_record(item, result=report.outcome)
    return report


@pytest.fixture
def support_record(request: pytest.FixtureRequest) -> SupportRecord:
    """Records what this test ran for the support matrix, docs/support.md.

    Mark the test with the layouts, so that a test that fails is listed as failed, and call this with the figures:

        @supports(architecture="Qwen3-MoE", source="TP2 EP2 ETP1", target="TP2")
        def test_refit(support_record):
            ...
            support_record(
                shard_to_shard=report.summary.shard_to_shard,
                proof="bit-exact, A-B-A-B, log-probabilities of Hugging Face",
            )

    shard_to_shard: the share of the model's bytes, 0 to 1, as `PlanSummary.shard_to_shard`. proof: what the test
    compared. Without names they hold for every row of the test; with the names that `supports` takes, for that row,
    which need not be marked. The result is the test's own: nobody states it.

    Without the option `--support-records DIR` nothing is written.
    """
    return _record_of(request.node)


_RECORD = pytest.StashKey[SupportRecord]()


def _record_of(item: pytest.Item) -> SupportRecord:
    return item.stash.setdefault(_RECORD, SupportRecord(mark.kwargs for mark in item.iter_markers("supports")))


def _write(item: pytest.Item, *, result: str) -> None:
    folder: Path | None = item.config.getoption("--support-records")
    record = _record_of(item)
    if folder is None or not record.rows:
        return
    shared = {
        "result": result,
        "test": item.nodeid,
        "nightly": item.get_closest_marker("nightly") is not None,
    }
    keys = ("architecture", "source", "target", "level")
    rows = [dict(zip(keys, key, strict=True)) | row | shared | _versions(key[-1]) for key, row in record.rows.items()]
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^A-Za-z0-9]+", "-", item.nodeid).strip("-")
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
