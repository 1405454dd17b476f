"""Arithmetic on pieces: joined where box and memory allow, clipped to a box, with a dim split in two."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from operator import mul

from refit_transport.layout.box import Box, Span
from refit_transport.layout.manifest import Piece


def within(piece: Piece, box: Box) -> Piece | None:
    """The part of a piece that lies in a box of its tensor, None when nothing does.

    A padded parameter's piece is clipped to the true rows so:

    >>> within(Piece("w", Box.of((6, 12), (0, 2)), "b", 0, (2, 1)), Box.of((0, 10), (0, 2)))
    Piece(tensor='w', box=Box.of((6, 10), (0, 2)), buffer='b', offset=0, strides=(2, 1))
    """
    common = piece.box.intersect(box)
    if common is None:
        return None
    steps = (inner - outer for inner, outer in zip(common.offset, piece.box.offset, strict=True))
    return replace(piece, box=common, offset=piece.offset + sum(map(mul, steps, piece.strides)))


def split_last(piece: Piece, size: int) -> Iterator[Piece]:
    """A piece of a tensor [.., n x size] as pieces of the same elements in dims [.., n, size]: one, or up to three.

    Columns 3 to 8 in pairs: half a pair, and two whole ones.

    >>> for split in split_last(Piece("w", Box.of((0, 4), (3, 8)), "b", 0, (5, 1)), 2): print(split)
    Piece(tensor='w', box=Box.of((0, 4), (1, 2), (1, 2)), buffer='b', offset=0, strides=(5, 2, 1))
    Piece(tensor='w', box=Box.of((0, 4), (2, 4), (0, 2)), buffer='b', offset=1, strides=(5, 2, 1))
    """
    *outer, last = piece.box.spans
    *strides, step = piece.strides
    start = last.start
    while start < last.stop:
        row, field = divmod(start, size)
        whole = (last.stop - start) // size if field == 0 else 0
        stop = start + whole * size if whole else min((row + 1) * size, last.stop)
        rows, fields = Span(row, row + max(1, whole)), Span(field, size if whole else field + stop - start)
        offset = piece.offset + (start - last.start) * step
        yield Piece(piece.tensor, Box((*outer, rows, fields)), piece.buffer, offset, (*strides, size * step, step))
        start = stop


def merge_pieces(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """The same elements at the same places in fewer pieces.

    Pieces of one tensor and one buffer become one where their boxes touch along a dim and their memory continues at one
    stride: experts traced one by one become one piece of a stacked parameter. The order is that of the first pieces.

    >>> merge_pieces([Piece("w", Box.of((e, e + 1), (0, 2)), "b", 6 * e, (0, 1)) for e in (2, 3, 4)])
    (Piece(tensor='w', box=Box.of((2, 5), (0, 2)), buffer='b', offset=12, strides=(6, 1)),)
    """
    groups: dict[tuple[str, str], dict[int, Piece]] = {}
    for index, piece in enumerate(pieces):
        groups.setdefault((piece.tensor, piece.buffer), {})[index] = piece
    merged = [pair for group in groups.values() for pair in _merge_group(group).items()]
    return tuple(piece for _, piece in sorted(merged, key=lambda pair: pair[0]))


def _merge_group(group: dict[int, Piece]) -> dict[int, Piece]:
    """Of one tensor and buffer, by position; dim after dim until nothing joins any more."""
    dims = len(next(iter(group.values())).box.spans)
    while len(group) > 1:
        before = len(group)
        for dim in reversed(range(dims)):
            group = _merge_dim(group, dim)
        if len(group) == before:
            break
    return group


def _merge_dim(group: dict[int, Piece], dim: int) -> dict[int, Piece]:
    # Plain integers: spans compare slowly.
    bounds = {index: [(s.start, s.stop) for s in piece.box.spans] for index, piece in group.items()}
    along = {index: spans.pop(dim) for index, spans in bounds.items()}
    order = sorted(group, key=lambda index: (bounds[index], along[index], group[index].offset))
    merged: dict[int, Piece] = {}
    for _, indices in groupby(order, key=bounds.__getitem__):
        # By where they end: several where the tensor lies in the buffer more than once.
        open_at: dict[int, list[int]] = {}
        for index in indices:
            first, piece = index, group[index]
            for head in open_at.get(along[index][0], ()):
                joined = _joined(merged[head], piece, dim)
                if joined is not None:
                    open_at[along[index][0]].remove(head)
                    del merged[head]
                    first, piece = min(head, index), joined
                    break
            merged[first] = piece
            open_at.setdefault(along[index][1], []).append(first)
    return merged


def _joined(a: Piece, b: Piece, dim: int) -> Piece | None:
    """Piece `a` and its neighbour `b` along `dim` as one, None when their memory doesn't continue at one stride."""
    length, distance = a.box.shape[dim], b.offset - a.offset
    if length == 0 or distance <= 0 or distance % length:
        return None
    strides = (*a.strides[:dim], distance // length, *a.strides[dim + 1 :])
    # The stride of a dim of one element says nothing.
    fits = all(
        size == 1 or stride == own
        for piece in (a, b)
        for size, stride, own in zip(piece.box.shape, strides, piece.strides, strict=True)
    )
    if not fits:
        return None
    spans = list(a.box.spans)
    spans[dim] = Span(spans[dim].start, b.box.spans[dim].stop)
    return replace(a, box=Box(tuple(spans)), strides=strides)
