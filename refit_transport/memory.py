"""Where tensors lie in memory: whether elements, or two sides of a refit, share any."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from refit_transport.errors import LayoutError


class _Extent(NamedTuple):
    """The addresses from a tensor's first byte to behind its last one."""

    device: str
    start: int
    stop: int
    name: str
    side: str


def check_apart(source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor], *, rank: int) -> None:
    """Proves that no target tensor reaches into the memory from the first to the last element of a source tensor.

    Addresses count, not storages: two storages may lie in one allocation, and one storage may hold both sides apart.
    Tensors that interleave without a common element are refused too. Memory that another process maps isn't seen.

    Raises:
        LayoutError: naming both tensors; a refit would write what it still has to send.
    """
    if not source or not target:
        return
    extents = sorted([*_extents(source, "source"), *_extents(target, "target")])
    furthest: dict[str, _Extent] = {}
    for extent in extents:
        other = furthest.get(extent.side)
        if other is not None and other.device == extent.device and extent.start < other.stop:
            here, there = (extent, other) if extent.side == "target" else (other, extent)
            raise LayoutError(here.name, rank, "a target in memory of its own", f"the memory of source {there.name}")
        # The one of each side that reaches furthest, for the other side to compare with.
        facing = "target" if extent.side == "source" else "source"
        known = furthest.get(facing)
        if known is None or known.device != extent.device or known.stop < extent.stop:
            furthest[facing] = extent


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements may share memory: a dim's stride doesn't step over all that smaller strides reach.

    >>> overlaps_itself(torch.zeros(2, 3)), overlaps_itself(torch.zeros(3).expand(2, 3))
    (False, True)
    """
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _extents(tensors: Mapping[str, torch.Tensor], side: str) -> Iterator[_Extent]:
    for name, tensor in tensors.items():
        if tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            yield _Extent(str(tensor.device), start, start + (last + 1) * tensor.element_size(), name, side)
