"""Whether engines that run ahead of training serve the trainer's weights."""

from __future__ import annotations

from collections.abc import Sequence

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

    def __init__(self, policy: WorkerGroup, engines: Sequence[WorkerGroup], *, timeout_s: float) -> None:
        self._policy, self._engines, self._timeout_s = policy, tuple(engines), timeout_s
        self._calls: list[Pending] = []

    def begin(self, samples: Sequence[Sample]) -> None:
        """Asks both sides; to be called before the trainer's update, of a step's samples."""
        chosen = [sample.tokens for sample in samples[:: -(-len(samples) // _SEQUENCES)]]
        self._calls = [group.start("logprobs", chosen) for group in (self._policy, *self._engines)]

    def finish(self) -> LogprobError:
        """Waits for the answers; to be called before the next refit.

        Raises:
            WorkerError: a worker failed or took too long, or `begin` wasn't called.
        """
        if not self._calls:
            raise WorkerError("generation", -1, "logprobs", "no comparison was begun")
        calls, self._calls = self._calls, []
        trained, *served = (found[0] for found in collect(calls, timeout_s=self._timeout_s))
        return LogprobError.between([trained] * len(served), served)
