"""`MegatronSource` on hand-made modules: what it refuses, and that its pieces alias live storage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from small_models import qwen
from torch import nn

from refit_transport.errors import LayoutError
from refit_transport.sources.megatron import MegatronSource
from refit_transport.views import piece_view

MODEL = qwen(layers=2, hidden=8, vocab=12, head_dim=2, intermediate=6)
KEY = "decoder.layers.self_attention.linear_qkv.weight"


class Chunk(nn.Module):
    """Describes `weight` as rank 1 of 2's rows of layer 1's fused QKV."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.register_buffer("first", torch.zeros(1))
        self.weight = nn.Parameter(torch.arange(64.0).reshape(8, 8))
        for name, value in attributes.items():
            setattr(self.weight, name, value)
        self.key, self.described = KEY, None

    def sharded_state_dict(self, metadata: object) -> dict[str, ShardedTensor]:
        data = self.weight if self.described is None else self.described
        return {
            "x": ShardedTensor.from_rank_offsets(self.key, data, (0, 1, 2), (1, 1, 2), prepend_axis_num=1),
        }


FLAGGED = {"tensor_model_parallel": True, "partition_dim": 0}


def test_pieces_alias_the_parameter_and_follow_it() -> None:
    chunk = Chunk(**FLAGGED)
    source = MegatronSource([chunk], MODEL)
    manifest = source.manifest(3)
    assert manifest.rank == 3
    assert [piece.tensor.split(".")[4] for piece in manifest.pieces] == ["q_proj", "k_proj", "v_proj"]
    key_rows = next(piece for piece in manifest.pieces if "k_proj" in piece.tensor)
    assert key_rows.box.shape == (2, 8)
    assert key_rows.box.offset == (2, 0)
    piece_view(key_rows, source.buffers()).fill_(-1)
    assert (chunk.weight[4:6] == -1).all()
    assert (chunk.weight[:4] >= 0).all()
    chunk.weight = nn.Parameter(torch.full((8, 8), 5.0))
    assert (piece_view(key_rows, source.buffers()) == 5).all()


def test_parameters_packed_in_one_storage_are_told_apart() -> None:
    chunk = Chunk(**FLAGGED)
    packed = torch.zeros(200)
    chunk.first = packed[:100]
    chunk.weight.data = packed[100:164].view(8, 8)
    (buffer,) = {piece.buffer for piece in MegatronSource([chunk], MODEL).manifest(0).pieces}
    assert buffer == "0.weight"


def test_a_neighbour_in_the_same_storage_is_not_the_parameter() -> None:
    chunk = Chunk(**FLAGGED)
    packed = torch.zeros(200)
    chunk.weight.data = packed[:64].view(8, 8)
    chunk.described = packed[100:164].view(8, 8)
    with pytest.raises(LayoutError, match="view of a live parameter"):
        MegatronSource([chunk], MODEL).manifest(0)


def test_wrapped_chunks_are_unwrapped() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    assert MegatronSource([Wrapper(Wrapper(Chunk(**FLAGGED)))], MODEL).manifest(0).pieces


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": "decoder.layers.self_attention.linear_unheard_of.weight"}, "linear_unheard_of.*rank 5: .*explains"),
        ({"key": "decoder.layers.mlp.linear_fc2.weight"}, r"linear_fc2.*rank 5: .*\[8, 6\].*got \[16, 8\]"),
        ({"described": torch.zeros(8, 8)}, "rank 5: expected a view of a live parameter"),
        ({"described": torch.zeros(7, 8)}, "live"),
    ],
)
def test_what_it_cannot_explain_is_refused(change: dict[str, Any], message: str) -> None:
    chunk = Chunk(**FLAGGED)
    for name, value in change.items():
        setattr(chunk, name, value)
    with pytest.raises(LayoutError, match=message):
        MegatronSource([chunk], MODEL).manifest(5)


def test_shards_that_do_not_add_up_are_refused() -> None:
    """Two shards of 8 rows make no 24: the last one, or a third, is missing."""

    class Short(Chunk):
        def sharded_state_dict(self, metadata: object) -> dict[str, ShardedTensor]:
            (sharded,) = super().sharded_state_dict(metadata).values()
            return {"x": replace(sharded, global_shape=(2, 24, 8))}

    with pytest.raises(LayoutError, match=r"2 shards of 24 in dim 0, got a shard of 8"):
        MegatronSource([Short(**FLAGGED)], qwen(layers=2, hidden=8, vocab=12, head_dim=3, intermediate=6)).manifest(0)


@pytest.mark.parametrize("flags", [{}, {"tensor_model_parallel": False}, {**FLAGGED, "partition_dim": 1}])
def test_a_shard_that_hides_is_refused(flags: dict[str, Any]) -> None:
    with pytest.raises(LayoutError, match=r"flagged as tensor-parallel in dim 0 \(local 8 of 16\)"):
        MegatronSource([Chunk(**flags)], MODEL).manifest(0)


def test_a_parameter_that_the_model_does_not_describe_is_refused() -> None:
    chunk = Chunk(**FLAGGED)
    chunk.forgotten = nn.Parameter(torch.zeros(3))
    with pytest.raises(LayoutError, match=r"tensor forgotten: rank 2: expected all 3 elements .* got 0 of them"):
        MegatronSource([chunk], MODEL).manifest(2)


def test_an_element_in_two_parameters_is_refused() -> None:
    class Doubled(Chunk):
        """Has a second parameter for the same rows, as two stages' layers under one number would."""

        def __init__(self) -> None:
            super().__init__(**FLAGGED)
            self.copy = nn.Parameter(torch.zeros(8, 8))

        def sharded_state_dict(self, metadata: object) -> dict[str, ShardedTensor]:
            twice = ShardedTensor.from_rank_offsets(self.key, self.copy, (0, 1, 2), (1, 1, 2), prepend_axis_num=1)
            for name, value in FLAGGED.items():
                setattr(self.copy, name, value)
            return {**super().sharded_state_dict(metadata), "y": twice}

    with pytest.raises(LayoutError, match=r"q_proj.*rank 1: .*each element in one parameter.*0\.weight, 0\.copy"):
        MegatronSource([Doubled()], MODEL).manifest(1)
