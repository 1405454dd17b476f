"""Layouts as plain JSON values: the same words as their fields, so that people can read them too."""

from __future__ import annotations

from typing import Any

from refit_transport.errors import LayoutError
from refit_transport.layout.layout import Layout
from refit_transport.layout.mesh import Mesh
from refit_transport.layout.placement import BlockShard, Partial, Placement, Replicate, Shard, StridedShard


def layout_to_json(layout: Layout) -> dict[str, Any]:
    """A plain value of lists, strings and integers.

    >>> layout_to_json(Layout((8,), Mesh.of(tp=2), (Shard(0),)))["placements"]
    [['shard', 0]]
    """
    return {
        "shape": list(layout.shape),
        "axes": list(layout.mesh.axes),
        "sizes": list(layout.mesh.shape),
        "ranks": list(layout.mesh.ranks),
        "placements": [_placement_to_json(placement) for placement in layout.placements],
    }


def layout_from_json(value: dict[str, Any]) -> Layout:
    """The inverse of `layout_to_json`; LayoutError when the value isn't a layout."""
    try:
        mesh = Mesh.from_ranks(value["axes"], value["sizes"], value["ranks"])
        placements = tuple(_placement_from_json(placement) for placement in value["placements"])
        return Layout(tuple(value["shape"]), mesh, placements)
    except (KeyError, TypeError, ValueError) as error:
        raise LayoutError("", -1, "a layout", f"a malformed one ({error!r})") from error


def _placement_to_json(placement: Placement) -> list[Any]:
    match placement:
        case Shard(dim):
            return ["shard", dim]
        case StridedShard(dim, factor):
            return ["strided", dim, factor]
        case BlockShard(dim, blocks):
            return ["blocks", dim, list(blocks)]
        case Replicate():
            return ["replicate"]
        case Partial():
            return ["partial"]


def _placement_from_json(value: list[Any]) -> Placement:
    match value:
        case ["shard", int(dim)]:
            return Shard(dim)
        case ["strided", int(dim), int(factor)]:
            return StridedShard(dim, factor)
        case ["blocks", int(dim), list(blocks)]:
            return BlockShard(dim, tuple(blocks))
        case ["replicate"]:
            return Replicate()
        case ["partial"]:
            return Partial()
    raise LayoutError("", -1, "a placement", str(value))
