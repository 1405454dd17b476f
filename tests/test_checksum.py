"""Checksums: equal to the formula in plain Python, additive, and blind to nothing that a wrong refit does."""

from __future__ import annotations

import itertools
from concurrent.futures import CancelledError
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from refit_transport import checksum
from refit_transport.checksum import BoxView, Checksums, added, box_checksum
from refit_transport.layout.box import Box

DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.int8, torch.float8_e4m3fn, torch.float64, torch.bool)
SHAPES = ((), (1,), (9,), (5, 7), (3, 4, 6), (2, 3, 1, 4))


def filled(shape, dtype, seed):
    """Any bits at all, not-a-numbers too."""
    dice = np.random.default_rng(seed)
    size = torch.empty((), dtype=dtype).element_size()
    high = 2 if dtype is torch.bool else 256
    raw = torch.from_numpy(dice.integers(0, high, (int(np.prod(shape)), size), dtype=np.uint8))
    return raw.view(dtype).reshape(shape)


@cache
def column_weights():
    return [[int(x) for x in row] for row in checksum._column_weights(torch.device("cpu")).tolist()]


def plain(tensor, at=(), shape=None):
    """The module's formula, element by element in Python's integers."""
    shape = shape or tuple(tensor.shape)
    lead = (1,) * (2 - len(shape))
    at = (0,) * len(lead) + tuple(at or (0,) * len(shape))
    shape, tensor = lead + tuple(shape), tensor.reshape(*lead, *tensor.shape)
    lanes = max(1, tensor.element_size() // 2)
    kind = np.uint8 if tensor.element_size() == 1 else np.int16
    blocks = -(-shape[-1] * lanes // 65536)
    total = 0
    b = column_weights()
    for index in itertools.product(*map(range, tensor.shape)):
        row = 0
        for start, place, size in zip(at[:-1], index[:-1], shape[:-1], strict=True):
            row = row * size + start + place
        raw = tensor[index].reshape(1).view(torch.uint8).numpy().view(kind)
        for lane in range(lanes):
            column = (at[-1] + index[-1]) * lanes + lane
            a = checksum._row_weights(np.array([row], dtype=np.uint64), column // 65536, blocks)[0]
            total += int(raw[lane]) * sum(x * int(y) for x, y in zip(b[column % 65536], a, strict=True))
    return total % 2**64


@st.composite
def tensors(draw, shapes=SHAPES):
    return filled(draw(st.sampled_from(shapes)), draw(st.sampled_from(DTYPES)), draw(st.integers(0, 2**32)))


def of(tensor, box=None, shape=None):
    return box_checksum(tensor, box or Box.full(tensor.shape), shape or tensor.shape)


def test_what_nobody_wants_any_more_is_given_up():
    asked = iter([False, True])
    box = BoxView(torch.ones(8, checksum._CHUNK // 4), Box.full((8, checksum._CHUNK // 4)), (8, checksum._CHUNK // 4))
    with pytest.raises(CancelledError):
        Checksums([[box]]).compute(lambda: next(asked))


@given(tensors())
def test_it_is_the_formula(tensor):
    assert of(tensor) == plain(tensor)


@given(st.data())
def test_rows_longer_than_a_block_and_chunks(data):
    """Three blocks of columns in float32, beginning anywhere, summed in several chunks of rows."""
    first = data.draw(st.integers(0, 70_000))
    width, rows = data.draw(st.integers(1, 40_000)), data.draw(st.integers(1, 6))
    tensor = filled((rows, width), torch.float32, 1)
    shape, box = (8, 120_000), Box.of((1, 1 + rows), (first, first + width))
    cut = data.draw(st.integers(0, width))
    left = of(tensor[:, :cut], Box.of((1, 1 + rows), (first, first + cut)), shape)
    right = of(tensor[:, cut:], Box.of((1, 1 + rows), (first + cut, first + width)), shape)
    assert added(left, right) == of(tensor, box, shape)
    place = data.draw(st.integers(0, width - 1))
    single = tensor[-1:, place : place + 1]
    at = (rows, first + place)
    assert of(single, Box.of((at[0], at[0] + 1), (at[1], at[1] + 1)), shape) == plain(single, at, shape)


@given(tensors(((9,), (5, 7), (3, 4, 6), (2, 3, 1, 4))), st.data())
def test_boxes_add_up_and_strides_do_not_matter(tensor, data):
    dim = data.draw(st.integers(0, tensor.dim() - 1))
    cut = data.draw(st.integers(0, tensor.shape[dim]))
    parts = []
    for start, stop in ((0, cut), (cut, tensor.shape[dim])):
        spans = [(0, size) for size in tensor.shape]
        spans[dim] = (start, stop)
        parts.append(of(tensor.narrow(dim, start, stop - start), Box.of(*spans), tensor.shape))
    assert added(*parts) == of(tensor)
    order = data.draw(st.permutations(range(tensor.dim())))
    strided = tensor.permute(*order).contiguous().permute(*np.argsort(order).tolist())
    assert of(strided) == of(tensor)


@given(tensors(), st.data())
def test_a_flipped_bit_is_found(tensor, data):
    raw = tensor.clone().reshape(-1).view(torch.uint8)
    byte = data.draw(st.integers(0, len(raw) - 1))
    raw[byte] ^= 1 << (0 if tensor.dtype is torch.bool else data.draw(st.integers(0, 7)))
    assert of(raw.view(tensor.dtype).reshape(tensor.shape)) != of(tensor)


@given(tensors(((9,), (5, 7), (3, 4, 6))), st.data())
def test_swapped_boxes_are_found(tensor, data):
    sizes = [data.draw(st.integers(1, size)) for size in tensor.shape]
    here, there = (
        tuple(slice(start, start + size) for start, size in zip(corner, sizes, strict=True))
        for corner in (
            [data.draw(st.integers(0, outer - inner)) for outer, inner in zip(tensor.shape, sizes, strict=True)]
            for _ in range(2)
        )
    )
    disjoint = any(a.stop <= b.start or b.stop <= a.start for a, b in zip(here, there, strict=True))
    assume(disjoint)
    swapped = tensor.clone()
    swapped[here], swapped[there] = tensor[there], tensor[here]
    same = torch.equal(bits(tensor[here]), bits(tensor[there]))
    assert (of(swapped) == of(tensor)) == same


@given(tensors(((9,), (5, 7), (3, 4, 6))), st.data())
def test_a_shift_by_one_element_is_found(tensor, data):
    dim = data.draw(st.integers(-1, tensor.dim() - 1))
    flat = tensor.reshape(-1) if dim < 0 else tensor
    shifted = flat.roll(1, max(dim, 0)).reshape(tensor.shape) if tensor.dtype not in NO_ROLL else None
    assume(shifted is not None)
    assert (of(shifted) == of(tensor)) == torch.equal(bits(shifted), bits(tensor))


@pytest.mark.parametrize("a", [0.5, 3.0])
def test_swapped_signs_and_small_values_in_one_row_are_found(a):
    """Differences of few bits, where weights with common factors would cancel."""
    row = torch.full((1, 3000), a, dtype=torch.bfloat16)
    row[0, ::2] = -a
    reference = of(row)
    seen = set()
    for other in range(1, 3000, 2):
        swapped = row.clone()
        swapped[0, 0], swapped[0, other] = row[0, other], row[0, 0]
        seen.add(of(swapped))
    assert len(seen) == 1500
    assert reference not in seen


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_columns_with_gaps(dtype, size):
    tensor = filled((3, 5, 4), dtype, 2)[:, :size, 1]
    assert of(tensor) == of(tensor.clone(memory_format=torch.contiguous_format)) == plain(tensor)


def test_conversions_come_first():
    tensor = torch.randn(4, 5)
    assert box_checksum(tensor, Box.full((4, 5)), (4, 5), torch.bfloat16, torch.float32) == of(
        tensor.bfloat16().float()
    )


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


# torch doesn't roll these.
NO_ROLL = (torch.float8_e4m3fn,)
