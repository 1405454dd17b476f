"""Weights for a benchmark that are never whole anywhere: any box of them can be computed alone."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch

from refit_transport.layout.box import Box, Span
from refit_transport.views import box_view

# Integers below it are exact in every dtype of weights.
_DISTINCT = 251
_STEP = 101
_SPREAD = 2654435761  # Knuth's multiplicative hash
_LARGEST = 1 << 22


def box_values(tensor: str, box: Box, *, version: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """The elements of a box, int16 shaped like it, 0 to 250. They depend on tensor, position and version.

    An element at another place has, but for one time in 251, another value.

    >>> whole = box_values("w", Box.of((0, 4), (0, 9)), version=1)
    >>> torch.equal(whole[1:3, 5:], box_values("w", Box.of((1, 3), (5, 9)), version=1))
    True
    """
    total = torch.tensor(zlib.crc32(tensor.encode()) % _DISTINCT + version * _STEP % _DISTINCT, dtype=torch.int16)
    total = total.to(device)
    for dim, span in enumerate(box.spans):
        salt = zlib.crc32(f"{tensor}/{dim}".encode())
        places = torch.arange(span.start, span.stop, dtype=torch.int64, device=device) + salt
        # Overflow wraps, and only the low 32 bits count.
        mixed = (((places * _SPREAD) & 0xFFFFFFFF) >> 16) % _DISTINCT
        total = total + mixed.to(torch.int16).reshape([-1 if d == dim else 1 for d in range(len(box.spans))])
    return total % _DISTINCT


def fill_box(view: torch.Tensor, tensor: str, box: Box, *, version: int) -> None:
    """Gives `view`, which shows the box, a version's values."""
    for part in _parts(box):
        box_view(view, box, part).copy_(box_values(tensor, part, version=version, device=view.device))


def is_version(view: torch.Tensor, tensor: str, box: Box, *, version: int) -> bool:
    """Whether every element of `view`, which shows the box, is the version's."""
    return all(
        torch.equal(
            box_view(view, box, part),
            box_values(tensor, part, version=version, device=view.device).to(view.dtype),
        )
        for part in _parts(box)
    )


def _parts(box: Box) -> Iterator[Box]:
    """The box in slices of its first dim, so that what is computed stays small."""
    if not box.spans or box.numel <= _LARGEST:
        yield box
        return
    first, *others = box.spans
    rows = max(1, _LARGEST * first.size // box.numel)
    for start in range(first.start, first.stop, rows):
        yield Box((Span(start, min(start + rows, first.stop)), *others))
