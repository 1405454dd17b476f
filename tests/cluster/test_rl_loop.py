"""The order of a step, what a job goes on from, and which samples an asynchronous one trains on."""

from dataclasses import dataclass, field

import pytest

from refit_transport.cluster import rollouts as rollouts_module
from refit_transport.cluster.learning import Learned, LogprobError
from refit_transport.cluster.rl_loop import LogprobLimit, Loop
from refit_transport.cluster.rollouts import AheadRollouts, Asking, FreshRollouts, spread_of_ages
from refit_transport.cluster.run_state import RunFolder
from refit_transport.errors import ConfigError, ParityError, WorkerError
from refit_transport.rl.tasks import FirstDigitEcho
from refit_transport.rl.trajectories import Rollout, Sample

ASKING = Asking(FirstDigitEcho(), prompts=3, samples=2, seed=5, max_tokens=4, temperature=1.0, stop_ids=(2,))


@dataclass
class Engines:
    """Answers every request at once, each token chosen by the version that is served then."""

    version: int = -1
    asked: list[tuple[int, int]] = field(default_factory=list)

    def answer(self, requests):
        return [
            Sample(r.prompt, (9, 2), (-1.0, -1.0), (self.version, self.version), r.seed, r.group, "stop")
            for r in requests
        ]


class Summary:
    received_bytes = 10


class Refit:
    summary, seconds = Summary(), {"network": 0.0}


@dataclass
class Learner:
    """Counts its updates, as weights would."""

    error: float = 0.0
    seen: list[tuple[int, Rollout]] = field(default_factory=list)
    weights: int = 0

    def learn(self, rollout, *, step, announce):
        announce("training")
        self.seen.append((step, rollout))
        self.weights += 1
        return Learned((), (), LogprobError(self.error, self.error), 0.0, 0.0)

    def save(self, folder):
        (folder / "weights").write_text(str(self.weights))

    def restore(self, folder):
        self.weights = int((folder / "weights").read_text())


@pytest.fixture
def engines(monkeypatch):
    found = Engines()

    @dataclass
    class Begun:
        requests: list
        samples: list | None = None

        def take(self, *, timeout_s):
            assert timeout_s == 7.0
            return found.answer(self.requests) if self.samples is None else self.samples

    def submit(_, requests, *, timeout_s):
        assert timeout_s == 7.0
        found.asked.append((found.version, requests[0].seed))
        return Begun(requests, found.answer(requests))

    monkeypatch.setattr(rollouts_module, "sample_on", lambda _, requests, timeout_s: found.answer(requests))
    monkeypatch.setattr(rollouts_module, "submit_to", submit)
    return found


def loop(engines, rollouts, learner, *, folder=None, limit=None, period=2, fingerprint="job", published=None):
    def sync(version):
        engines.version = version
        if published is not None:
            published.append((version, learner.weights))
        return Refit()

    return Loop(
        learner=learner,
        rollouts=rollouts,
        sync=sync,
        folder=None if folder is None else RunFolder(folder, keep=None, best=False),
        save_period=period,
        fingerprint=fingerprint,
        limit=limit,
        announce=lambda _: None,
    )


def ahead(*, max_age, in_flight=False):
    found = AheadRollouts([], ASKING, max_age=max_age, in_flight=in_flight, timeout_s=7.0)
    found.activity = list
    return found


def test_every_step_trains_the_version_that_was_sampled_and_publishes_the_next(engines):
    learner, published = Learner(), []
    reports = list(
        loop(engines, FreshRollouts([], ASKING, timeout_s=7.0), learner, published=published).run(3)
    )  # fmt: skip
    assert published == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert [(report.step, report.version, report.ages) for report in reports] == [
        (1, 1, {0: 12}),
        (2, 2, {0: 12}),
        (3, 3, {0: 12}),
    ]
    assert [step for step, _ in learner.seen] == [1, 2, 3]
    assert all(report.overlap is None for report in reports)


def test_samples_of_another_version_than_the_trainers_are_refused(engines):
    rollouts = FreshRollouts([], ASKING, timeout_s=7.0)
    engines.version = 4
    with pytest.raises(WorkerError, match="version 4 where version 5"):
        rollouts.take(1, version=5)


@pytest.mark.parametrize("cut", [2, 4])
def test_a_resumed_job_sees_the_same_samples_and_publishes_larger_versions(engines, tmp_path, cut):
    whole = Learner()
    list(loop(engines, FreshRollouts([], ASKING, timeout_s=7.0), whole).run(6))

    first, published = Learner(), []
    rollouts = FreshRollouts([], ASKING, timeout_s=7.0)
    going = loop(engines, rollouts, first, folder=tmp_path, published=published).run(6)
    for _ in range(cut + 1):  # one step more than the last checkpoint
        next(going)
    going.close()

    second = Learner()
    list(loop(engines, FreshRollouts([], ASKING, timeout_s=7.0), second, folder=tmp_path, published=published).run(6))
    versions = [version for version, _ in published]
    assert versions == sorted(set(versions))
    assert second.seen[0][0] == cut + 1
    assert second.weights == whole.weights == 6

    def seeds(seen):
        return [(step, [sample.seed for sample in rollout.samples]) for step, rollout in seen]

    assert seeds(second.seen) == seeds(whole.seen)[cut:]


def test_a_finished_job_has_nothing_to_do(engines, tmp_path):
    rollouts = FreshRollouts([], ASKING, timeout_s=7.0)
    assert len(list(loop(engines, rollouts, Learner(), folder=tmp_path).run(3))) == 3
    assert list(loop(engines, rollouts, Learner(), folder=tmp_path).run(3)) == []


def test_another_jobs_checkpoint_is_refused(engines, tmp_path):
    rollouts = FreshRollouts([], ASKING, timeout_s=7.0)
    list(loop(engines, rollouts, Learner(), folder=tmp_path).run(2))
    with pytest.raises(ConfigError, match=r"(?s)another job.*step_2"):
        list(loop(engines, rollouts, Learner(), folder=tmp_path, fingerprint="other").run(4))


@pytest.mark.parametrize("error", [2e-5, float("nan")])
def test_samplers_that_compute_something_else_end_the_job_or_mark_the_step(engines, error):
    learner = Learner(error=error)
    rollouts = FreshRollouts([], ASKING, timeout_s=7.0)
    with pytest.raises(ParityError, match="logprob_error_limit is 1e-05"):
        list(loop(engines, rollouts, learner, limit=LogprobLimit(1e-5, stops=True)).run(2))
    assert [r.is_apart for r in loop(engines, rollouts, learner, limit=LogprobLimit(1e-5, stops=False)).run(2)] == [
        True,
        True,
    ]
    fine = loop(engines, rollouts, Learner(error=9e-6), limit=LogprobLimit(1e-5, stops=True))
    assert not any(report.is_apart for report in fine.run(2))


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("max_age", [1, 2, 3])
def test_generation_runs_ahead_by_the_allowed_age_and_no_further(engines, max_age, in_flight):
    learner = Learner()
    reports = list(loop(engines, ahead(max_age=max_age, in_flight=in_flight), learner).run(8))
    # The first steps were begun by the first weights; then every step is as old as allowed.
    assert [report.ages for report in reports] == [{min(step, max_age): 12} for step in range(8)]
    assert [report.dropped_samples for report in reports] == [0] * 8
    seeds = [seed for _, seed in engines.asked]
    assert len(set(seeds)) == len(seeds), "a step was begun twice"


def test_what_is_too_old_is_dropped_and_replaced(engines):
    rollouts = ahead(max_age=1)
    engines.version = 0
    assert spread_of_ages(rollouts.take(1, version=0), 0) == {0: 12}
    engines.version = 5
    taken = rollouts.take(2, version=5)
    assert spread_of_ages(taken, 5) == {0: 12}
    assert sum(each.samples for each in rollouts.dropped) == 6
    assert len(taken.samples) == 6


def test_requests_of_a_step_do_not_depend_on_when_they_are_made():
    assert ASKING.requests(4) == ASKING.requests(4)
    seeds = [request.seed for step in range(5) for request in ASKING.requests(step)]
    assert len(set(seeds)) == 5 * 6
    assert [request.group for request in ASKING.requests(0)] == [0, 0, 1, 1, 2, 2]
