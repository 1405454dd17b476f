"""The loop of a GRPO or PPO job: sample, score, train, refit, again and again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from refit_transport.cluster.fleet import Fleet
from refit_transport.cluster.job import Announce
from refit_transport.cluster.learning import Clock, Learned, Learner, LogprobError
from refit_transport.cluster.overlap import Interval, Overlap, overlap
from refit_transport.cluster.rollouts import Rollouts, spread_of_ages
from refit_transport.cluster.run_state import RunFolder, RunState
from refit_transport.cluster.served import ServedCheck
from refit_transport.cluster.validation import Validation, Validator
from refit_transport.errors import ParityError, WorkerError
from refit_transport.report import RefitReport
from refit_transport.rl.trajectories import Rollout

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LogprobLimit:
    """How far trainer and samplers may be apart (nats, mean of a step); whether going beyond ends the job at once."""

    limit: float
    stops: bool

    def judge(self, version: int, error: float) -> ParityError | None:
        """The error that `error` at a version is, if it is one: the refit is wrong."""
        if error <= self.limit:
            return None
        what = "differ from the trainer's on average by"
        return ParityError(version, error, self.limit, what, "logprob_error_limit")


@dataclass(frozen=True, slots=True)
class StepReport:
    """One finished step, which trained the weights of `version - 1` and published `version`.

    `logprob_error` is between trainer and samplers under the version that was trained. `seconds` by phase of the
    driver's wall time (`wait`: for sequences that a refit may not interrupt), `total` among them. `ages`: response
    tokens by how many versions behind the trainer they were chosen. `overlap` is None where generation and training
    take turns. `validations` are those since the report before.
    """

    step: int
    version: int
    rollout: Rollout = field(repr=False)
    learned: Learned
    logprob_error: LogprobError
    ages: Mapping[int, int]
    dropped_samples: int
    seconds: Mapping[str, float]
    refit: RefitReport
    overlap: Overlap | None
    limit: LogprobLimit
    validations: tuple[Validation, ...] = ()

    def apart(self) -> ParityError | None:
        """An error if the samplers computed something else than the trainer."""
        return self.limit.judge(self.version - 1, self.logprob_error.mean)

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
            "logprob_error": self.logprob_error.mean,
            "largest_logprob_error": self.logprob_error.largest,
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
            found["off_policy"] = learned.logprob_error.mean
        for each in self.validations:
            if each.step == self.step:
                found |= {"validation/reward": each.reward, "validation/length": each.length}
        return found

    def to_json(self) -> dict[str, Any]:
        """A plain value for the log file."""
        return {
            "step": self.step,
            **self.scalars(),
            "ages": {str(age): n for age, n in self.ages.items()},
            "validations": [asdict(each) for each in self.validations],
        }


def _means(updates: tuple[Any, ...]) -> dict[str, float]:
    """The mean of each figure over a step's updates; the loss's own figures are nested in `loss`."""
    flat = [{**asdict(update), **asdict(update)["loss"]} for update in updates]
    return {name: sum(each[name] for each in flat) / len(flat) for name in flat[0]}


@dataclass(slots=True)
class Loop:
    """The parts of a running job, whatever its algorithm. `sync` publishes a version to the engines of `fleet`.

    `served` is for rollouts whose samples don't tell whether the samplers have the trainer's weights.
    """

    learner: Learner
    rollouts: Rollouts
    sync: Callable[[int], RefitReport]
    fleet: Fleet
    folder: RunFolder | None
    save_period: int
    limit: LogprobLimit
    announce: Announce
    served: ServedCheck | None = None
    validator: Validator | None = None
    _version: int = -1
    _validations: list[Validation] = field(default_factory=list)

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
        done = 0
        if self.folder is not None:
            self._version = self.folder.published()
            if (found := self.folder.latest()) is not None:
                path, state = found
                self.announce(f"restoring step {state.step}")
                self.learner.restore(path)
                done, self._version = state.step, max(state.version, self._version)
        self.announce("first refit")
        self._publish()
        if done == 0:
            self._validate(0, is_last=False)
        return done

    def _step(self, step: int, *, is_last: bool) -> StepReport:
        clock, began = Clock(), time.time()
        with clock.timing("generate"):
            self.announce("generating")
            rollout = self._surviving(lambda: self.rollouts.take(step, version=self._version))
        training = time.time()
        if self.served is not None:
            self.served.begin(rollout.samples)
        learned = self.learner.learn(rollout, step=step, announce=self.announce, clock=clock)
        trained = Interval(training, time.time())
        with clock.timing("wait"):
            apart = learned.logprob_error if self.served is None else self._surviving(self.served.finish)
            if self.limit.stops and (error := self.limit.judge(self._version, apart.mean)):
                raise error
            self._surviving(self.rollouts.before_refit)
        with clock.timing("refit"):
            self.announce("refit")
            refit = self._publish()
        # Before engines are busy with what they are asked for next.
        ran = self._surviving(self.rollouts.activity)
        ages = spread_of_ages(rollout, self._version - 1)
        if not is_last:
            self._surviving(lambda: self.rollouts.after_refit(step))
        with clock.timing("validate"):
            self._validate(step, is_last=is_last)
        with clock.timing("save"):
            self._save(step, rollout, is_last=is_last)
        whole = Interval(began, time.time())
        validations, self._validations = tuple(self._validations), []
        return StepReport(
            step,
            self._version,
            rollout,
            learned,
            apart,
            ages,
            sum(each.samples for each in self.rollouts.dropped),
            {**clock.seconds, "total": whole.end - whole.start},
            refit,
            overlap(ran, [trained], within=whole) if ran else None,
            self.limit,
            validations,
        )

    def _publish(self) -> RefitReport:
        """Publishes the weights under the next version; engines that have died meanwhile are left out of it."""
        if (change := self.fleet.tend()).left:
            self._tell(change.left)
            self.rollouts.engines_left()
        for name in change.joined:
            self.announce(f"{name} takes part again")
        return self._surviving(self._publish_next)

    def _publish_next(self) -> RefitReport:
        # A version that some engine may have is never used again.
        self._version += 1
        if self.folder is not None:
            self.folder.publishing(self._version)
        return self.sync(self._version)

    def _validate(self, step: int, *, is_last: bool) -> None:
        if self.validator is not None and self.validator.is_due(step, is_last=is_last):
            self.announce("validating")
            validate = self.validator.validate
            self._validations.append(self._surviving(lambda: validate(step, self.rollouts.draw)))

    def _surviving(self, call: Callable[[], T]) -> T:
        """What `call` returns; once more for each time that an engine has died in it, which is then left out."""
        while True:
            try:
                return call()
            except WorkerError:
                left = self.fleet.drop_dead()
                if not left:
                    raise
                self._tell(left)
                self.rollouts.engines_left()

    def _tell(self, left: Mapping[str, str]) -> None:
        for name, what in left.items():
            self.announce(f"{name} has died, {what}")

    def _save(self, step: int, rollout: Rollout, *, is_last: bool) -> None:
        if self.folder is not None and (is_last or step % self.save_period == 0):
            self.announce("saving")
            state = RunState(step, self._version, rollout.mean_reward())
            self.folder.save(state, self.learner.save)
