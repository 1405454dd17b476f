"""Pass 5: cutting atoms into parcels, exactly as large as their route's share, and packing parcels into payloads.

All of it is columns: a model of many small tensors has as many stacks as atoms.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self, overload

import numpy as np

from refit_transport.planning.plan import Ints, TransferPlan
from refit_transport.scheduling.routes import Flow, Route

ALIGNMENT = 16
# A cut leaves no part smaller than this where it need not.
_SLIVER = 4096


@overload
def aligned(nbytes: int) -> int: ...
@overload
def aligned(nbytes: Ints) -> Ints: ...
def aligned(nbytes: int | Ints) -> int | Ints:
    """The next multiple of the alignment of parcels in payloads and staging.

    >>> aligned(0), aligned(1), aligned(16)
    (0, 16, 16)
    """
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Stacks:
    """Boxes as they can be cut: `rows` slabs of `row_bytes` each along `dim`, a row of the columns per box.

    `atom` is the row of the plan; `lo` and `hi`, of shape [n, d], are the box's corners.
    """

    atom: Ints
    dim: Ints
    rows: Ints
    row_bytes: Ints
    lo: Ints
    hi: Ints

    @classmethod
    def of(cls, plan: TransferPlan, *, most_bytes: int) -> Self:
        """All atoms in order, in slabs of at most `most_bytes`, one element at least.

        Slabs are along the outermost dim that has several elements; a box whose slabs are too large becomes several
        boxes.
        """
        width = np.array([tensor.wire_bytes for tensor in plan.tensors], dtype=np.int64)[plan.tensor]
        atom, lo, hi = np.arange(len(plan)), plan.lo, plan.hi
        dims = np.arange(lo.shape[1])
        while True:
            sizes = hi - lo
            dim = np.where((sizes > 1).any(axis=1), (sizes > 1).argmax(axis=1), len(dims) - 1)
            inner = np.where(dims > dim[:, None], sizes, 1)
            rows, row_bytes = sizes[np.arange(len(sizes)), dim], inner.prod(axis=1, dtype=np.int64) * width[atom]
            too_large = (row_bytes > most_bytes) & (inner > 1).any(axis=1)
            if not too_large.any():
                return cls(atom, dim, rows, row_bytes, lo, hi)
            # Every slab of these becomes a box of its own, which has several elements in later dims only.
            box, nth = _repeated(np.where(too_large, rows, 1))
            atom, lo, hi = atom[box], lo[box], hi[box]
            slabs = np.flatnonzero(too_large[box])
            along = dim[box[slabs]]
            lo[slabs, along] += nth[slabs]
            hi[slabs, along] = lo[slabs, along] + 1


@dataclass(frozen=True, slots=True)
class Stream:
    """Parts of stacks in the order in which they travel: `rows` slabs from slab `first` of stack number `stack` on."""

    stack: Ints
    first: Ints
    rows: Ints
    row_bytes: Ints

    @classmethod
    def of(cls, stacks: Stacks, chosen: Ints) -> Self:
        """These stacks, whole."""
        return cls(chosen, np.zeros_like(chosen), stacks.rows[chosen], stacks.row_bytes[chosen])

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """One after the other."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__slots__))

    def __len__(self) -> int:
        return len(self.stack)

    def __getitem__(self, chosen: slice | Ints) -> Self:
        return type(self)(*(getattr(self, name)[chosen] for name in self.__slots__))

    @property
    def nbytes(self) -> Ints:
        return self.rows * self.row_bytes

    @property
    def starts(self) -> Ints:
        """The number of slabs before each part and, last, of all."""
        return _starts(self.rows)

    def split(self, cuts: Sequence[int]) -> Self:
        """The same slabs, in parts that end at each of these numbers of slabs."""
        starts = self.starts
        begins = np.union1d(starts[:-1], np.array(cuts, dtype=np.int64))
        begins = begins[begins < starts[-1]]
        part = np.searchsorted(starts, begins, side="right") - 1
        first = self.first[part] + begins - starts[part]
        return type(self)(self.stack[part], first, np.diff(begins, append=starts[-1]), self.row_bytes[part])


def divide(stream: Stream, weights: Sequence[int]) -> list[Stream]:
    """Cuts a stream into consecutive parts in the proportion of the weights, at the nearest slab."""
    if len(weights) == 1:
        return [stream]
    ends = np.cumsum(stream.nbytes).tolist()
    rows, row_bytes, starts = stream.rows.tolist(), stream.row_bytes.tolist(), stream.starts.tolist()
    total, whole = (ends[-1] if ends else 0), sum(weights)
    cuts = [0]
    for weight in np.cumsum(weights[:-1]).tolist():
        edge = total * weight / whole
        part = bisect_right(ends, edge)
        cut = starts[part]
        if part < len(rows):
            cut += _nearest_cut(rows[part], row_bytes[part], edge - (ends[part] - rows[part] * row_bytes[part]))
        cuts.append(cut)
    fine = stream.split(cuts)
    bounds = np.searchsorted(fine.starts, [*cuts, starts[-1]]).tolist()
    return [fine[start:stop] for start, stop in pairwise(bounds)]


def _nearest_cut(rows: int, row_bytes: int, position: float) -> int:
    """The number of slabs before the cut nearest to a byte position, none or all rather than a sliver."""
    if rows * row_bytes <= 2 * _SLIVER:
        return rows if 2 * position >= rows * row_bytes else 0
    before = round(position / row_bytes)
    if before * row_bytes < _SLIVER:
        return 0
    return rows if (rows - before) * row_bytes < _SLIVER else before


def pack(stream: Stream, *, bucket_bytes: int) -> list[int]:
    """The slabs before each payload of at most `bucket_bytes` (one slab at least), all of about equal size."""
    padded = aligned(stream.nbytes)
    total = int(padded.sum())
    # Equal payloads would be total / count; a slab more in each spares a small last one.
    most = int(stream.row_bytes.max(initial=0))
    room = min(bucket_bytes, aligned(-(-total // max(1, -(-total // bucket_bytes))) + most + ALIGNMENT))
    before = _starts(padded)
    # Where each part would end if all up to it were one payload; ascending.
    ends = (before[:-1] + stream.nbytes).tolist()
    starts, rows, row_bytes = stream.starts.tolist(), stream.rows.tolist(), stream.row_bytes.tolist()
    before = before.tolist()
    cuts = []
    part = done = 0
    while part < len(rows):
        cuts.append(starts[part] + done)
        left, width = rows[part] - done, row_bytes[part]
        if left * width > room:
            # The payload has nothing but slabs of this part.
            done += max(1, room // width)
            part, done = (part + 1, 0) if done == rows[part] else (part, done)
            continue
        filled = aligned(left * width) - before[part + 1]
        part = bisect_right(ends, room - filled, lo=part + 1)
        done = max(0, room - filled - before[part]) // row_bytes[part] if part < len(rows) else 0
    return cuts


def streams_of(plan: TransferPlan, stacks: Stacks, flows: Iterable[Flow]) -> dict[Route, Stream]:
    """What each route carries, in the order of the flows."""
    first = np.searchsorted(stacks.atom, np.arange(len(plan) + 1))
    streams: dict[Route, list[Stream]] = {}
    for flow in flows:
        atoms = np.array(flow.atoms, dtype=np.int64)
        atom, nth = _repeated(first[atoms + 1] - first[atoms])
        whole = Stream.of(stacks, first[atoms][atom] + nth)
        parts = divide(whole, [share.weight for share in flow.shares])
        for share, part in zip(flow.shares, parts, strict=True):
            for route in share.routes:
                streams.setdefault(route, []).append(part)
    return {route: Stream.join(parts) for route, parts in streams.items()}


def _starts(counts: Ints) -> Ints:
    """The sum of the counts before each, and of all."""
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts)))


def _repeated(counts: Ints) -> tuple[Ints, Ints]:
    """Each index as often as it counts, and the how manieth of it each is.

    >>> [column.tolist() for column in _repeated(np.array([2, 0, 1]))]
    [[0, 0, 2], [0, 1, 0]]
    """
    index = np.repeat(np.arange(len(counts)), counts)
    return index, np.arange(len(index)) - _starts(counts)[index]
