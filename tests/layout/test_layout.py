"""Placements and layouts against torch's own DTensor arithmetic, and what makes layouts equal."""

import dataclasses
import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from refit_transport.errors import LayoutError
from refit_transport.layout.box import Box, Span
from refit_transport.layout.layout import Layout, row_major_strides
from refit_transport.layout.layout_wire import layout_from_json, layout_to_json
from refit_transport.layout.manifest import Piece
from refit_transport.layout.mesh import Mesh
from refit_transport.layout.placement import BlockShard, Partial, Replicate, Shard, StridedShard, split
from refit_transport.testing.strategies import layouts, local_memories, meshes, shapes


@st.composite
def random_layouts(draw, mesh=None):
    return draw(layouts(draw(shapes()), draw(meshes()) if mesh is None else mesh))


def torch_placement(placement):
    match placement:
        case Shard(dim):
            return TorchShard(dim)
        case StridedShard(dim, factor):
            return _StridedShard(dim, split_factor=factor)
    return TorchReplicate()


def local_by_torch(layout, rank):
    """The rank's local tensor of a tensor that counts its elements: torch's placements split it, axis by axis."""
    local = torch.arange(math.prod(layout.shape)).reshape(layout.shape)
    for index, parts, placement in zip(layout.mesh.coordinate(rank), layout.mesh.shape, layout.placements, strict=True):
        if isinstance(placement, BlockShard):
            blocks = local.split(placement.blocks, dim=placement.dim)
            cut = [TorchShard(placement.dim)._split_tensor(block, parts, with_padding=False)[0] for block in blocks]
            local = torch.cat([shards[index] for shards in cut], dim=placement.dim)
        elif not isinstance(placement, Replicate):
            shards, _ = torch_placement(placement)._split_tensor(local, parts, with_padding=False)
            local = shards[index]
    return local


@given(random_layouts())
def test_local_tensors_equal_torchs(layout):
    counted = torch.arange(math.prod(layout.shape)).reshape(layout.shape)
    for rank in layout.mesh.ranks:
        expected = local_by_torch(layout, rank)
        assert layout.local_shape(rank) == tuple(expected.shape)
        local = torch.full(layout.local_shape(rank), -1)
        for held in layout.held(rank):
            box, place = (tuple(slice(span.start, span.stop) for span in b.spans) for b in (held.box, held.local))
            assert (local[place] == -1).all()
            local[place] = counted[box]
        assert torch.equal(local, expected)


@given(random_layouts())
def test_shapes_and_offsets_equal_dtensors(layout):
    assume(not any(isinstance(placement, BlockShard) for placement in layout.placements))
    placements = [torch_placement(placement) for placement in layout.placements]
    for rank in layout.mesh.ranks:
        shape, offset = _compute_local_shape_and_global_offset(
            layout.shape, layout.mesh.shape, list(layout.mesh.coordinate(rank)), placements
        )
        assert layout.local_shape(rank) == tuple(shape)
        region = layout.region(rank)
        assert bool(region) == (math.prod(shape) > 0)
        if region:
            assert region[0].offset == tuple(offset)


@given(random_layouts(), st.data())
def test_pieces_point_at_the_elements_of_any_local_memory(layout, data):
    counted = torch.arange(math.prod(layout.shape)).reshape(layout.shape)
    for rank in layout.mesh.ranks:
        memory = data.draw(local_memories(layout.local_shape(rank)))
        local = local_by_torch(layout, rank)
        size = memory.offset + sum((n - 1) * step for n, step in zip(local.shape, memory.strides, strict=True)) + 1
        buffer = torch.full((max(size, 1),), -1)
        if local.numel():
            buffer.as_strided(local.shape, memory.strides, memory.offset).copy_(local)
        for piece in layout.pieces(rank, "w", buffer="b", offset=memory.offset, strides=memory.strides):
            box = counted[tuple(slice(span.start, span.stop) for span in piece.box.spans)]
            assert torch.equal(buffer.as_strided(box.shape, piece.strides, piece.offset), box)


def test_fsdp_over_tensor_parallelism_holds_one_box_where_it_is_even_and_several_where_blocks_are_fused():
    mesh = Mesh.of(dp=2, tp=2)
    even = Layout((8, 3), mesh, (StridedShard(0, 2), Shard(0)))
    assert [even.region(rank) for rank in range(4)] == [
        (Box.of(rows, (0, 3)),) for rows in ((0, 2), (4, 6), (2, 4), (6, 8))
    ]
    odd = Layout((8, 3), mesh, (StridedShard(0, 4), Shard(0)))
    assert odd.region(0) == (Box.of((0, 1), (0, 3)), Box.of((2, 3), (0, 3)))
    alone = Layout((8,), Mesh.of(dp=2), (StridedShard(0, 2),))
    assert alone.region(1) == (Box.of((2, 4)), Box.of((6, 8)))


def test_layouts_are_equal_when_every_rank_holds_the_same():
    mesh = Mesh.of(dp=2, tp=2)
    fsdp = Layout((8, 3), mesh, (StridedShard(0, 2), Shard(0)))
    plain = Layout((8, 3), Mesh.from_ranks(("x",), (4,), (0, 2, 1, 3)), (Shard(0),))
    transposed = Layout((8, 3), Mesh.from_ranks(("tp", "dp"), (2, 2), (0, 2, 1, 3)), (Shard(0), Shard(0)))
    assert fsdp == plain == transposed
    assert len({fsdp, plain, transposed}) == 1
    assert fsdp.digest() == plain.digest() == transposed.digest()
    for same in (StridedShard(0, 1), BlockShard(0, (8,)), BlockShard(0, (0, 8))):
        assert Layout((8, 3), mesh, (Replicate(), same)) == Layout((8, 3), mesh, (Replicate(), Shard(0)))
    alone = Mesh.of(dp=1, tp=2)
    for same in (Shard(0), StridedShard(0, 2), BlockShard(0, (3, 5)), Shard(1), Replicate()):
        assert Layout((8, 3), alone, (same, Shard(0))) == Layout((8, 3), Mesh.of(tp=2), (Shard(0),))
    assert Layout((8,), Mesh.of(a=2), (BlockShard(0, (4, 4)),)) == Layout((8,), Mesh.of(a=2), (StridedShard(0, 2),))


def test_layouts_are_unequal_when_a_rank_or_an_element_differs():
    layout = Layout((8, 3), Mesh.of(tp=2), (Shard(0),))
    others = [
        Layout((8, 3), Mesh.of(tp=2), (Shard(1),)),
        Layout((8, 3), Mesh.of(first_rank=1, tp=2), (Shard(0),)),
        Layout((8, 3), Mesh.from_ranks(("tp",), (2,), (1, 0)), (Shard(0),)),
        Layout((8, 4), Mesh.of(tp=2), (Shard(0),)),
        Layout((8, 3), Mesh.of(tp=2), (BlockShard(0, (4, 4)),)),
        Layout((8, 3), Mesh.of(tp=2), (Replicate(),)),
    ]
    assert layout not in others
    assert len({layout.digest(), *(other.digest() for other in others)}) == 1 + len(others)


@given(random_layouts(), random_layouts())
def test_equality_hash_and_digest_agree(a, b):
    """Equal exactly when all local tensors are: by torch, not by our own geometry."""

    def contents(layout):
        locals_ = {rank: local_by_torch(layout, rank) for rank in layout.mesh.ranks}
        return layout.shape, {rank: local.tolist() if local.numel() else None for rank, local in locals_.items()}

    for other in (b, dataclasses.replace(a, mesh=dataclasses.replace(a.mesh, axes=tuple("xyz"[: len(a.mesh.axes)])))):
        assert (a == other) == (contents(a) == contents(other)) == (a.digest() == other.digest())
        if a == other:
            assert hash(a) == hash(other)


@given(st.data())
def test_on_one_small_mesh_equality_means_equal_contents(data):
    mesh = Mesh.of(a=2, b=2)
    shape = (data.draw(st.integers(0, 4)), data.draw(st.integers(1, 2)))
    a, b = data.draw(layouts(shape, mesh)), data.draw(layouts(shape, mesh))
    same = all(
        torch.equal(x, y) or not (x.numel() or y.numel())
        for x, y in ((local_by_torch(a, rank), local_by_torch(b, rank)) for rank in mesh.ranks)
    )
    assert (a == b) == same == (a.digest() == b.digest())


@given(random_layouts())
def test_json_gives_the_same_layout_back(layout):
    again = layout_from_json(layout_to_json(layout))
    assert (again.shape, again.mesh, again.placements) == (layout.shape, layout.mesh, layout.placements)
    assert again.digest() == layout.digest()


@pytest.mark.parametrize(
    "damage",
    [
        {"placements": [["shard", "x"]]},
        {"placements": [["torn", 0]]},
        {"placements": [["strided", 0, 0]]},
        {"placements": [["partial"]]},
        {"ranks": [3, 3]},
        {"shape": 7},
    ],
)
def test_damaged_json_is_refused(damage):
    value = layout_to_json(Layout((8,), Mesh.of(tp=2), (Shard(0),)))
    with pytest.raises(LayoutError):
        layout_from_json(value | damage)
    del value["axes"]
    with pytest.raises(LayoutError, match="malformed"):
        layout_from_json(value)


def test_digests_are_the_same_on_every_machine():
    layout = Layout((8, 3), Mesh.of(tp=2), (Shard(0),))
    assert layout.digest() == "d8f0b8a29c87d62a5bd04570c56983e34f830798fb2dc703320d59a9b7d26c17"


def test_partial_is_refused_with_a_reason():
    with pytest.raises(LayoutError, match="axis tp, got Partial"):
        Layout((4,), Mesh.of(tp=2), (Partial(),))


@pytest.mark.parametrize("placement", [Shard(1), Shard(-1), StridedShard(1, 2), BlockShard(1, (4,))])
def test_a_dim_that_the_tensor_lacks_is_refused(placement):
    with pytest.raises(LayoutError, match="a dim below 1"):
        Layout((4,), Mesh.of(tp=2), (placement,))


def test_blocks_that_do_not_add_up_are_refused():
    with pytest.raises(LayoutError, match=r"blocks of 8 elements in all in dim 0, got 7"):
        Layout((8,), Mesh.of(tp=2), (BlockShard(0, (4, 3)),))
    with pytest.raises(LayoutError, match=r"blocks of at least 0"):
        BlockShard(0, (9, -1))
    Layout((8,), Mesh.of(a=2, tp=2), (Shard(0), BlockShard(0, (2, 2))))
    with pytest.raises(LayoutError, match=r"blocks of 3 elements in all in dim 0, got 4"):
        Layout((7,), Mesh.of(a=2, tp=2), (Shard(0), BlockShard(0, (2, 2))))


def test_meshes_reject_repeated_ranks_and_axes():
    with pytest.raises(ValueError, match="distinct ranks"):
        Mesh(("a",), (2,), (3, 3))
    with pytest.raises(ValueError, match="distinct name"):
        Mesh(("a", "a"), (1, 2), (0, 1))
    with pytest.raises(ValueError, match="ranks from 0 up"):
        Mesh(("a",), (2,), (0, -1))
    with pytest.raises(ValueError, match="axes of at least 1"):
        Mesh(("a",), (0,), ())


@pytest.mark.parametrize("edge", [1 << 31, 1 << 32, (1 << 32) + 3])
def test_offsets_past_2_to_the_31_and_2_to_the_32(edge):
    """Two fused blocks of `edge` rows of 5 over 2 ranks: figures by hand."""
    layout = Layout((2 * edge, 5), Mesh.of(tp=2), (BlockShard(0, (edge, edge)),))
    half = -(-edge // 2)
    assert layout.region(1) == (Box.of((half, edge), (0, 5)), Box.of((edge + half, 2 * edge), (0, 5)))
    rest = edge - half
    assert layout.pieces(1, "w", buffer="b")[1] == Piece("w", layout.region(1)[1], "b", rest * 5, (5, 1))
    assert layout.region(1)[1].numel == rest * 5


def test_strides_and_splits_of_sizes_without_elements():
    assert row_major_strides((3, 0, 2)) == (0, 2, 1)
    assert split(Span(5, 5), parts=3, index=2) == Span(5, 5)
