"""An oracle for resharding: tensors whose elements tell their coordinates, and buffers made from manifests."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from refit_transport.fabrics.binding import Binding
from refit_transport.layout.box import Box
from refit_transport.layout.manifest import Manifest, RankManifest
from refit_transport.views import box_view, make_buffers, torch_dtype

# No element of a coordinate tensor has this value.
_UNTOUCHED = 255
_GUARD = 5


def coordinate_tensor(name: str, shape: tuple[int, ...], dtype: str, *, version: int = 0) -> torch.Tensor:
    """A tensor of this shape in which misplaced elements show: values depend on name, position and version.

    Values are integers below 251, exact in uint8, bfloat16 and everything wider.
    """
    position = torch.arange(math.prod(shape), dtype=torch.int64)
    salt = sum(name.encode()) * 7 + version * 101
    return ((position * 131 + position // 251 * 17 + salt) % 251).to(torch_dtype(dtype)).reshape(shape)


@dataclass(frozen=True, slots=True)
class HeldSide:
    """Buffers for every rank of a manifest."""

    bindings: Mapping[int, Binding]

    @classmethod
    def of(cls, manifest: Manifest, tensors: Mapping[str, torch.Tensor] | None = None) -> HeldSide:
        """Allocates every rank's buffers; fills the pieces from full tensors, the rest (or all when None) with 255.

        Buffers reach a few elements past their last piece.
        """
        return cls({ranked.rank: _bind(ranked, tensors) for ranked in manifest.ranks})

    def differences(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Which pieces differ from the same boxes of the full tensors: "rank 3: name[0:4]"."""
        wrong = []
        for rank, binding in self.bindings.items():
            for index, piece in enumerate(binding.manifest.pieces):
                view = binding.view(index)
                expected = box_of(tensors[piece.tensor], piece.box.offset, piece.box.shape).to(view.dtype)
                if not torch.equal(view, expected):
                    wrong.append(f"rank {rank}: {piece.tensor}{piece.box}")
        return wrong

    def strays(self) -> list[str]:
        """The buffers of a side made without tensors whose elements outside of every piece were written."""
        written = []
        for rank, binding in self.bindings.items():
            for name, buffer in binding.buffers.items():
                outside = torch.ones(buffer.numel(), dtype=torch.bool)
                for piece in binding.manifest.pieces:
                    if piece.buffer == name:
                        outside.as_strided(piece.box.shape, piece.strides, piece.offset).fill_(False)
                if bool((buffer != _UNTOUCHED)[outside].any()):
                    written.append(f"rank {rank}: {name}")
        return written


def box_of(tensor: torch.Tensor, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    """The view of one box of a full tensor."""
    return box_view(tensor, Box.full(tensor.shape), Box.at(offset, shape))


def _bind(ranked: RankManifest, tensors: Mapping[str, torch.Tensor] | None) -> Binding:
    buffers = make_buffers(ranked, spare=_GUARD)
    for buffer in buffers.values():
        buffer.fill_(_UNTOUCHED)
    binding = Binding.of(ranked, buffers)
    if tensors is not None:
        for index, piece in enumerate(ranked.pieces):
            binding.view(index).copy_(box_of(tensors[piece.tensor], piece.box.offset, piece.box.shape))
    return binding
