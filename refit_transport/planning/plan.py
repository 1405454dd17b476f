"""The transfer plan: which boxes the targets need and who can send them. No choice, order or time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refit_transport.errors import PlanError
from refit_transport.layout.box import Box
from refit_transport.layout.manifest import DTYPE_BYTES, Manifest
from refit_transport.layout.wire import digest
from refit_transport.planning.overlap import Boxes, are_disjoint, boxes_to_array, uncovered, volumes

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor of the plan. The wire carries the narrower of the two sides' dtypes; of equal widths, the target's."""

    name: str
    shape: tuple[int, ...]
    source_dtype: str
    target_dtype: str

    @property
    def wire_dtype(self) -> str:
        narrower = DTYPE_BYTES[self.source_dtype] < DTYPE_BYTES[self.target_dtype]
        return self.source_dtype if narrower else self.target_dtype

    @property
    def wire_bytes(self) -> int:
        """Bytes of one element on the wire."""
        return DTYPE_BYTES[self.wire_dtype]


@dataclass(frozen=True, slots=True)
class Holdings:
    """For each atom, the (rank, piece) pairs that hold or want it: those of atom i are rows `start[i]:start[i + 1]`.

    `piece` is the index among that rank's pieces in its manifest.
    """

    start: Ints
    rank: Ints
    piece: Ints

    def of(self, atom: int) -> Iterable[tuple[int, int]]:
        """The pairs of one atom, in order."""
        rows = slice(self.start[atom], self.start[atom + 1])
        return zip(self.rank[rows].tolist(), self.piece[rows].tolist(), strict=True)

    def take(self, atoms: Ints) -> Holdings:
        """The holdings of a sequence of atoms, in that order; an atom may come more than once."""
        counts = np.diff(self.start)[atoms]
        start = np.concatenate(([0], np.cumsum(counts)))
        rows = np.arange(start[-1]) - np.repeat(start[:-1] - self.start[atoms], counts)
        return Holdings(start, self.rank[rows], self.piece[rows])


@dataclass(frozen=True, slots=True)
class Parcels:
    """Boxes of tensors, a row per box.

    Columns: `tensor` (index in `tensors`), `lo` and `hi` (shape [n, most dims], padded with 0, 1).
    """

    tensors: tuple[PlannedTensor, ...]
    tensor: Ints
    lo: Ints
    hi: Ints

    def __len__(self) -> int:
        return len(self.tensor)

    def box(self, row: int) -> Box:
        """The box in its tensor's own dims."""
        dims = len(self.tensors[self.tensor[row]].shape)
        return Box.of(*zip(self.lo[row, :dims].tolist(), self.hi[row, :dims].tolist(), strict=True))

    def name(self, row: int) -> str:
        """The canonical name of the box's tensor."""
        tensor: PlannedTensor = self.tensors[self.tensor[row]]
        return tensor.name

    def nbytes(self) -> Ints:
        """The bytes of each box on the wire, shape [n]."""
        width = np.array([tensor.wire_bytes for tensor in self.tensors], dtype=np.int64)
        elements: Ints = np.prod(self.hi - self.lo, axis=1, dtype=np.int64)
        return elements * width[self.tensor] if len(self) else elements


@dataclass(frozen=True, slots=True)
class TransferPlan(Parcels):
    """Disjoint boxes ("atoms"), each wholly held by its holders (source pieces) and wholly wanted by its wanters."""

    holders: Holdings
    wanters: Holdings

    def digest(self) -> str:
        """Equal on every rank that computed the same plan."""
        columns = (self.tensor, self.lo, self.hi)
        pairs = (side for h in (self.holders, self.wanters) for side in (h.start, h.rank, h.piece))
        return digest(repr(self.tensors), *(np.ascontiguousarray(c).tobytes() for c in (*columns, *pairs)))

    def split(self, *, max_bytes: int) -> TransferPlan:
        """The same plan with every atom of more than `max_bytes` cut into slabs, along its outermost dims first."""
        return _split(self, max_bytes)

    def check(self, source: Manifest, target: Manifest) -> None:
        """Proves that each wanted element is delivered exactly once, from a rank that holds it.

        `target` may hold fewer ranks than want something (the plan may be of a subset of the tensors).

        Raises:
            PlanError: a hole, a doubled element, or a holder or wanter whose piece doesn't contain the atom.
        """
        boxes = [self.box(atom) for atom in range(len(self))]
        wanted: dict[tuple[int, int], list[int]] = {}
        for side, holdings in ((source, self.holders), (target, self.wanters)):
            pieces = {manifest.rank: manifest.pieces for manifest in side.ranks}
            for atom, box in enumerate(boxes):
                name = self.tensors[self.tensor[atom]].name
                for rank, index in holdings.of(atom):
                    piece = pieces[rank][index]
                    if piece.tensor != name or not piece.box.contains(box):
                        raise PlanError(name, str(box), rank, f"lies outside the {side.role} piece {piece.box}")
                    if side.role == "target":
                        wanted.setdefault((rank, index), []).append(atom)
            if side.role == "source" and np.any(np.diff(holdings.start) == 0):
                atom = int(np.flatnonzero(np.diff(holdings.start) == 0)[0])
                raise PlanError(self.tensors[self.tensor[atom]].name, str(boxes[atom]), -1, "no source rank holds it")
        self._check_coverage(target, boxes, wanted)

    def _check_coverage(self, target: Manifest, boxes: list[Box], wanted: dict[tuple[int, int], list[int]]) -> None:
        names = {tensor.name for tensor in self.tensors}
        for manifest in target.ranks:
            for index, piece in enumerate(manifest.pieces):
                if piece.tensor not in names or piece.box.numel == 0:
                    continue
                dims = len(piece.box.spans)
                cover = boxes_to_array((boxes[atom] for atom in wanted.get((manifest.rank, index), ())), dims)
                # Every box of `cover` lies in the piece: of its size and disjoint, they leave no hole.
                if int(volumes(cover).sum()) == piece.box.numel and (len(cover) == 1 or are_disjoint(cover)):
                    continue
                hole = uncovered(boxes_to_array((piece.box,), dims), cover)
                if hole is not None:
                    raise PlanError(piece.tensor, str(hole), manifest.rank, "is delivered by nobody")
                raise PlanError(piece.tensor, str(piece.box), manifest.rank, "has elements delivered twice")


def _split(plan: TransferPlan, max_bytes: int) -> TransferPlan:
    nbytes = plan.nbytes()
    large = np.flatnonzero(nbytes > max_bytes)
    if not len(large):
        return plan
    parent, boxes = [], []
    for atom in range(len(plan)):
        whole = np.stack((plan.lo[atom], plan.hi[atom]), axis=1)[None]
        elements = max(1, max_bytes // plan.tensors[plan.tensor[atom]].wire_bytes)
        parts = slabs(whole, elements) if nbytes[atom] > max_bytes else whole
        parent.append(np.full(len(parts), atom, dtype=np.int64))
        boxes.append(parts)
    atoms, cut = np.concatenate(parent), np.concatenate(boxes)
    return TransferPlan(
        plan.tensors,
        plan.tensor[atoms],
        cut[:, :, 0],
        cut[:, :, 1],
        plan.holders.take(atoms),
        plan.wanters.take(atoms),
    )


def slabs(box: Boxes, elements: int) -> Boxes:
    """Cuts one box (shape [1, d, 2]) into boxes of at most `elements`, keeping inner dims whole as long as possible."""
    sizes = (box[0, :, 1] - box[0, :, 0]).tolist()
    for dim, size in enumerate(sizes):
        if size == 1:
            continue
        inner = math.prod(sizes[dim + 1 :])
        starts = np.arange(box[0, dim, 0], box[0, dim, 1], max(1, elements // inner))
        cut = np.repeat(box, len(starts), axis=0)
        cut[:, dim, 0], cut[:, dim, 1] = starts, np.append(starts[1:], box[0, dim, 1])
        return cut if inner <= elements else np.concatenate([slabs(part[None], elements) for part in cut])
    return box
