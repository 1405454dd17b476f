"""VllmTarget against real vLLM engines; see `vllm_cases.py` for what is compared with what."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).with_name("vllm_cases.py")
ALONE = ("dense-fp32", "dense-bf16", "moe-fp32", "moe-bf16", "tied-bf16", "bias-bf16", "dummy-bf16")
PARALLEL = ("kv1-fp32", "moe-tp-fp32", "moe-ep-fp32")
TIMEOUT = 240


def _run(folder, cases, *, plain, ranks):
    """Runs the cases in `ranks` processes and returns each rank's results."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"REFIT_TRANSPORT_VLLM_PLAIN_WEIGHTS": "1" if plain else "0"}
    processes, files = [], [folder / f"results-{rank}.json" for rank in range(ranks)]
    for rank, file in enumerate(files):
        launched = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": ranks,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        own = environment | ({name: str(value) for name, value in launched.items()} if ranks > 1 else {})
        log = (folder / f"log-{rank}.txt").open("w")
        command = [sys.executable, str(SCRIPT), str(file), str(folder / f"models-{rank}"), *cases]
        processes.append(subprocess.Popen(command, env=own, stdout=log, stderr=subprocess.STDOUT))
    try:
        for rank, process in enumerate(processes):
            code = process.wait(timeout=TIMEOUT)
            assert code == 0, (folder / f"log-{rank}.txt").read_text()[-4000:]
    finally:
        for process in processes:
            process.kill()
    return [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="module", params=["stock", "plain"])
def alone(request, tmp_path_factory):
    plain = request.param == "plain"
    return plain, _run(tmp_path_factory.mktemp(request.param), ALONE, plain=plain, ranks=1)[0]


@pytest.fixture(scope="module")
def parallel(tmp_path_factory):
    return _run(tmp_path_factory.mktemp("parallel"), PARALLEL, plain=True, ranks=2)


def _failed(results, *, plain):
    """The checks that went wrong. In stock mode the dense parameters are empty, so outputs alone must tell."""
    return [
        name
        for name, passed in results.items()
        if isinstance(passed, bool)
        and not passed
        and name != "swapped parameters are noticed"
        and not (not plain and name.endswith("parameters"))
    ]


@pytest.mark.parametrize("case", ALONE)
def test_refits_equal_a_fresh_engine(alone, case):
    plain, results = alone
    assert _failed(results[case], plain=plain) == []


@pytest.mark.parametrize("case", ALONE)
def test_swapped_parameters_differ_from_the_oracle(alone, case):
    plain, results = alone
    if plain:
        assert results[case]["swapped parameters are noticed"] is False


def test_private_layers_are_found_by_proof(alone):
    plain, results = alone
    private = results["moe-bf16"]["private"]
    if plain:
        assert private == {}
        return
    experts = private["model.layers.0.mlp.experts.routed_experts"]
    assert experts.startswith("stage: ")
    assert "differs from the loaded" in experts
    assert private["lm_head"] == "reprocess: it computes with a copy of its weight"
    assert "model.norm" not in private


def test_without_a_checkpoint_experts_are_private(alone):
    _, results = alone
    private = results["dummy-bf16"]["private"]
    assert "no checkpoint" in private["model.layers.0.mlp.experts.routed_experts"]
    assert "model.norm" not in private


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", PARALLEL)
def test_tensor_parallel_refits_equal_a_fresh_engine(parallel, case, rank):
    results = parallel[rank][case]
    assert _failed(results, plain=True) == []
    assert results["private"] == {}
    assert results["swapped parameters are noticed"] is False or (case == "moe-ep-fp32" and rank == 1)
