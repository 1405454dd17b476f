"""The split rule and layouts against torch's own DTensor arithmetic."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from refit_transport.errors import LayoutError
from refit_transport.layout.layout import Layout
from refit_transport.layout.mesh import Mesh
from refit_transport.layout.placement import Partial, Replicate, Shard
from refit_transport.testing.strategies import layouts, meshes


@st.composite
def random_layouts(draw):
    shape = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=4)))
    return draw(layouts(shape, draw(meshes())))


@settings(deadline=None)
@given(random_layouts())
def test_boxes_equal_dtensors(layout):
    placements = [TorchShard(p.dim) if isinstance(p, Shard) else TorchReplicate() for p in layout.placements]
    for rank in layout.mesh.ranks:
        coordinate = layout.mesh.coordinate(rank)
        shape, offset = _compute_local_shape_and_global_offset(
            layout.shape, layout.mesh.shape, lambda axis, c=coordinate: c[axis], placements
        )
        box = layout.box(rank)
        assert box.shape == tuple(shape)
        if box.numel:
            assert box.offset == tuple(offset)


def test_partial_is_refused_with_a_reason():
    with pytest.raises(LayoutError, match="axis tp, got Partial"):
        Layout((4,), Mesh.of(tp=2), (Partial(),))


def test_a_dim_that_the_tensor_lacks_is_refused():
    with pytest.raises(LayoutError, match="a dim below 1"):
        Layout((4,), Mesh.of(tp=2), (Shard(1),))


def test_meshes_reject_repeated_ranks_and_axes():
    with pytest.raises(ValueError, match="distinct ranks"):
        Mesh(("a",), (2,), (3, 3))
    with pytest.raises(ValueError, match="distinct name"):
        Mesh(("a", "a"), (1, 2), (0, 1))


def test_all_replicated_works_on_any_mesh():
    layout = Layout((3, 2), Mesh.of(a=2, b=2), (Replicate(), Replicate()))
    assert {layout.box(rank).shape for rank in range(4)} == {(3, 2)}
