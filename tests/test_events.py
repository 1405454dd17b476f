"""What watchers of a job see: an event for each thing that happens, and counters that add them up."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from refit_transport.cluster.network import PortRange
from refit_transport.cluster.synchronizer import RefitSynchronizer
from refit_transport.config.settings import RefitSettings
from refit_transport.errors import ConfigError, MissingDependencyError, WorkerError
from refit_transport.events import SCHEMA, Counters, EventLog, Observer, observing
from refit_transport.report import PHASES, PlanSummary, RankReport, RefitReport, TransportReport, render_notes


def report(version: int, *, refused: dict[str, int] | None = None) -> RefitReport:
    summary = PlanSummary((TransportReport("nccl_reshard", 1, 100, 70, 30, 0),), {1: 90, 2: 10}, 0, 0, {}, {})
    ranks = tuple(RankReport(rank, "target", "h", {"network": 0.5 * rank}, 0, 50, verified=3) for rank in (1, 2))
    return RefitReport(version, 2.0, summary, ranks, refused or {})


class Group:
    count = 2

    def __init__(self, name: str) -> None:
        self.name = name


class Refits(RefitSynchronizer):
    """A synchronizer whose workers do what it is told: a report, or an error."""

    def __init__(self, observer: Observer, *, commit: Any = "in_place") -> None:
        self.outcomes: list[RefitReport | Exception] = []
        groups = [Group(name) for name in ("policy", "engine 0", "engine 1")]
        self.groups: list[Any] = groups
        settings = RefitSettings(commit=commit)
        super().__init__(groups[0], groups[1:], settings=settings, ports=PortRange(), observer=observer)  # type: ignore[arg-type]

    def _prepare(self) -> None:
        if self.outcomes and isinstance(self.outcomes[0], WorkerError) and self.outcomes[0].phase == "join_refit":
            raise self.outcomes.pop(0)

    def _sync(self, version: int) -> RefitReport:
        if not self._prepared:
            self.prepare()
        self._prepared = False
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        self._prepared = True
        return outcome


def failure(phase: str) -> WorkerError:
    return WorkerError("engine 1", 3, phase, "it died")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def samples(path: Path) -> dict[str, float]:
    """Every sample of a file, as any Prometheus reader reads it."""
    families = text_string_to_metric_families(path.read_text())
    return {
        " ".join([sample.name.removeprefix("refit_transport_"), *sample.labels.values()]): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def story(refits: Refits) -> None:
    """One refit, one that fails and its retry with a restarted engine, one that is staged no further."""
    refits.outcomes = [report(1, refused={"garbage": 2})]
    refits.sync(1)
    refits.outcomes = [failure("receive")]
    with pytest.raises(WorkerError):
        refits.sync(2)
    policy, first, _ = refits.groups
    refits.reconcile(policy, [first, Group("engine 1")])  # type: ignore[list-item]
    refits.outcomes = [report(3, refused={"garbage": 1, "secret": 1})]
    refits.sync(3)
    refits.outcomes = [report(4, refused={"garbage": 4, "secret": 1})]
    refits.sync(4)


def test_everything_that_happens_is_an_event(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "events.jsonl"
    with observing(events=str(path), metrics=None) as observer:
        observer.clock = Clock()
        story(Refits(observer))
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert [event["event"] for event in events] == [
        "members",
        "refit_started",
        "prepared",
        "refit_finished",
        "refit_started",
        "refit_failed",
        "members",
        "refit_started",
        "prepared",
        "refit_finished",
        "refit_started",
        "refit_finished",
    ]
    assert {event["schema"] for event in events} == {SCHEMA}
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)
    first, *_ = events
    assert (first["joined"], first["left"]) == (["engine 0", "engine 1", "policy"], [])
    assert events[2]["ranks"] == 6
    finished = [event for event in events if event["event"] == "refit_finished"]
    assert [(event["version"], event["attempt"]) for event in finished] == [(1, 1), (3, 2), (4, 1)]
    # A new session counts anew; within one, only what came since.
    strangers = [event["strangers_refused"] for event in finished]
    assert strangers == [{"garbage": 2}, {"garbage": 1, "secret": 1}, {"garbage": 3}]
    assert (finished[0]["network_bytes"], finished[0]["received_bytes"], finished[0]["verified_boxes"]) == (70, 100, 6)
    assert finished[0]["phases"] == {phase: (1.0 if phase == "network" else 0.0) for phase in PHASES}
    assert finished[0]["seconds"] > 0
    failed = events[5]
    assert (failed["version"], failed["phase"], failed["worker"], failed["rank"]) == (2, "receive", "engine 1", 3)
    assert failed["fenced_engines"] == 2
    assert "it died" in failed["reason"]
    assert (events[6]["joined"], events[6]["left"]) == (["engine 1"], ["engine 1"])


def test_counters_add_the_events_up(tmp_path: Path) -> None:
    path = tmp_path / "refits.prom"
    with observing(events=None, metrics=str(path)) as observer:
        assert samples(path)["refits_total"] == 0.0
        observer.clock = Clock()
        refits = Refits(observer)
        refits.outcomes = [report(1)]
        refits.sync(1)
        refits.outcomes = [failure("receive")]
        with pytest.raises(WorkerError):
            refits.sync(2)
        assert samples(path)["fenced_engines"] == 2.0
        refits._prepared = False
        story(refits)
    found = samples(path)
    assert found["refits_total"] == 4.0
    assert found["failures_total receive"] == 2.0
    assert found["retries_total"] == 2.0
    assert found["phase_seconds_total network"] == 4.0
    assert found["network_bytes_total"] == 280.0
    assert found["received_bytes_total"] == 400.0
    assert found["prepares_total"] == 3.0
    assert found["membership_changes_total joined"] == 4.0
    assert found["membership_changes_total left"] == 1.0
    assert found["members"] == 3.0
    assert found["strangers_refused_total garbage"] == 6.0
    assert found["strangers_refused_total secret"] == 1.0
    assert found["version"] == 4.0
    assert found["fenced_engines"] == 0.0
    assert found["refit_seconds_total"] > 0
    assert found["prepare_seconds_total"] > 0


@pytest.mark.parametrize(
    ("commit", "phase", "fenced"),
    [
        ("in_place", "send", 2),
        ("in_place", "receive", 2),
        ("in_place", "start_refit", 2),
        ("in_place", "finish_refit", 2),
        ("in_place", "join_refit", 0),
        ("staged", "send", 0),
        ("staged", "stage", 0),
        ("staged", "receive", 2),
    ],
)
def test_a_failure_fences_the_engines_that_may_hold_parts_of_it(commit, phase: str, fenced: int) -> None:
    events: list[Any] = []
    refits = Refits(Observer([events.append]), commit=commit)
    refits.outcomes = [failure(phase)]
    with pytest.raises(WorkerError):
        refits.sync(1)
    assert events[-1].name == "refit_failed"
    assert events[-1].fields["fenced_engines"] == fenced
    # What isn't known to be whole stays fenced while nothing is delivered.
    refits.outcomes = [failure("join_refit")]
    with pytest.raises(WorkerError):
        refits.sync(2)
    assert events[-1].fields["fenced_engines"] == fenced


def test_an_error_of_the_drivers_own_counts_as_its() -> None:
    events: list[Any] = []
    refits = Refits(Observer([events.append]))
    refits.outcomes = [ValueError("a bug")]
    with pytest.raises(ValueError, match="a bug"):
        refits.sync(1)
    assert events[-1].fields["phase"] == "driver"


def test_what_can_not_be_written_ends_no_refit(caplog: pytest.LogCaptureFixture) -> None:
    def full(event: Any) -> None:
        raise OSError(28, "No space left on device")

    others: list[Any] = []
    refits = Refits(Observer([full, others.append]))
    refits.outcomes = [report(1)]
    with caplog.at_level(logging.WARNING):
        assert refits.sync(1).version == 1
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    assert [event.name for event in others][-1] == "refit_finished"


@pytest.mark.parametrize("key", ["events", "metrics"])
def test_a_file_that_can_not_be_written_is_an_error_before_anything_starts(tmp_path: Path, key: str) -> None:
    (tmp_path / "file").touch()
    paths = {"events": None, "metrics": None, key: str(tmp_path / "file" / "below")}
    with pytest.raises(ConfigError, match=rf"refit_run\.{key}: can't be written"), observing(**paths):
        pass


def test_without_prometheus_client_counters_name_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    with pytest.raises(MissingDependencyError, match=r"refit-transport\[metrics\]"):
        Counters(tmp_path / "c.prom")


def test_a_log_is_continued(tmp_path: Path) -> None:
    for _ in range(2):
        log = EventLog(tmp_path / "e.jsonl")
        Observer([log]).members(joined=["a"], left=[])
        log.close()
    assert len((tmp_path / "e.jsonl").read_text().splitlines()) == 2


def test_a_report_tells_of_strangers() -> None:
    found = report(1, refused={"silent": 1, "garbage": 2})
    assert "refused at the rendezvous: 3 connections (garbage 2, silent 1)" in render_notes(found)
    assert found.to_json()["refused"] == {"silent": 1, "garbage": 2}
    assert not any("refused" in note for note in render_notes(report(1)))


def test_the_documentation_lists_every_event_and_counter(tmp_path: Path) -> None:
    text = (Path(__file__).parents[1] / "docs/observability.md").read_text()
    Counters(tmp_path / "c.prom")
    for family in text_string_to_metric_families((tmp_path / "c.prom").read_text()):
        assert family.name.endswith("_created") or f"`{family.name}" in text, family.name
    events: list[Any] = []
    story(Refits(Observer([events.append])))
    for event in events:
        assert f"`{event.name}`" in text
        for name in event.fields:
            assert f"`{name}`" in text, (event.name, name)
