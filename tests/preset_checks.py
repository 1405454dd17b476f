"""Manifests compared by what they hold, whatever the buffers and however these cut it."""

from __future__ import annotations

from refit_transport.layout.manifest import Manifest, RankManifest, TensorSpec
from refit_transport.layout.region import merge_boxes
from refit_transport.planning.overlap import boxes_to_array

Regions = dict[str, list[list[list[int]]]]
Contents = dict[int, tuple[frozenset[TensorSpec], Regions]]


def contents(manifest: Manifest) -> Contents:
    """Each rank's tensors and the region that it holds of each, without buffers, offsets and order."""
    return {ranked.rank: (frozenset(ranked.tensors), regions(ranked)) for ranked in manifest.ranks}


def regions(ranked: RankManifest) -> Regions:
    """What a rank holds of each tensor."""
    held = {piece.tensor: len(piece.box.spans) for piece in ranked.pieces}
    return {
        tensor: merge_boxes(boxes_to_array((p.box for p in ranked.pieces if p.tensor == tensor), dims)).tolist()
        for tensor, dims in held.items()
    }
