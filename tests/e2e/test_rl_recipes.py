"""The recipes through the whole system, as a user launches them: they learn, and are interrupted in order."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rl_records import figures
from test_run_command import MARK, processes

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]
# Nats on the mean of a step. Every wrong refit below is above the first by far.
FP32, BF16 = 1e-5, 1e-2
SEEDS = (42, 1, 2)
WRONG = ("refit_run.on_logprob_error=warn", "policy.generation.refit_cfg.gather_broadcast.verify='off'")


def command(recipe, *overrides, launcher="grpo"):
    found = [sys.executable, str(ROOT / "recipes" / f"run_{launcher}.py"), str(ROOT / "recipes" / recipe)]
    return [*found, *(part for override in overrides for part in ("--set", override))]


def environment(**more):
    return os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests"))), "OMP_NUM_THREADS": "1"} | more


def steps_of(folder):
    log = folder / "rl-output" / "logs" / "steps.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


class Run:
    """A finished launcher: what it printed, and what it says of its steps."""

    def __init__(self, folder, recipe, *overrides, launcher="grpo", timeout_s=560.0):
        done = subprocess.run(
            command(recipe, *overrides, launcher=launcher),
            cwd=folder,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr
        self.steps = steps_of(folder)
        self.figures = figures(self.steps) if self.steps else {}


def learns(record, folder, name, recipe, *overrides, launcher="grpo", **bars):
    """Launches a whole job and holds it to the bars: at least `last`, at most the others."""
    record |= {"kind": "learns", "run": name, "bars": bars}
    run = Run(folder, recipe, *overrides, launcher=launcher)
    record["figures"] = run.figures
    assert run.code == 0, run.err
    assert run.figures["last"] >= bars["last"]
    for name in bars.keys() - {"last"}:
        assert run.figures[name] <= bars[name], name
    return run


def test_a_user_launches_a_moe_and_it_learns(tmp_path):
    """CI's short form of what `make nightly` runs whole."""
    validation = ("data.validation.dataset_name=first_digit_echo", "grpo.val_at_start=true", "grpo.val_period=20")
    run = Run(tmp_path, "grpo-tiny-moe-cpu.yaml", "grpo.max_num_steps=45", *validation)
    assert run.code == 0, run.err
    assert run.figures["first"] <= 0.12
    assert run.figures["last"] >= 0.75
    assert run.figures["error"] <= FP32
    assert run.figures["refit_share"] <= 0.10
    assert "reward of the last 5 steps" in run.out
    assert "validation before the first step: reward 0.0" in run.out
    assert "validation after step 40: reward 0." in run.out


@pytest.mark.nightly
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("kind", "name"), [("dense", "GRPO, dense, fp32"), ("moe", "GRPO, MoE, fp32")])
def test_grpo_learns_in_fp32(rl_record, tmp_path, kind, name, seed):
    recipe = f"grpo-tiny-{kind}-cpu.yaml"
    learns(rl_record, tmp_path, name, recipe, f"grpo.seed={seed}", first=0.12, last=0.90, error=FP32, refit_share=0.10)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", SEEDS)
def test_ppo_learns(rl_record, tmp_path, seed):
    changes = (f"ppo.seed={seed}",)
    learns(
        rl_record,
        tmp_path,
        "PPO, dense, fp32",
        "ppo-tiny-dense-cpu.yaml",
        *changes,
        launcher="ppo",
        last=0.85,
        error=FP32,
    )


@pytest.mark.nightly
@pytest.mark.parametrize("seed", SEEDS)
def test_bf16_generation_learns(rl_record, tmp_path, seed):
    name, recipe = "GRPO, dense, bf16 generation", "grpo-tiny-dense-bf16-cpu.yaml"
    learns(rl_record, tmp_path, name, recipe, f"grpo.seed={seed}", last=0.75, error=BF16)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", SEEDS)
def test_one_step_off_learns(rl_record, tmp_path, seed):
    name, recipe = "GRPO, dense, one step off", "grpo-tiny-dense-async-cpu.yaml"
    learns(rl_record, tmp_path, name, recipe, f"grpo.seed={seed}", last=0.85, error=FP32)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", SEEDS)
def test_ppo_one_step_off_learns(rl_record, tmp_path, seed):
    name, recipe = "PPO, dense, one step off", "ppo-tiny-dense-async-cpu.yaml"
    learns(rl_record, tmp_path, name, recipe, f"ppo.seed={seed}", launcher="ppo", last=0.85, error=FP32)


def test_a_job_without_refits_says_so_loudly_and_fails(rl_record, tmp_path):
    rl_record |= {"kind": "control", "run": "no refit at all", "bars": {"last": 0.10, "error": 0.1}}
    transport = "policy.generation.refit_transport=faulty_transports:Idle"
    run = Run(tmp_path, "grpo-tiny-dense-cpu.yaml", transport, "grpo.max_num_steps=20", *WRONG)
    rl_record["figures"] = run.figures
    assert run.code == 1
    assert run.figures["last"] <= 0.10
    assert run.figures["error"] > 0.1
    assert "WARNING" in run.out
    assert "do not have the trainer's weights" in run.out
    assert "logprob_error_limit" in run.err


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("transport", "name"),
    [("WithoutExperts", "refits without the experts"), ("SwappedExpert", "gate and up of one expert exchanged")],
)
def test_a_wrong_expert_fails_the_job_though_the_reward_rises(rl_record, tmp_path, transport, name):
    rl_record |= {"kind": "control", "run": f"MoE, {name}", "bars": {"error": 1e-3}}
    changes = (f"policy.generation.refit_transport=faulty_transports:{transport}", *WRONG)
    run = Run(tmp_path, "grpo-tiny-moe-cpu.yaml", *changes)
    rl_record["figures"] = run.figures
    assert run.code == 1
    assert run.figures["steps"] == 60
    assert run.figures["error"] > 1e-3
    assert "logprob_error_limit" in run.err


IN_TURNS = (
    "grpo.async_grpo.enabled=false",
    "policy.generation.vllm_cfg.async_engine=false",
    "loss_fn.use_importance_sampling_correction=false",
    "loss_fn.truncated_importance_sampling_type=null",
    "loss_fn.truncated_importance_sampling_ratio=null",
)


@pytest.mark.nightly
def test_generation_beside_training_saves_time(rl_record, tmp_path):
    """One training process and one vLLM process, one thread each; on a machine of two cores that does nothing else."""
    rl_record |= {"kind": "overlap", "run": "GRPO, dense, fp32", "bars": {"quotient": 0.85}}
    recipe, short = "grpo-tiny-dense-async-cpu.yaml", ("grpo.max_num_steps=25", "checkpointing.enabled=false")
    turns, ahead = (
        Run(make(tmp_path / name), recipe, *short, *more) for name, more in (("turns", IN_TURNS), ("ahead", ()))
    )
    assert turns.code == ahead.code == 0, turns.err + ahead.err
    seconds = {name: [median(run.steps, f"seconds/{name}") for run in (turns, ahead)] for name in ("generate", "total")}
    train = median(turns.steps, "seconds/score") + median(turns.steps, "seconds/train")
    in_turns, one_step_off = seconds["total"]
    rl_record["figures"] = found = {
        "in_turns": in_turns,
        "one_step_off": one_step_off,
        "quotient": one_step_off / in_turns,
        "generate_share": seconds["generate"][0] / in_turns,
        "train_share": train / in_turns,
    }
    assert min(found["generate_share"], found["train_share"]) >= 0.30
    assert found["quotient"] <= 0.85


def median(steps, name):
    """Over the steps at which all is warm."""
    return statistics.median(step[name] for step in steps[5:])


@pytest.mark.parametrize(
    "recipe",
    ["grpo-tiny-dense-async-cpu.yaml", pytest.param("grpo-tiny-moe-cpu.yaml", marks=pytest.mark.nightly)],
)
def test_ctrl_c_in_the_middle_of_a_step_ends_everything_soon(tmp_path, recipe):
    """As a terminal sends it: to all processes of the group."""
    mark, plot = tmp_path.name, tmp_path / "plot.png"
    started = subprocess.Popen(
        [*command(recipe, "checkpointing.enabled=false"), "--plot", str(plot)],
        cwd=tmp_path,
        env=environment(**{MARK: mark}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        end = time.monotonic() + 240.0
        while len(steps_of(tmp_path)) < 2 and started.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
        interrupted = time.monotonic()
        os.killpg(started.pid, signal.SIGINT)
        out, err = started.communicate(timeout=60.0)
        assert time.monotonic() - interrupted < 20.0
        assert started.returncode == 130, err
        assert "interrupted; everything that was started has ended" in err
        assert "Traceback" not in err
        done = len(steps_of(tmp_path))
        assert 2 <= done < 60
        assert f"{done} steps" in out
        assert plot.read_bytes().startswith(b"\x89PNG")
        while (left := processes(mark)) and time.monotonic() < interrupted + 40.0:
            time.sleep(0.2)
        assert left == []
    finally:
        for process, _ in processes(mark):
            os.kill(process, signal.SIGKILL)


def make(folder):
    folder.mkdir()
    return folder
