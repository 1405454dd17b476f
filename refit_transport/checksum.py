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

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from refit_transport.layout.box import Box

Words = npt.NDArray[np.uint64]

_LANES = 1 << 16
# Elements that a core sums at once: their float64 stay in its cache. A GPU is kept busy by more.
_CHUNK, _GPU_CHUNK = 1 << 17, 1 << 24


@dataclass(frozen=True, slots=True)
class Derived:
    """A tensor that an engine computes from weights, such as MLA's absorbed projections, under its qualified name.

    `served` is what it uses now, `recomputed` what its present weights give.
    """

    name: str
    served: torch.Tensor
    recomputed: torch.Tensor


@dataclass(frozen=True, slots=True)
class BoxView:
    """The elements of a box, a part of a tensor of this shape, in memory; `view` is shaped as the box.

    `casts` are dtypes that each element is converted to first, one after the other.
    """

    view: torch.Tensor
    box: Box
    shape: Sequence[int]
    casts: Sequence[torch.dtype] = ()


class Checksums:
    """Checksums of boxes in memory that stays where it is: prepared once, computed whenever the values have changed.

    Rows of one length are summed by one matrix product, whichever boxes they belong to: models have thousands of small
    ones.
    """

    def __init__(self, boxes: Sequence[Sequence[BoxView]]) -> None:
        """Each box is given by disjoint parts of it, whose checksums are added."""
        self._count = len(boxes)
        weights: dict[_Place, Words] = {}
        groups: dict[_Columns, list[_Strip]] = {}
        for number, parts in enumerate(boxes):
            for part in parts:
                for columns, strip in _strips(number, part, weights):
                    groups.setdefault(columns, []).append(strip)
        self._batches = [batch for columns, strips in groups.items() for batch in _batches(columns, strips)]

    def compute(self, is_over: Callable[[], bool] = lambda: False) -> list[int]:
        """Of each box as it is now, below 2**64.

        Raises:
            CancelledError: `is_over`, which is asked now and then, says that nobody wants them any more.
        """
        totals = [0] * self._count
        for batch in self._batches:
            if is_over():
                raise CancelledError
            for strip, sums in zip(batch.strips, batch.row_sums(), strict=True):
                totals[strip.box] += int(np.dot(sums, strip.weights))
        return [total % (1 << 64) for total in totals]


def box_checksum(view: torch.Tensor, box: Box, shape: Sequence[int], *casts: torch.dtype) -> int:
    """The checksum of one box that is given as a whole; the arguments are those of `BoxView`.

    >>> tensor = torch.arange(12.0).view(3, 4)
    >>> whole = box_checksum(tensor, Box.full((3, 4)), (3, 4))
    >>> left = box_checksum(tensor[:, :1], Box.of((0, 3), (0, 1)), (3, 4))
    >>> right = box_checksum(tensor[:, 1:], Box.of((0, 3), (1, 4)), (3, 4))
    >>> added(left, right) == whole
    True
    """
    return Checksums([[BoxView(view, box, shape, casts)]]).compute()[0]


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


class _Place(NamedTuple):
    """Rows of a box, dim by dim but the last, and a block of the columns of its tensor."""

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    sizes: tuple[int, ...]
    block: int
    blocks: int

    def weights(self) -> Words:
        """a1 and a2 of each row, shape [rows, 2]."""
        rows = np.zeros((), dtype=np.uint64)
        for start, count, size in zip(self.starts, self.counts, self.sizes, strict=True):
            rows = rows[..., None] * np.uint64(size) + np.arange(start, start + count, dtype=np.uint64)
        return _row_weights(rows.reshape(-1), self.block, self.blocks)


class _Columns(NamedTuple):
    """Lanes of a block: what rows have in common that one matrix product sums."""

    first: int
    width: int
    device: torch.device

    @property
    def chunk(self) -> int:
        """How many such rows are summed at once."""
        return max(1, (_CHUNK if self.device.type == "cpu" else _GPU_CHUNK) // self.width)


@dataclass(frozen=True, slots=True)
class _Strip:
    """Rows of the box of this number, at most a chunk of them; `weights` has two numbers for each, flat."""

    box: int
    matrix: torch.Tensor
    casts: Sequence[torch.dtype]
    weights: Words

    def lanes(self) -> torch.Tensor:
        """The rows' lanes, as integers."""
        matrix = self.matrix
        for dtype in self.casts:
            matrix = matrix.to(dtype)
        if matrix.stride(-1) != 1:
            # A copy makes what follows faster. `contiguous` leaves the stride of a single column as it is.
            matrix = matrix.clone(memory_format=torch.contiguous_format)
        return matrix.view(torch.uint8 if matrix.element_size() == 1 else torch.int16)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Strips that are summed together."""

    columns: _Columns
    strips: Sequence[_Strip]

    def row_sums(self) -> list[Words]:
        """The sums over both column weights of each strip's rows, flat."""
        first, width, device = self.columns
        heights = [len(strip.matrix) for strip in self.strips]
        buffer = torch.empty(sum(heights), width, dtype=torch.float64, device=device)
        for part, strip in zip(torch.split(buffer, heights), self.strips, strict=True):
            part.copy_(strip.lanes())
        sums = torch.mm(buffer, _column_weights(device)[first : first + width])
        exact = sums.cpu().numpy().astype(np.int64).view(np.uint64).reshape(-1)
        ends = np.cumsum(heights)[:-1] * 2
        return np.split(exact, ends)


def _strips(number: int, part: BoxView, weights: dict[_Place, Words]) -> Iterator[tuple[_Columns, _Strip]]:
    """A part of box `number`, cut into strips; `weights` are those of places that were seen before."""
    if not part.box.numel:
        return
    view, starts, sizes = part.view.detach(), part.box.offset, tuple(part.shape)
    # Fewer than two dims are seen as one row.
    padding = 2 - len(sizes)
    if padding > 0:
        view, starts, sizes = view.reshape(1, -1), (0,) * padding + starts, (1,) * padding + sizes
    dtype = part.casts[-1] if part.casts else view.dtype
    lanes = max(1, dtype.itemsize // 2)
    step, blocks = _LANES // lanes, -(-sizes[-1] * lanes // _LANES)
    for matrix, first_rows, counts in _matrices(view, starts[:-1]):
        start = 0
        while start < matrix.shape[1]:
            block, inside = divmod(starts[-1] + start, step)
            stop = min(matrix.shape[1], start + step - inside)
            columns = _Columns(inside * lanes, (stop - start) * lanes, view.device)
            place = _Place(first_rows, counts, sizes[:-1], block, blocks)
            if place not in weights:
                weights[place] = place.weights()
            for row in range(0, len(matrix), columns.chunk):
                end = row + columns.chunk
                own = weights[place][row:end].reshape(-1)
                yield columns, _Strip(number, matrix[row:end, start:stop], part.casts, own)
            start = stop


def _matrices(
    view: torch.Tensor, starts: tuple[int, ...]
) -> Iterator[tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]]:
    """The view as matrices, which share its memory, each with the start and the count of its rows in each dim."""
    counts = tuple(view.shape[:-1])
    try:
        yield view.view(-1, view.shape[-1]), starts, counts
    except RuntimeError:
        for index, part in enumerate(view):
            for matrix, first, count in _matrices(part, starts[1:]):
                yield matrix, (starts[0] + index, *first), (1, *count)


def _batches(columns: _Columns, strips: Sequence[_Strip]) -> Iterator[_Batch]:
    """Of strips of equal columns: as many together as make a chunk."""
    batch: list[_Strip] = []
    height = 0
    for strip in strips:
        if batch and height + len(strip.matrix) > columns.chunk:
            yield _Batch(columns, batch)
            batch, height = [], 0
        batch.append(strip)
        height += len(strip.matrix)
    if batch:
        yield _Batch(columns, batch)


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
