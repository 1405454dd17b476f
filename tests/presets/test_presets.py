"""Presets of both sides fit each other for any valid sizes. That they are what real engines say of themselves is tested
where those run: `tests/cluster/test_megatron_training.py` and `tests/targets/test_vllm_target.py`."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from small_models import qwen

from refit_transport.errors import ConfigError
from refit_transport.layout.box import Box
from refit_transport.layout.parallelism import MegatronParallelism, place_of, stage_layers
from refit_transport.layout.presets.megatron import source_manifest, training_misfits
from refit_transport.layout.presets.vllm import EngineParallelism, target_manifest
from refit_transport.planning.planner import plan_transfer
from refit_transport.scheduling.scheduler import build_schedule
from refit_transport.scheduling.topology import Topology
from refit_transport.sources.naming import check_complete, expected_tensors

SIZES = st.sampled_from((1, 2, 4))
SMALLEST: dict[str, Any] = {"hidden": 8, "head_dim": 2, "intermediate": 8}
SMALLEST_MOE: dict[str, Any] = {**SMALLEST, "experts": 4, "moe_intermediate": 8}
DENSE, MOE = qwen(**SMALLEST), qwen(**SMALLEST_MOE)


@st.composite
def models(draw):
    layers = draw(st.integers(1, 6))
    dense = draw(st.sets(st.integers(0, layers - 1)))
    return qwen(
        layers=layers,
        hidden=8,
        vocab=draw(st.integers(1, 200)),
        heads=draw(st.sampled_from((4, 8))),
        kv_heads=draw(st.sampled_from((1, 2, 4))),
        head_dim=4,
        intermediate=16,
        experts=draw(st.sampled_from((0, 4, 8))) if len(dense) < layers else 0,
        moe_intermediate=8,
        shared=draw(st.sampled_from((0, 8))),
        dense=tuple(sorted(dense)),
        qkv_bias=draw(st.booleans()),
        tied=draw(st.booleans()),
    )


@st.composite
def cuts(draw, model):
    """A way to train the model, and the number of ranks."""
    tensor, pipeline = draw(SIZES), draw(st.integers(1, 3))
    cut = MegatronParallelism(
        tensor,
        pipeline,
        draw(st.sampled_from((1, 2))) if pipeline > 1 else 1,
        expert=draw(SIZES) if model.experts else 1,
        expert_tensor=draw(st.sampled_from((0, 1, 2))),
        sequence_parallel=tensor > 1,
        first_stage_layers=draw(st.integers(0, 2)) if pipeline > 1 else 0,
        last_stage_layers=draw(st.integers(0, 2)) if pipeline > 1 else 0,
    )
    smallest = pipeline * max(tensor, cut.experts_over * cut.expert)
    ranks = smallest * draw(st.sampled_from((1, 2)))
    assume(training_misfits(model, cut, world_size=ranks) == ())
    return cut, ranks


def trained(model, cut, *, ranks, **options):
    return source_manifest(model, cut, world_size=ranks, dtype="float32", **options)


def served(model, tensor=1, data=1, expert=1, *, first=0):
    parallelism = EngineParallelism(tensor, data, expert)
    return target_manifest(model, parallelism, first_rank=first, dtype="bfloat16")


@given(
    models().flatmap(lambda model: st.tuples(st.just(model), cuts(model))),
    SIZES,
    st.booleans(),
    st.integers(1, 2),
)
def test_any_two_valid_sides_fit(trained_so, tensor, expert_parallel, engines):
    model, (cut, ranks) = trained_so
    source = trained(model, cut, ranks=ranks, make_vocab_size_divisible_by=3)
    check_complete(source, model)
    assert set(source.tensors) == set(expected_tensors(model, dtype="float32"))
    # Every element of every tensor is on some source rank.
    whole = served(model, first=ranks)
    plan_transfer(source, whole).check(source, whole)

    expert = tensor if expert_parallel and model.experts else 1
    target = served(model, tensor, engines, expert, first=ranks)
    assert [ranked.rank for ranked in target.ranks] == list(range(ranks, ranks + engines * tensor))
    assert set(target.tensors) == {replace(spec, dtype="bfloat16") for spec in source.tensors}
    for first in range(0, engines * tensor, tensor):
        _check_engine(target.ranks[first : first + tensor], source.tensors)
    plan = plan_transfer(source, target)
    plan.check(source, target)
    topology = Topology.of((range(ranks), range(ranks, ranks + engines * tensor)))
    build_schedule(plan, topology, bucket_bytes=256).check(plan)


def _check_engine(ranks, tensors):
    """An engine's ranks hold every element: once, or once per copy of a replicated tensor."""
    for spec in tensors:
        boxes = Counter(piece.box for ranked in ranks for piece in ranked.pieces if piece.tensor == spec.name)
        copies = set(boxes.values())
        assert len(copies) == 1
        assert sum(box.numel for box in boxes) == spec.box.numel


def test_the_kinds_of_cut_by_hand():
    """TP2 x EP2 with experts whole on each rank, rank 1, against figures worked out on paper."""
    cut = MegatronParallelism(2, expert=2, expert_tensor=1, sequence_parallel=True)
    held = {}
    for piece in trained(MOE, cut, ranks=2).ranks[1].pieces:
        held.setdefault(piece.tensor.removeprefix("model.layers.0."), []).append(piece.box)
    # 251 rows are padded to 252; rank 1's second half ends at the last true row.
    assert held["model.embed_tokens.weight"] == [Box.of((126, 251), (0, 8))]
    # Two query groups of two q heads, one k and one v head, two rows each: rank 1 has the second group.
    assert held["self_attn.q_proj.weight"] == [Box.of((4, 8), (0, 8))]
    assert held["self_attn.k_proj.weight"] == [Box.of((2, 4), (0, 8))]
    assert held["self_attn.o_proj.weight"] == [Box.of((0, 8), (4, 8))]
    assert held["self_attn.q_norm.weight"] == [Box.of((0, 2))]
    assert held["mlp.experts.gate_proj.weight"] == [Box.of((2, 4), (0, 8), (0, 8))]
    assert held["mlp.gate.weight"] == [Box.of((0, 4), (0, 8))]


def test_ranks_that_outnumber_the_kv_heads_share_them_in_order():
    name = "model.layers.0.self_attn.v_proj.weight"
    manifest = served(DENSE, tensor=4, data=2, first=7)
    rows = [
        (ranked.rank, piece.box.spans[0].start)
        for ranked in manifest.ranks
        for piece in ranked.pieces
        if piece.tensor == name
    ]
    assert rows == [(7, 0), (8, 0), (9, 2), (10, 2), (11, 0), (12, 0), (13, 2), (14, 2)]


def test_experts_that_do_not_divide_go_to_the_first_ranks():
    name = "model.layers.0.mlp.experts.up_proj.weight"
    manifest = served(qwen(**SMALLEST_MOE | {"experts": 7}), tensor=4, expert=4)
    numbers = [
        [(piece.box.spans[0].start, piece.box.spans[0].stop) for piece in ranked.pieces if piece.tensor == name]
        for ranked in manifest.ranks
    ]
    assert numbers == [[(0, 2)], [(2, 4)], [(4, 6)], [(6, 7)]]


def test_a_tied_head_is_a_second_copy_on_the_last_stage():
    tied = qwen(**SMALLEST, tied=True)
    for cut, holders in ((MegatronParallelism(pipeline=4), {0, 3}), (MegatronParallelism(), {0, 1, 2, 3})):
        manifest = trained(tied, cut, ranks=4)
        pieces = [(r.rank, p.tensor) for r in manifest.ranks for p in r.pieces if "layers" not in p.tensor]
        assert {rank for rank, tensor in pieces if tensor == "model.embed_tokens.weight"} == holders
        assert len(pieces) == len(set(pieces))
        assert "lm_head.weight" not in {tensor for _, tensor in pieces}


@pytest.mark.parametrize("first", [0, 4])
def test_layers_are_numbered_as_megatron_numbers_them(first):
    import torch
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    layers = 14 + (first and first - 4)
    cut = MegatronParallelism(pipeline=4, virtual_pipeline=2, first_stage_layers=first, last_stage_layers=2)
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_model_parallel_size=4,
        virtual_pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
        num_layers_in_first_pipeline_stage=first or None,
        num_layers_in_last_pipeline_stage=2,
    )
    expected = tuple(
        tuple(
            get_transformer_layer_offset(config, chunk, stage) + local
            for chunk in range(2)
            for local in range(get_num_layers_to_build(config, vp_stage=chunk, pp_rank=stage))
        )
        for stage in range(4)
    )
    assert stage_layers(layers, cut) == expected


@pytest.mark.parametrize(
    ("cut", "world_size"),
    [
        (MegatronParallelism(2, 2, expert=2, expert_tensor=1), 16),
        (MegatronParallelism(1, 2, expert=4, expert_tensor=2), 16),
        (MegatronParallelism(4, 1, expert=2, expert_tensor=2), 8),
    ],
)
def test_ranks_stand_where_megatron_puts_them(cut, world_size):
    from megatron.core.parallel_state import RankGenerator

    dense = RankGenerator(
        tp=cut.tensor, ep=1, dp=world_size // (cut.tensor * cut.pipeline), pp=cut.pipeline, cp=1, order="tp-cp-ep-dp-pp"
    )
    experts = RankGenerator(
        tp=cut.experts_over,
        ep=cut.expert,
        dp=world_size // (cut.experts_over * cut.expert * cut.pipeline),
        pp=cut.pipeline,
        cp=1,
        order="tp-cp-ep-dp-pp",
    )
    for generator, token, index in (
        (dense, "tp", "tensor"),
        (dense, "pp", "stage"),
        (experts, "tp", "expert_tensor"),
        (experts, "ep", "expert"),
        (experts, "pp", "stage"),
    ):
        for group in generator.get_ranks(token):
            places = [getattr(place_of(rank, cut, world_size=world_size), index) for rank in group]
            assert places == list(range(len(group))), (token, group, places)


def test_what_does_not_divide_is_refused_with_both_sizes():
    with pytest.raises(ConfigError, match="tensor parallel size: must divide the model's 4 attention heads"):
        trained(DENSE, MegatronParallelism(3), ranks=3)
    with pytest.raises(ConfigError, match=r"4 attention heads.*\n.*2 key-value heads") as refused:
        served(qwen(**SMALLEST | {"intermediate": 9}), tensor=3)
    assert "FFN width" not in str(refused.value)
    with pytest.raises(ConfigError, match="experts' width 6"):
        served(qwen(**SMALLEST_MOE | {"moe_intermediate": 6}), tensor=4)
    with pytest.raises(ConfigError, match="no experts"):
        served(DENSE, tensor=2, expert=2)
    with pytest.raises(ConfigError, match="FFN width 6"):
        served(qwen(**SMALLEST | {"intermediate": 6}), tensor=4)
