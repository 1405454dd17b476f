"""A piece that doesn't lie inside its buffer is refused, even where the storage goes on behind it."""

from __future__ import annotations

import pytest
import torch

from refit_transport.errors import LayoutError
from refit_transport.layout.box import Box
from refit_transport.layout.manifest import Piece
from refit_transport.views import piece_view


def piece(*, rows: int, columns: int, strides: tuple[int, ...], offset: int = 0) -> Piece:
    return Piece("w", Box.of((0, rows), (0, columns)), "buffer", offset, strides)


def test_a_piece_up_to_the_last_element_is_its_view() -> None:
    storage = torch.arange(100.0)
    buffer = storage[10:30].view(4, 5)
    view = piece_view(piece(rows=2, columns=3, strides=(5, 1), offset=12), {"buffer": buffer})
    torch.testing.assert_close(view, buffer[2:, 2:])
    # The columns of a transposed buffer.
    view = piece_view(piece(rows=5, columns=4, strides=(1, 5)), {"buffer": buffer.t()})
    torch.testing.assert_close(view, buffer.t())
    empty = piece(rows=0, columns=3, strides=(5, 1), offset=20)
    assert piece_view(empty, {"buffer": buffer}).shape == (0, 3)


@pytest.mark.parametrize(
    "wrong",
    [
        piece(rows=2, columns=3, strides=(5, 1), offset=13),
        piece(rows=5, columns=5, strides=(5, 1)),
        piece(rows=4, columns=5, strides=(6, 1)),
    ],
)
def test_a_piece_beyond_its_buffer_is_refused(wrong: Piece) -> None:
    buffer = torch.arange(100.0)[10:30].view(4, 5)
    with pytest.raises(LayoutError, match="ends with element 19"):
        piece_view(wrong, {"buffer": buffer})


def test_a_missing_buffer_is_named() -> None:
    with pytest.raises(LayoutError, match="tensor w: expected a buffer buffer, got none of that name"):
        piece_view(piece(rows=1, columns=1, strides=(1, 1)), {"other": torch.zeros(1)})
