"""VllmTarget against real vLLM engines; see `vllm_cases.py` for what is compared with what."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from preset_checks import contents
from rank_pool import free_port
from rank_scripts import VLLM

from refit_transport.layout.manifest import Manifest, TensorSpec
from refit_transport.layout.presets.model import LogicalModel
from refit_transport.layout.presets.vllm import EngineParallelism, target_manifest
from refit_transport.layout.wire import manifest_from_json

pytest.importorskip("vllm")
pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).with_name("vllm_cases.py")
STOCK = ("dense-fp32", "dense-bf16", "moe-fp32", "moe-bf16", "tied-bf16", "bias-bf16", "dummy-bf16")
PLAIN = ("dense-fp32", "dense-bf16", "moe-fp32", "moe-bf16", "tied-bf16", "dummy-bf16")
ALONE = [*(("stock", case) for case in STOCK), *(("plain", case) for case in PLAIN)]
PARALLEL = ("kv1-fp32", "moe-tp-fp32", "moe-ep-fp32")
TIMEOUT = 420


def _start(folder, cases, *, plain, rank=0, launched=None):
    mode = {"REFIT_TRANSPORT_VLLM_PLAIN_WEIGHTS": "1" if plain else "0"}
    environment = os.environ | VLLM | mode | (launched or {})
    command = [sys.executable, str(SCRIPT), str(folder / f"{rank}.json"), str(folder / f"models-{rank}"), *cases]
    with (folder / f"{rank}.log").open("w") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def _results(processes):
    """What each process, by its folder and rank, has found."""
    deadline = time.monotonic() + TIMEOUT
    try:
        for (folder, rank), process in processes.items():
            code = process.wait(timeout=deadline - time.monotonic())
            assert code == 0, (folder / f"{rank}.log").read_text()[-4000:]
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    return [json.loads((folder / f"{rank}.json").read_text()) for folder, rank in processes]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folders = {mode: tmp_path_factory.mktemp(mode) for mode in ("stock", "plain")}
    processes = {
        (folders["stock"], 0): _start(folders["stock"], STOCK, plain=False),
        (folders["plain"], 0): _start(folders["plain"], PLAIN, plain=True),
    }
    return dict(zip(folders, _results(processes), strict=True))


@pytest.fixture(scope="module")
def parallel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallel")
    port = str(free_port())
    processes = {}
    for rank in range(2):
        launched = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        processes[folder, rank] = _start(folder, PARALLEL, plain=True, rank=rank, launched=launched)
    results = _results(processes)
    # The processes exit without vLLM's exit handlers; the plugin sees to it that they leave no shared memory.
    assert list(Path("/dev/shm").glob(f"127.0.0.1-{port}-*")) == []
    return results


def _failed(results):
    return [name for name, passed in results.items() if passed is False and not name.startswith("swapped parameters")]


@pytest.mark.parametrize(("mode", "case"), ALONE)
def test_refits_equal_a_fresh_engine(alone, mode, case):
    assert _failed(alone[mode][case]) == []


@pytest.mark.parametrize("case", PLAIN)
def test_swapped_gate_and_up_differ_from_the_oracle(alone, case):
    assert alone["plain"][case]["swapped parameters are the oracle's"] is False


def test_packed_layers_are_found_by_proof(alone):
    private = alone["stock"]["moe-fp32"]["private"]
    experts = private["model.layers.0.mlp.experts.routed_experts"]
    assert experts.startswith("stage: ")
    assert "differs from the loaded" in experts
    assert private["lm_head"] == "reprocess: it computes with a copy of its weight"
    assert "model.norm" not in private


def test_what_a_kernel_pads_is_zero_after_each_refit(alone):
    """Experts of 48 columns, which the stock kernel pads to 64 and packs in an order of its own."""
    for mode, columns in (("stock", 64), ("plain", 48)):
        after_each = alone[mode]["moe-bf16"]["experts"]
        assert len(after_each) == 4
        for weights in after_each:
            assert len(weights) >= 2
            assert [48 * elements for elements, _ in weights.values()] == [
                columns * filled for _, filled in weights.values()
            ]


@pytest.mark.parametrize("case", [case for case in PLAIN if case != "dummy-bf16"])
def test_plain_weights_are_proven_live(alone, case):
    assert alone["plain"][case]["private"] == {}


def test_without_a_checkpoint_only_what_computes_plainly_is_live(alone):
    experts = "model.layers.0.mlp.experts.routed_experts"
    plain, stock = (alone[mode]["dummy-bf16"]["private"] for mode in ("plain", "stock"))
    assert plain == {experts: "stage: there is no checkpoint to compare its weights with"}
    assert {experts, "lm_head", "model.layers.0.self_attn.o_proj"} <= stock.keys()
    assert "model.norm" not in stock


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", PARALLEL)
def test_tensor_parallel_refits_equal_a_fresh_engine(parallel, case, rank):
    results = parallel[rank][case]
    assert _failed(results) == []
    assert results["private"] == {}
    # The swapped expert lies on one rank only where experts are spread.
    assert results["swapped parameters are the oracle's"] is (case == "moe-ep-fp32" and rank == 1)


def _assert_preset_agrees(results, *, tensor_parallel, expert_parallel=False):
    """`results` of one case on all ranks: the preset is what the trace of the loader found."""
    traced = Manifest.of(manifest_from_json(found["manifest"]) for found in results)
    source = [TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in results[0]["source"]]
    model = LogicalModel.from_config(results[0]["config"])
    assert {(spec.name, spec.shape) for spec in source} == {(tensor.name, tensor.shape) for tensor in model.main}
    preset = target_manifest(
        model,
        EngineParallelism(tensor_parallel, expert=tensor_parallel if expert_parallel else 1),
        first_rank=0,
        dtype=traced.tensors[0].dtype,
    )
    assert contents(preset) == contents(traced)


# Biases on every attention projection are of no architecture that a preset knows.
@pytest.mark.parametrize(("mode", "case"), [pair for pair in ALONE if pair[1] != "bias-bf16"])
def test_a_preset_is_what_one_rank_loads(alone, mode, case):
    _assert_preset_agrees([alone[mode][case]], tensor_parallel=1)


@pytest.mark.parametrize("case", PARALLEL)
def test_a_preset_is_what_two_ranks_load(parallel, case):
    _assert_preset_agrees([rank[case] for rank in parallel], tensor_parallel=2, expert_parallel=case == "moe-ep-fp32")


def test_ranks_hold_what_their_parallelism_says(parallel):
    first, second = ([rank[case]["boxes"] for case in PARALLEL] for rank in parallel)
    replicated, sharded, experts = 0, 1, 2
    for kv in ("self_attn.k_proj.weight", "self_attn.v_proj.weight"):
        assert first[replicated][kv] == second[replicated][kv] == ["[0:32, 0:64]"]
        assert (first[sharded][kv], second[sharded][kv]) == (["[0:32, 0:64]"], ["[32:64, 0:64]"])
    # 250 rows padded to 256: the padded rows are no elements.
    assert first[replicated]["lm_head.weight"] == ["[0:128, 0:64]"]
    assert second[replicated]["lm_head.weight"] == ["[128:250, 0:64]"]
    down = "mlp.experts.down_proj.weight"
    assert first[sharded][down] == ["[0:8, 0:64, 0:32]"]
    assert second[experts][down] == ["[4:8, 0:64, 0:64]"]
