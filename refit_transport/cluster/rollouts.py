"""Where a step's samples come from: drawn when they are asked for, or by engines that run ahead of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from refit_transport.cluster.overlap import Interval
from refit_transport.cluster.samplers import Submission, sample_on, submit_to
from refit_transport.cluster.sampling import SampleRequest
from refit_transport.cluster.workers import WorkerGroup, collect
from refit_transport.errors import ConfigError, Violation, WorkerError
from refit_transport.rl.replay_buffer import Dropped, ReplayBuffer
from refit_transport.rl.seeds import sample_seed
from refit_transport.rl.tasks import Task
from refit_transport.rl.trajectories import Rollout, Sample


@dataclass(frozen=True, slots=True)
class Asking:
    """What is asked for at each step: `samples` responses to each of `prompts` prompts of a task.

    `seed` decides prompts and responses: those of a step are the same whenever and wherever they are drawn.
    """

    task: Task
    prompts: int
    samples: int
    seed: int
    max_prompt_tokens: int
    max_tokens: int
    temperature: float
    stop_ids: tuple[int, ...]

    def requests(self, step: int) -> list[SampleRequest]:
        """All requests of a step; those of one prompt are neighbours and a group.

        Raises:
            ConfigError: a prompt is too long.
        """
        prompts = self.task.prompts(step=step, count=self.prompts, seed=self.seed)
        if (longest := max(map(len, prompts))) > self.max_prompt_tokens:
            reason = f"is less than the {longest} tokens of a prompt of step {step}"
            path, value = "data.max_input_seq_length", str(self.max_prompt_tokens)
            violation = Violation(path, value, reason, "raise it, or let the task make shorter prompts")
            raise ConfigError("data", (violation,))
        return [
            SampleRequest(
                prompt,
                sample_seed(self.seed, step=step, prompt=group, sample=sample),
                group,
                max_tokens=self.max_tokens,
                temperature=self.temperature,
                stop_ids=self.stop_ids,
            )
            for group, prompt in enumerate(prompts)
            for sample in range(self.samples)
        ]

    def judged(self, samples: Sequence[Sample]) -> Rollout:
        """The samples with the task's rewards."""
        return Rollout(tuple(samples), tuple(self.task.reward(s.prompt, s.response) for s in samples))


class Engines(Protocol):
    """Whoever knows which engines serve at present; see `fleet.Fleet`."""

    @property
    def serving(self) -> Sequence[WorkerGroup]:
        """The engines that may be asked for samples."""


class Rollouts(Protocol):
    """A step's samples, and what has to happen around a refit. The calls come in this order, step by step."""

    def take(self, step: int, *, version: int) -> Rollout:
        """The samples that step `step` trains the weights of `version` on."""

    def before_refit(self) -> None:
        """Whatever must not be in flight during a refit is waited for."""

    def after_refit(self, step: int) -> None:
        """Step `step` is over, and the engines serve its weights."""

    def draw(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        """Other samples than a step's, now, from the weights that are served."""

    def engines_left(self) -> None:
        """An engine has gone, and with it what it was asked for: the others are asked for it again."""

    def activity(self) -> list[Interval]:
        """When engines generated since the last call, as far as they ran beside training."""

    @property
    def dropped(self) -> tuple[Dropped, ...]:
        """What had become too old at the last `take`."""


class FreshRollouts:
    """Each step's samples are drawn from the weights that it trains: generation and training take turns."""

    dropped: tuple[Dropped, ...] = ()

    def __init__(self, engines: Engines, asking: Asking, *, timeout_s: float) -> None:
        self._engines, self._asking, self._timeout_s = engines, asking, timeout_s

    def take(self, step: int, *, version: int) -> Rollout:
        """See `Rollouts.take`.

        Raises:
            WorkerError: an engine failed, or sampled from another version.
        """
        samples = self.draw(self._asking.requests(step))
        if found := {v for sample in samples for v in sample.versions} - {version}:
            reason = f"sampled from version {min(found)} where version {version} was to be served"
            raise WorkerError("generation", -1, "sample", reason)
        return self._asking.judged(samples)

    def before_refit(self) -> None:
        """Nothing is in flight."""

    def after_refit(self, step: int) -> None:
        """Nothing to do."""

    def draw(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        """See `Rollouts.draw`."""
        return sample_on(self._engines.serving, requests, timeout_s=self._timeout_s)

    def engines_left(self) -> None:
        """Nothing is in flight: the samples are drawn again, and are the same wherever they are drawn."""

    def activity(self) -> list[Interval]:
        """Never beside training."""
        return []


class AheadRollouts:
    """Engines generate the samples of the next `max_age` steps while the policy trains on older ones.

    With `in_flight` a refit interrupts sequences, which go on with the new weights; otherwise it waits until all that
    was begun is finished. Engines are groups of one `AsyncGenerationWorker` each.
    """

    def __init__(self, engines: Engines, asking: Asking, *, max_age: int, in_flight: bool, timeout_s: float) -> None:
        self._engines, self._asking, self._timeout_s = engines, asking, timeout_s
        self._max_age, self._in_flight = max_age, in_flight
        self._buffer = ReplayBuffer(max_age=max_age)
        # None where the work was lost and has to be asked for again.
        self._begun: dict[int, Submission | None] = {}
        self._newest = -1
        self.dropped: tuple[Dropped, ...] = ()

    def take(self, step: int, *, version: int) -> Rollout:
        """See `Rollouts.take`. The oldest samples come first, none older than allowed.

        Raises:
            WorkerError: an engine failed or took too long.
        """
        dropped: list[Dropped] = []
        self._begin(step)
        while True:
            taken = self._buffer.take(self._asking.prompts, version=version)
            dropped += taken.dropped
            if taken.rollout is not None:
                self.dropped = tuple(dropped)
                return taken.rollout
            if not self._begun:
                # All that was there had become too old.
                self._begin(max(step, self._newest + 1))
            self._finish(min(self._begun))

    def before_refit(self) -> None:
        """See `Rollouts.before_refit`."""
        if not self._in_flight:
            for step in sorted(self._begun):
                self._finish(step)

    def after_refit(self, step: int) -> None:
        """Begins the samples that may still be trained on `max_age` steps from now."""
        self._begin(step + 1)

    def draw(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        """See `Rollouts.draw`."""
        return submit_to(self._engines.serving, requests).take(timeout_s=self._timeout_s)

    def engines_left(self) -> None:
        """See `Rollouts.engines_left`. What the others have begun of the same steps is dropped too."""
        collect([engine.start("abort") for engine in self._engines.serving], timeout_s=self._timeout_s)
        self._begun = dict.fromkeys(self._begun)

    def activity(self) -> list[Interval]:
        """See `Rollouts.activity`."""
        found = collect([engine.start("activity") for engine in self._engines.serving], timeout_s=self._timeout_s)
        return [interval for by_rank in found for interval in by_rank[0]]

    def _begin(self, step: int) -> None:
        """Begins all steps from `step` to `max_age` later that haven't been."""
        for each in range(max(step, self._newest + 1), step + self._max_age + 1):
            self._begun[each] = self._submitted(each)
            self._newest = each

    def _finish(self, step: int) -> None:
        submission = self._begun[step] = self._begun[step] or self._submitted(step)
        samples = submission.take(timeout_s=self._timeout_s)
        del self._begun[step]
        self._buffer.add(self._asking.judged(samples))

    def _submitted(self, step: int) -> Submission:
        return submit_to(self._engines.serving, self._asking.requests(step))


def spread_of_ages(rollout: Rollout, version: int) -> Mapping[int, int]:
    """How many response tokens were chosen by weights how many versions behind `version`."""
    ages: dict[int, int] = {}
    for sample in rollout.samples:
        for chosen in sample.versions:
            ages[version - chosen] = ages.get(version - chosen, 0) + 1
    return dict(sorted(ages.items()))
