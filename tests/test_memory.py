"""Whether two sides share memory: by address, whatever storages say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refit_transport.errors import LayoutError
from refit_transport.memory import check_apart, overlaps_itself


@st.composite
def views(draw):
    """A view somewhere in 40 elements, and the elements from its first to its last one."""
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    strides = [draw(st.integers(0, 4)) for _ in shape]
    inner = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    offset = draw(st.integers(0, max(0, 39 - max(inner, 0))))
    return shape, strides, offset, set() if 0 in shape else set(range(offset, offset + inner + 1))


@given(st.lists(views(), max_size=4), st.lists(views(), max_size=4))
def test_sides_are_apart_when_no_reach_meets_another(source, target):
    memory = torch.zeros(40)
    sides = [
        {str(i): memory.as_strided(shape, strides, offset) for i, (shape, strides, offset, _) in enumerate(side)}
        for side in (source, target)
    ]
    if any(here[-1] & there[-1] for here in source for there in target):
        with pytest.raises(LayoutError, match="rank 3: expected a target in memory of its own, got the memory of sour"):
            check_apart(*sides, rank=3)
    else:
        check_apart(*sides, rank=3)


def test_storages_of_one_allocation_are_one_memory():
    memory = bytearray(64)
    a, b, c = (torch.frombuffer(memory, dtype=torch.float32, offset=at, count=6) for at in (0, 20, 24))
    assert len({tensor.untyped_storage().data_ptr() for tensor in (a, b, c)}) == 3
    check_apart({"a": a}, {"c": c}, rank=0)
    with pytest.raises(LayoutError, match=r"tensor b: rank 0: .*the memory of source a"):
        check_apart({"a": a}, {"b": b}, rank=0)


@given(views())
def test_a_view_overlaps_itself_only_where_it_must_be_refused(view):
    shape, strides, offset, _ = view
    tensor = torch.zeros(40).as_strided(shape, strides, offset)
    places = torch.arange(40).as_strided(shape, strides, offset).flatten().tolist()
    if len(set(places)) < len(places):
        assert overlaps_itself(tensor)
    elif tensor.is_contiguous() and 0 not in shape:
        assert not overlaps_itself(tensor)
