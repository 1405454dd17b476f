"""Pieces that are merged, clipped or unfused keep their meaning: each element has the same address as before."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refit_transport.errors import LayoutError
from refit_transport.layout.box import Box
from refit_transport.layout.fusion import Fusion, Part
from refit_transport.layout.layout import row_major_strides
from refit_transport.layout.manifest import Piece
from refit_transport.layout.pieces import merge_pieces, split_last, within
from refit_transport.testing.strategies import local_memories


def addresses(pieces):
    """(tensor, element index, buffer, address) of every element of every piece."""
    return sorted(
        (
            piece.tensor,
            tuple(o + i for o, i in zip(piece.box.offset, index, strict=True)),
            piece.buffer,
            piece.offset + sum(i * step for i, step in zip(index, piece.strides, strict=True)),
        )
        for piece in pieces
        for index in itertools.product(*map(range, piece.box.shape))
    )


@st.composite
def cut_tensors(draw):
    """Pieces of up to two tensors in up to two buffers, each a grid of cuts of one local memory, some left out."""
    pieces = []
    for tensor, buffer in draw(st.lists(st.tuples(st.sampled_from("vw"), st.sampled_from("ab")), max_size=3)):
        shape = tuple(draw(st.lists(st.integers(1, 5), min_size=2, max_size=2)))
        memory = draw(local_memories(shape))
        cuts = [sorted({0, size, *draw(st.lists(st.integers(1, size), max_size=2))}) for size in shape]
        for spans in itertools.product(*(itertools.pairwise(cut) for cut in cuts)):
            if draw(st.integers(0, 5)):
                whole = Piece(tensor, Box.full(shape), buffer, memory.offset, memory.strides)
                piece = within(whole, Box.of(*spans))
                steps = tuple(
                    draw(st.integers(0, 9)) if n == 1 else s
                    for n, s in zip(piece.box.shape, piece.strides, strict=True)
                )
                pieces.append(Piece(tensor, piece.box, buffer, piece.offset, steps))
    return draw(st.permutations(pieces))


@given(cut_tensors())
def test_merged_pieces_have_the_same_elements_at_the_same_addresses(pieces):
    merged = merge_pieces(pieces)
    assert addresses(merged) == addresses(pieces)
    assert merge_pieces(merged) == merged


@given(cut_tensors(), st.lists(st.integers(0, 5), min_size=4, max_size=4))
def test_a_clipped_piece_keeps_the_addresses_inside_the_box(pieces, ends):
    box = Box.of(tuple(sorted(ends[:2])), tuple(sorted(ends[2:])))
    for piece in pieces:
        part = within(piece, box)
        inside = [place for place in addresses([piece]) if box.contains(Box.at(place[1], (1, 1)))]
        assert ([] if part is None else addresses([part])) == inside


def test_a_grid_of_cuts_of_one_memory_becomes_one_piece():
    whole = Piece("w", Box.full((4, 6)), "b", 3, (1, 8))
    cells = [within(whole, Box.of((i, i + 1), (j, j + 3))) for j in (3, 0) for i in (2, 0, 3, 1)]
    assert merge_pieces(cells) == (whole,)


def test_experts_of_a_fused_parameter_become_one_strided_piece_per_projection():
    experts, width, hidden = 4, 3, 5
    row = row_major_strides((experts, 2 * width, hidden))
    traced = [
        Piece(
            name, Box.of((e, e + 1), (0, width), (0, hidden)), "w13", e * row[0] + half * width * hidden, (0, *row[1:])
        )
        for e in range(experts)
        for half, name in enumerate(("gate", "up"))
    ]
    assert merge_pieces(traced) == tuple(
        Piece(name, Box.full((experts, width, hidden)), "w13", half * width * hidden, row)
        for half, name in enumerate(("gate", "up"))
    )


def test_what_does_not_continue_stays_apart():
    first = Piece("w", Box.of((0, 2), (0, 3)), "b", 0, (3, 1))
    for other in (
        Piece("v", Box.of((2, 4), (0, 3)), "b", 6, (3, 1)),
        Piece("w", Box.of((2, 4), (0, 3)), "c", 6, (3, 1)),
        Piece("w", Box.of((2, 4), (0, 3)), "b", 7, (3, 1)),
        Piece("w", Box.of((2, 4), (0, 3)), "b", 6, (1, 2)),
        Piece("w", Box.of((3, 4), (0, 3)), "b", 6, (3, 1)),
        Piece("w", Box.of((2, 4), (0, 2)), "b", 6, (3, 1)),
        Piece("w", Box.of((0, 2), (0, 3)), "b", 6, (3, 1)),
    ):
        assert merge_pieces((first, other)) == (first, other)


def test_experts_in_reverse_order_in_memory_stay_apart():
    """No stride of a view runs backwards."""
    pieces = tuple(Piece("w", Box.of((e, e + 1)), "b", 9 - e, (0,)) for e in range(3))
    assert merge_pieces(pieces) == pieces


def test_scalars_and_nothing():
    scalar = Piece("s", Box.of(), "b", 3, ())
    assert merge_pieces(()) == ()
    assert merge_pieces((scalar, scalar)) == (scalar, scalar)
    assert within(scalar, Box.of()) == scalar


@given(st.data())
def test_unfused_rows_are_the_parts_rows(data):
    """Against numpy: the fused tensor is built from its parts, and each piece reads them back."""
    parts = tuple(Part(name, data.draw(st.integers(0, 3))) for name in "qkv")
    fusion = Fusion(0, parts, groups=data.draw(st.integers(1, 3)))
    whole = {
        part.tensor: np.full((*fusion.shape(part.tensor, (0, 2)),), index * 100) for index, part in enumerate(parts)
    }
    for array in whole.values():
        array += np.arange(array.size).reshape(array.shape)
    split = {name: np.split(array, fusion.groups) for name, array in whole.items()}
    fused = np.concatenate([split[part.tensor][g] for g in range(fusion.groups) for part in parts])
    assert len(fused) == fusion.size == sum(fusion.blocks)
    start = data.draw(st.integers(0, fusion.size))
    stop = data.draw(st.integers(start, fusion.size))
    local = np.ascontiguousarray(fused[start:stop]).ravel()
    found = 0
    for piece in fusion.unfuse([Piece("qkv", Box.of((start, stop), (0, 2)), "b", 0, (2, 1))]):
        box = whole[piece.tensor][tuple(slice(span.start, span.stop) for span in piece.box.spans)]
        places = piece.offset + np.add.outer(*(np.arange(n) * s for n, s in zip(box.shape, piece.strides, strict=True)))
        assert np.array_equal(local[places], box)
        found += box.size
    assert found == local.size


def test_a_piece_past_the_fused_dim_is_refused():
    with pytest.raises(LayoutError, match=r"tensor qkv: expected at most 8 elements in dim 0, got \[0:9\]"):
        Fusion(0, (Part("q", 4),), groups=2).unfuse([Piece("qkv", Box.of((0, 9)), "b", 0, (1,))])


@given(st.integers(1, 4), st.integers(0, 11), st.integers(0, 11), st.integers(1, 3))
def test_a_split_dim_keeps_every_address(size, first, second, step):
    start, stop = sorted((first, second))
    piece = Piece("w", Box.of((1, 3), (start, stop)), "b", 7, (40, step))
    parts = tuple(split_last(piece, size))
    wanted = [(tensor, (row, *divmod(column, size)), *place) for tensor, (row, column), *place in addresses([piece])]
    assert addresses(parts) == wanted
    assert len(parts) <= 3
