"""An engine that generates in the background and is refitted in the middle of sequences."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from hf_oracle import token_logprobs
from refit_jobs import ENVIRONMENT, TIMEOUT_S, Case, RunningCase
from test_sampling import PREFIX, drawn, requests

from refit_transport.cluster.overlap import Interval, overlap
from refit_transport.cluster.samplers import sample_on, submit_to
from refit_transport.cluster.sampling import SampleRequest
from refit_transport.cluster.workers import WorkerGroup, collect
from refit_transport.errors import WorkerError
from refit_transport.layout.parallelism import MegatronParallelism as Cut
from refit_transport.testing.models import save_tiny_model

pytestmark = pytest.mark.e2e

LONG = 300


class AsyncJob(RunningCase):
    """A job whose policy has weights A and B."""

    def start(self):
        super().start()
        for name in "AB":
            self.policy.call("perturb", ord(name))
            self.policy.call("remember", name)
        self.weights = {}
        for name in "BA":
            self.policy.call("recall", name)
            self.weights[name] = self.exported()
        self.refits = self.synchronizer(coverage="all")
        self.version = 0
        self.refit("A")

    def refit(self, name):
        """Serves weights A or B as the next version, and returns it."""
        self.policy.call("recall", name)
        self.version += 1
        self.refits.sync(self.version)
        return self.version


@pytest.fixture(scope="module")
def engine():
    group = WorkerGroup("engine-async", 1, resources={"CPU": 0.5}, environment=ENVIRONMENT, timeout_s=TIMEOUT_S)
    yield group
    group.release()


@pytest.fixture(scope="module")
def job(groups, engine, tmp_path_factory):
    case = Case("dense", Cut(tensor=2), engines=2, max_model_len=512, model={"max_position_embeddings": 512})
    folder = save_tiny_model(tmp_path_factory.mktemp("model"), kind="dense", seed=3, **dict(case.model))
    running = AsyncJob(case, Path(folder), groups["policy"], [groups["engine-a"], engine])
    running.start()
    yield running
    # The last test ends the other engine.
    del running.engines[1:]
    running.stop()


@pytest.fixture(autouse=True)
def whole(request, job, engine):
    """Each test starts with an idle engine that serves A and computes its cache anew, unless it builds its own."""
    if "death" in request.node.name:
        return
    engine.call("abort")
    engine.call("use_kv_cache", "recompute")
    job.refit("A")
    engine.call("activity")


def long_requests(count=3, prefix=(), max_tokens=LONG):
    return [SampleRequest((*prefix, 1, 2, 3 + seed), seed, seed, max_tokens) for seed in range(count)]


def started(engine, submission):
    """Waits until every response has a token."""
    end = time.monotonic() + TIMEOUT_S
    while engine.call("started")[0] < len(submission.shares[0][1]):
        assert time.monotonic() < end
        time.sleep(0.01)


def errors(job, sample, name):
    """How far each log-probability is from what weights A or B give after all tokens before."""
    [rows] = token_logprobs(job.folder, job.weights[name], [sample.tokens])
    rows = rows[len(sample.prompt) - 1 :]
    return np.abs(rows[np.arange(len(sample.response)), sample.response] - sample.generation_logprobs)


def test_it_draws_what_the_other_engine_draws(job, engine):
    asked = requests()
    expected = sample_on([job.engines[0]], asked, timeout_s=TIMEOUT_S)
    assert drawn(engine.call("sample", asked)[0]) == drawn(expected)
    assert drawn(submit_to([engine], asked).take(timeout_s=TIMEOUT_S)) == drawn(expected)
    prompts = [list(sample.tokens) for sample in expected]
    for row, other in zip(
        engine.call("logprobs", prompts)[0], job.engines[0].call("logprobs", prompts)[0], strict=True
    ):
        assert np.allclose(row, other, atol=1e-5, rtol=0)


def test_a_refit_in_the_middle_of_sequences(job, engine):
    """Stamps say which weights chose each token, and its log-probability is what these give after all before it."""
    submission = submit_to([engine], long_requests())
    started(engine, submission)
    old = job.version
    began = time.time()
    new = job.refit("B")
    refit = Interval(began, time.time())
    samples = submission.take(timeout_s=TIMEOUT_S)
    for sample in samples:
        versions = np.array(sample.versions)
        switch = int((versions == old).sum())
        assert 0 < switch < LONG
        assert versions.tolist() == [old] * switch + [new] * (LONG - switch)
        of_a, of_b = errors(job, sample, "A"), errors(job, sample, "B")
        assert of_a[:switch].max() < 1e-4
        assert of_b[switch:].max() < 1e-4
        assert of_b[:switch].max() > 1e-2
        assert of_a[switch:].max() > 1e-2
    # It generated before and after, and not while it was refitted.
    ran = engine.call("activity")[0]
    assert len(ran) == 2
    within = Interval(ran[0].start, ran[-1].end)
    measured = overlap(ran, [refit], within=within)
    assert 0 < measured.generation_s < within.end - within.start
    assert measured.both_s < refit.end - refit.start


def test_a_refit_of_the_same_weights_changes_nothing_but_the_stamps(job, engine):
    asked = long_requests()
    undisturbed = engine.call("sample", asked)[0]
    submission = submit_to([engine], asked)
    started(engine, submission)
    job.refit("A")
    disturbed = submission.take(timeout_s=TIMEOUT_S)
    assert [sample.response for sample in disturbed] == [sample.response for sample in undisturbed]
    assert all(len(set(sample.versions)) == 2 for sample in disturbed)
    for sample in disturbed:
        assert errors(job, sample, "A").max() < 1e-4


def test_a_kept_cache_is_never_found_by_later_prompts(job, engine):
    engine.call("use_kv_cache", "keep")
    asked = long_requests(prefix=PREFIX, max_tokens=100)
    submission = submit_to([engine], asked)
    started(engine, submission)
    old = job.version
    new = job.refit("B")
    # These have the same first block while the old sequences, which hold it, still run.
    later = submit_to([engine], long_requests(prefix=PREFIX, max_tokens=4))
    for sample in later.take(timeout_s=TIMEOUT_S):
        assert set(sample.versions) == {new}
        assert errors(job, sample, "B").max() < 1e-4
    for sample in submission.take(timeout_s=TIMEOUT_S):
        switch = sample.versions.index(new)
        assert switch > 0
        assert errors(job, sample, "A")[:switch].max() < 1e-4
        # Sampled from the new weights, after what the old ones had computed of the prompt.
        assert errors(job, sample, "B")[switch:].max() > 1e-3
        assert errors(job, sample, "A")[switch:].max() > 1e-2
        assert sample.versions == (old,) * switch + (new,) * (100 - switch)


def test_prompts_that_wait_during_a_refit_start_anew(job, engine):
    """More prompts than the engine takes at once: those without a token would find what the old weights cached."""
    engine.call("use_kv_cache", "keep")
    job.policy.call("recall", "B")
    crowd = [SampleRequest((*PREFIX, *divmod(seed, 16)), seed, seed, max_tokens=40) for seed in range(320)]
    submission = submit_to([engine], crowd)
    while not engine.call("started")[0]:
        time.sleep(0.01)
    new = job.refit("B")
    samples = [s for s in submission.take(timeout_s=TIMEOUT_S) if set(s.versions) == {new}]
    assert 16 <= len(samples) < len(crowd)
    assert max(errors(job, sample, "B").max() for sample in samples[::8]) < 1e-4


def test_after_a_failed_refit_it_stands_still_until_a_complete_one(job, engine):
    submission = submit_to([engine], long_requests())
    started(engine, submission)
    old = job.version
    job.refits = job.synchronizer(coverage="all", timeout_s=10.0)
    job.policy.call("refuse_next_send", 1)
    with pytest.raises(WorkerError, match=r"a refusal|no receive completed|peer failure|Connection closed"):
        job.refit("B")
    with pytest.raises(WorkerError, match=r"take: fenced: a refit is open"):
        submission.take(timeout_s=TIMEOUT_S)
    with pytest.raises(WorkerError, match=r"submit: fenced: a refit is open"):
        submit_to([engine], requests()).take(timeout_s=TIMEOUT_S)
    assert engine.call("version") == [old]
    new = job.refit("B")
    for sample in submission.take(timeout_s=TIMEOUT_S):
        assert set(sample.versions) == {old, new}
        assert errors(job, sample, "B")[sample.versions.index(new) :].max() < 1e-4


def test_nothing_waits_for_ever_and_aborted_requests_leave_the_engine(job, engine):
    submission = submit_to([engine], long_requests())
    with pytest.raises(WorkerError, match=r"take: 3 of 3 responses are not finished within 0.05 s"):
        submission.take(timeout_s=0.05)
    assert engine.call("abort") == [3]
    assert engine.call("unfinished") == [0]
    with pytest.raises(WorkerError, match=r"no such tickets: \[\d+, \d+, \d+\]"):
        submission.take(timeout_s=1.0)
    with pytest.raises(WorkerError, match="512"):
        engine.call("sample", [SampleRequest((1,) * 600, 0, 0, 4)])
    with pytest.raises(WorkerError, match="token 256, and the model has tokens 0 to 255"):
        engine.call("sample", [SampleRequest((1, 256), 0, 0, 4)])
    assert len(engine.call("sample", long_requests(max_tokens=4))[0]) == 3


def test_shutdown_ends_what_is_generated_and_every_process(job, engine):
    """Of the last tests, which end the engine."""
    children = running_children(engine)
    submit_to([engine], long_requests())
    engine.call("shutdown")
    engine.call("shutdown")
    assert psutil.wait_procs(children, timeout=30)[1] == []
    with pytest.raises(WorkerError, match="fenced: it was shut down"):
        engine.call("sample", requests())


@pytest.mark.nightly
def test_no_process_outlives_the_death_of_another(job, engine):
    """Last, because it ends the actor."""
    collect([job.building(engine, job.folder)], timeout_s=TIMEOUT_S)
    submission = submit_to([engine], long_requests())
    started(engine, submission)
    children = running_children(engine)
    for child in children:
        child.kill()
    with pytest.raises(WorkerError, match="EngineDeadError"):
        submission.take(timeout_s=TIMEOUT_S)
    engine.call("shutdown")

    collect([job.building(engine, job.folder)], timeout_s=TIMEOUT_S)
    children = running_children(engine)
    submit_to([engine], long_requests())
    psutil.Process(*engine.process_ids()).kill()
    assert psutil.wait_procs(children, timeout=30)[1] == []


def running_children(engine):
    """The processes of an engine, without those that Python keeps for its own purposes."""
    children = psutil.Process(*engine.process_ids()).children(recursive=True)
    found = [child for child in children if "EngineCore" in " ".join(child.cmdline())]
    assert found, [child.cmdline() for child in children]
    return found
