"""Whether engines that run ahead of training serve the trainer's weights."""

from __future__ import annotations

from collections.abc import Sequence

from refit_transport.cluster.fleet import Fleet
from refit_transport.cluster.learning import LogprobError
from refit_transport.cluster.workers import Pending, WorkerGroup, collect
from refit_transport.errors import WorkerError
from refit_transport.rl.trajectories import Sample

_SEQUENCES = 16


class ServedCheck:
    """Compares trainer and engines on some sequences of each step, under the version that both have at that moment.

    Samples of older weights can't tell: they differ from the trainer's by what it has learned since. So the trainer
    computes the log-probabilities of a few sequences before its update, and each engine those of the same ones beside
    what it generates, before it gets the next version.
    """

    def __init__(self, policy: WorkerGroup, fleet: Fleet, *, timeout_s: float) -> None:
        self._policy, self._fleet, self._timeout_s = policy, fleet, timeout_s
        self._trained: Pending | None = None
        self._served: list[Pending] = []

    def begin(self, samples: Sequence[Sample]) -> None:
        """Asks both sides; to be called before the trainer's update, of a step's samples."""
        chosen = [sample.tokens for sample in samples[:: -(-len(samples) // _SEQUENCES)]]
        self._trained = self._policy.start("logprobs", chosen)
        self._served = [engine.start("logprobs", chosen) for engine in self._fleet.serving]

    def finish(self) -> LogprobError:
        """Waits for the answers; to be called before the next refit. Engines that have left the fleet aren't asked for.

        Raises:
            WorkerError: a worker failed or took too long, or `begin` wasn't called.
        """
        if self._trained is None:
            raise WorkerError("generation", -1, "logprobs", "no comparison was begun")
        calls = [self._trained, *(call for call in self._served if call.group in self._fleet.serving)]
        trained, *served = (found[0] for found in collect(calls, timeout_s=self._timeout_s))
        return LogprobError.between([trained] * len(served), served)
