"""What each rank of a refit holds: logical tensors and the pieces of them that lie in its local buffers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Literal, Self

from refit_transport.errors import LayoutError
from refit_transport.layout.box import Box

Role = Literal["source", "target"]
RankRole = Literal["source", "target", "both", "none"]

DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


# A refit rounds between these; to and from any other dtype (integers, FP8 with its scales) it only copies.
CONVERTIBLE = frozenset({"float64", "float32", "bfloat16", "float16"})


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One logical tensor as one side stores it.

    `name` is canonical (see `layout.canonical`), `shape` the true, unpadded shape in elements, `dtype` torch's name of
    it without the `torch.` prefix.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise LayoutError(self.name, -1, f"a dtype of {', '.join(DTYPE_BYTES)}", self.dtype)

    @property
    def box(self) -> Box:
        return Box.full(self.shape)


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a logical tensor and where it lies on one rank.

    The element at box coordinates `(i0, i1, ...)` (relative to the box) is at element
    `offset + i0 * strides[0] + i1 * strides[1] + ...` of the local buffer named `buffer`; offset and strides count
    elements from the buffer's first element. So a piece is any strided view: a row range of a fused projection, one
    expert of a stacked parameter, a transposed matrix.
    """

    tensor: str
    box: Box
    buffer: str
    offset: int
    strides: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.strides) != len(self.box.spans):
            raise LayoutError(self.tensor, -1, f"{len(self.box.spans)} strides", str(self.strides))


@dataclass(frozen=True, slots=True)
class Opaque:
    """A tensor that a target can only take whole, through its own loader, and why."""

    tensor: str
    reason: str


@dataclass(frozen=True, slots=True)
class RankManifest:
    """One rank's share of one side: the tensors it holds something of, and the pieces.

    `opaque` (targets only) lists tensors that must arrive whole. A tensor in neither `pieces` nor `opaque` of any
    target rank is one that the target's loader ignores.
    """

    rank: int
    role: Role
    tensors: tuple[TensorSpec, ...]
    pieces: tuple[Piece, ...]
    opaque: tuple[Opaque, ...] = ()

    def replica(self, rank: int) -> Self:
        """The manifest of another rank that holds the same; it shares the tuples and isn't checked again."""
        copy = object.__new__(type(self))
        for field in fields(self):
            object.__setattr__(copy, field.name, rank if field.name == "rank" else getattr(self, field.name))
        return copy

    def __post_init__(self) -> None:
        whole = {spec.name: spec.box for spec in self.tensors}
        for piece in self.pieces:
            box = whole.get(piece.tensor)
            if box is None:
                raise LayoutError(piece.tensor, self.rank, "a tensor listed in this manifest", "an unlisted name")
            if len(box.spans) != len(piece.box.spans) or not box.contains(piece.box):
                raise LayoutError(piece.tensor, self.rank, f"a box inside {list(box.shape)}", str(piece.box))


@dataclass(frozen=True, slots=True)
class Manifest:
    """One side of a refit: its logical tensors in canonical order and every rank's manifest, by rank."""

    role: Role
    tensors: tuple[TensorSpec, ...]
    ranks: tuple[RankManifest, ...]

    @classmethod
    def of(cls, manifests: Iterable[RankManifest]) -> Self:
        """Joins the ranks' manifests, in any order.

        Raises:
            LayoutError: two ranks declare different shapes or dtypes for one tensor, or a rank appears twice.
        """
        ranks = tuple(sorted(manifests, key=lambda manifest: manifest.rank))
        if not ranks:
            raise LayoutError("", -1, "at least one rank", "none")
        specs: dict[str, TensorSpec] = {}
        joined: set[int] = set()
        for previous, manifest in zip((None, *ranks), ranks, strict=False):
            if previous is not None and previous.rank == manifest.rank:
                raise LayoutError("", manifest.rank, "each rank once", "it twice")
            if manifest.role != ranks[0].role:
                raise LayoutError("", manifest.rank, f"role {ranks[0].role}", manifest.role)
            if id(manifest.tensors) in joined:  # Replicas share one tuple.
                continue
            joined.add(id(manifest.tensors))
            for spec in manifest.tensors:
                known = specs.setdefault(spec.name, spec)
                if known != spec:
                    raise LayoutError(
                        spec.name,
                        manifest.rank,
                        f"{list(known.shape)} {known.dtype}",
                        f"{list(spec.shape)} {spec.dtype}",
                    )
        return cls(ranks[0].role, tuple(sorted(specs.values(), key=lambda spec: _natural(spec.name))), ranks)

    def spec(self, name: str) -> TensorSpec:
        """The named tensor; raises KeyError when this side doesn't have it."""
        return next(spec for spec in self.tensors if spec.name == name)


def _natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """A sort key under which `layers.2` comes before `layers.10`."""
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name))
