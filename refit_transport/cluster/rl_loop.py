"""The loop of a GRPO or PPO job: sample, score, train, refit, again and again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from refit_transport.cluster.learning import Announce, Learned, Learner
from refit_transport.cluster.overlap import Interval, Overlap, overlap
from refit_transport.cluster.rollouts import Rollouts, spread_of_ages
from refit_transport.cluster.run_state import RunFolder, RunState
from refit_transport.errors import ConfigError, ParityError, Violation
from refit_transport.report import RefitReport
from refit_transport.rl.trajectories import Rollout

PHASES = ("generate", "score", "train", "wait", "refit", "save")


@dataclass(frozen=True, slots=True)
class LogprobLimit:
    """How far trainer and samplers may be apart (nats, mean of a step); whether going beyond ends the job at once."""

    limit: float
    stops: bool


@dataclass(frozen=True, slots=True)
class StepReport:
    """One finished step, which trained the weights of `version - 1` and published `version`.

    `seconds` by phase of the driver's wall time (`wait`: for sequences that a refit may not interrupt), `total` among
    them. `ages`: response tokens by how many versions behind the trainer they were chosen. `overlap` is None where
    generation and training take turns.
    """

    step: int
    version: int
    rollout: Rollout = field(repr=False)
    learned: Learned
    ages: Mapping[int, int]
    dropped_samples: int
    seconds: Mapping[str, float]
    refit: RefitReport
    overlap: Overlap | None
    limit: LogprobLimit | None

    @property
    def is_apart(self) -> bool:
        """Whether the samplers computed something else than the trainer."""
        return self.limit is not None and not self.learned.logprob_error.mean <= self.limit.limit

    @property
    def refit_share(self) -> float:
        """The part of the step that its refit took."""
        return self.seconds["refit"] / self.seconds["total"]

    def scalars(self) -> dict[str, float]:
        """Everything that is one number, for logs."""
        learned = self.learned
        found = {
            "version": float(self.version),
            "reward": self.rollout.mean_reward(),
            "length": self.rollout.mean_length(),
            "logprob_error": learned.logprob_error.mean,
            "largest_logprob_error": learned.logprob_error.largest,
            "refit_bytes": float(self.refit.summary.received_bytes),
            "refit_share": self.refit_share,
            "dropped_samples": float(self.dropped_samples),
            **{f"seconds/{phase}": seconds for phase, seconds in self.seconds.items()},
            **{f"refit_seconds/{phase}": seconds for phase, seconds in self.refit.seconds.items()},
        }
        if learned.policy:
            found |= {f"policy/{name}": value for name, value in _means(learned.policy).items()}
        if learned.critic:
            found |= {f"critic/{name}": value for name, value in _means(learned.critic).items()}
        if self.overlap is not None:
            found |= {f"overlap/{name}": value for name, value in asdict(self.overlap).items()}
            found["overlap/share"] = self.overlap.share
        return found

    def to_json(self) -> dict[str, Any]:
        """A plain value for the log file."""
        return {"step": self.step, **self.scalars(), "ages": {str(age): n for age, n in self.ages.items()}}


def _means(updates: tuple[Any, ...]) -> dict[str, float]:
    """The mean of each figure over a step's updates; the loss's own figures are nested in `loss`."""
    flat = [{**asdict(update), **asdict(update)["loss"]} for update in updates]
    return {name: sum(each[name] for each in flat) / len(flat) for name in flat[0]}


@dataclass(slots=True)
class Loop:
    """The parts of a running job, whatever its algorithm. `sync` publishes a version to the engines."""

    learner: Learner
    rollouts: Rollouts
    sync: Callable[[int], RefitReport]
    folder: RunFolder | None
    save_period: int
    fingerprint: str
    limit: LogprobLimit | None
    announce: Announce
    _seconds: dict[str, float] = field(default_factory=dict)
    _version: int = -1

    def run(self, steps: int) -> Iterator[StepReport]:
        """Goes on from the last checkpoint, if there is one, and yields every finished step up to `steps`.

        Raises:
            WorkerError: a worker failed.
            ParityError: the samplers' log-probabilities aren't the trainer's.
        """
        first = self._begin() + 1
        for step in range(first, steps + 1):
            yield self._step(step, is_last=step == steps)

    def _begin(self) -> int:
        """Brings the engines to the trainer's weights; returns the last step that is done."""
        state = self._restored()
        self._version = max(
            -1 if state is None else state.version, -1 if self.folder is None else self.folder.published()
        )
        self.announce("first refit")
        self._publish()
        return 0 if state is None else state.step

    def _restored(self) -> RunState | None:
        found = None if self.folder is None else self.folder.latest()
        if found is None:
            return None
        path, state = found
        if state.fingerprint != self.fingerprint:
            raise _other_job(path)
        self.announce(f"restoring step {state.step}")
        self.learner.restore(path)
        return state

    def _step(self, step: int, *, is_last: bool) -> StepReport:
        self._seconds = dict.fromkeys(PHASES, 0.0)
        began = time.time()
        with self._timing("generate"):
            self.announce("generating")
            rollout = self.rollouts.take(step, version=self._version)
        training = time.time()
        learned = self.learner.learn(rollout, step=step, announce=self.announce)
        trained = Interval(training, time.time())
        self._seconds |= {"score": learned.score_s, "train": learned.train_s}
        self._judge(learned)
        with self._timing("wait"):
            self.rollouts.before_refit()
        with self._timing("refit"):
            self.announce("refit")
            refit = self._publish()
        ages = spread_of_ages(rollout, self._version - 1)
        if not is_last:
            self.rollouts.after_refit(step)
        with self._timing("save"):
            self._save(step, rollout, is_last=is_last)
        whole = Interval(began, time.time())
        ran = self.rollouts.activity()
        return StepReport(
            step,
            self._version,
            rollout,
            learned,
            ages,
            sum(each.samples for each in self.rollouts.dropped),
            {**self._seconds, "total": whole.end - whole.start},
            refit,
            overlap(ran, [trained], within=whole) if ran else None,
            self.limit,
        )

    def _publish(self) -> RefitReport:
        self._version += 1
        if self.folder is not None:
            self.folder.publishing(self._version)
        return self.sync(self._version)

    def _judge(self, learned: Learned) -> None:
        error = learned.logprob_error.mean
        if self.limit is not None and self.limit.stops and not error <= self.limit.limit:
            raise apart(self._version, error, self.limit)

    def _save(self, step: int, rollout: Rollout, *, is_last: bool) -> None:
        if self.folder is not None and (is_last or step % self.save_period == 0):
            self.announce("saving")
            state = RunState(step, self._version, rollout.mean_reward(), self.fingerprint)
            self.folder.save(state, self.learner.save)

    @contextmanager
    def _timing(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds[phase] += time.perf_counter() - began


def apart(version: int, error: float, limit: LogprobLimit) -> ParityError:
    """Trainer and samplers compute different things with one version of the weights: the refit is wrong."""
    what = "differ from the trainer's on average by"
    return ParityError(version, error, limit.limit, what, "logprob_error_limit")


def _other_job(path: Path) -> ConfigError:
    reason = "has the checkpoint of another job: what decides its course (model, data, algorithm, seeds) differs"
    violation = Violation("checkpointing.checkpoint_dir", str(path), reason, "name another folder, or remove this one")
    return ConfigError("checkpointing", (violation,))
