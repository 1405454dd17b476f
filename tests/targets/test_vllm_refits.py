"""vLLM models of many architectures: refits against fresh loads (see `vllm_refits.py`), presets against loaders."""

from __future__ import annotations

from pathlib import Path

import pytest
from preset_checks import regions
from rank_pool import free_port
from rank_scripts import run_ranks

from refit_transport.layout.presets.model import LogicalModel
from refit_transport.layout.presets.vllm import EngineParallelism, target_manifest
from refit_transport.layout.wire import manifest_from_json

pytest.importorskip("vllm")
pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).with_name("vllm_refits.py")
# Multimodal models need torchvision, and vLLM has no CPU kernel for experts without a gate (Nemotron 3).
CUT = (
    "llama of 1003 rows",
    "qwen2 tied",
    "qwen3 of one kv head",
    "mixtral",
    "deepseek",
    "glm",
    "gpt-oss",
    "nemotron dense",
    "qwen3 next",
    "gemma text",
)
EXPERTS = ("deepseek/spread", "qwen3 moe of 7 experts/spread")
MORE = (
    *("llama with biases", "mistral", "qwen3 tied", "qwen3 moe", "deepseek without q lora", "deepseek v2", "gemma 2"),
    *(f"{kind}/spread" for kind in ("qwen3 moe", "mixtral", "glm", "gpt-oss", "qwen3 next", "deepseek v2")),
)
ONE_RANK = (*CUT, *MORE[:7], "gemma 1", "qwen3 moe of 7 experts")
WITHOUT_PRESET = ("deepseek v2", "gemma 1", "gemma 2")


def _refits(folder, kinds, *, world_size, plain="1"):
    environment = {
        "CHANNEL_PORTS": ",".join(str(free_port()) for _ in kinds),
        "REFIT_TRANSPORT_VLLM_PLAIN_WEIGHTS": plain,
    }
    return run_ranks(SCRIPT, folder, kinds, world_size=world_size, environment=environment)


def _assert_exact(results, kinds):
    assert list(results[0]) == list(kinds)
    for found in (rank[kind] for rank in results for kind in kinds):
        assert found["differ before"] > 20
        assert [found[f"{version}: differs from a fresh {name}"] for version, name in enumerate("bab")] == [[], [], []]
        assert found["moved tensors"] == []
        assert [filled for _, filled in found["tails"].values()] == [0] * len(found["tails"])
        assert found["tails"]
    for found in (results[0][kind] for kind in kinds):
        assert (found["whole"], found["unused"]) == ({}, [])


def _assert_preset(results, kind):
    for rank, found in enumerate(ranked[kind] for ranked in results):
        traced = manifest_from_json(found["manifest"])
        parallelism = EngineParallelism(len(results), expert=len(results) if kind.endswith("/spread") else 1)
        preset = target_manifest(LogicalModel.from_config(found["config"]), parallelism, first_rank=0).ranks[rank]
        assert traced.opaque == ()
        assert regions(preset) == regions(traced)
        assert len(traced.pieces) > 20


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return _refits(tmp_path_factory.mktemp("refits"), (*CUT, *EXPERTS), world_size=2)


def test_two_ranks_of_every_architecture_are_as_freshly_loaded(loaded):
    _assert_exact(loaded, (*CUT, *EXPERTS))


@pytest.mark.parametrize("kind", [*CUT, *EXPERTS])
def test_a_preset_is_what_two_ranks_load(loaded, kind):
    _assert_preset(loaded, kind)


def test_plain_weights_are_written_in_place(loaded):
    assert [found["private"] for rank in loaded for found in rank.values()] == [{}] * 2 * len(CUT + EXPERTS)


def test_padded_vocabulary_rows_stay_zero_on_the_rank_that_has_them(loaded):
    tails = [{kind: rank[kind]["tails"]["model.embed_tokens"][0] for kind in CUT[:2]} for rank in loaded]
    assert tails == [{"llama of 1003 rows": 0, "qwen2 tied": 0}, {"llama of 1003 rows": 21, "qwen2 tied": 41}]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kinds", "world_size", "plain"),
    [(MORE, 2, "1"), (ONE_RANK, 1, "1"), (ONE_RANK, 1, "0"), ((*CUT, *EXPERTS), 2, "0")],
    ids=["two ranks", "one rank", "one rank with stock kernels", "two ranks with stock kernels"],
)
def test_more_architectures_are_as_freshly_loaded(tmp_path, kinds, world_size, plain):
    results = _refits(tmp_path, kinds, world_size=world_size, plain=plain)
    _assert_exact(results, kinds)
    for kind in (kind for kind in kinds if kind.removesuffix("/spread") not in WITHOUT_PRESET):
        _assert_preset(results, kind)
