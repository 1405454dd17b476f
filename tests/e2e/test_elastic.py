"""Engines and trainers that die, come back and change between refits: real Megatron, real vLLM, real signals."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from refit_jobs import ENVIRONMENT, TIMEOUT_S, Case, RunningCase, largest_difference, wrong_parameters

from refit_transport.cluster.fleet import Fleet
from refit_transport.cluster.workers import WorkerGroup, collect
from refit_transport.errors import WorkerError
from refit_transport.layout.parallelism import MegatronParallelism as Cut
from refit_transport.testing.models import save_tiny_model

pytestmark = pytest.mark.e2e

REFIT_TIMEOUT_S = 20.0


def group(name, count):
    return WorkerGroup(name, count, resources={"CPU": 0.5}, environment=ENVIRONMENT, timeout_s=TIMEOUT_S)


@pytest.fixture
def start(groups, tmp_path_factory):
    """Starts a job with a warm engine and the given one."""
    jobs = []

    def start(other):
        folder = save_tiny_model(tmp_path_factory.mktemp("model"), kind="dense", seed=3, num_hidden_layers=2)
        case = Case("dense", Cut(tensor=2), engines=2, model={"num_hidden_layers": 2})
        jobs.append(RunningCase(case, Path(folder), groups["policy"], [groups["engine-a"], other]))
        jobs[0].start()
        return jobs[0]

    yield start
    jobs[0].stop()


@pytest.fixture
def mortal(groups):
    """An engine that the test kills."""
    made = group("engine-mortal", 1)
    yield made
    made.release()


def publish(job, synchronizer, version):
    """A refit of new weights; every engine of the job must serve exactly these."""
    job.policy.call("perturb", version)
    report = synchronizer.sync(version)
    assert report.version == version
    assert wrong_parameters(job, job.exported()) == []
    assert largest_difference(job) <= 1e-4
    return report


@pytest.mark.parametrize(
    ("number", "commit"),
    [(signal.SIGKILL, "in_place"), pytest.param(signal.SIGSTOP, "staged", marks=pytest.mark.nightly)],
)
def test_a_dead_engine_is_left_out_and_its_successor_gets_everything(start, mortal, number, commit):
    job = start(mortal)
    survivor, successors = job.engines[0], []
    synchronizer = job.synchronizer(timeout_s=REFIT_TIMEOUT_S, commit=commit)

    def start_again():
        successors.append(group(mortal.name, 1))
        return successors[-1], job.building(successors[-1], job.folder)

    fleet = Fleet(
        job.policy,
        {engine.name: engine for engine in job.engines},
        synchronizer=synchronizer,
        start={mortal.name: start_again},
        restarts=1,
        timeout_s=REFIT_TIMEOUT_S + 10.0,
    )
    try:
        assert publish(job, synchronizer, 1).seconds["plan"] > 0
        assert publish(job, synchronizer, 2).seconds["plan"] == 0
        assert not fleet.tend()

        os.kill(mortal.process_ids()[0], number)
        began = time.monotonic()
        with pytest.raises(WorkerError):
            synchronizer.sync(3)
        assert time.monotonic() - began < REFIT_TIMEOUT_S + 35.0
        # In place, the survivor may be torn and refuses; staged, it still serves version 2, whole.
        if commit == "in_place":
            with pytest.raises(WorkerError, match="fenced"):
                survivor.call("logprobs", [(1, 2, 3)])
        else:
            survivor.call("logprobs", [(1, 2, 3)])
            job.engines = [survivor]
            assert wrong_parameters(job, job.exported()) == []
        assert survivor.call("version") == [2]

        assert fleet.drop_dead() == {mortal.name: "starting again"}
        assert fleet.serving == (survivor,)
        job.engines = [survivor]
        publish(job, synchronizer, 4)

        while not (change := fleet.tend()):
            time.sleep(0.2)
        assert change.joined == (mortal.name,)
        job.engines = list(fleet.serving)
        assert len(job.engines) == 2
        report = publish(job, synchronizer, 5)
        assert report.seconds["plan"] > 0
        assert publish(job, synchronizer, 6).seconds["plan"] == 0
    finally:
        job.engines = [survivor]
        for each in successors:
            each.release()


@pytest.mark.nightly
def test_the_trainer_may_come_back_with_another_layout(start, groups):
    job = start(groups["engine-b"])
    synchronizer = job.synchronizer(timeout_s=60.0)
    publish(job, synchronizer, 1)
    trainer, others = group("policy", 1), list(job.engines)
    try:
        again = RunningCase(Case("dense", Cut(), engines=0), job.folder, trainer, [])
        again.start()
        synchronizer.reconcile(trainer, others)
        again.engines = others
        publish(again, synchronizer, 2)
        again.policy.call("shutdown")
    finally:
        trainer.release()


def test_while_a_staged_refit_arrives_the_engine_answers_from_its_old_weights(start, groups):
    job = start(groups["engine-b"])
    synchronizer = job.synchronizer(timeout_s=60.0, commit="staged")
    publish(job, synchronizer, 1)
    before = job.engines[0].call("logprobs", [(1, 2, 3, 4)])
    job.policy.call("perturb", 2)
    collect([engine.start("stage", 2) for engine in job.engines], timeout_s=60.0)
    # The sources haven't begun to send, and the engines already wait for them.
    assert job.engines[0].call("logprobs", [(1, 2, 3, 4)]) == before
    assert job.engines[0].call("version") == [1]
    collect([job.policy.start("send", 2)], timeout_s=60.0)
    assert job.engines[0].call("logprobs", [(1, 2, 3, 4)]) == before
    for method, arguments in (("start_refit", ()), ("receive", (2,))):
        collect([engine.start(method, *arguments) for engine in job.engines], timeout_s=60.0)
    with pytest.raises(WorkerError, match="fenced"):
        job.engines[0].call("logprobs", [(1, 2, 3, 4)])
    finishing = [job.policy.start("finish_refit"), *(engine.start("finish_refit", 2) for engine in job.engines)]
    collect(finishing, timeout_s=60.0)
    assert wrong_parameters(job, job.exported()) == []
    assert job.engines[0].call("logprobs", [(1, 2, 3, 4)]) != before
