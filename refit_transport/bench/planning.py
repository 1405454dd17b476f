"""What planning costs: seconds and peak memory of each part, each in a fresh process of one thread."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Group
from rich.table import Table

from refit_transport.bench.full_size import FULL_SIZE, FullSize
from refit_transport.bench.isolation import Announce, die_with_parent
from refit_transport.config.settings import MIB
from refit_transport.errors import WorkerError
from refit_transport.fabrics.binding import Binding
from refit_transport.fabrics.program import lower
from refit_transport.fabrics.slots import Slots, SlotSizes
from refit_transport.layout.manifest import RankManifest
from refit_transport.planning.planner import plan_transfer
from refit_transport.planning.routing import RESHARD, route_tensors
from refit_transport.scheduling.schedule import Schedule
from refit_transport.scheduling.scheduler import build_schedule
from refit_transport.views import torch_dtype

GIB = 1 << 30
_CHUNK_BYTES = 16 * MIB
_STAGING_BYTES = 16 * _CHUNK_BYTES
_TIMEOUT_S = 1800.0
# ru_maxrss counts KiB on Linux.
_RUSAGE_UNIT = 1024


@dataclass(frozen=True, slots=True)
class Part:
    """One part of planning. CPU `seconds` of each step that counts; peak memory (bytes) of the whole process.

    CPU seconds of the one thread are what the clock shows on an idle machine; `wall_seconds` is what it did show.
    """

    model: str
    name: str
    seconds: Mapping[str, float]
    wall_seconds: float
    peak_memory: int
    most_seconds: float
    most_memory: int | None = None

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def misses(self) -> list[str]:
        """A line for each limit that is missed."""
        lines = []
        if self.total > self.most_seconds:
            lines.append(f"{self.model}: {self.name}: {self.total:.2f} s, must be <= {self.most_seconds:g} s")
        if self.most_memory is not None and self.peak_memory > self.most_memory:
            got, most = (f"{value / GIB:.2f} GiB" for value in (self.peak_memory, self.most_memory))
            lines.append(f"{self.model}: {self.name}: {got}, must be <= {most}")
        return lines


@dataclass(frozen=True, slots=True)
class _Task:
    """A part of planning that is measured: what it does, and its limits."""

    measure: Callable[[FullSize, _Clock], None]
    most_seconds: float
    most_memory: int | None = None


class _Clock:
    """CPU seconds by step, and seconds of all steps by the clock."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.wall_seconds = 0.0

    def timed(self, step: str, function: Callable[[], Any]) -> Any:
        """What the function returns; counts its time."""
        began, cpu = time.perf_counter(), time.process_time()
        value = function()
        self.seconds[step] = time.process_time() - cpu
        self.wall_seconds += time.perf_counter() - began
        return value


def measure_planning(*, announce: Announce) -> tuple[Part, ...]:
    """Every part for every full-size model.

    Raises:
        WorkerError: a measuring process failed.
    """
    parts = []
    for model in FULL_SIZE:
        for name in _TASKS:
            announce(f"{model}: {name}")
            parts.append(_measured(model, name))
    return tuple(parts)


def render_planning(parts: tuple[Part, ...]) -> Group:
    """All parts beside their limits, a table per model."""
    models = dict.fromkeys(part.model for part in parts)
    return Group(*(_table(model, [part for part in parts if part.model == model]) for model in models))


def _table(model: str, parts: Sequence[Part]) -> Table:
    table = Table(title=f"Planning {model}, one core", title_justify="left")
    table.add_column("part", overflow="fold")
    for column in ("CPU time", "limit", "wall time", "peak memory", "limit"):
        table.add_column(column, justify="right")
    table.add_column("CPU time of the steps", overflow="fold")
    for part in parts:
        most = "" if part.most_memory is None else f"{part.most_memory / GIB:.2f} GiB"
        steps = ", ".join(f"{step} {seconds:.2f} s" for step, seconds in part.seconds.items())
        peak = f"{part.peak_memory / GIB:.2f} GiB"
        times = (f"{part.total:.2f} s", f"{part.most_seconds:g} s", f"{part.wall_seconds:.2f} s")
        table.add_row(part.name, *times, peak, most, steps)
    return table


def planning_to_json(parts: tuple[Part, ...]) -> dict[str, Any]:
    """A plain value for programs."""
    return {
        "parts": [{**asdict(part), "total": part.total} for part in parts],
        "misses": [line for part in parts for line in part.misses],
    }


def _measured(model: str, name: str) -> Part:
    """Runs one task in a process of its own, so that its peak memory is its own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-m", __name__, model, name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise WorkerError("that plans", 0, name, f"still runs after {_TIMEOUT_S:g} s") from error
    if done.returncode:
        raise WorkerError("that plans", 0, name, done.stderr.strip())
    found = json.loads(done.stdout)
    task = _TASKS[name]
    return Part(model, name, **found, most_seconds=task.most_seconds, most_memory=task.most_memory)


def _ffn_plan(sides: FullSize, clock: _Clock) -> None:
    names = clock.timed("route", lambda: _routed(sides, "ffn"))
    clock.timed("plan", lambda: plan_transfer(sides.source, sides.target, tensors=names))


def _whole_plan(sides: FullSize, clock: _Clock) -> None:
    names = _routed(sides, "all")
    plan = clock.timed("plan", lambda: plan_transfer(sides.source, sides.target, tensors=names))
    schedule = clock.timed("schedule", lambda: build_schedule(plan, sides.topology, bucket_bytes=_CHUNK_BYTES))
    clock.timed("check plan", lambda: plan.check(sides.source, sides.target))
    clock.timed("check schedule", lambda: schedule.check(plan))


def _own_program(sides: FullSize, clock: _Clock) -> None:
    """The programs of the first source and the first target rank, from a schedule made before the clock starts."""
    plan = plan_transfer(sides.source, sides.target, tensors=_routed(sides, "all"))
    schedule: Schedule = build_schedule(plan, sides.topology, bucket_bytes=_CHUNK_BYTES)
    sizes = SlotSizes.of([schedule], staging_bytes=_STAGING_BYTES)
    memory = Slots.private(sizes.nbytes)
    send, receive = (Binding.of(side.ranks[0], _untouched(side.ranks[0])) for side in (sides.source, sides.target))
    clock.timed(
        "source", lambda: lower(schedule, send.manifest.rank, source=send, target=None, memory=memory, sizes=sizes)
    )
    clock.timed(
        "target",
        lambda: lower(schedule, receive.manifest.rank, source=None, target=receive, memory=memory, sizes=sizes),
    )


def _routed(sides: FullSize, coverage: Any) -> tuple[str, ...]:
    routes = route_tensors(sides.target, transport=RESHARD, coverage=coverage, rules=())
    return tuple(route.tensor for route in routes if route.transport == RESHARD)


def _untouched(ranked: RankManifest) -> dict[str, torch.Tensor]:
    """Buffers as large as the rank's, without memory."""
    kinds = {spec.name: torch_dtype(spec.dtype) for spec in ranked.tensors}
    return {
        piece.buffer: torch.empty(piece.box.numel, dtype=kinds[piece.tensor], device="meta") for piece in ranked.pieces
    }


_TASKS: Mapping[str, _Task] = {
    "FFN-only plan": _Task(_ffn_plan, 1.2),
    "whole plan, schedule and check, 16 MiB chunks": _Task(_whole_plan, 8.0, 2 * GIB),
    "own programs of a source and a target rank": _Task(_own_program, 2.0),
}


def _main(model: str, name: str) -> None:
    """The measuring process: prints its figures as JSON."""
    die_with_parent()
    torch.set_num_threads(1)
    sides, clock = FULL_SIZE[model](), _Clock()
    _TASKS[name].measure(sides, clock)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RUSAGE_UNIT
    found = {"seconds": clock.seconds, "wall_seconds": clock.wall_seconds, "peak_memory": peak}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    _main(*sys.argv[1:])
