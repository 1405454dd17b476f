"""Pass 5: cutting atoms into parcels, exactly as large as their route's share, and packing parcels into payloads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from refit_transport.planning.overlap import Boxes
from refit_transport.planning.plan import TransferPlan
from refit_transport.scheduling.routes import Flow, Route

ALIGNMENT = 16
# A cut leaves no part smaller than this where it need not.
_SLIVER = 4096


def aligned(nbytes: int) -> int:
    """The next multiple of the alignment of parcels in payloads and staging.

    >>> aligned(0), aligned(1), aligned(16)
    (0, 16, 16)
    """
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Stack:
    """Part of an atom as it can be cut: `rows` slabs of `row_bytes` each along `dim`, from `first` on.

    `box` has shape [d, 2] and is the whole of which the slabs are a part.
    """

    atom: int
    box: Boxes
    dim: int
    first: int
    rows: int
    row_bytes: int

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    def take(self, first: int, rows: int) -> Stack:
        """A run of the slabs, counted from this stack's first."""
        return Stack(self.atom, self.box, self.dim, self.first + first, rows, self.row_bytes)


def stacks_of(atom: int, box: Boxes, width: int, *, most_bytes: int) -> list[Stack]:
    """A box (shape [d, 2], elements of `width` bytes) as stacks of slabs of at most `most_bytes`, one element at least.

    Slabs are along the outermost dim that has several elements; a box whose slabs are too large becomes several stacks.
    """
    sizes = (box[:, 1] - box[:, 0]).tolist()
    dim = next((number for number, size in enumerate(sizes) if size > 1), len(sizes) - 1)
    row_bytes = math.prod(sizes[dim + 1 :]) * width
    if row_bytes <= most_bytes or max(sizes[dim + 1 :], default=1) == 1:
        return [Stack(atom, box, dim, 0, sizes[dim], row_bytes)]
    found = []
    for start in range(int(box[dim, 0]), int(box[dim, 1])):
        row = box.copy()
        row[dim] = start, start + 1
        found += stacks_of(atom, row, width, most_bytes=most_bytes)
    return found


def divide(stacks: Sequence[Stack], weights: Sequence[int]) -> list[list[Stack]]:
    """Cuts a sequence of stacks into consecutive parts in the proportion of the weights, at the nearest slab."""
    if len(weights) == 1:
        return [list(stacks)]
    total, whole = sum(stack.nbytes for stack in stacks), sum(weights)
    edges = [total * part / whole for part in np.cumsum(weights[:-1]).tolist()]
    parts: list[list[Stack]] = [[]]
    position = 0
    for stack in stacks:
        done = 0
        while edges and edges[0] < position + stack.nbytes:
            rows = _nearest_cut(stack, edges.pop(0) - position)
            if rows > done:
                parts[-1].append(stack.take(done, rows - done))
                done = rows
            parts.append([])
        if done < stack.rows:
            parts[-1].append(stack.take(done, stack.rows - done))
        position += stack.nbytes
    return parts + [[] for _ in edges]


def _nearest_cut(stack: Stack, position: float) -> int:
    """The number of slabs before the cut nearest to a byte position, none or all rather than a sliver."""
    if stack.nbytes <= 2 * _SLIVER:
        return stack.rows if 2 * position >= stack.nbytes else 0
    rows = round(position / stack.row_bytes)
    if rows * stack.row_bytes < _SLIVER:
        return 0
    return stack.rows if (stack.rows - rows) * stack.row_bytes < _SLIVER else rows


def pack(stacks: Iterable[Stack], *, bucket_bytes: int) -> Iterator[list[Stack]]:
    """Packs stacks into payloads of at most `bucket_bytes` (one slab at least), of about equal size."""
    stacks = list(stacks)
    total = sum(aligned(stack.nbytes) for stack in stacks)
    count = -(-total // bucket_bytes)
    # Equal payloads would be total / count; a slab more in each spares a small last one.
    most = max((min(stack.row_bytes, stack.nbytes) for stack in stacks), default=0)
    room = min(bucket_bytes, aligned(-(-total // max(1, count)) + most + ALIGNMENT))
    payload: list[Stack] = []
    filled = 0
    for stack in stacks:
        done = 0
        while done < stack.rows:
            rows = min(stack.rows - done, (room - filled) // stack.row_bytes if stack.row_bytes else stack.rows)
            if rows < 1 and payload:
                yield payload
                payload, filled = [], 0
                continue
            rows = max(1, rows)
            payload.append(stack.take(done, rows))
            filled += aligned(rows * stack.row_bytes)
            done += rows
    if payload:
        yield payload


def streams_of(plan: TransferPlan, flows: Iterable[Flow], *, bucket_bytes: int) -> dict[Route, list[Stack]]:
    """What each route carries, in the order of the flows."""
    width = np.array([tensor.wire_bytes for tensor in plan.tensors], dtype=np.int64)[plan.tensor].tolist()
    boxes = np.stack((plan.lo, plan.hi), axis=2)
    known: dict[int, list[Stack]] = {}
    streams: dict[Route, list[Stack]] = {}
    for flow in flows:
        stacks: list[Stack] = []
        for atom in flow.atoms:
            if atom not in known:
                known[atom] = stacks_of(atom, boxes[atom], width[atom], most_bytes=max(1, bucket_bytes // 8))
            stacks += known[atom]
        parts = divide(stacks, [share.weight for share in flow.shares])
        for share, part in zip(flow.shares, parts, strict=True):
            for route in share.routes:
                streams.setdefault(route, []).extend(part)
    return streams
