"""What each rank of a refit holds: logical tensors and the pieces of them that lie in its local buffers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import gt
from typing import ClassVar, Literal, Self, overload

import numpy as np
import numpy.typing as npt

from refit_transport.errors import LayoutError
from refit_transport.layout.box import Box

Rows = npt.NDArray[np.int64]
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


@dataclass(frozen=True, slots=True, eq=False)
class PieceColumns(Sequence[Piece]):
    """A sequence of pieces of which each is made when it is asked for; equal to a tuple of the same pieces.

    `rows`, of shape [n, 5], has for each piece its tensor, box, buffer, offset (elements) and strides; all but the
    offset are indices in what the other fields list, each once. Whoever has the same names and rows may share them.
    """

    tensors: tuple[str, ...]
    boxes: tuple[Box, ...]
    buffers: tuple[str, ...]
    strides: tuple[tuple[int, ...], ...]
    rows: Rows

    WIDTH: ClassVar[int] = 5

    @classmethod
    def of(cls, pieces: Sequence[Piece], *, tensors: Sequence[str] = ()) -> Self:
        """The same pieces, whose tensors' names begin with `tensors`, in this order."""
        if isinstance(pieces, cls):
            return pieces
        names = {name: index for index, name in enumerate(tensors)}
        boxes: dict[Box, int] = {}
        buffers: dict[str, int] = {}
        strides: dict[tuple[int, ...], int] = {}
        # Boxes take long to compare, and many pieces have the very same.
        known: dict[int, int] = {}
        rows = []
        for piece in pieces:
            box = known.get(id(piece.box))
            if box is None:
                box = known[id(piece.box)] = boxes.setdefault(piece.box, len(boxes))
            rows.append(
                (
                    names.setdefault(piece.tensor, len(names)),
                    box,
                    buffers.setdefault(piece.buffer, len(buffers)),
                    piece.offset,
                    strides.setdefault(piece.strides, len(strides)),
                )
            )
        columns = np.array(rows, dtype=np.int64).reshape(-1, 5)
        return cls(tuple(names), tuple(boxes), tuple(buffers), tuple(strides), columns)

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Piece: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Piece, ...]: ...
    def __getitem__(self, index: int | slice) -> Piece | tuple[Piece, ...]:
        if isinstance(index, slice):
            return tuple(map(self._piece, self.rows[index].tolist()))
        return self._piece(self.rows[index].tolist())

    def __iter__(self) -> Iterator[Piece]:
        return map(self._piece, self.rows.tolist())

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, (PieceColumns, tuple)) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def _piece(self, row: list[int]) -> Piece:
        tensor, box, buffer, offset, strides = row
        return Piece(self.tensors[tensor], self.boxes[box], self.buffers[buffer], offset, self.strides[strides])

    @property
    def tensor(self) -> Rows:
        """The index of each piece's tensor."""
        return self.rows[:, 0]

    @property
    def box(self) -> Rows:
        """The index of each piece's box."""
        return self.rows[:, 1]

    def check(self) -> None:
        """Proves that what the rows refer to is there, once, and that boxes and strides have as many dims.

        Raises:
            ValueError: saying what is wrong.
        """
        for listed, column in ((self.tensors, 0), (self.boxes, 1), (self.buffers, 2), (self.strides, 4)):
            found = self.rows[:, column]
            if found.min(initial=0) < 0 or found.max(initial=-1) >= len(listed):
                raise ValueError(f"a piece refers to entry {found.max()} or {found.min()} of {len(listed)}")
        for what, names in (("tensor", self.tensors), ("buffer", self.buffers)):
            if len(set(names)) != len(names):
                raise ValueError(f"a {what} is listed twice")
        dims, steps = (
            np.array(list(map(len, x)), dtype=np.int64) for x in ([b.spans for b in self.boxes], self.strides)
        )
        if len(self) and (dims[self.box] != steps[self.rows[:, 4]]).any():
            raise ValueError("a box and its strides have different dims")


@dataclass(frozen=True, slots=True)
class Opaque:
    """A tensor that a target can only take whole, through its own loader, and why."""

    tensor: str
    reason: str


@dataclass(frozen=True, slots=True)
class RankManifest:
    """One rank's share of one side: the tensors it holds something of, and the pieces, a tuple or columns.

    `opaque` (targets only) lists tensors that must arrive whole. A tensor in neither `pieces` nor `opaque` of any
    target rank is one that the target's loader ignores.
    """

    rank: int
    role: Role
    tensors: tuple[TensorSpec, ...]
    pieces: Sequence[Piece]
    opaque: tuple[Opaque, ...] = ()

    def replica(self, rank: int) -> Self:
        """The manifest of another rank that holds the same; it shares the tuples and isn't checked again."""
        copy = object.__new__(type(self))
        for field in fields(self):
            object.__setattr__(copy, field.name, rank if field.name == "rank" else getattr(self, field.name))
        return copy

    def held(self) -> set[str]:
        """The names of the tensors that there are pieces of."""
        if isinstance(self.pieces, PieceColumns):
            return {self.pieces.tensors[index] for index in np.unique(self.pieces.tensor).tolist()}
        return {piece.tensor for piece in self.pieces}

    def __post_init__(self) -> None:
        shapes = {spec.name: spec.shape for spec in self.tensors}
        # Many small tensors have one shape, and their pieces the very same box.
        fitting: set[tuple[tuple[int, ...], int]] = set()
        for tensor, box in self._located():
            shape = shapes.get(tensor)
            if shape is None:
                raise LayoutError(tensor, self.rank, "a tensor listed in this manifest", "an unlisted name")
            if (shape, id(box)) not in fitting:
                if len(box.spans) != len(shape) or any(map(gt, (span.stop for span in box.spans), shape)):
                    raise LayoutError(tensor, self.rank, f"a box inside {list(shape)}", str(box))
                fitting.add((shape, id(box)))

    def _located(self) -> Iterator[tuple[str, Box]]:
        """The tensor and the box of each piece."""
        if not isinstance(self.pieces, PieceColumns):
            return ((piece.tensor, piece.box) for piece in self.pieces)
        names, boxes = self.pieces.tensors, self.pieces.boxes
        found = zip(self.pieces.tensor.tolist(), self.pieces.box.tolist(), strict=True)
        return ((names[tensor], boxes[box]) for tensor, box in found)


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
