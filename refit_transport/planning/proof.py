"""The proof that a transfer plan fills every target piece, each element once, from ranks that hold it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from refit_transport.errors import PlanError
from refit_transport.layout.box import Box
from refit_transport.layout.manifest import Manifest
from refit_transport.planning.holdings import Holding, HoldingIndex
from refit_transport.planning.overlap import Boxes, are_disjoint, inside, uncovered, volumes

if TYPE_CHECKING:
    from refit_transport.planning.plan import TransferPlan

Mask = npt.NDArray[np.bool_]


def prove(plan: TransferPlan, source: Manifest, target: Manifest) -> None:
    """Compares the plan with both manifests; see `TransferPlan.check`. Tensors that are cut alike are proved once."""
    names = {tensor.name for tensor in plan.tensors}
    held, wanted = HoldingIndex.of(source, names), HoldingIndex.of(target, names)
    if np.any(np.diff(plan.tensor) < 0):
        raise PlanError("", "", -1, "atoms are not ordered by tensor")
    first = np.searchsorted(plan.tensor, np.arange(len(plan.tensors) + 1)).tolist()
    known: set[tuple[object, ...]] = set()
    disjoint: dict[bytes, bool] = {}
    for index, tensor in enumerate(plan.tensors):
        rows = slice(first[index], first[index + 1])
        case = _Case(
            tensor.name,
            np.stack((plan.lo[rows], plan.hi[rows]), axis=2)[:, : max(1, len(tensor.shape))],
            plan.holders[rows],
            plan.wanters[rows],
            held.of_tensor(tensor.name),
            wanted.of_tensor(tensor.name),
            plan.rank_sets,
        )
        shape = case.atoms.tobytes()
        key = (shape, case.holders.tobytes(), case.wanters.tobytes(), case.held, case.wanted)
        if key in known:
            continue
        if shape not in disjoint:
            disjoint[shape] = are_disjoint(case.atoms)
        case.prove(atoms_are_disjoint=disjoint[shape])
        known.add(key)


@dataclass(frozen=True, slots=True)
class _Case:
    """One tensor: its atoms and what both sides really hold."""

    name: str
    atoms: Boxes
    holders: npt.NDArray[np.int64]
    wanters: npt.NDArray[np.int64]
    held: Holding
    wanted: Holding
    rank_sets: tuple[tuple[int, ...], ...]

    def prove(self, *, atoms_are_disjoint: bool) -> None:
        dims = self.atoms.shape[1]
        holding, wanting = (
            inside(self.atoms, side.array(dims)) if side.boxes else np.zeros((len(self.atoms), 0), dtype=bool)
            for side in (self.held, self.wanted)
        )
        self._prove_members(self.holders, self.held, holding, "source")
        self._prove_members(self.wanters, self.wanted, wanting, "target")
        self._prove_coverage(wanting, dims)
        if not atoms_are_disjoint:
            raise PlanError(self.name, "", self._some_wanter(), "has elements delivered twice")

    def _prove_members(self, sets: npt.NDArray[np.int64], side: Holding, within: Mask, role: str) -> None:
        """Every rank of an atom's set has a box around the atom; no set of holders is empty."""
        allowed: dict[bytes, frozenset[int]] = {}
        proved: set[tuple[bytes, int]] = set()
        for atom, index in enumerate(sets.tolist()):
            boxes = within[atom].tobytes()
            if (boxes, index) in proved:
                continue
            if boxes not in allowed:
                allowed[boxes] = frozenset(rank for box in np.flatnonzero(within[atom]) for rank in side.ranks[box])
            stranger = next((rank for rank in self.rank_sets[index] if rank not in allowed[boxes]), None)
            if stranger is not None:
                raise PlanError(self.name, self._box(atom), stranger, f"lies outside what the {role} rank has")
            if not self.rank_sets[index]:
                raise PlanError(self.name, self._box(atom), -1, f"no {role} rank is listed for it")
            proved.add((boxes, index))

    def _prove_coverage(self, wanting: Mask, dims: int) -> None:
        """The atoms inside each wanted box have its volume together, and list all its ranks."""
        size = volumes(self.atoms)
        present = np.unique(self.wanters).tolist()
        members = {index: frozenset(self.rank_sets[index]) for index in present}
        for box, ranks in enumerate(self.wanted.ranks):
            full = {index for index in present if members[index].issuperset(ranks)}
            candidates = np.flatnonzero(wanting[:, box])
            rows = candidates[np.isin(self.wanters[candidates], list(full))]
            whole = self.wanted.array(dims)[box : box + 1]
            missing = int(volumes(whole)[0]) - int(size[rows].sum())
            if missing < 0:
                raise PlanError(self.name, _text(whole[0]), ranks[0], "has elements delivered twice")
            hole = uncovered(whole, self.atoms[rows]) if missing else None
            if hole is not None:
                raise PlanError(self.name, str(hole), ranks[0], "is delivered by nobody")

    def _box(self, atom: int) -> str:
        return _text(self.atoms[atom])

    def _some_wanter(self) -> int:
        return self.rank_sets[int(self.wanters[0])][0]


def _text(box: npt.NDArray[np.int64]) -> str:
    return str(Box.of(*((int(start), int(stop)) for start, stop in box)))
