"""What happens to a job's refits, for people and programs that watch it: events as JSON lines, and counters.

The driver of a job writes both, one process each. Neither ever ends a refit: what can't be written is said once in the
log, and then left out. `docs/observability.md` lists every event and counter.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from refit_transport.errors import ConfigError, Violation, WorkerError
from refit_transport.optional import optional_module
from refit_transport.report import RefitReport

SCHEMA = 1
EventName = Literal["members", "prepared", "refit_started", "refit_finished", "refit_failed"]
# Where a refit that failed leaves engines that can't be used before a complete one; "send" only in place.
_FENCING = ("start_refit", "receive", "finish_refit")


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened, at a time in seconds since 1970."""

    name: EventName
    time: float
    fields: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """A plain value; `schema` changes when a field is renamed or means something else."""
        return {"schema": SCHEMA, "event": self.name, "time": self.time, **self.fields}


Sink = Callable[[Event], None]


@dataclass(slots=True)
class Watched:
    """A refit under way; whoever runs it leaves the report here."""

    report: RefitReport | None = None


@dataclass(slots=True)
class Observer:
    """Tells every sink what the driver of a job's refits tells it; without sinks it costs nothing.

    `clock` gives seconds since 1970.
    """

    sinks: list[Sink] = field(default_factory=list)
    clock: Callable[[], float] = time.time
    _attempt: int = 0
    _fenced: int = 0
    _refused: dict[str, int] = field(default_factory=dict)

    def members(self, *, joined: Collection[str], left: Collection[str]) -> None:
        """Groups of workers that take part from the next refit on, or no longer."""
        if joined or left:
            self._tell("members", joined=sorted(joined), left=sorted(left))

    @contextmanager
    def preparing(self, *, ranks: int) -> Iterator[None]:
        """Around a preparation of `ranks` ranks; one that fails is part of the refit that fails with it."""
        began = self.clock()
        yield
        self._refused.clear()  # a new session counts anew
        self._tell("prepared", ranks=ranks, seconds=self.clock() - began)

    @contextmanager
    def refit(self, version: int, *, engines: int, commit: str) -> Iterator[Watched]:
        """Around one refit to `engines` engines, which fails with any error."""
        began, watched = self.clock(), Watched()
        self._attempt += 1
        self._tell("refit_started", version=version, attempt=self._attempt)
        try:
            yield watched
        except Exception as error:
            phase = error.phase if isinstance(error, WorkerError) else "driver"
            if phase in _FENCING or (phase == "send" and commit == "in_place"):
                self._fenced = engines
            self._tell(
                "refit_failed",
                version=version,
                attempt=self._attempt,
                seconds=self.clock() - began,
                phase=phase,
                worker=error.actor if isinstance(error, WorkerError) else "",
                rank=error.rank if isinstance(error, WorkerError) else -1,
                reason=str(error),
                fenced_engines=self._fenced,
            )
            raise
        attempt, self._attempt, self._fenced = self._attempt, 0, 0
        if watched.report is not None:
            self._tell(
                "refit_finished",
                version=version,
                attempt=attempt,
                seconds=self.clock() - began,
                **self._figures(watched.report),
            )

    def _figures(self, report: RefitReport) -> dict[str, Any]:
        fresh = {kind: count - self._refused.get(kind, 0) for kind, count in report.refused.items()}
        self._refused = dict(report.refused)
        return {
            "phases": report.seconds,
            "network_bytes": report.summary.network_bytes,
            "received_bytes": report.summary.received_bytes,
            "verified_boxes": sum(rank.verified for rank in report.ranks),
            "strangers_refused": {kind: count for kind, count in fresh.items() if count},
        }

    def _tell(self, name: EventName, **fields: Any) -> None:
        event = Event(name, self.clock(), fields)
        for sink in list(self.sinks):
            try:
                sink(event)
            except OSError as error:
                self.sinks.remove(sink)
                logging.getLogger(__name__).warning("no more events or counters: %s", error)


class EventLog:
    """Appends events to a file of JSON lines; each is there as soon as it has happened."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def __call__(self, event: Event) -> None:
        self._file.write(json.dumps(event.to_json()) + "\n")

    def close(self) -> None:
        self._file.close()


class Counters:
    """Keeps a file of counters in Prometheus' text format, for node_exporter's textfile collector and the like."""

    def __init__(self, path: Path) -> None:
        """Writes the file for the first time, with zeros.

        Raises:
            MissingDependencyError: prometheus_client isn't installed.
        """
        prometheus = optional_module("prometheus_client", needed_for="refit_run.metrics", extra="metrics")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._write = path, prometheus.write_to_textfile
        self._registry = prometheus.CollectorRegistry()

        def counter(name: str, what: str, *labels: str) -> Any:
            return prometheus.Counter(f"refit_transport_{name}", what, labels, registry=self._registry)

        def gauge(name: str, what: str) -> Any:
            return prometheus.Gauge(f"refit_transport_{name}", what, registry=self._registry)

        self._refits = counter("refits", "Refits that every engine has.")
        self._failures = counter("failures", "Refits that failed, by the phase in which they did.", "phase")
        self._retries = counter("retries", "Refits that followed one that had failed.")
        self._seconds = counter("refit_seconds", "Seconds of finished refits.")
        self._phases = counter("phase_seconds", "Seconds of finished refits by phase, the slowest rank's.", "phase")
        self._network = counter("network_bytes", "Payload bytes of finished refits between fast domains.")
        self._received = counter("received_bytes", "Payload bytes of finished refits that ranks received from others.")
        self._prepares = counter("prepares", "Sessions that were planned and connected.")
        self._prepare_seconds = counter("prepare_seconds", "Seconds of planning and connecting sessions.")
        self._changes = counter("membership_changes", "Groups that came or went.", "change")
        self._strangers = counter("strangers_refused", "Connections that the rendezvous dropped.", "kind")
        self._version = gauge("version", "The weight version that every engine has.")
        self._fenced = gauge("fenced_engines", "Engines that serve nothing before a complete refit.")
        self._members = gauge("members", "Groups of workers that take part in refits.")
        self._write(str(self._path), self._registry)

    def __call__(self, event: Event) -> None:
        getattr(self, f"_on_{event.name}")(event.fields)
        self._write(str(self._path), self._registry)

    def _on_members(self, fields: Mapping[str, Any]) -> None:
        for change in ("joined", "left"):
            self._changes.labels(change).inc(len(fields[change]))
        self._members.inc(len(fields["joined"]) - len(fields["left"]))

    def _on_prepared(self, fields: Mapping[str, Any]) -> None:
        self._prepares.inc()
        self._prepare_seconds.inc(max(0.0, fields["seconds"]))

    def _on_refit_started(self, fields: Mapping[str, Any]) -> None:
        if fields["attempt"] > 1:
            self._retries.inc()

    def _on_refit_finished(self, fields: Mapping[str, Any]) -> None:
        self._refits.inc()
        self._seconds.inc(max(0.0, fields["seconds"]))
        for phase, seconds in fields["phases"].items():
            self._phases.labels(phase).inc(seconds)
        self._network.inc(fields["network_bytes"])
        self._received.inc(fields["received_bytes"])
        for kind, count in fields["strangers_refused"].items():
            self._strangers.labels(kind).inc(count)
        self._version.set(fields["version"])
        self._fenced.set(0)

    def _on_refit_failed(self, fields: Mapping[str, Any]) -> None:
        self._failures.labels(fields["phase"]).inc()
        self._fenced.set(fields["fenced_engines"])


@contextmanager
def observing(*, events: str | None, metrics: str | None) -> Iterator[Observer]:
    """An observer that writes to these files, None for neither.

    Raises:
        ConfigError: a file can't be written; names its key of `refit_run`.
        MissingDependencyError: as `Counters`.
    """
    observer, log = Observer(), None
    for key, path in (("events", events), ("metrics", metrics)):
        if path is None:
            continue
        try:
            if key == "events":
                log = EventLog(Path(path))
                observer.sinks.append(log)
            else:
                observer.sinks.append(Counters(Path(path)))
        except OSError as error:
            violation = Violation(f"refit_run.{key}", path, f"can't be written: {error}", "name another file, or null")
            raise ConfigError("refit_run", (violation,)) from error
    try:
        yield observer
    finally:
        if log is not None:
            log.close()
