"""From two manifests to a transfer plan: intersect per dim, take the product, list the holders, prove coverage."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refit_transport.errors import LayoutError, PlanError
from refit_transport.layout.manifest import CONVERTIBLE, Manifest, TensorSpec
from refit_transport.planning.holdings import Corners, Holding, HoldingIndex
from refit_transport.planning.overlap import Boxes, atoms_of, inside, intersect, uncovered, volumes
from refit_transport.planning.plan import Ints, PlannedTensor, RankSet, TransferPlan


@dataclass(frozen=True, slots=True)
class _Geometry:
    """The atoms of one pair of box sets, and for each atom the indices of the boxes that contain it."""

    atoms: Boxes
    holding: tuple[tuple[int, ...], ...]
    wanting: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class _Pair:
    """One distinct layout pair: its atoms and, for each, the indices of its holders' and wanters' rank sets."""

    atoms: Boxes
    holders: Ints
    wanters: Ints


def plan_transfer(
    source: Manifest, target: Manifest, *, tensors: Iterable[str] | None = None, held: HoldingIndex | None = None
) -> TransferPlan:
    """Plans how the target's pieces are filled from the source's; pure and deterministic, whatever the ranks' order.

    Each distinct layout pair is planned once; tensors that share it only repeat its rows.

    Args:
        source: the side that holds the tensors.
        target: the side that needs them.
        tensors: canonical names to plan; all that the target has when None.
        held: the source's holdings, where the caller has them.

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
    specs = [(_source_spec(have, spec), spec) for spec in target.tensors if spec.name in names]
    holding = HoldingIndex.of(source, names) if held is None else held
    planner = _Planner(holding, HoldingIndex.of(target, names))
    pairs = [planner.pair(spec) for _, spec in specs]
    planned = tuple(PlannedTensor(spec.name, spec.shape, theirs.dtype, spec.dtype) for theirs, spec in specs)
    return _assemble(planned, pairs, planner.rank_sets)


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


class _Planner:
    """What one `plan_transfer` has found so far: geometries, layout pairs, rank sets in order of first use."""

    def __init__(self, held: HoldingIndex, wanted: HoldingIndex) -> None:
        self._held, self._wanted = held, wanted
        self._geometries: dict[tuple[tuple[Corners, ...], tuple[Corners, ...]], _Geometry] = {}
        # By identity: tensors that are held alike have the very same holding, and comparing them takes long.
        self._pairs: dict[tuple[int, int], _Pair] = {}
        self._sets: dict[RankSet, int] = {}

    @property
    def rank_sets(self) -> tuple[RankSet, ...]:
        return tuple(self._sets)

    def pair(self, spec: TensorSpec) -> _Pair:
        """The atoms of a tensor, planned once for all tensors with equal holdings on both sides."""
        held, wanted = self._held.of_tensor(spec.name), self._wanted.of_tensor(spec.name)
        key = (id(held), id(wanted))
        if key not in self._pairs:
            self._pairs[key] = self._plan(held, wanted, spec)
        return self._pairs[key]

    def _plan(self, held: Holding, wanted: Holding, spec: TensorSpec) -> _Pair:
        key = (held.boxes, wanted.boxes)
        if key not in self._geometries:
            self._geometries[key] = _geometry(held, wanted, spec)
        geometry = self._geometries[key]
        return _Pair(
            geometry.atoms, self._indices(geometry.holding, held.ranks), self._indices(geometry.wanting, wanted.ranks)
        )

    def _indices(self, containing: tuple[tuple[int, ...], ...], ranks: tuple[RankSet, ...]) -> Ints:
        """The rank set of each atom: the union of the ranks of all boxes that contain it."""
        known: dict[tuple[int, ...], int] = {}
        for boxes in containing:
            if boxes not in known:
                union = tuple(sorted({rank for box in boxes for rank in ranks[box]}))
                known[boxes] = self._sets.setdefault(union, len(self._sets))
        return np.array([known[boxes] for boxes in containing], dtype=np.int64)


def _geometry(held: Holding, wanted: Holding, spec: TensorSpec) -> _Geometry:
    dims = len(spec.shape)
    have, want = held.array(dims), wanted.array(dims)
    atoms = intersect(atoms_of(have), atoms_of(want)).boxes
    holding, wanting = inside(atoms, have), inside(atoms, want)
    covered = wanting.T.astype(np.int64) @ volumes(atoms)
    for index in np.flatnonzero(covered != volumes(want)).tolist():
        hole = uncovered(want[index : index + 1], atoms)
        raise PlanError(spec.name, str(hole), wanted.ranks[index][0], "no source rank holds it")
    return _Geometry(atoms, _members(holding), _members(wanting))


def _members(inside_of: npt.NDArray[np.bool_]) -> tuple[tuple[int, ...], ...]:
    """For each row, the indices of its true columns."""
    rows, columns = np.nonzero(inside_of)
    starts = np.searchsorted(rows, np.arange(len(inside_of) + 1)).tolist()
    flat = columns.tolist()
    return tuple(tuple(flat[first:last]) for first, last in itertools.pairwise(starts))


def _assemble(planned: tuple[PlannedTensor, ...], pairs: list[_Pair], rank_sets: tuple[RankSet, ...]) -> TransferPlan:
    counts = np.array([len(pair.atoms) for pair in pairs], dtype=np.int64)
    first = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts)))
    most = max((pair.atoms.shape[1] for pair in pairs), default=1)
    lo, hi = np.zeros((first[-1], most), dtype=np.int64), np.ones((first[-1], most), dtype=np.int64)
    for pair, start, stop in zip(pairs, first[:-1].tolist(), first[1:].tolist(), strict=True):
        dims = pair.atoms.shape[1]
        lo[start:stop, :dims], hi[start:stop, :dims] = pair.atoms[:, :, 0], pair.atoms[:, :, 1]
    none = [np.zeros(0, dtype=np.int64)]
    return TransferPlan(
        planned,
        np.repeat(np.arange(len(planned)), counts),
        lo,
        hi,
        rank_sets,
        np.concatenate(none + [pair.holders for pair in pairs]),
        np.concatenate(none + [pair.wanters for pair in pairs]),
    )
