"""Samples from several engines at once, from the driver's side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from refit_transport.cluster.sampling import SampleRequest, split_over_engines
from refit_transport.cluster.workers import Pending, WorkerGroup, collect
from refit_transport.errors import WorkerError
from refit_transport.rl.trajectories import Sample

# A worker reports its own deadline with a better message than the driver's: give it time to.
_MARGIN_S = 30.0


def sample_on(engines: Sequence[WorkerGroup], requests: Sequence[SampleRequest], *, timeout_s: float) -> list[Sample]:
    """Spreads the requests over engines of `GenerationWorker` ranks and waits; the samples in the requests' order.

    Raises:
        WorkerError: an engine failed or took longer than `timeout_s`, or two ranks of one drew different samples.
    """
    shares = _shares(engines, requests)
    pending = [engine.start("sample", [requests[index] for index in share]) for engine, share in shares]
    answers = collect(pending, timeout_s=timeout_s)
    for (engine, _), by_rank in zip(shares, answers, strict=True):
        for rank, samples in by_rank.items():
            if samples != by_rank[0]:
                raise WorkerError(engine.name, rank, "sample", "drew other samples than rank 0 of the engine")
    return _in_order(shares, [by_rank[0] for by_rank in answers])


@dataclass(frozen=True, slots=True)
class Submission:
    """Requests that `AsyncGenerationWorker` engines work on: engine by engine, their places and calls of `submit`."""

    shares: tuple[tuple[WorkerGroup, tuple[int, ...]], ...]
    accepted: tuple[Pending, ...]

    def take(self, *, timeout_s: float) -> list[Sample]:
        """Waits for all responses; the samples in the requests' order.

        Raises:
            WorkerError: an engine failed, is fenced, was fenced when it was asked, didn't accept within `timeout_s`, or
                hasn't finished so long after it did.
        """
        tickets = [found[0] for found in collect(self.accepted, timeout_s=timeout_s + _MARGIN_S)]
        pending = [
            engine.start("take", own, timeout_s=timeout_s)
            for (engine, _), own in zip(self.shares, tickets, strict=True)
        ]
        return _in_order(self.shares, [found[0] for found in collect(pending, timeout_s=timeout_s + _MARGIN_S)])


def submit_to(engines: Sequence[WorkerGroup], requests: Sequence[SampleRequest]) -> Submission:
    """Spreads the requests over `AsyncGenerationWorker` engines, which generate in the background; waits for none."""
    shares = _shares(engines, requests)
    accepted = [engine.start("submit", [requests[index] for index in share]) for engine, share in shares]
    return Submission(tuple(shares), tuple(accepted))


def _shares(
    engines: Sequence[WorkerGroup], requests: Sequence[SampleRequest]
) -> list[tuple[WorkerGroup, tuple[int, ...]]]:
    """The engines that get any requests, with the places of these."""
    shares = split_over_engines(requests, len(engines))
    return [(engine, tuple(share)) for engine, share in zip(engines, shares, strict=True) if share]


def _in_order(shares: Sequence[tuple[WorkerGroup, Sequence[int]]], answers: Sequence[Sequence[Any]]) -> list[Sample]:
    places = [index for _, share in shares for index in share]
    samples = [sample for answer in answers for sample in answer]
    return [sample for _, sample in sorted(zip(places, samples, strict=True), key=lambda found: found[0])]
