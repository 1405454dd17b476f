"""Whole jobs, started as users start them, of the double's driver with real Megatron, FSDP2 and vLLM behind it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from refit_jobs import ENVIRONMENT, TESTS

from refit_transport.cluster.network import LOOPBACK
from refit_transport.testing.models import save_tiny_model

pytestmark = pytest.mark.e2e

DOUBLE = Path(__file__).resolve().parent / "double"
TIMEOUT_S = 240
SETTINGS = {"coverage": "all", "verify": "full", "staging_bytes": "128KiB", "bucket_bytes": "16KiB", "timeout_s": 60}


@dataclass(frozen=True)
class Case:
    """A policy of two ranks and what serves it."""

    algorithm: str = "grpo"
    backend: str = "megatron"
    kind: str = "dense"
    parallelism: dict[str, Any] = field(default_factory=lambda: {"tensor": 2})
    is_async: bool = False
    tensor: int = 1
    engines: int = 1
    layers: int = 2
    settings: dict[str, Any] = field(default_factory=lambda: SETTINGS)
    # None: a refit in which a policy rank fails.
    seeds: tuple[int | None, ...] = (3, 4)

    def config(self, folder: Path) -> dict[str, Any]:
        return {
            "model_name": str(folder),
            "precision": "float32",
            "megatron_cfg": {"enabled": self.backend == "megatron"},
            "dtensor_cfg": {"enabled": self.backend == "dtensor"},
            "generation": {
                "backend": "vllm",
                "model_name": str(folder),
                "colocated": {"enabled": False},
                "vllm_cfg": {
                    "tensor_parallel_size": self.tensor,
                    "pipeline_parallel_size": 1,
                    "async_engine": self.is_async,
                    "precision": "float32",
                    "load_format": "dummy",
                },
                "refit_transport": "nccl_reshard",
                "refit_cfg": {"nccl_reshard": self.settings},
            },
            "double": {
                "init_method": f"tcp://{LOOPBACK}:{_port()}",
                "parallelism": self.parallelism,
                "ranks": [2, self.engines * self.tensor],
                "seeds": self.seeds,
            },
        }


def _port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def run(case: Case, folder: Path, *, driver: Path = DOUBLE / "run_double.py") -> dict[str, Any]:
    model = save_tiny_model(folder / "model", kind=case.kind, seed=3, num_hidden_layers=case.layers)
    config, results = folder / "job.json", folder / "results.json"
    config.write_text(json.dumps(case.config(Path(model))), encoding="utf-8")
    arguments = ["--algorithm", case.algorithm, "--config", str(config), "--results", str(results)]
    command = [sys.executable, "-m", "refit_transport.integrations.nemo_rl", str(driver), *arguments]
    paths = (DOUBLE, TESTS, TESTS.parent)
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, cwd=folder
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(results.read_text(encoding="utf-8"))
    return found


def apart(one: list[list[float]], other: list[list[float]]) -> float:
    pairs = zip((x for row in one for x in row), (x for row in other for x in row), strict=True)
    return max(abs(here - there) for here, there in pairs)


def assert_serves(case: Case, found: dict[str, Any]) -> None:
    assert found["synchronizer"] == "RefitTransportSynchronizer"
    assert found["load_format"] == "auto"
    assert found["stale"] == [True, *(seed is None for seed in case.seeds)]
    # The workers run the copy that Ray has brought to their node.
    assert all("py_modules" in path for path in found["paths"]), found["paths"]
    version = 0
    for seed, refit in zip(case.seeds, found["refits"], strict=True):
        if seed is None:
            assert "weight version" in refit["error"]
            assert "a refusal" in refit["error"]
            assert "fenced" in refit["fence"]
            assert "serves again after a complete refit" in refit["fence"]
            continue
        version += 1
        assert refit["figures"]["refit/version"] == version
        assert len(refit["served"]) == case.engines
        for before in refit["before"]:
            assert apart(before, refit["trained"]) > 1e-3
        for served in refit["served"]:
            assert apart(served, refit["trained"]) < 1e-4


MOE = {"tensor": 2, "expert": 2, "expert_tensor": 1, "sequence_parallel": True}
CASES = {
    "GRPO, Megatron, sync, a failure": Case(settings={**SETTINGS, "timeout_s": 20}, seeds=(3, None, 4)),
}
NIGHTLY = {
    "PPO, FSDP2, async": Case(algorithm="ppo", backend="dtensor", is_async=True),
    "GRPO, Megatron ETP2, two engines": Case(
        kind="moe", parallelism={"tensor": 2, "expert_tensor": 2, "sequence_parallel": True}, engines=2
    ),
    "GRPO, Megatron PP2 VPP2, async TP2": Case(
        parallelism={"pipeline": 2, "virtual_pipeline": 2}, is_async=True, tensor=2, layers=4
    ),
    "PPO, Megatron TP2 EP2, async, staged": Case(
        algorithm="ppo", kind="moe", parallelism=MOE, is_async=True, settings={**SETTINGS, "commit": "staged"}
    ),
}


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=name) for name, case in CASES.items()),
        *(pytest.param(case, id=name, marks=pytest.mark.nightly) for name, case in NIGHTLY.items()),
    ],
)
def test_engines_serve_the_policys_weights(case: Case, tmp_path: Path) -> None:
    assert_serves(case, run(case, tmp_path))
