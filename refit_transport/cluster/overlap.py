"""How long two things ran at the same time."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Interval:
    """From `start` to `end`, in seconds since the epoch, so that hosts whose clocks agree can be compared.

    Raises:
        ValueError: it ends before it starts.
    """

    start: float
    end: float

    def __post_init__(self) -> None:
        if not self.start <= self.end:
            raise ValueError(f"an interval must not end before it starts (got {self.start} to {self.end})")


@dataclass(frozen=True, slots=True)
class Overlap:
    """Seconds of wall time, of generation, of training, and of both at once."""

    wall_s: float
    generation_s: float
    training_s: float
    both_s: float

    @property
    def share(self) -> float:
        """The part of the wall time in which both ran."""
        return self.both_s / self.wall_s if self.wall_s else 0.0


def overlap(generation: Iterable[Interval], training: Iterable[Interval], *, within: Interval) -> Overlap:
    """Measures both activities inside of a window. Intervals may touch, overlap and come in any order.

    >>> overlap([Interval(0, 4), Interval(3, 6)], [Interval(5, 9)], within=Interval(0, 10))
    Overlap(wall_s=10, generation_s=6, training_s=4, both_s=1)
    """
    ran = [_merged(intervals, within) for intervals in (generation, training)]
    both = sum(max(0, min(a.end, b.end) - max(a.start, b.start)) for a in ran[0] for b in ran[1])
    seconds = [sum(interval.end - interval.start for interval in merged) for merged in ran]
    return Overlap(within.end - within.start, *seconds, both)


def _merged(intervals: Iterable[Interval], within: Interval) -> list[Interval]:
    """The same times as disjoint intervals in order."""
    merged: list[Interval] = []
    for interval in sorted(intervals):
        start, end = max(interval.start, within.start), min(interval.end, within.end)
        if start >= end:
            continue
        if merged and start <= merged[-1].end:
            merged[-1] = Interval(merged[-1].start, max(end, merged[-1].end))
        else:
            merged.append(Interval(start, end))
    return merged


class Activity:
    """Notes when something runs."""

    def __init__(self) -> None:
        self._done: list[Interval] = []
        self._since: float | None = None

    def begin(self) -> None:
        """It runs now, if it didn't."""
        if self._since is None:
            self._since = time.time()

    def end(self) -> None:
        """It stops now, if it ran."""
        if self._since is not None:
            # The system's clock may be set back.
            self._done.append(Interval(self._since, max(self._since, time.time())))
            self._since = None

    def take(self) -> list[Interval]:
        """What has run since the last call; what still runs goes on as a new interval."""
        running = self._since is not None
        self.end()
        taken, self._done = self._done, []
        if running:
            self.begin()
        return taken
