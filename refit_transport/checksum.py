"""Checksums of boxes of a logical tensor: weighted by position, additive over boxes, the same wherever a box lies.

The bits of an element are cut into 16-bit lanes (8-bit ones of one-byte dtypes). A lane of value x in row r (all dims
but the last, row-major) and lane column c (of the last dim) adds

    x * (b1[c % 65536] * a1[r, c // 65536] + b2[c % 65536] * a2[r, c // 65536])    modulo 2**64

where b1, b2 are odd 22-bit numbers, different for all columns of a block, a1 odd and a2 even hashes of 64 bits. So the
checksums of boxes that make up another one add up to its own, however they are cut and strided.

What is found: any change of one lane, so any flipped bit, for certain: b1 * a1 + b2 * a2 is odd, and x changes by less
than 2**16. Any other change (swapped boxes, shifted rows) unless its parts cancel out. The sums of a row are float64
matrix products and exact: 2**15 * 2**22 * 65536 lanes are at most 2**53.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from refit_transport.layout.box import Box

Words = npt.NDArray[np.uint64]

_LANES = 1 << 16
# Elements that a core sums at once: their float64 stay in its cache. A GPU is kept busy by more.
_CHUNK, _GPU_CHUNK = 1 << 17, 1 << 24
# What can't be seen as a matrix is copied when it is as small as this, else summed slice by slice.
_SMALL = 1 << 20


@dataclass(frozen=True, slots=True)
class Derived:
    """A tensor that an engine computes from weights, such as MLA's absorbed projections, under its qualified name.

    `served` is what it uses now, `recomputed` what its present weights give.
    """

    name: str
    served: torch.Tensor
    recomputed: torch.Tensor


def box_checksum(view: torch.Tensor, box: Box, shape: Sequence[int], *casts: torch.dtype) -> int:
    """The checksum, below 2**64, of the elements `view`, which is shaped as `box`, a part of a tensor of this shape.

    `casts` are dtypes that each element is converted to first, one after the other.

    >>> tensor = torch.arange(12.0).view(3, 4)
    >>> whole = box_checksum(tensor, Box.full((3, 4)), (3, 4))
    >>> left = box_checksum(tensor[:, :1], Box.of((0, 3), (0, 1)), (3, 4))
    >>> right = box_checksum(tensor[:, 1:], Box.of((0, 3), (1, 4)), (3, 4))
    >>> added(left, right) == whole
    True
    """
    if not box.numel:
        return 0
    view, starts, sizes = view.detach(), [span.start for span in box.spans], list(shape)
    # Fewer than two dims are seen as one row.
    padding = 2 - len(sizes)
    if padding > 0:
        view, starts, sizes = view.reshape(1, -1), [0] * padding + starts, [1] * padding + sizes
    rows = _rows(starts[:-1], view.shape[:-1], sizes[:-1])
    return added(*(_slab(slab, of, starts[-1], sizes[-1], casts) for slab, of in _slabs(view, rows)))


def added(*checksums: int) -> int:
    """The checksum of disjoint boxes together."""
    return sum(checksums) % (1 << 64)


def weighted(numbers: Sequence[int], checksums: Sequence[int]) -> int:
    """One checksum of boxes of different tensors, each weighted by a number of its own.

    Without the weights, tensors of one shape that are swapped would add up to the same.

    >>> weighted([0, 1], [5, 7]) == weighted([0, 1], [7, 5])
    False
    """
    weights = (_hash(np.array(numbers, dtype=np.uint64)) | np.uint64(1)).tolist()
    return added(*(weight * checksum for weight, checksum in zip(weights, checksums, strict=True)))


def _rows(starts: Sequence[int], counts: Sequence[int], sizes: Sequence[int]) -> Words:
    """The global number of each row, shaped as the dims before the last."""
    found = np.zeros((), dtype=np.uint64)
    for start, count, size in zip(starts, counts, sizes, strict=True):
        found = found[..., None] * np.uint64(size) + np.arange(start, start + count, dtype=np.uint64)
    return found


def _slabs(view: torch.Tensor, rows: Words) -> Iterator[tuple[torch.Tensor, Words]]:
    """The view as matrices, with the numbers of their rows; nothing large is copied."""
    if view.dim() == 2:
        yield view, rows
        return
    try:
        yield view.view(-1, view.shape[-1]), rows.reshape(-1)
    except RuntimeError:
        if view.numel() <= _SMALL:
            yield view.reshape(-1, view.shape[-1]), rows.reshape(-1)
            return
        for index, part in enumerate(view):
            yield from _slabs(part, rows[index])


def _slab(slab: torch.Tensor, rows: Words, first: int, size: int, casts: Sequence[torch.dtype]) -> int:
    """Of a matrix whose column 0 is column `first` of a tensor whose rows have `size` elements."""
    dtype = casts[-1] if casts else slab.dtype
    lanes = max(1, dtype.itemsize // 2)
    step, blocks = _LANES // lanes, -(-size * lanes // _LANES)
    weights = _column_weights(slab.device)
    most = _CHUNK if slab.device.type == "cpu" else _GPU_CHUNK
    total, start = 0, 0
    while start < slab.shape[1]:
        block, inside = divmod(first + start, step)
        stop = min(slab.shape[1], start + step - inside)
        column = weights[inside * lanes : (inside + stop - start) * lanes]
        count = max(1, most // len(column))
        buffer = torch.empty(min(count, len(slab)), len(column), dtype=torch.float64, device=slab.device)
        sums = torch.empty(len(slab), 2, dtype=torch.float64, device=slab.device)
        for row in range(0, len(slab), count):
            chunk = _bits(slab[row : row + count, start:stop], casts)
            torch.mm(buffer[: len(chunk)].copy_(chunk), column, out=sums[row : row + count])
        exact = sums.cpu().numpy().astype(np.int64).view(np.uint64)
        total += int(np.sum(exact * _row_weights(rows, block, blocks), dtype=np.uint64))
        start = stop
    return total


def _bits(chunk: torch.Tensor, casts: Sequence[torch.dtype]) -> torch.Tensor:
    """The lanes of a matrix, as integers."""
    for dtype in casts:
        chunk = chunk.to(dtype)
    if chunk.stride(-1) != 1:
        # A copy makes what follows faster. `contiguous` leaves the stride of a single column as it is.
        chunk = chunk.clone(memory_format=torch.contiguous_format)
    return chunk.view(torch.uint8 if chunk.element_size() == 1 else torch.int16)


@cache
def _column_weights(device: torch.device) -> torch.Tensor:
    """b1 and b2, shape [65536, 2]. Their lower bits are a permutation, so no two are equal."""
    lane = np.arange(_LANES, dtype=np.uint64)
    columns = []
    for number, factor in enumerate((0x9E37, 0x85EB)):
        mixed = lane * np.uint64(factor) % np.uint64(_LANES)
        mixed ^= mixed >> np.uint64(7)
        high = _hash(lane + np.uint64(number * _LANES)) >> np.uint64(59)
        columns.append(((high << np.uint64(16) | mixed) << np.uint64(1)) | np.uint64(1))
    return torch.from_numpy(np.stack(columns, axis=1).astype(np.float64)).to(device)


def _row_weights(rows: Words, block: int, blocks: int) -> Words:
    """a1, odd, and a2, even, of a block of each row, shape [rows, 2]."""
    number = (rows * np.uint64(blocks) + np.uint64(block)) * np.uint64(2)
    odd, even = _hash(number) | np.uint64(1), _hash(number + np.uint64(1)) & ~np.uint64(1)
    return np.stack((odd, even), axis=1)


def _hash(numbers: Words) -> Words:
    """SplitMix64's output function, modulo 2**64 as it is meant."""
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
