"""Manifests of every architecture: no hole and no overlap, counted element by element, and full-size ones by hand."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from small_models import SMALL

from refit_transport.errors import ConfigError
from refit_transport.layout.box import Box
from refit_transport.layout.parallelism import MegatronParallelism
from refit_transport.layout.presets.megatron import balanced, source_manifest
from refit_transport.layout.presets.model import LogicalModel
from refit_transport.layout.presets.vllm import EngineParallelism, target_manifest
from refit_transport.simulation.presets import preset_manifests

DENSE = {kind for kind, config in SMALL.items() if "moe_intermediate_size" not in str(config)} - {"mixtral", "gpt-oss"}


def counts(manifest, ranks):
    """How many of these ranks hold each element, by tensor."""
    found = {spec.name: np.zeros(spec.shape, dtype=np.int64) for spec in manifest.tensors}
    for rank in ranks:
        for piece in manifest.ranks[rank].pieces:
            found[piece.tensor][tuple(slice(span.start, span.stop) for span in piece.box.spans)] += 1
    return found


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize(
    ("cut", "ranks"),
    [
        (MegatronParallelism(), 2),
        (MegatronParallelism(4, 2, expert=4, expert_tensor=1), 16),
        (MegatronParallelism(2, 2, 2, expert=2, expert_tensor=2), 8),
        (MegatronParallelism(1, 3, expert=2, expert_tensor=1), 6),
    ],
)
def test_every_element_is_on_some_source_rank(kind, cut, ranks):
    model = LogicalModel.from_config(SMALL[kind])
    if kind in DENSE:
        cut = MegatronParallelism(cut.tensor, cut.pipeline, cut.virtual_pipeline)
    cut = balanced(model, cut)
    manifest = source_manifest(model, cut, world_size=ranks)
    assert {spec.name for spec in manifest.tensors} == {tensor.name for tensor in model.main}
    found = counts(manifest, range(ranks))
    for name, held in found.items():
        assert held.min() > 0, name
        # What a group cuts lies once in it, so all its elements are equally often on the ranks.
        assert held.min() == held.max(), name


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("cut", [EngineParallelism(4, 2), EngineParallelism(2, 2, 2), EngineParallelism(2, 4, 8)])
def test_every_engine_has_every_element(kind, cut):
    model = LogicalModel.from_config(SMALL[kind])
    if kind in DENSE:
        cut = EngineParallelism(cut.tensor, cut.data)
    manifest = target_manifest(model, cut, first_rank=0)
    size = max(cut.tensor, cut.expert)
    for first in range(0, cut.ranks, size):
        for name, held in counts(manifest, range(first, first + size)).items():
            assert held.min() == held.max() > 0, name


def test_packed_blocks_are_divided_each_by_itself():
    """Mamba: z and x of 32 rows, B and C of 24, dt of 8; the second of two ranks has the second half of each."""
    model = LogicalModel.from_config(SMALL["nemotron dense"])
    pieces = source_manifest(model, MegatronParallelism(2), world_size=2).ranks[1].pieces
    rows = [piece.box.spans[0] for piece in pieces if piece.tensor == "backbone.layers.0.mixer.in_proj.weight"]
    assert [(span.start, span.stop) for span in rows] == [(16, 32), (48, 64), (76, 88), (100, 112), (116, 120)]


def test_deepseek_v3_by_hand():
    source, target = preset_manifests("DeepSeek-V3", source="pp16 ep16", target="tp32 dp8")
    # Stages of 3, 14 x 4 and 2 layers: rank 16 begins the second one, with layer 3, the first with experts.
    second = {piece.tensor: piece.box for piece in source.ranks[16 + 5].pieces}
    assert second["model.layers.3.mlp.experts.gate_proj.weight"] == Box.of((80, 96), (0, 2048), (0, 7168))
    assert "model.layers.2.mlp.gate_proj.weight" not in second
    assert "model.layers.6.mlp.gate.weight" in second
    assert "model.layers.7.mlp.gate.weight" not in second
    third = {piece.tensor: piece.box for piece in target.ranks[32 + 2].pieces}
    assert third["model.layers.3.mlp.experts.down_proj.weight"] == Box.of((0, 256), (0, 7168), (128, 192))
    assert third["model.layers.0.self_attn.q_b_proj.weight"] == Box.of((2 * 768, 3 * 768), (0, 1536))
    assert third["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"] == Box.of((0, 576), (0, 7168))
    assert third["lm_head.weight"] == Box.of((2 * 4040, 3 * 4040), (0, 7168))


def test_full_size_manifests_are_compact():
    tracemalloc.start()
    source, target = preset_manifests("DeepSeek-V3", source="pp16 ep16", target="tp32 dp8")
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 64 << 20
    assert max(len(ranked.pieces) for ranked in source.ranks) < 70
    for ranked in target.ranks:
        assert ranked.pieces is target.ranks[ranked.rank % 32].pieces
        assert ranked.tensors is target.ranks[ranked.rank % 32].tensors


@pytest.mark.parametrize(
    ("model", "source", "target", "message"),
    [
        ("Qwen3-235B-A22B", "pp40", "tp8", "leaves 40 stages that must divide the model's 94 layers"),
        ("DeepSeek-V3", "ep48", "tp8", "expert parallel size: must divide the model's 256 experts"),
        ("Nemotron-3-Ultra-550B-A55B", "tp8", "tp16", "must divide the model's 8 Mamba groups"),
        ("Llama-3.1-8B", "tp3", "tp1", "must divide the model's 32 attention heads"),
        ("Llama-3.1-8B", "tp1", "tp1 dp4 ep4", "must be 1, because the model has no experts"),
        ("Qwen3-30B-A3B", "ep8", "tp4 dp2 ep2", "must be a multiple of the tensor parallel size 4"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_both(model, source, target, message):
    with pytest.raises(ConfigError, match=message):
        preset_manifests(model, source=source, target=target)


@pytest.mark.parametrize(
    ("source", "sources", "message"),
    [
        ("pp16 ep16", 100, "needs a multiple of 256 training ranks .got 100"),
        ("tp2 dp2", 8, "needs exactly 4 training ranks .got 8"),
        ("tp2 xp2", None, "is no parallel size; known: tp, pp"),
        ("tp2 tp2", None, "gives a size twice"),
        ("tp0", None, "must be at least 1"),
        ("fsdp8 tp2", None, "has fsdp beside other sizes"),
    ],
)
def test_layouts_that_say_nothing_or_too_much(source, sources, message):
    with pytest.raises(ConfigError, match=message):
        preset_manifests("Qwen3-4B", source=source, target="tp1", sources=sources)


def test_fully_sharded_ranks_share_out_dim_0():
    source, _ = preset_manifests("Qwen3-4B", source="fsdp8", target="tp8")
    boxes = [piece.box for piece in source.ranks[3].pieces if piece.tensor == "model.embed_tokens.weight"]
    assert boxes == [Box.of((3 * 18992, 4 * 18992), (0, 2560))]
