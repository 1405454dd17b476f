"""The recipes through the whole system, as a user launches them: they learn, and a wrong refit doesn't go unnoticed."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]
# Nats on the mean of a step. Every wrong refit below is above the first by far.
FP32, BF16 = 1e-5, 1e-2


class Run:
    """A finished launcher: what it printed, and what it says of its steps."""

    def __init__(self, folder, recipe, *overrides, launcher="grpo", timeout_s=560.0):
        command = [sys.executable, str(ROOT / "recipes" / f"run_{launcher}.py"), str(ROOT / "recipes" / recipe)]
        for override in overrides:
            command += ["--set", override]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))}
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr
        log = folder / "rl-output" / "logs" / "steps.jsonl"
        self.steps = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def rewards(self):
        return [step["reward"] for step in self.steps]

    def last(self):
        return statistics.mean(self.rewards()[-5:])

    def first(self):
        return statistics.mean(self.rewards()[:5])

    def largest_error(self):
        return max(step["logprob_error"] for step in self.steps)

    def refit_share(self):
        return sum(s["seconds/refit"] for s in self.steps) / sum(s["seconds/total"] for s in self.steps)


def seeds(*values):
    """The first one in CI, all of them nightly."""
    return [values[0], *(pytest.param(value, marks=pytest.mark.nightly) for value in values[1:])]


def learned(run, *, bar, error, steps=60):
    assert run.code == 0, run.err
    assert len(run.steps) == steps
    assert run.last() >= bar
    assert run.largest_error() <= error
    return run


@pytest.mark.parametrize("seed", seeds(42, 1, 2))
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_grpo_learns_in_fp32(tmp_path, kind, seed):
    steps = 40  # of the recipe's 60: enough, and CI has other things to do
    run = Run(tmp_path, f"grpo-tiny-{kind}-cpu.yaml", f"grpo.seed={seed}", f"grpo.max_num_steps={steps}")
    learned(run, bar=0.90, error=FP32, steps=steps)
    assert run.first() <= 0.12
    assert run.refit_share() <= 0.10
    assert "reward of the last 5 steps" in run.out


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [42, 1, 2])
def test_ppo_learns(tmp_path, seed):
    learned(Run(tmp_path, "ppo-tiny-dense-cpu.yaml", f"ppo.seed={seed}", launcher="ppo"), bar=0.85, error=FP32)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [42, 1, 2])
def test_bf16_generation_learns(tmp_path, seed):
    learned(Run(tmp_path, "grpo-tiny-dense-bf16-cpu.yaml", f"grpo.seed={seed}"), bar=0.75, error=BF16)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [42, 1, 2])
def test_one_step_off_learns(tmp_path, seed):
    run = Run(tmp_path, "grpo-tiny-dense-async-cpu.yaml", f"grpo.seed={seed}")
    learned(run, bar=0.85, error=float("inf"))


def test_the_other_recipes_rise_and_stay_exact(tmp_path):
    """Short forms of the recipes that nightly runs whole."""
    ppo = Run(make(tmp_path / "ppo"), "ppo-tiny-dense-cpu.yaml", "ppo.max_num_steps=8", launcher="ppo")
    assert ppo.code == 0, ppo.err
    assert ppo.last() > 2 * ppo.rewards()[0]
    assert ppo.largest_error() <= FP32
    assert "critic/loss" in ppo.steps[0]
    narrow = Run(make(tmp_path / "bf16"), "grpo-tiny-dense-bf16-cpu.yaml", "grpo.max_num_steps=6")
    assert narrow.code == 0, narrow.err
    assert narrow.rewards()[-1] > narrow.rewards()[0]
    assert FP32 < narrow.largest_error() <= BF16


def test_generation_runs_beside_training(tmp_path):
    run = Run(tmp_path, "grpo-tiny-dense-async-cpu.yaml", "grpo.max_num_steps=8")
    assert run.code == 0, run.err
    assert [max(map(int, step["ages"])) for step in run.steps] == [0] + [1] * 7
    assert statistics.median(step["overlap/share"] for step in run.steps[1:]) > 0.1
    assert run.last() > run.rewards()[0]


def test_a_resumed_run_is_the_uninterrupted_one_with_larger_versions(tmp_path):
    recipe = "grpo-tiny-dense-cpu.yaml"
    whole = Run(make(tmp_path / "whole"), recipe, "grpo.max_num_steps=4", "checkpointing.enabled=false")
    parts = make(tmp_path / "parts")
    assert Run(parts, recipe, "grpo.max_num_steps=2", "checkpointing.save_period=2").code == 0
    resumed = Run(parts, recipe, "grpo.max_num_steps=4", "checkpointing.save_period=2")
    assert resumed.code == whole.code == 0, resumed.err + whole.err
    assert resumed.rewards() == whole.rewards()
    for name in ("policy/loss", "policy/grad_norm", "policy/entropy", "length"):
        assert [step[name] for step in resumed.steps] == [step[name] for step in whole.steps]
    versions = [step["version"] for step in resumed.steps]
    assert versions == sorted(set(versions))


WRONG = ("refit_run.on_logprob_error=warn", "policy.generation.refit_cfg.gather_broadcast.verify='off'")


def test_a_job_without_refits_says_so_loudly_and_fails(tmp_path):
    transport = "policy.generation.refit_transport=faulty_transports:Idle"
    run = Run(tmp_path, "grpo-tiny-dense-cpu.yaml", transport, "grpo.max_num_steps=10", *WRONG)
    assert run.code == 1
    assert run.last() <= 0.10
    assert run.largest_error() > 0.1
    assert "WARNING" in run.out
    assert "do not have the trainer's weights" in run.out
    assert "logprob_error_limit" in run.err


def test_a_refit_that_gets_an_expert_wrong_is_found_though_the_reward_rises(tmp_path):
    transport = "policy.generation.refit_transport=faulty_transports:SwappedExpert"
    run = Run(tmp_path, "grpo-tiny-moe-cpu.yaml", transport, "grpo.max_num_steps=12", *WRONG)
    assert run.code == 1
    assert len(run.steps) == 12
    assert run.largest_error() >= 1e-3
    assert "logprob_error_limit" in run.err


def test_a_refit_that_skips_the_experts_ends_the_job_at_once(tmp_path):
    transport = "policy.generation.refit_transport=faulty_transports:WithoutExperts"
    run = Run(tmp_path, "grpo-tiny-moe-cpu.yaml", transport, *WRONG[1:])
    assert run.code == 1
    assert len(run.steps) < 20
    assert "logprob_error_limit" in run.err


@pytest.mark.nightly
def test_skipped_experts_show_in_the_error(tmp_path):
    transport = "policy.generation.refit_transport=faulty_transports:WithoutExperts"
    run = Run(tmp_path, "grpo-tiny-moe-cpu.yaml", transport, *WRONG)
    assert run.code == 1
    assert run.largest_error() >= 1e-3


def make(folder):
    folder.mkdir()
    return folder
