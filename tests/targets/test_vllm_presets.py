"""Presets of many architectures, box by box against the loaders of two real vLLM ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from preset_checks import regions
from rank_pool import free_port

from refit_transport.layout.presets.model import LogicalModel
from refit_transport.layout.presets.vllm import EngineParallelism, target_manifest
from refit_transport.layout.wire import manifest_from_json

pytest.importorskip("vllm")
pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).with_name("vllm_preset_cases.py")
# Multimodal models need torchvision, and experts without a gate (Nemotron 3) a GPU.
SHARED_OUT = ("qwen3 moe", "deepseek", "qwen3 next", "mixtral")
CUT = (*SHARED_OUT, "llama", "deepseek without q lora", "glm", "gpt-oss", "gemma text", "nemotron dense")
# vLLM keeps -exp(A_log), and zeroes the copies of a bias that only the first rank adds: whole, by the loader.
WHOLE = (".A_log", ".experts.down_proj_bias")
TIMEOUT = 420


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """What each rank loads, by how experts lie and the kind of model."""
    return {
        spread: _run(tmp_path_factory.mktemp(spread), spread, kinds)
        for spread, kinds in (("none", CUT), ("experts", SHARED_OUT))
    }


def _run(folder, spread, kinds):
    launched = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = []
    for rank in range(2):
        environment = os.environ | launched | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        environment["PYTHONPATH"] = os.pathsep.join((str(SCRIPT.parent.parent), environment.get("PYTHONPATH", "")))
        command = [sys.executable, str(SCRIPT), str(folder / f"{rank}.json"), str(folder / f"{rank}"), spread, *kinds]
        with (folder / f"{rank}.log").open("w") as log:
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    deadline = time.monotonic() + TIMEOUT
    try:
        for rank, process in enumerate(processes):
            code = process.wait(timeout=max(1, deadline - time.monotonic()))
            assert code == 0, (folder / f"{rank}.log").read_text()[-3000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    ("spread", "kind"), [*(("none", kind) for kind in CUT), *(("experts", kind) for kind in SHARED_OUT)]
)
def test_a_preset_is_what_two_ranks_load(loaded, spread, kind):
    for rank, results in enumerate(loaded[spread]):
        traced = manifest_from_json(results[kind]["manifest"])
        parallelism = EngineParallelism(2, expert=2 if spread == "experts" else 1)
        model = LogicalModel.from_config(results[kind]["config"])
        preset = target_manifest(model, parallelism, first_rank=0).ranks[rank]
        opaque = {each.tensor for each in traced.opaque}
        assert all(name.endswith(WHOLE) for name in opaque)
        described = replace(preset, pieces=tuple(piece for piece in preset.pieces if piece.tensor not in opaque))
        assert regions(described) == regions(traced)
        assert len(traced.pieces) > 30
