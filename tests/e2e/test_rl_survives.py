"""A GRPO job goes on when one of its engines is killed, and takes it back when it is there again."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from refit_transport.cluster.job import model_and_cluster
from refit_transport.cluster.rl_job import loop_of, running_workers
from refit_transport.config.rl import load_rl_config
from refit_transport.transports.registry import resolve

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]
ROOT = Path(__file__).parents[2]
TWO_ENGINES = ("policy.generation.colocated.resources.gpus_per_node=2", "cluster.gpus_per_node=4")
SHORT = ("policy.generation.refit_cfg.nccl_reshard.timeout_s=20", "checkpointing.enabled=false")


@pytest.mark.parametrize("recipe", ["grpo-tiny-dense-cpu.yaml", "grpo-tiny-dense-async-cpu.yaml"])
def test_training_goes_on_without_a_dead_engine_and_takes_it_back(tmp_path, monkeypatch, recipe):
    monkeypatch.chdir(tmp_path)
    overrides = [*TWO_ENGINES, *SHORT, "grpo.max_num_steps=200"]
    config = load_rl_config(ROOT / "recipes" / recipe, overrides=overrides, resolve_transport=resolve)
    told: list[str] = []
    steps = []
    with (
        model_and_cluster(config.refit, address=None, announce=told.append) as scratch,
        running_workers(config, scratch=scratch) as workers,
    ):
        engines = [engine.name for engine in workers.fleet.serving]
        assert len(engines) == 2
        for step in loop_of(config, workers, None, announce=told.append).run(200):
            steps.append(step)
            if step.step == 2:
                os.kill(workers.fleet.serving[1].process_ids()[0], signal.SIGKILL)
            if any("takes part again" in text for text in told) and steps[-1].step > 4:
                break
        assert [engine.name for engine in workers.fleet.serving] == engines
    assert f"{engines[1]} has died, starting again" in told
    assert [step.step for step in steps] == list(range(1, len(steps) + 1))
    # One refit or none was repeated; trainer and samplers agree all the way.
    assert steps[-1].version - steps[-1].step in (0, 1)
    if "async" not in recipe:
        assert max(step.learned.logprob_error.mean for step in steps) <= 1e-5
