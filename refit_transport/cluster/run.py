"""The main job: train, refit, compare what both sides compute, again and again."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from refit_transport.cluster.job import Announce, RefitJob, agreed, model_and_cluster, running_job
from refit_transport.cluster.workers import collect
from refit_transport.config.model import logical_model
from refit_transport.config.schema import RefitConfig
from refit_transport.config.settings import RefitSettings
from refit_transport.errors import ParityError
from refit_transport.report import RefitReport
from refit_transport.verification import Comparison


@dataclass(frozen=True, slots=True)
class RefitRound:
    """One round: steps of training, a refit, and the comparison.

    `loss` is the last step's; `step_seconds` is what the steps before the refit took, all together.
    `largest_difference` is that of log-probabilities (natural logarithm) of the same tokens between trainer and
    samplers; `largest_change` that of the samplers' between this version and the one before.
    """

    version: int
    loss: float
    largest_difference: float
    largest_change: float
    report: RefitReport
    step_seconds: float

    def to_json(self) -> dict[str, Any]:
        """A plain value for the report file."""
        return {**asdict(self), "report": self.report.to_json()}


@dataclass(frozen=True, slots=True)
class VerifiedJob:
    """What both sides held before and after one refit.

    Training has changed the weights before, so comparing them there shows that the checksums see it.
    """

    before: Comparison
    report: RefitReport
    after: Comparison

    def to_json(self) -> dict[str, Any]:
        """A plain value for programs."""
        return {
            "equal": not self.after.differing,
            "before": self.before.to_json(),
            "after": self.after.to_json(),
            "report": self.report.to_json(),
        }


def run_rounds(config: RefitConfig, *, ray_address: str | None, announce: Announce) -> Iterator[RefitRound]:
    """Runs the configured number of rounds and yields each when it is done.

    Args:
        config: the job.
        ray_address: a running Ray cluster's address; None starts one on this machine.
        announce: called with what comes next, in a few words.

    Raises:
        ConfigError: the checkpoint can't be read, or the tiny model can't be written; nothing has started.
        WorkerError: a worker failed; everything is released first.
        ParityError: trainer and samplers disagree after a refit, or a refit changed nothing.
    """
    with (
        model_and_cluster(config, address=ray_address, announce=announce) as scratch,
        _started(config, scratch, announce) as job,
    ):
        before = agreed(job.engines, "logprobs", config.refit_run.prompts, timeout_s=config.refit_run.worker_timeout_s)
        for version in range(1, config.refit_run.refits + 1):
            finished = _round(config, job, version, before, announce)
            before = finished[1]
            yield finished[0]


def verify_job(config: RefitConfig, *, ray_address: str | None, announce: Announce) -> VerifiedJob:
    """Trains, refits once with every box verified, and compares all that both sides hold before and after.

    Arguments and errors are those of `run_rounds`. What differs in the end is in the result, not an error.
    """
    with (
        model_and_cluster(config, address=ray_address, announce=announce) as scratch,
        _started(config, scratch, announce, settings=replace(config.refit_settings(), verify="full")) as job,
    ):
        _train(config, job, 1, announce)
        announce("comparing both sides before the refit")
        before = job.synchronizer.compare()
        announce("refit")
        report = job.synchronizer.sync(1)
        announce("comparing both sides after it")
        return VerifiedJob(before, report, job.synchronizer.compare())


@contextmanager
def _started(
    config: RefitConfig, scratch: Path | None, announce: Announce, *, settings: RefitSettings | None = None
) -> Iterator[RefitJob]:
    announce(f"starting {config.training_ranks} training and {config.generation_ranks} generation workers")
    with running_job(config, scratch=scratch, settings=settings) as job:
        announce("planning the refit")
        job.synchronizer.prepare()
        yield job


def _round(
    config: RefitConfig, job: RefitJob, version: int, before: list[list[float]], announce: Announce
) -> tuple[RefitRound, list[list[float]]]:
    run, began = config.refit_run, time.perf_counter()
    loss = _train(config, job, version, announce)
    step_seconds = time.perf_counter() - began
    announce(f"version {version}: refit")
    report = job.synchronizer.sync(version)
    announce(f"version {version}: comparing log-probabilities")
    trained, served = _logprobs(config, job)
    finished = RefitRound(version, loss, _distance(trained, served), _distance(before, served), report, step_seconds)
    if not finished.largest_difference <= run.logprob_tolerance:
        raise ParityError(version, finished.largest_difference, run.logprob_tolerance, "differ from the trainer's by")
    if finished.largest_change <= run.logprob_tolerance:
        raise ParityError(version, finished.largest_change, run.logprob_tolerance, "moved since the last version by")
    return finished, served


def _train(config: RefitConfig, job: RefitJob, version: int, announce: Announce) -> float:
    """The steps before a version; returns the last one's loss."""
    loss, steps = 0.0, config.refit_run.steps_per_refit
    for step in range(steps):
        announce(f"version {version}: training step {step + 1} of {steps}")
        batch = token_batch(config, (version - 1) * steps + step)
        loss = agreed((job.policy,), "train_step", batch, timeout_s=config.refit_run.worker_timeout_s)
    return loss


def _logprobs(config: RefitConfig, job: RefitJob) -> tuple[list[list[float]], list[list[float]]]:
    """The trainer's and the samplers' log-probabilities of the configured prompts."""
    prompts, timeout_s = config.refit_run.prompts, config.refit_run.worker_timeout_s
    [trained] = collect([job.policy.start("logprobs", prompts)], timeout_s=timeout_s)
    return trained[0], agreed(job.engines, "logprobs", prompts, timeout_s=timeout_s)


def _distance(a: list[list[float]], b: list[list[float]]) -> float:
    return max(abs(x - y) for left, right in zip(a, b, strict=True) for x, y in zip(left, right, strict=True))


def token_batch(config: RefitConfig, step: int) -> list[list[int]]:
    """A global batch that a model can learn: arithmetic progressions of token ids with random start and stride."""
    run = config.refit_run
    dice = random.Random(f"{run.seed}/{step}")
    vocab = logical_model(config).vocab
    rows = []
    for _ in range(run.batch_size * config.data_parallel_size):
        start, stride = dice.randrange(vocab), dice.randrange(1, 8)
        rows.append([(start + stride * place) % vocab for place in range(config.sequence_length)])
    return rows
