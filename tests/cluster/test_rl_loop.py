"""The order of a step, what a job goes on from, and which samples an asynchronous one trains on."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from refit_transport.cluster import rollouts as rollouts_module
from refit_transport.cluster.fleet import Change
from refit_transport.cluster.learning import Learned, LogprobError
from refit_transport.cluster.rl_job import fingerprint
from refit_transport.cluster.rl_loop import LogprobLimit, Loop
from refit_transport.cluster.rollouts import AheadRollouts, Asking, FreshRollouts, spread_of_ages
from refit_transport.cluster.run_state import RunFolder
from refit_transport.cluster.validation import Validator
from refit_transport.config.rl import load_rl_config
from refit_transport.errors import ConfigError, ParityError, WorkerError
from refit_transport.rl.tasks import FirstDigitEcho
from refit_transport.rl.trajectories import Rollout, Sample
from refit_transport.rl_log import StepLog, plot_steps
from refit_transport.transports.registry import resolve

ASKING = Asking(
    FirstDigitEcho(), prompts=3, samples=2, seed=5, max_prompt_tokens=6, max_tokens=4, temperature=1.0, stop_ids=(2,)
)


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


@dataclass
class Crew:
    """Engines by name; those of `dying` die at the calls of `sync` and `sample_on` with these numbers."""

    serving: tuple = ("a", "b")
    dying: dict[int, str] = field(default_factory=dict)
    restarted: dict[int, str] = field(default_factory=dict)
    calls: int = 0
    dead: set[str] = field(default_factory=set)
    tended: int = 0

    def called(self):
        """A call that all engines take part in."""
        self.calls += 1
        if self.calls in self.dying:
            self.dead.add(self.dying[self.calls])
        if self.dead & set(self.serving):
            raise WorkerError("engine", 0, "call", "the process died")

    def drop_dead(self):
        left = {name: "starting again" for name in self.serving if name in self.dead}
        self.serving = tuple(name for name in self.serving if name not in left)
        if not self.serving:
            raise WorkerError("generation", -1, "reconcile", "all generation engines have died")
        return left

    def tend(self):
        left = self.drop_dead()
        self.tended += 1
        name = self.restarted.get(self.tended)
        if name:
            self.dead.discard(name)
            self.serving += (name,)
        return Change(left, (name,) if name else ())


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

    def learn(self, rollout, *, step, announce, clock):
        announce("training")
        self.seen.append((step, rollout))
        self.weights += 1
        return Learned((), (), LogprobError(self.error, self.error))

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

    def submit(_, requests):
        found.asked.append((found.version, requests[0].seed))
        return Begun(requests, found.answer(requests))

    monkeypatch.setattr(rollouts_module, "sample_on", lambda _, requests, timeout_s: found.answer(requests))
    monkeypatch.setattr(rollouts_module, "submit_to", submit)
    return found


ANY_ERROR = LogprobLimit(float("inf"), stops=True)


def loop(
    engines,
    rollouts,
    learner,
    *,
    folder=None,
    limit=ANY_ERROR,
    period=2,
    fingerprint="job",
    published=None,
    crew=None,
    told=(),
    **more,
):
    def sync(version):
        if crew is not None:
            crew.called()
        engines.version = version
        if published is not None:
            published.append((version, learner.weights))
        return Refit()

    return Loop(
        learner=learner,
        rollouts=rollouts,
        sync=sync,
        fleet=crew or Crew(),
        folder=None if folder is None else RunFolder(folder, fingerprint, keep=None, best=False),
        save_period=period,
        limit=limit,
        announce=told.append if told != () else lambda _: None,
        **more,
    )


def ahead(*, max_age, in_flight=False, crew=None):
    found = AheadRollouts(crew or Crew(), ASKING, max_age=max_age, in_flight=in_flight, timeout_s=7.0)
    found.activity = list
    return found


def test_every_step_trains_the_version_that_was_sampled_and_publishes_the_next(engines):
    learner, published = Learner(), []
    reports = list(
        loop(engines, FreshRollouts(Crew(), ASKING, timeout_s=7.0), learner, published=published).run(3)
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
    rollouts = FreshRollouts(Crew(), ASKING, timeout_s=7.0)
    engines.version = 4
    with pytest.raises(WorkerError, match="version 4 where version 5"):
        rollouts.take(1, version=5)


@pytest.mark.parametrize("cut", [2, 4])
def test_a_resumed_job_sees_the_same_samples_and_publishes_larger_versions(engines, tmp_path, cut):
    whole = Learner()
    list(loop(engines, FreshRollouts(Crew(), ASKING, timeout_s=7.0), whole).run(6))

    first, published = Learner(), []
    rollouts = FreshRollouts(Crew(), ASKING, timeout_s=7.0)
    going = loop(engines, rollouts, first, folder=tmp_path, published=published).run(6)
    for _ in range(cut + 1):  # one step more than the last checkpoint
        next(going)
    going.close()

    second = Learner()
    list(
        loop(engines, FreshRollouts(Crew(), ASKING, timeout_s=7.0), second, folder=tmp_path, published=published).run(6)
    )
    versions = [version for version, _ in published]
    assert versions == sorted(set(versions))
    assert second.seen[0][0] == cut + 1
    assert second.weights == whole.weights == 6

    def seeds(seen):
        return [(step, [sample.seed for sample in rollout.samples]) for step, rollout in seen]

    assert seeds(second.seen) == seeds(whole.seen)[cut:]


def test_a_finished_job_has_nothing_to_do(engines, tmp_path):
    rollouts = FreshRollouts(Crew(), ASKING, timeout_s=7.0)
    assert len(list(loop(engines, rollouts, Learner(), folder=tmp_path).run(3))) == 3
    assert list(loop(engines, rollouts, Learner(), folder=tmp_path).run(3)) == []


def test_another_jobs_checkpoint_is_refused(engines, tmp_path):
    rollouts = FreshRollouts(Crew(), ASKING, timeout_s=7.0)
    list(loop(engines, rollouts, Learner(), folder=tmp_path).run(2))
    with pytest.raises(ConfigError, match=r"(?s)another job.*step_2"):
        list(loop(engines, rollouts, Learner(), folder=tmp_path, fingerprint="other").run(4))


@pytest.mark.parametrize("error", [2e-5, float("nan")])
def test_samplers_that_compute_something_else_end_the_job_or_mark_the_step(engines, error):
    learner = Learner(error=error)
    rollouts = FreshRollouts(Crew(), ASKING, timeout_s=7.0)
    with pytest.raises(ParityError, match="logprob_error_limit is 1e-05"):
        list(loop(engines, rollouts, learner, limit=LogprobLimit(1e-5, stops=True)).run(2))
    assert [
        bool(r.apart()) for r in loop(engines, rollouts, learner, limit=LogprobLimit(1e-5, stops=False)).run(2)
    ] == [
        True,
        True,
    ]
    fine = loop(engines, rollouts, Learner(error=9e-6), limit=LogprobLimit(1e-5, stops=True))
    assert not any(report.apart() for report in fine.run(2))


class Served:
    """Both sides' answers, with what they were asked and when."""

    def __init__(self, errors):
        self.errors, self.calls = iter(errors), []

    def begin(self, samples):
        self.calls.append(len(samples))

    def finish(self):
        self.calls.append("finish")
        return LogprobError(error := next(self.errors), error)


def test_samples_of_older_weights_are_not_what_the_refit_is_judged_by(engines):
    """What training changed since is no error, and what both sides compute now is."""
    limit, learner = LogprobLimit(1e-5, stops=True), Learner(error=0.7)
    served = Served([1e-7, 1e-7, 2e-5])
    running = loop(engines, ahead(max_age=1), learner, limit=limit, served=served).run(4)
    reports = [next(running), next(running)]
    with pytest.raises(ParityError, match="logprob_error_limit is 1e-05"):
        next(running)
    assert served.calls == [6, "finish"] * 3
    assert [report.scalars()["logprob_error"] for report in reports] == [1e-7, 1e-7]
    # The wrong weights were trained, but nothing was published after them.
    assert engines.version == 2


def test_an_engine_that_dies_in_the_comparison_is_left_out_of_it(engines):
    crew, told = Crew(), []

    class Dying(Served):
        def finish(self):
            if "a" in crew.serving:
                crew.dead.add("a")
                raise WorkerError("a", 0, "logprobs", "the process died")
            return super().finish()

    served = Dying([1e-7] * 2)
    rollouts = FreshRollouts(crew, ASKING, timeout_s=7.0)
    reports = list(loop(engines, rollouts, Learner(), crew=crew, told=told, served=served).run(2))
    assert [report.logprob_error.mean for report in reports] == [1e-7, 1e-7]
    assert "a has died, starting again" in told


def test_validation_asks_the_same_after_every_period_and_at_both_ends(engines):
    asking = replace(ASKING, prompts=5, samples=1)
    validator = Validator(asking, period=2, start_at=4, at_start=True, at_end=True)
    rollouts, drawn = FreshRollouts(Crew(), ASKING, timeout_s=7.0), []
    draw = rollouts.draw

    def remember(requests):
        drawn.append((engines.version, [(r.prompt, r.seed) for r in requests]))
        return draw(requests)

    rollouts.draw = remember
    reports = list(loop(engines, rollouts, Learner(), validator=validator).run(7))
    found = {each.step: (report.step, each.samples) for report in reports for each in report.validations}
    assert found == {0: (1, 5), 4: (4, 5), 6: (6, 5), 7: (7, 5)}
    asked = [(version, what) for version, what in drawn if len(what) == 5]
    # After a step the engines serve what it trained.
    assert [version for version, _ in asked] == [0, 4, 6, 7]
    assert all(what == asked[0][1] for _, what in asked)
    trained = {seed for _, what in drawn if len(what) == 6 for _, seed in what}
    assert not trained & {seed for _, seed in asked[0][1]}
    assert "validation/reward" not in reports[0].scalars()
    assert reports[0].to_json()["validations"][0]["step"] == 0
    assert reports[3].scalars()["validation/reward"] == reports[3].validations[0].reward


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


def test_a_prompt_that_is_too_long_is_refused_with_the_setting():
    with pytest.raises(ConfigError, match=r"data.max_input_seq_length: is less than the 6 tokens .*got 5"):
        replace(ASKING, max_prompt_tokens=5).requests(0)


def test_a_step_is_a_line_of_json_a_point_on_the_board_and_in_the_picture(engines, tmp_path):
    pytest.importorskip("tensorboardX")
    pytest.importorskip("matplotlib")
    reports = list(loop(engines, FreshRollouts(Crew(), ASKING, timeout_s=7.0), Learner(error=1e-7)).run(3))
    for first in (0, 2):  # a resumed job appends
        with StepLog(tmp_path, tensorboard=True) as log:
            for report in reports[first : first + 2]:
                log.write(report)
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["reward"] for line in lines] == [report.rollout.mean_reward() for report in reports]
    assert all(path.stat().st_size > 0 for path in tmp_path.glob("events*"))
    assert list(tmp_path.glob("events*"))
    plot_steps(reports, tmp_path / "plots" / "run.png")
    assert (tmp_path / "plots" / "run.png").read_bytes().startswith(b"\x89PNG")


def test_a_log_that_cannot_be_written_is_told_with_its_setting(tmp_path):
    (tmp_path / "logs").write_text("a file")
    with pytest.raises(ConfigError, match=r"logger.log_dir: can't be written"):
        StepLog(tmp_path / "logs", tensorboard=False)


@pytest.mark.parametrize(
    ("override", "is_the_same"),
    [
        ("grpo.max_num_steps=7", True),
        ("policy.train_micro_batch_size=64", True),
        ("checkpointing.save_period=3", True),
        ("grpo.val_period=3", True),
        ("data.validation.dataset_name=first_digit_echo", True),
        ("grpo.seed=1", False),
        ("policy.precision=bfloat16", False),
        ("policy.megatron_cfg.optimizer.lr=1.0e-4", False),
        ("loss_fn.ratio_clip_max=0.3", False),
        ("policy.generation.temperature=0.7", False),
    ],
)
def test_what_decides_a_jobs_course_makes_it_another_job(override, is_the_same):
    recipe = Path(__file__).parents[2] / "recipes" / "grpo-tiny-dense-cpu.yaml"
    plain, changed = (
        fingerprint(load_rl_config(recipe, resolve_transport=resolve, overrides=overrides))
        for overrides in ((), (override,))
    )
    assert (plain == changed) is is_the_same


def test_the_critics_optimizer_decides_too():
    recipe = Path(__file__).parents[2] / "recipes" / "ppo-tiny-dense-cpu.yaml"
    rates = ("1.0e-3", "2.0e-3")
    found = {
        fingerprint(
            load_rl_config(recipe, resolve_transport=resolve, overrides=(f"value.megatron_cfg.optimizer.lr={rate}",))
        )
        for rate in rates
    }
    assert len(found) == 2


@pytest.fixture
def fragile(engines, monkeypatch):
    """Engines whose `sample_on` is a call of the crew too."""

    def sample_on(serving, requests, timeout_s):
        crew.called()
        assert serving == crew.serving
        return engines.answer(requests)

    crew = Crew()
    monkeypatch.setattr(rollouts_module, "sample_on", sample_on)
    return crew


# The calls: the first refit, then samples and refit of each of three steps.
@pytest.mark.parametrize("call", range(1, 8))
def test_an_engine_that_dies_is_left_out_and_training_goes_on(engines, fragile, call):
    fragile.dying, published, told, learner = {call: "b"}, [], [], Learner()
    rollouts = FreshRollouts(fragile, ASKING, timeout_s=7.0)
    steps = list(loop(engines, rollouts, learner, published=published, crew=fragile, told=told).run(3))
    assert [step.step for step in steps] == [1, 2, 3]
    assert fragile.serving == ("a",)
    assert told.count("b has died, starting again") == 1
    # Every step's weights are published once, each under a version above all that were tried before.
    assert [weights for _, weights in published] == [0, 1, 2, 3]
    versions = [version for version, _ in published]
    assert versions == sorted(set(versions))
    assert versions[-1] == (4 if call % 2 else 3)
    assert [step.version for step in steps] == versions[1:]


def test_an_engine_that_is_ready_again_takes_part_from_the_next_refit_on(engines, fragile):
    fragile.dying, fragile.restarted, told = {2: "b"}, {3: "b"}, []
    list(loop(engines, FreshRollouts(fragile, ASKING, timeout_s=7.0), Learner(), crew=fragile, told=told).run(3))
    assert fragile.serving == ("a", "b")
    assert told.index("b has died, starting again") < told.index("b takes part again")


def test_without_engines_the_job_ends(engines, fragile):
    fragile.dying = {2: "b", 4: "a"}
    with pytest.raises(WorkerError, match="all generation engines have died"):
        list(loop(engines, FreshRollouts(fragile, ASKING, timeout_s=7.0), Learner(), crew=fragile).run(3))


def test_an_error_that_is_no_death_is_raised_as_it_is(engines, fragile, monkeypatch):
    def fail(*_, **__):
        raise WorkerError("engine a", 0, "sample", "no such thing")

    monkeypatch.setattr(rollouts_module, "sample_on", fail)
    with pytest.raises(WorkerError, match="no such thing"):
        list(loop(engines, FreshRollouts(fragile, ASKING, timeout_s=7.0), Learner(), crew=fragile).run(1))


def test_what_a_dead_engine_was_asked_for_ahead_is_asked_again(engines, monkeypatch):
    crew, aborted = Crew(), []
    monkeypatch.setattr(rollouts_module, "collect", lambda pending, timeout_s: aborted.extend(pending) or [{0: []}])
    rollouts = ahead(max_age=1, crew=crew)
    rollouts.take(1, version=0)
    crew.serving = (_Engine("a"),)
    rollouts.engines_left()
    assert aborted == ["a: abort"]
    rollouts.take(2, version=0)
    first, second, third, again = [seed for _, seed in engines.asked]
    assert again == second
    assert len({first, second, third}) == 3


@dataclass
class _Engine:
    name: str

    def start(self, call):
        return f"{self.name}: {call}"
