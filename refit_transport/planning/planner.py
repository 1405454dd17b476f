"""From two manifests to a transfer plan: intersect per dim, take the product, list the holders, prove coverage."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from refit_transport.errors import LayoutError, PlanError
from refit_transport.layout.box import Box
from refit_transport.layout.manifest import CONVERTIBLE, Manifest, TensorSpec
from refit_transport.planning.overlap import Boxes, atoms_of, boxes_to_array, inside, intersect, uncovered, volumes
from refit_transport.planning.plan import Holdings, Ints, PlannedTensor, TransferPlan

_Owners = list[list[tuple[int, int]]]


@dataclass(frozen=True, slots=True)
class HeldBoxes:
    """What one side holds of one tensor: its distinct boxes, sorted, and the (rank, piece) pairs that have each."""

    boxes: tuple[Box, ...]
    owners: _Owners


_NOTHING = HeldBoxes((), [])


@dataclass(frozen=True, slots=True)
class _Geometry:
    """The atoms of one pair of box sets, and for each atom the indices of the boxes that contain it."""

    atoms: Boxes
    holding: list[list[int]]
    wanting: list[list[int]]


@dataclass(frozen=True, slots=True)
class PieceIndex:
    """One side's boxes by tensor. Whoever plans many parts of one manifest makes it once."""

    by_tensor: Mapping[str, HeldBoxes]

    @classmethod
    def of(cls, manifest: Manifest, names: Container[str] | None = None) -> Self:
        """Of all the manifest's tensors, or of those named."""
        found: dict[str, dict[Box, list[tuple[int, int]]]] = {}
        for rank in manifest.ranks:
            for index, piece in enumerate(rank.pieces):
                if (names is None or piece.tensor in names) and piece.box.numel:
                    found.setdefault(piece.tensor, {}).setdefault(piece.box, []).append((rank.rank, index))
        sorted_boxes = {name: tuple(sorted(owners)) for name, owners in found.items()}
        return cls(
            {name: HeldBoxes(boxes, [found[name][box] for box in boxes]) for name, boxes in sorted_boxes.items()}
        )

    def of_tensor(self, name: str) -> HeldBoxes:
        """Empty where the side holds nothing of it."""
        return self.by_tensor.get(name, _NOTHING)


def plan_transfer(
    source: Manifest, target: Manifest, *, tensors: Iterable[str] | None = None, held: PieceIndex | None = None
) -> TransferPlan:
    """Plans how the target's pieces are filled from the source's; pure and deterministic, whatever the ranks' order.

    Args:
        source: the side that holds the tensors.
        target: the side that needs them.
        tensors: canonical names to plan; all that the target has when None.
        held: the source's pieces by tensor, where the caller has them.

    Raises:
        LayoutError: as `check_sides_agree`.
        PlanError: a wanted element lies on no source rank.

    An 8 x 8 matrix in rows over 2 sources and in columns over 4 targets: each target gets a 4 x 2 box from each source.

    >>> from refit_transport.layout.layout import Layout, manifest_from_layouts
    >>> from refit_transport.layout.mesh import Mesh
    >>> from refit_transport.layout.placement import Shard
    >>> rows = Layout((8, 8), Mesh.of(tp=2), (Shard(0),))
    >>> columns = Layout((8, 8), Mesh.of(first_rank=2, tp=4), (Shard(1),))
    >>> source = manifest_from_layouts("source", {"w": rows}, dtype="float32")
    >>> plan = plan_transfer(source, manifest_from_layouts("target", {"w": columns}, dtype="float32"))
    >>> len(plan), plan.box(0).shape
    (8, (4, 2))
    """
    names = {spec.name for spec in target.tensors} if tensors is None else set(tensors)
    have = {spec.name: spec for spec in source.tensors}
    pairs = [(_source_spec(have, spec), spec) for spec in target.tensors if spec.name in names]
    holding, wanting = PieceIndex.of(source, names) if held is None else held, PieceIndex.of(target, names)
    geometries: dict[tuple[tuple[Box, ...], tuple[Box, ...]], _Geometry] = {}
    planned, rows = [], []
    for from_spec, spec in pairs:
        planned.append(PlannedTensor(spec.name, spec.shape, from_spec.dtype, spec.dtype))
        here, there = holding.of_tensor(spec.name), wanting.of_tensor(spec.name)
        if not there.boxes:
            continue
        key = (here.boxes, there.boxes)
        if key not in geometries:
            geometries[key] = _geometry(here, there, spec)
        rows.append((len(planned) - 1, geometries[key], here.owners, there.owners))
    return _assemble(tuple(planned), rows)


def check_sides_agree(source: Manifest, target: Manifest) -> None:
    """Proves that the source has every tensor of the target's, in its shape and in a dtype that converts to it.

    Raises:
        LayoutError: naming the tensor and both sides' sizes or dtypes.
    """
    have = {spec.name: spec for spec in source.tensors}
    for spec in target.tensors:
        _source_spec(have, spec)


def _source_spec(have: dict[str, TensorSpec], spec: TensorSpec) -> TensorSpec:
    found = have.get(spec.name)
    if found is None:
        raise LayoutError(spec.name, -1, "a tensor that the source has (the target needs it)", "no such tensor")
    if found.shape != spec.shape:
        raise LayoutError(spec.name, -1, f"the source's shape {list(found.shape)}", f"the target's {list(spec.shape)}")
    if found.dtype != spec.dtype and not {found.dtype, spec.dtype} <= CONVERTIBLE:
        raise LayoutError(spec.name, -1, f"the source's dtype {found.dtype}", f"{spec.dtype}, which it can't become")
    return found


def _geometry(source: HeldBoxes, target: HeldBoxes, spec: TensorSpec) -> _Geometry:
    dims = len(spec.shape)
    held, wanted = boxes_to_array(source.boxes, dims), boxes_to_array(target.boxes, dims)
    atoms = intersect(atoms_of(held), atoms_of(wanted)).boxes
    holding, wanting = inside(atoms, held), inside(atoms, wanted)
    covered = wanting.T.astype(np.int64) @ volumes(atoms)
    for index in np.flatnonzero(covered != volumes(wanted)).tolist():
        hole = uncovered(wanted[index : index + 1], atoms)
        raise PlanError(spec.name, str(hole), target.owners[index][0][0], "no source rank holds it")
    return _Geometry(
        atoms,
        [np.flatnonzero(row).tolist() for row in holding],
        [np.flatnonzero(row).tolist() for row in wanting],
    )


def _assemble(planned: tuple[PlannedTensor, ...], rows: list[tuple[int, _Geometry, _Owners, _Owners]]) -> TransferPlan:
    count = sum(len(geometry.atoms) for _, geometry, _, _ in rows)
    most = max((geometry.atoms.shape[1] for _, geometry, _, _ in rows), default=1)
    tensor = np.zeros(count, dtype=np.int64)
    lo, hi = np.zeros((count, most), dtype=np.int64), np.ones((count, most), dtype=np.int64)
    holders: _Owners = []
    wanters: _Owners = []
    first = 0
    for index, geometry, held, wanted in rows:
        last, dims = first + len(geometry.atoms), geometry.atoms.shape[1]
        tensor[first:last] = index
        lo[first:last, :dims], hi[first:last, :dims] = geometry.atoms[:, :, 0], geometry.atoms[:, :, 1]
        holders += [sorted(pair for box in boxes for pair in held[box]) for boxes in geometry.holding]
        wanters += [sorted(pair for box in boxes for pair in wanted[box]) for boxes in geometry.wanting]
        first = last
    return TransferPlan(planned, tensor, lo, hi, _holdings(holders), _holdings(wanters))


def _holdings(owners: _Owners) -> Holdings:
    start = np.concatenate(([0], np.cumsum([len(pairs) for pairs in owners], dtype=np.int64))).astype(np.int64)
    flat: Ints = np.array([pair for pairs in owners for pair in pairs], dtype=np.int64).reshape(-1, 2)
    return Holdings(start, flat[:, 0], flat[:, 1])
