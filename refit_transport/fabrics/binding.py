"""A rank's manifest bound to live buffers: where in memory the parts of a box lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch

from refit_transport.errors import LayoutError
from refit_transport.layout.box import Box
from refit_transport.layout.canonical import canonical_name
from refit_transport.layout.manifest import Piece, RankManifest
from refit_transport.views import box_view, piece_view, torch_dtype


@dataclass(frozen=True, slots=True)
class Part:
    """What one piece holds of a box: the common box, and its live elements, shaped like it."""

    box: Box
    view: torch.Tensor


@dataclass(frozen=True)
class Binding:
    """A rank's manifest of one role together with the live buffers that its pieces point into."""

    manifest: RankManifest
    buffers: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, manifest: RankManifest, buffers: Mapping[str, torch.Tensor]) -> Self:
        return cls(manifest, buffers)

    @cached_property
    def _dtypes(self) -> dict[str, torch.dtype]:
        return {spec.name: torch_dtype(spec.dtype) for spec in self.manifest.tensors}

    @cached_property
    def _pieces(self) -> dict[str, list[Piece]]:
        found: dict[str, list[Piece]] = {}
        for piece in self.manifest.pieces:
            found.setdefault(piece.tensor, []).append(piece)
        return found

    def view(self, piece: int) -> torch.Tensor:
        """The strided view of a whole piece, shaped like its box, in the dtype that the manifest declares."""
        return self._view(self.manifest.pieces[piece])

    def parts(self, tensor: str, box: Box) -> list[Part]:
        """What this rank's pieces hold of a box, piece by piece; a box may lie in several, or twice."""
        parts = []
        for piece in self._pieces.get(tensor, ()):
            common = piece.box.intersect(box)
            if common is not None:
                parts.append(Part(common, self._view(piece, common)))
        return parts

    def cover(self, tensor: str, box: Box) -> list[Part]:
        """Parts that have every element of a box at least once.

        Raises:
            LayoutError: the rank's pieces don't cover it.
        """
        parts = self.parts(tensor, box)
        whole = next((part for part in parts if part.box == box), None)
        if whole is not None:
            return [whole]
        # Pieces that overlap hold equal values, so it is enough to know that nothing is missing.
        if sum(part.box.numel for part in parts) < box.numel:
            raise LayoutError(tensor, self.manifest.rank, f"a rank that holds {box}", "one that holds less")
        return parts

    def take(self, name: str, whole: torch.Tensor) -> None:
        """Copies what this rank's pieces hold of a checkpoint tensor, by its checkpoint name, from the whole of it."""
        found = canonical_name(name)
        for piece in self._pieces.get(found.tensor, ()):
            if found.expert is None:
                self._view(piece).copy_(box_view(whole, Box.full(whole.shape), piece.box))
            elif (own := piece.box.spans[0]).start <= found.expert < own.stop:
                part = box_view(whole, Box.full(whole.shape), Box(piece.box.spans[1:]))
                self._view(piece)[found.expert - own.start].copy_(part)

    def addresses(self) -> tuple[int, ...]:
        """Where the buffers lie; when it changes, programs bound to them are void."""
        return tuple(buffer.data_ptr() for buffer in self.buffers.values())

    def _view(self, piece: Piece, box: Box | None = None) -> torch.Tensor:
        return piece_view(piece, self.buffers, dtype=self._dtypes[piece.tensor], box=box)
