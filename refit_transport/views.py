"""Strided views of pieces in live buffers: where geometry meets memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from refit_transport.errors import LayoutError
from refit_transport.layout.box import Box
from refit_transport.layout.manifest import Piece, RankManifest


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype of this name, such as "bfloat16"."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def piece_view(
    piece: Piece, buffers: Mapping[str, torch.Tensor], *, dtype: torch.dtype | None = None, box: Box | None = None
) -> torch.Tensor:
    """The live elements of a piece, or of a box inside its box, shaped as that; writing to the view writes the buffer.

    `dtype` is that of the elements; a buffer of raw bytes (staging) is seen as such; offsets and strides count them.

    Raises:
        LayoutError: there is no such buffer, it has elements of another dtype, or the piece reaches beyond it.
    """
    if piece.buffer not in buffers:
        raise LayoutError(piece.tensor, -1, f"a buffer {piece.buffer}", "none of that name")
    buffer = buffers[piece.buffer]
    if dtype is not None and buffer.dtype != dtype:
        if buffer.dtype != torch.uint8:
            raise LayoutError(piece.tensor, -1, f"buffer {piece.buffer} of {dtype}", str(buffer.dtype))
        buffer = buffer.view(dtype)
    # torch looks at the storage only, in which other tensors may lie behind this one.
    inner = _reach(piece.box.shape, piece.strides)
    end = buffer.numel() - 1 if buffer.is_contiguous() else _reach(buffer.shape, buffer.stride())
    if inner >= 0 and (last := piece.offset + inner) > end:
        expected = f"buffer {piece.buffer} to reach element {last} for box {piece.box}"
        raise LayoutError(piece.tensor, -1, expected, f"it ends with element {end}")
    offset = buffer.storage_offset() + piece.offset
    if box is None:
        return buffer.as_strided(piece.box.shape, piece.strides, offset)
    for inner_span, outer_span, stride in zip(box.spans, piece.box.spans, piece.strides, strict=True):
        offset += (inner_span.start - outer_span.start) * stride
    return buffer.as_strided(box.shape, piece.strides, offset)


def make_buffers(
    manifest: RankManifest, *, device: torch.device | str = "cpu", spare: int = 0
) -> dict[str, torch.Tensor]:
    """Memory for a rank whose buffers are only described: each just long enough for its pieces, and `spare` elements.

    What is in it is undefined.
    """
    dtypes = {spec.name: torch_dtype(spec.dtype) for spec in manifest.tensors}
    sizes: dict[str, int] = {}
    kinds: dict[str, torch.dtype] = {}
    for piece in manifest.pieces:
        end = piece.offset + _reach(piece.box.shape, piece.strides) + 1
        sizes[piece.buffer] = max(sizes.get(piece.buffer, 0), end)
        kinds[piece.buffer] = dtypes[piece.tensor]
    return {name: torch.empty(size + spare, dtype=kinds[name], device=device) for name, size in sizes.items()}


def _reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """How many elements of memory the last element lies behind the first; -1 without elements.

    >>> _reach((2, 3), (8, 1)), _reach((0, 3), (3, 1)), _reach((), ())
    (10, -1, 0)
    """
    return -1 if 0 in shape else sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def box_view(view: torch.Tensor, around: Box, box: Box) -> torch.Tensor:
    """The part of `view`, which shows the box `around`, that shows `box`."""
    for dim, (inner, outer) in enumerate(zip(box.spans, around.spans, strict=True)):
        if inner != outer:
            view = view.narrow(dim, inner.start - outer.start, inner.size)
    return view
