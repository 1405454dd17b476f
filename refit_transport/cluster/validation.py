"""How good the served policy is at prompts that it isn't trained on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from refit_transport.cluster.rollouts import Asking
from refit_transport.cluster.sampling import SampleRequest
from refit_transport.rl.trajectories import Sample

# Training asks for the prompts of steps from 1 on.
_STEP = 0


@dataclass(frozen=True, slots=True)
class Validation:
    """After `step` (0: before the first): mean reward and response length of `samples` samples; took `seconds`."""

    step: int
    reward: float
    length: float
    samples: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Validator:
    """Draws answers to the same prompts with the same seeds each time, so that only the weights make a difference.

    After every `period` steps (0: never) from step `start_at` on; before the first and after the last step if asked.
    """

    asking: Asking
    period: int
    start_at: int
    at_start: bool
    at_end: bool

    def is_due(self, step: int, *, is_last: bool) -> bool:
        """Whether the policy is to be validated after `step`; 0: before the first."""
        if step == 0:
            return self.at_start
        regular = self.period > 0 and step >= self.start_at and step % self.period == 0
        return regular or (is_last and self.at_end)

    def validate(self, step: int, draw: Callable[[Sequence[SampleRequest]], list[Sample]]) -> Validation:
        """Of the weights that are served now."""
        began = time.perf_counter()
        found = self.asking.judged(draw(self.asking.requests(_STEP)))
        seconds = time.perf_counter() - began
        return Validation(step, found.mean_reward(), found.mean_length(), len(found.samples), seconds)
