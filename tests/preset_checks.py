"""Manifests compared by what they hold, whatever the buffers."""

from __future__ import annotations

from collections import Counter

from refit_transport.layout.box import Box
from refit_transport.layout.manifest import Manifest, TensorSpec

Contents = dict[int, tuple[frozenset[TensorSpec], Counter[tuple[str, Box]]]]


def contents(manifest: Manifest) -> Contents:
    """Each rank's tensors and boxes, without buffers, offsets and order."""
    return {
        ranked.rank: (
            frozenset(ranked.tensors),
            Counter((piece.tensor, piece.box) for piece in ranked.pieces),
        )
        for ranked in manifest.ranks
    }
