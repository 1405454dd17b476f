"""Strided views of dense tensors as boxes: where a view begins, which dims it spans and how its copy is laid out."""

from __future__ import annotations

import math
from dataclasses import dataclass

from refit_transport.layout.box import Box
from refit_transport.layout.layout import row_major_strides


@dataclass(frozen=True, slots=True)
class StridedView:
    """Element `(i0, i1, ...)` lies at `offset + i0 * strides[0] + ...`, in elements of the tensor viewed."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class LocatedView:
    """The box of a dense tensor that a view is, and the strides of the view's copy along the dense tensor's dims."""

    box: Box
    strides: tuple[int, ...]


def locate(view: StridedView, dense: tuple[int, ...], copy_strides: tuple[int, ...]) -> LocatedView | None:
    """Finds the box of a contiguous tensor of shape `dense` that `view` covers.

    The view may transpose, drop or add dims of size 1, split dims or join them. `copy_strides` are the strides, along
    the view's dims, of the tensor that the view is copied to; they are returned along the dims of `dense` (0 where the
    box has size 1). None when the view's elements aren't a box (a step, a broadcast, a range that wraps).

    Rows 1..2 of a 4 x 6 matrix, transposed, copied into a contiguous 6 x 2 one:

    >>> located = locate(StridedView(6, (6, 2), (1, 6)), (4, 6), (2, 1))
    >>> located.box, located.strides
    (Box.of((1, 3), (0, 6)), (1, 2))
    >>> locate(StridedView(0, (2, 6), (12, 1)), (4, 6), (6, 1)) is None  # every second row
    True
    """
    if view.numel == 0:
        return None
    steps = row_major_strides(dense)
    starts = tuple(view.offset // step % size for step, size in zip(steps, dense, strict=True))
    lengths, strides = [1] * len(dense), [0] * len(dense)
    wide = [dim for dim, size in enumerate(dense) if size > 1]
    for joined in _joined(view, copy_strides):
        size, stride = joined.size, joined.copy_stride
        position = next((index for index, dim in enumerate(wide) if steps[dim] == joined.stride), -1)
        while size > 1:
            if position < 0 or lengths[wide[position]] > 1:
                return None
            dim = wide[position]
            strides[dim] = stride
            if size <= dense[dim] - starts[dim]:
                lengths[dim], size = size, 1
            elif starts[dim] == 0 and size % dense[dim] == 0:
                lengths[dim], size, stride = dense[dim], size // dense[dim], stride * dense[dim]
                position -= 1
            else:
                return None
    return LocatedView(Box.at(starts, lengths), tuple(strides))


@dataclass(frozen=True, slots=True)
class _Dim:
    size: int
    stride: int
    copy_stride: int


def _joined(view: StridedView, copy_strides: tuple[int, ...]) -> list[_Dim]:
    """The view's dims, outermost first, without those of size 1, neighbours joined where both sides allow it."""
    dims = [
        _Dim(size, stride, copy_stride)
        for size, stride, copy_stride in zip(view.shape, view.strides, copy_strides, strict=True)
        if size > 1
    ]
    joined: list[_Dim] = []
    for dim in sorted(dims, key=lambda dim: -dim.stride):
        outer = joined[-1] if joined else None
        if (
            outer is not None
            and outer.stride == dim.size * dim.stride
            and outer.copy_stride == dim.size * dim.copy_stride
        ):
            joined[-1] = _Dim(outer.size * dim.size, dim.stride, dim.copy_stride)
        else:
            joined.append(dim)
    return joined
