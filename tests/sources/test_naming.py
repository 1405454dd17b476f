"""The naming table and its geometry against splits written by hand with numpy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_models import qwen

from refit_transport.errors import LayoutError
from refit_transport.layout.box import Box, Span
from refit_transport.layout.fused import split_rows
from refit_transport.layout.manifest import Manifest, RankManifest
from refit_transport.layout.presets.model import LogicalModel
from refit_transport.sources.naming import Naming, Placed, Shard, check_complete, expected_tensors

DENSE = qwen(heads=64, head_dim=3)
MOE = qwen(hidden=8, head_dim=2, experts=6, moe_intermediate=10, dense=(0, 2))


def place(shard: Shard, model: LogicalModel) -> tuple[Placed, ...]:
    return Naming(model).place(shard)


def _numbered(*shape: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + int(np.prod(shape))).reshape(shape)


def _fuse_qkv(q: np.ndarray, k: np.ndarray, v: np.ndarray, groups: int) -> np.ndarray:
    """Megatron's rows: for each query group its q heads, its k head, its v head."""
    width, heads = len(k) // groups, len(q) // groups
    blocks = []
    for group in range(groups):
        blocks += [q[group * heads : (group + 1) * heads]]
        blocks += [k[group * width : (group + 1) * width], v[group * width : (group + 1) * width]]
    return np.concatenate(blocks)


def _check_shards(shards: list[tuple[Shard, np.ndarray]], model: LogicalModel, whole: dict[str, np.ndarray]) -> None:
    """Each piece holds the right elements, and all pieces together each element once."""
    seen = {name: np.zeros(tensor.shape, int) for name, tensor in whole.items()}
    for shard, local in shards:
        for placed in place(shard, model):
            assert placed.shape == whole[placed.tensor].shape
            here = tuple(slice(span.start, span.stop) for span in placed.local.spans)
            there = tuple(slice(span.start, span.stop) for span in placed.box.spans)
            assert np.array_equal(local[here].reshape(placed.box.shape), whole[placed.tensor][there])
            seen[placed.tensor][there] += 1
    for name, count in seen.items():
        assert (count == 1).all(), name


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize(("heads", "kv_heads"), [(64, 2), (8, 8), (8, 1), (16, 4)])
def test_qkv_rows_are_cut_at_every_border(heads: int, kv_heads: int, tp: int) -> None:
    width, hidden, layer = 4, 5, 2
    model = qwen(heads=heads, kv_heads=kv_heads, head_dim=width, hidden=hidden)
    q = _numbered(heads * width, hidden)
    k = _numbered(kv_heads * width, hidden, start=q.size)
    v = _numbered(kv_heads * width, hidden, start=q.size + k.size)
    fused = _fuse_qkv(q, k, v, kv_heads)
    rows = len(fused) // tp
    shards = [
        (
            Shard(
                "decoder.layers.self_attention.linear_qkv.weight",
                (4, *fused.shape),
                Box.at((layer, rank * rows, 0), (1, rows, hidden)),
                prepended=1,
            ),
            fused[rank * rows : (rank + 1) * rows],
        )
        for rank in range(tp)
    ]
    names = [f"model.layers.{layer}.self_attn.{letter}_proj.weight" for letter in "qkv"]
    _check_shards(shards, model, dict(zip(names, (q, k, v), strict=True)))
    for name, tensor in zip(names, (q, k, v), strict=True):
        (place_in_megatron,) = Naming(model).homes(name)
        assert place_in_megatron.key == "decoder.layers.self_attention.linear_qkv.weight"
        assert place_in_megatron.layer == layer
        assert sum(found.size for found in place_in_megatron.ranges) == len(tensor)
        for found in place_in_megatron.ranges:
            mine = fused[found.fused : found.fused + found.size]
            assert np.array_equal(mine, tensor[found.start : found.start + found.size])


def test_ranks_without_a_kv_row_hold_only_q() -> None:
    rows = (64 + 2 * 2) * 3 // 4
    shard = Shard(
        "decoder.layers.self_attention.linear_qkv.weight", (4, rows * 4, 64), Box.at((0, 0, 0), (1, rows, 64)), 1
    )
    assert {placed.tensor.split(".")[4] for placed in place(shard, DENSE)} == {"q_proj"}


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_gate_and_up_of_each_expert(tp: int) -> None:
    gate, up = _numbered(6, 10, 8), _numbered(6, 10, 8, start=1000)
    shards = []
    for expert, rank in itertools.product(range(6), range(tp)):
        if 10 % tp:
            continue
        rows = 10 // tp
        # Megatron describes the local [gate | up] as two tensors, both in the whole [gates | ups].
        for half, tensor in ((0, gate), (10, up)):
            local = tensor[expert, rank * rows : (rank + 1) * rows]
            box = Box.at((3, expert, half + rank * rows, 0), (1, 1, rows, 8))
            key = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
            shards.append((Shard(key, (4, 6, 20, 8), box, prepended=2), local))
    if shards:
        prefix = "model.layers.3.mlp.experts."
        _check_shards(shards, MOE, {f"{prefix}gate_proj.weight": gate, f"{prefix}up_proj.weight": up})


@pytest.mark.parametrize(("vocab", "padded", "tp"), [(151, 160, 4), (1003, 1024, 4), (1003, 1008, 3), (5, 16, 4)])
def test_padded_vocabulary_rows_are_no_logical_elements(vocab: int, padded: int, tp: int) -> None:
    model = qwen(vocab=vocab, hidden=2)
    table = np.concatenate([_numbered(vocab, 2), np.full((padded - vocab, 2), -1)])
    rows = padded // tp
    for key, name in (
        ("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        ("output_layer.weight", "lm_head.weight"),
    ):
        shards = [
            (Shard(key, (padded, 2), Box.at((rank * rows, 0), (rows, 2))), table[rank * rows : (rank + 1) * rows])
            for rank in range(tp)
        ]
        _check_shards(shards, model, {name: table[:vocab]})


@given(
    shares=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    groups=st.integers(1, 5),
    cuts=st.lists(st.integers(0, 200), max_size=5),
)
def test_any_cut_covers_every_row_once(shares: list[int], groups: int, cuts: list[int]) -> None:
    part_rows = [share * groups for share in shares]
    total = sum(part_rows)
    borders = sorted({0, total, *(min(cut, total) for cut in cuts)})
    seen = [np.zeros(rows, int) for rows in part_rows]
    fused_seen = np.zeros(total, int)
    for start, stop in itertools.pairwise(borders):
        for found in split_rows(part_rows, groups=groups, window=Span(start, stop)):
            seen[found.part][found.start : found.start + found.size] += 1
            fused_seen[found.fused : found.fused + found.size] += 1
    assert all((count == 1).all() for count in (*seen, fused_seen))


@pytest.mark.parametrize("model", [DENSE, MOE, qwen(tied=True), qwen(qkv_bias=True)])
def test_every_expected_tensor_has_a_home_that_names_it(model: LogicalModel) -> None:
    for spec in expected_tensors(model, dtype="float32"):
        (found,) = Naming(model).homes(spec.name)
        rows = spec.shape[1 if ".experts." in spec.name else 0]
        assert sum(r.size for r in found.ranges) == rows
        assert found.layer == (int(spec.name.split(".")[2]) if ".layers." in spec.name else -1)


def test_both_spellings_and_both_key_forms_name_the_same_tensor() -> None:
    for key, shape, prepended in (
        ("decoder.layers.self_attention.linear_qkv.layer_norm_weight", (4, 64), 1),
        ("decoder.layers.input_layernorm.weight", (4, 64), 1),
        ("decoder.layers.2.input_layernorm.weight", (64,), 0),
    ):
        box = Box.at((2, 0), (1, 64)) if prepended else Box.full((64,))
        (placed,) = place(Shard(key, shape, box, prepended), DENSE)
        assert placed.tensor == "model.layers.2.input_layernorm.weight"


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        (Shard("decoder.layers.mlp.linear_fc9.weight", (4, 8), Box.full((1, 8)), 1), "linear_fc9"),
        (Shard("decoder.layers.mlp.router.expert_bias", (4, 6), Box.full((1, 6)), 1), "expert_bias"),
        # A dense MLP in a layer of experts, and the reverse.
        (Shard("decoder.layers.1.mlp.linear_fc2.weight", (8, 96), Box.full((8, 96))), r"layers\.1\.mlp"),
        (Shard("decoder.layers.0.mlp.router.weight", (6, 8), Box.full((6, 8))), r"layers\.0\.mlp\.router"),
        # L5: the flag that says "this is half of the experts' rows" is missing.
        (
            Shard(
                "decoder.layers.mlp.experts.experts.linear_fc2.weight",
                (4, 6, 8, 5),
                Box.at((1, 0, 0, 0), (1, 1, 8, 5)),
                2,
            ),
            r"\[6, 8, 10\].*\[6, 8, 5\]",
        ),
        # L3: fewer vocabulary rows than the config's.
        (Shard("output_layer.weight", (250, 8), Box.full((250, 8))), r"\[251, 8\].*\[250, 8\]"),
        (Shard("decoder.layers.input_layernorm.weight", (3, 8), Box.full((1, 8)), 1), "4 layers.*3"),
    ],
)
def test_what_the_table_or_the_config_does_not_explain_is_refused(shard: Shard, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        place(shard, MOE)


def test_a_tied_model_has_no_head() -> None:
    with pytest.raises(LayoutError, match="output_layer"):
        place(Shard("output_layer.weight", (251, 64), Box.full((251, 64))), qwen(tied=True))
    with pytest.raises(LayoutError, match="lm_head"):
        Naming(qwen(tied=True)).homes("lm_head.weight")


def _holding(model: LogicalModel, keep: object) -> Manifest:
    specs = tuple(spec for spec in expected_tensors(model, dtype="float32") if keep(spec.name))  # type: ignore[operator]
    return Manifest.of([RankManifest(0, "source", specs, ())])


def test_missing_layers_and_tensors_are_named() -> None:
    model = qwen(layers=30)
    check_complete(_holding(model, lambda _: True), model)
    with pytest.raises(LayoutError, match=r"layers \[28, 29\]"):
        check_complete(
            _holding(model, lambda name: not name.startswith(("model.layers.28.", "model.layers.29."))), model
        )
    with pytest.raises(LayoutError, match=r"model\.layers\.3\.self_attn\.k_norm\.weight"):
        check_complete(_holding(model, lambda name: name != "model.layers.3.self_attn.k_norm.weight"), model)
