"""Short jobs of every kind, driven on warm actors: they rise, stay exact, resume, and a wrong refit ends them."""

from __future__ import annotations

import statistics
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from refit_jobs import ENVIRONMENT, TIMEOUT_S

from refit_transport.cluster.job import PlacedGroups
from refit_transport.cluster.network import LOOPBACK, PortRange
from refit_transport.cluster.rl_job import build_workers, loop_of, run_folder
from refit_transport.cluster.tiny_model import tiny_model
from refit_transport.cluster.workers import WorkerGroup, collect
from refit_transport.config.rl import load_rl_config
from refit_transport.errors import ParityError
from refit_transport.transports.registry import resolve

pytestmark = pytest.mark.e2e
RECIPES = Path(__file__).parents[2] / "recipes"
FP32, BF16 = 1e-5, 1e-2
WARN = "refit_run.on_logprob_error=warn"
UNVERIFIED = "policy.generation.refit_cfg.gather_broadcast.verify='off'"
# On more ranks than the recipe has: a critic of two ranks beside a policy of two.
CUT_PPO = (
    "cluster.gpus_per_node=5",
    "policy.megatron_cfg.tensor_model_parallel_size=2",
    "policy.megatron_cfg.sequence_parallel=true",
)


@pytest.fixture(scope="module")
def ahead():
    """An engine with processes of its own."""
    group = WorkerGroup("engine-async", 1, resources={"CPU": 0.5}, environment=ENVIRONMENT, timeout_s=TIMEOUT_S)
    yield group
    group.release()


@pytest.fixture(scope="module")
def one_trainer():
    group = WorkerGroup("policy-of-one", 1, resources={"CPU": 0.5}, environment=ENVIRONMENT, timeout_s=TIMEOUT_S)
    yield group
    group.release()


@dataclass
class Jobs:
    """Runs a recipe on warm groups, the policy's first."""

    folder: Path

    def run(self, recipe, steps, *groups, overrides=(), checkpoints=None):
        """Every step's report, as far as it came; `checkpoints` is a folder for them."""
        found = []
        with self.looping(recipe, steps, *groups, overrides=overrides, checkpoints=checkpoints) as reports:
            found.extend(reports)
        return found

    @contextmanager
    def looping(self, recipe, steps, *groups, overrides=(), checkpoints=None):
        algorithm = recipe.split("-", maxsplit=1)[0]
        changes = (
            f"policy.model_name={self.folder / 'model'}",
            f"{algorithm}.max_num_steps={steps}",
            f"checkpointing.enabled={'true' if checkpoints else 'false'}",
            f"checkpointing.checkpoint_dir={checkpoints or self.folder}",
        )
        config = load_rl_config(RECIPES / recipe, resolve_transport=resolve, overrides=(*changes, *overrides))
        with tiny_model(Path(config.refit.policy.model_name), config.refit.refit_run.tiny_model):
            workers = build_workers(config, PlacedGroups(tuple(groups), PortRange(), LOOPBACK, no_more))
            try:
                workers.synchronizer.prepare()
                yield loop_of(config, workers, run_folder(config), announce=lambda _: None).run(steps)
            finally:
                collect([group.start("shutdown") for group in groups], timeout_s=TIMEOUT_S)


def no_more(role, timeout_s):
    raise AssertionError(f"{role} was to be started again")


@pytest.fixture
def jobs(tmp_path):
    return Jobs(tmp_path)


def rewards(reports):
    return [report.rollout.mean_reward() for report in reports]


def errors(reports):
    return [report.logprob_error.mean for report in reports]


def test_dense_grpo_learns(jobs, groups):
    reports = jobs.run("grpo-tiny-dense-cpu.yaml", 45, groups["policy"], groups["engine-a"])
    assert statistics.mean(rewards(reports)[:5]) <= 0.12
    assert statistics.mean(rewards(reports)[-5:]) >= 0.75
    assert max(errors(reports)) <= FP32


def test_ppo_rises_and_stays_exact(jobs, groups):
    validation = ("data.validation.dataset_name=first_digit_echo", "ppo.val_at_start=true", "ppo.val_period=6")
    cut = (groups["policy"], groups["engine-tp2"], groups["engine-a"])
    reports = jobs.run("ppo-tiny-dense-cpu.yaml", 12, *cut, overrides=(*CUT_PPO, *validation))
    assert statistics.mean(rewards(reports)[-3:]) > 2 * rewards(reports)[0]
    assert max(errors(reports)) <= FP32
    assert all(report.learned.critic for report in reports)
    found = {each.step: each for report in reports for each in report.validations}
    assert list(found) == [0, 6, 12]
    assert found[12].reward > 2 * found[0].reward
    assert all(each.samples == 256 for each in found.values())


def test_bf16_generation_stays_near(jobs, groups):
    reports = jobs.run("grpo-tiny-dense-bf16-cpu.yaml", 6, groups["policy"], groups["engine-a"])
    assert rewards(reports)[-1] > rewards(reports)[0]
    assert FP32 < max(errors(reports)) <= BF16


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_generation_runs_beside_training(jobs, groups, ahead, one_trainer, algorithm):
    trainers = [one_trainer] if algorithm == "grpo" else [one_trainer, groups["engine-b"]]
    reports = jobs.run(f"{algorithm}-tiny-dense-async-cpu.yaml", 8, *trainers, ahead)
    assert [max(report.ages) for report in reports] == [0] + [1] * 7
    assert statistics.median(report.overlap.share for report in reports[1:]) > 0.1
    assert statistics.mean(rewards(reports)[-3:]) > rewards(reports)[0]
    # What the samples' age makes is no error of the refit.
    assert max(errors(reports)) <= FP32
    assert max(report.learned.logprob_error.mean for report in reports[1:]) > 1e-3


def test_a_wrong_refit_is_found_while_generation_runs_ahead(jobs, ahead, one_trainer):
    overrides = ("policy.generation.refit_transport=faulty_transports:Idle", UNVERIFIED)
    with (
        jobs.looping("grpo-tiny-dense-async-cpu.yaml", 8, one_trainer, ahead, overrides=overrides) as reports,
        pytest.raises(ParityError, match="logprob_error_limit"),
    ):
        assert len(list(reports)) < 2


def test_a_resumed_job_is_the_uninterrupted_one_with_larger_versions(jobs, groups, tmp_path):
    recipe, cut, folder = "grpo-tiny-dense-cpu.yaml", (groups["policy"], groups["engine-a"]), tmp_path / "checkpoints"
    period = ("checkpointing.save_period=2",)
    whole = jobs.run(recipe, 4, *cut)
    first = jobs.run(recipe, 2, *cut, overrides=period, checkpoints=folder)
    resumed = jobs.run(recipe, 4, *cut, overrides=period, checkpoints=folder)
    assert [report.step for report in resumed] == [3, 4]
    for name in ("reward", "policy/loss", "policy/grad_norm", "policy/entropy", "length"):
        assert [r.scalars()[name] for r in (*first, *resumed)] == [r.scalars()[name] for r in whole], name
    versions = [report.version for report in (*first, *resumed)]
    assert versions == sorted(set(versions))


def test_a_refit_that_gets_an_expert_wrong_is_found_though_the_reward_rises(jobs, groups):
    overrides = ("policy.generation.refit_transport=faulty_transports:SwappedExpert", WARN, UNVERIFIED)
    cut = (groups["policy"], groups["engine-tp2"])
    reports = jobs.run("grpo-tiny-moe-cpu.yaml", 12, *cut, overrides=overrides)
    assert max(errors(reports)) >= 1e-3
    assert all(report.apart() for report in reports)
    assert statistics.mean(rewards(reports)[-3:]) > 2 * rewards(reports)[0]


def test_a_refit_that_skips_the_experts_ends_the_job_at_once(jobs, groups):
    overrides = ("policy.generation.refit_transport=faulty_transports:WithoutExperts", UNVERIFIED)
    cut = (groups["policy"], groups["engine-tp2"])
    with (
        jobs.looping("grpo-tiny-moe-cpu.yaml", 20, *cut, overrides=overrides) as reports,
        pytest.raises(ParityError, match="logprob_error_limit"),
    ):
        list(reports)
