"""vLLM models that no Megatron ranks here can fill, and kernels that pack weights: refits against fresh loads.

See `vllm_refits.py`. The other architectures are those of `tests/e2e/test_layout_pairs.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from preset_checks import regions
from rank_pool import free_port
from rank_scripts import run_ranks
from support_names import vllm_rows
from support_records import listed

from refit_transport.layout.presets.model import LogicalModel
from refit_transport.layout.presets.vllm import EngineParallelism, target_manifest
from refit_transport.layout.wire import manifest_from_json

pytest.importorskip("vllm")
pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).with_name("vllm_refits.py")
# Multimodal models need torchvision. Nemotron-H also shows what is composed and derived.
LOADED = (
    *("deepseek with a drafter", "nemotron dense", "qwen3 next with a drafter", "gemma text"),
    "deepseek with a drafter/drafts",
)
# vLLM's drafters use the model's own.
SHARED = (".embed_tokens.weight", ".shared_head.head.weight")
DRAFTS = ("glm with a drafter/drafts", "qwen3 next with a drafter/drafts")
MORE = (
    *("llama with biases", "mistral", "deepseek without q lora", "gemma of one kv head", "gemma 2"),
    *("gemma text/stages", "glm with a drafter/stages", *DRAFTS),
)
ONE_RANK = ("gemma text", "gemma 1", "gemma 2", "llama with biases", "mistral", "deepseek without q lora", *DRAFTS)
# Kernels that pack weights: every architecture.
STOCK = (
    *("llama of 1003 rows", "qwen2 tied", "qwen3 of one kv head", "mixtral", "deepseek with a drafter", "glm"),
    *("gpt-oss", "nemotron dense", "qwen3 next with a drafter", "gemma text", "deepseek with a drafter/drafts"),
)
STOCK_ALONE = (*STOCK, *("qwen3 tied", "qwen3 moe", "deepseek v2"), *(kind for kind in ONE_RANK if kind not in STOCK))
SPREAD = ("deepseek/spread", "qwen3 moe of 7 experts/spread")
STAGES = ("llama of 5 layers/stages", "qwen3 tied/stages", "deepseek/stages", "nemotron dense/stages")
WITHOUT_PRESET = ("deepseek v2", "gemma 2")


def _refits(folder, kinds, *, world_size, plain="1", **environment):
    environment |= {
        "CHANNEL_PORTS": ",".join(str(free_port()) for _ in kinds),
        "REFIT_TRANSPORT_VLLM_PLAIN_WEIGHTS": plain,
        "VLLM_DIST_IDENT": "refits",
    }
    return run_ranks(SCRIPT, folder, kinds, world_size=world_size, environment=environment)


def _assert_exact(results, kinds, *, coverage="all"):
    assert list(results[0]) == list(kinds)
    for found in (rank[kind] for rank in results for kind in kinds):
        assert found["differ before"] > 10
        assert [found[f"{version}: differs from a fresh {name}"] for version, name in enumerate("bab")] == [[], [], []]
        assert all(differing == [] for name, differing in found.items() if name.startswith("only "))
        assert found["moved tensors"] == []
        assert found["compared"] == 0
        assert [filled for _, filled in found["tails"].values()] == [0] * len(found["tails"])
        assert found["tails"]
    for kind in kinds:
        found = results[0][kind]
        assert (found["whole"] == {}) is (coverage == "all")
        reason, skipped = "multi-token prediction: no target drafts", found["drafter"]
        if kind.endswith("/drafts"):
            reason, skipped = "the targets' loaders ignore it", [name for name in skipped if name.endswith(SHARED)]
        assert {why: sorted(names) for why, names in found["skipped"].items()} == (
            {reason: sorted(skipped)} if skipped else {}
        )


def _assert_preset(results, kind):
    ranks = len(results)
    for rank, found in enumerate(ranked[kind] for ranked in results):
        traced = manifest_from_json(found["manifest"])
        parallelism = {
            "": EngineParallelism(ranks),
            "spread": EngineParallelism(ranks, expert=ranks),
            "stages": EngineParallelism(pipeline=ranks),
            "drafts": EngineParallelism(ranks),
        }[kind.partition("/")[2]]
        drafter = found["drafter"] if kind.endswith("/drafts") else ()
        preset = target_manifest(LogicalModel.from_config(found["config"]), parallelism, first_rank=0).ranks[rank]
        assert traced.opaque == ()
        assert regions(preset) == {name: held for name, held in regions(traced).items() if name not in drafter}
        assert len(traced.pieces) > 10


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return _refits(tmp_path_factory.mktemp("refits"), LOADED, world_size=2)


def _record(support_record, results):
    shares = [rank[kind]["shard to shard"] for rank in results[:1] for kind in rank]
    support_record(shard_to_shard=min(shares), proof="every tensor bit-identical with a fresh vLLM, A-B-A-B")


@listed(*vllm_rows(LOADED, ranks=2))
def test_two_ranks_are_as_freshly_loaded(loaded, support_record):
    _assert_exact(loaded, LOADED)
    _record(support_record, loaded)


def test_a_composed_parameter_that_no_longer_follows_is_found(loaded):
    found = [rank["nemotron dense"]["compared after a change"] for rank in loaded]
    assert found[0] == found[1]
    assert any(name.endswith(".A") for name in found[0])
    assert loaded[0]["gemma text"]["compared after a change"] == []


def test_what_is_derived_follows_the_one_tensor_that_changes(loaded):
    deepseek, nemotron = (loaded[1][kind] for kind in ("deepseek with a drafter", "nemotron dense"))
    assert deepseek["kept of kv_b_proj"] == ["W_UK_T", "W_UV", "weight"]
    assert deepseek["kept of e_score_correction_bias"] == ["e_score_correction_bias"]
    assert nemotron["kept of conv1d.weight"] == ["conv_weights", "weight"]
    assert nemotron["kept of A_log"] == ["A"]
    assert nemotron["kept of mixer.D"] == ["D"]


@pytest.mark.parametrize("kind", LOADED)
def test_a_preset_is_what_two_ranks_load(loaded, kind):
    _assert_preset(loaded, kind)


def test_plain_weights_are_written_in_place(loaded):
    assert [found["private"] for rank in loaded for found in rank.values()] == [{}] * 2 * len(LOADED)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kinds", "world_size", "plain"),
    [
        pytest.param(kinds, ranks, plain, id=name, marks=vllm_rows(kinds, ranks=ranks, plain=plain))
        for name, kinds, ranks, plain in (
            ("two ranks", MORE, 2, "1"),
            ("one rank", ONE_RANK, 1, "1"),
            ("one rank with stock kernels", STOCK_ALONE, 1, "0"),
            ("two ranks with stock kernels", (*STOCK, *SPREAD, *STAGES), 2, "0"),
        )
    ],
)
def test_more_architectures_are_as_freshly_loaded(tmp_path, kinds, world_size, plain, support_record):
    results = _refits(tmp_path, kinds, world_size=world_size, plain=plain)
    _assert_exact(results, kinds)
    for kind in (kind for kind in kinds if kind not in WITHOUT_PRESET):
        _assert_preset(results, kind)
    _record(support_record, results)


@pytest.mark.nightly
def test_most_tensors_whole_through_the_loader_are_as_freshly_loaded(tmp_path):
    results = _refits(tmp_path, (*STOCK, *SPREAD), world_size=2, COVERAGE="ffn")
    _assert_exact(results, (*STOCK, *SPREAD), coverage="ffn")


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["nemotron dense", "qwen3 next"])
def test_packed_convolutions_and_the_buffer_beside_them_follow(tmp_path, kind):
    results = _refits(tmp_path, (kind,), world_size=1, plain="0", PACK_CONVOLUTIONS="1")
    _assert_exact(results, (kind,))
    assert any(layer.endswith("conv1d") for layer in results[0][kind]["private"])
