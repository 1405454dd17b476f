"""What a step does with its samples: scores them, turns rewards into advantages, and updates policy and critic."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from refit_transport.cluster.critic import CriticUpdate
from refit_transport.cluster.job import Announce
from refit_transport.cluster.rl_training import PolicyUpdate
from refit_transport.cluster.workers import Pending, WorkerGroup, collect
from refit_transport.rl.advantages import GaeSettings, GroupSettings, with_gae, with_group_advantages
from refit_transport.rl.settings import PolicyLossSettings, ValueLossSettings
from refit_transport.rl.trajectories import Rollout, TrainBatch, prompt_groups, split_evenly


@dataclass(frozen=True, slots=True)
class LogprobError:
    """|log pi_trainer - log pi_sampler| over some tokens (nats): what a wrong refit shows in."""

    mean: float
    largest: float

    @classmethod
    def of(cls, batch: TrainBatch) -> LogprobError:
        """Between `prev_logprobs`, which must be there, and `generation_logprobs`."""
        assert batch.prev_logprobs is not None
        tokens = batch.token_mask.bool()
        apart = (batch.prev_logprobs - batch.generation_logprobs).abs()[tokens].double()
        return cls(float(apart.mean()), float(apart.max()))

    @classmethod
    def between(
        cls, one: Sequence[Sequence[Sequence[float]]], other: Sequence[Sequence[Sequence[float]]]
    ) -> LogprobError:  # fmt: skip
        """Between two lists of rows of log-probabilities for each of several engines."""
        apart = [
            abs(a - b)
            for rows, others in zip(one, other, strict=True)
            for row, its in zip(rows, others, strict=True)
            for a, b in zip(row, its, strict=True)
        ]
        return cls(sum(apart) / len(apart), max(apart))


@dataclass(frozen=True, slots=True)
class Learned:
    """What one step taught.

    `logprob_error` is between the trainer before its update and the samplers when they drew: where these were older,
    most of it is what was learned since.
    """

    policy: tuple[PolicyUpdate, ...]
    critic: tuple[CriticUpdate, ...]
    logprob_error: LogprobError


class Clock:
    """Seconds of a step by phase."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("generate", "score", "train", "wait", "refit", "validate", "save"), 0.0)

    @contextmanager
    def timing(self, phase: str) -> Iterator[None]:
        """Adds the block's wall time to a phase."""
        began = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - began


class Learner(Protocol):
    """Owns the training groups of a job."""

    def learn(self, rollout: Rollout, *, step: int, announce: Announce, clock: Clock) -> Learned:
        """Updates the weights with a step's samples; `step` is its number. Adds to the phases `score` and `train`.

        Raises:
            WorkerError: a training worker failed.
        """

    def save(self, folder: Path) -> None:
        """Writes everything that the training groups need to go on into a new folder."""

    def restore(self, folder: Path) -> None:
        """Goes on from what `save` wrote."""


class _Training:
    """The groups that train, as a driver calls them: on all ranks at once, the answer from rank 0."""

    def __init__(self, policy: WorkerGroup, critic: WorkerGroup | None, *, timeout_s: float) -> None:
        self._policy, self._critic, self._timeout_s = policy, critic, timeout_s

    def _freeze_reference(self) -> None:
        self._collect([self._policy.start("freeze_reference")])

    def _scored(self, rollout: Rollout, announce: Announce, *, with_reference: bool) -> TrainBatch:
        """The samples as a batch, with the policy's log-probabilities, the reference's and the critic's values."""
        batch = TrainBatch.from_samples(rollout.samples)
        announce("scoring")
        calls = [self._policy.start("logprobs_of", batch)]
        if self._critic is not None:
            calls.append(self._critic.start("values_of", batch))
        found: list[Any] = self._collect(calls)
        batch = replace(batch, prev_logprobs=found[0], values=found[1] if self._critic is not None else None)
        if with_reference:
            [reference] = self._collect([self._policy.start("reference_logprobs_of", batch)])
            batch = replace(batch, reference_logprobs=reference)
        return batch

    def _update(self, batch: TrainBatch, loss: PolicyLossSettings) -> PolicyUpdate:
        [update] = self._collect([self._policy.start("rl_step", batch, loss)])
        assert isinstance(update, PolicyUpdate)
        return update

    def _update_both(
        self, batch: TrainBatch, loss: PolicyLossSettings | None, value_loss: ValueLossSettings
    ) -> tuple[PolicyUpdate | None, CriticUpdate]:
        """Both at once, on their own ranks; without `loss` the critic alone."""
        assert self._critic is not None
        calls = [self._critic.start("rl_step", batch, value_loss)]
        if loss is not None:
            calls.append(self._policy.start("rl_step", batch, loss))
        found: list[Any] = self._collect(calls)
        return (found[1] if loss is not None else None), found[0]

    def save(self, folder: Path) -> None:
        """See `Learner.save`."""
        self._collect([group.start("save", str(folder / name)) for name, group in self._named])

    def restore(self, folder: Path) -> None:
        """See `Learner.restore`."""
        self._collect([group.start("restore", str(folder / name)) for name, group in self._named])

    @property
    def _named(self) -> Sequence[tuple[str, WorkerGroup]]:
        critic = [("critic", self._critic)] if self._critic is not None else []
        return [("policy", self._policy), *critic]

    def _collect(self, calls: Sequence[Pending]) -> list[Any]:
        return [by_rank[0] for by_rank in collect(calls, timeout_s=self._timeout_s)]


class GrpoLearner(_Training):
    """Group-relative advantages. A step is cut into updates of `rows_per_update` samples, in the order of the prompts.

    The reference policy is the one that this is made with; a resumed job makes this before `restore`.
    """

    def __init__(
        self,
        policy: WorkerGroup,
        *,
        groups: GroupSettings,
        loss: PolicyLossSettings,
        rows_per_update: int,
        timeout_s: float,
    ) -> None:
        super().__init__(policy, None, timeout_s=timeout_s)
        self._groups, self._loss, self._rows = groups, loss, rows_per_update
        if loss.kl is not None:
            self._freeze_reference()

    def learn(self, rollout: Rollout, *, step: int, announce: Announce, clock: Clock) -> Learned:  # noqa: ARG002  # the protocol's
        """See `Learner.learn`."""
        with clock.timing("score"):
            batch = self._scored(rollout, announce, with_reference=self._loss.kl is not None)
        batch = with_group_advantages(batch, rollout.rewards, prompt_groups(rollout.samples), self._groups)
        announce("training")
        with clock.timing("train"):
            updates = [self._update(part, self._loss) for part in split_evenly(batch, batch.size // self._rows)]
        return Learned(tuple(updates), (), LogprobError.of(batch))


@dataclass(frozen=True, slots=True)
class PpoSettings:
    """`epochs`: passes over each step's samples, each in another order, in updates of `rows_per_update` samples.

    Steps before `first_policy_step` train the critic alone. `seed` decides the orders.
    """

    gae: GaeSettings
    loss: PolicyLossSettings
    value_loss: ValueLossSettings
    epochs: int
    rows_per_update: int
    first_policy_step: int
    seed: int

    @property
    def needs_reference(self) -> bool:
        return self.loss.kl is not None or self.gae.kl is not None


class PpoLearner(_Training):
    """Advantages by a critic, which learns beside the policy on ranks of its own. See `GrpoLearner`."""

    def __init__(
        self, policy: WorkerGroup, critic: WorkerGroup, *, settings: PpoSettings, timeout_s: float
    ) -> None:  # fmt: skip
        super().__init__(policy, critic, timeout_s=timeout_s)
        self._settings = settings
        if settings.needs_reference:
            self._freeze_reference()

    def learn(self, rollout: Rollout, *, step: int, announce: Announce, clock: Clock) -> Learned:
        """See `Learner.learn`."""
        settings = self._settings
        with clock.timing("score"):
            batch = self._scored(rollout, announce, with_reference=settings.needs_reference)
        batch = with_gae(batch, rollout.rewards, settings.gae)
        trains_policy = step >= settings.first_policy_step
        policy: list[PolicyUpdate] = []
        critic: list[CriticUpdate] = []
        announce("training")
        with clock.timing("train"):
            for order in self._orders(batch.size, step):
                for part in split_evenly(batch.rows(order), batch.size // settings.rows_per_update):
                    both = self._update_both(part, settings.loss if trains_policy else None, settings.value_loss)
                    policy += [both[0]] if both[0] is not None else []
                    critic.append(both[1])
        return Learned(tuple(policy), tuple(critic), LogprobError.of(batch))

    def _orders(self, rows: int, step: int) -> Iterator[list[int]]:
        dice = np.random.default_rng((self._settings.seed, step))
        for _ in range(self._settings.epochs):
            yield dice.permutation(rows).tolist()
