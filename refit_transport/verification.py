"""Checksums of logical boxes on both sides of a refit, compared without gathering anything.

Boxes that the same ranks hold and the same ranks want are one *class*. A class's first holder publishes one sum of
its boxes' checksums, each weighted by the box; its other holders and every rank that wants it compute their own from
their own memory. Only where two sums differ does a rank look at the checksums of the single boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice, pairwise
from typing import Any, Literal, Self

import numpy as np
import torch

from refit_transport.checksum import BoxView, Checksums, box_checksum, weighted
from refit_transport.errors import AgreementError, RefitTransportError, VerificationError
from refit_transport.fabrics.binding import Binding, Part
from refit_transport.fabrics.deadline import Deadline
from refit_transport.fabrics.rendezvous import ControlChannel
from refit_transport.layout.box import Box
from refit_transport.planning.plan import RankSet, TransferPlan
from refit_transport.targets.base import Target
from refit_transport.views import box_view, torch_dtype

# Of the boxes, a refit with `verify: sample` compares one in so many, others each time.
SAMPLED_SHARE = 16
# Differences that one rank lists; it counts them all.
_LISTED = 3


What = Literal["replica", "target", "derived"]


@dataclass(frozen=True, slots=True)
class Atoms:
    """The boxes of one class that are to be compared: rows of a plan. `number` is the same on every rank."""

    number: int
    plan: TransferPlan
    holders: RankSet
    wanters: RankSet
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """A box that isn't what it should be.

    what: "replica" when `rank` and `source_rank` both hold it at the source; "target" when `rank` serves something else
    than `source_rank` holds; "derived" when `rank` serves a tensor that its own weights don't give (source_rank is -1).
    """

    what: What
    tensor: str
    box: str
    source_rank: int
    rank: int

    def precedence(self) -> tuple[int, int]:
        """Causes before effects, then by rank."""
        return ("replica", "target", "derived").index(self.what), self.rank

    def error(self, version: int) -> RefitTransportError:
        """As an error to raise."""
        if self.what == "replica":
            values = (("one value", (self.source_rank,)), ("another", (self.rank,)))
            return AgreementError(f"tensor {self.tensor}, box {self.box}, held twice", values)
        return VerificationError(self.tensor, self.box, self.source_rank, self.rank, version)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What one comparison of both sides found; the same on every rank when the session returns it.

    boxes: compared on the targets, each rank's by itself, and the derived tensors. nbytes: of these as they are served.
    differing: how many of them, and of the sources' replicas, differ. first: the first that differ, at most three of a
    rank, the sources' replicas before all others. unverified: tensors that can't be compared, with the reason.
    """

    version: int
    boxes: int
    nbytes: int
    differing: int
    first: tuple[Difference, ...] = ()
    unverified: Mapping[str, str] = field(default_factory=dict)

    def require_equal(self, *what: What) -> Self:
        """Itself, when nothing differs; looks at differences of these kinds only, when any are named.

        Raises:
            AgreementError: replicas of a source differ.
            VerificationError: a target serves something else; names the first tensor, box and ranks.
        """
        for found in self.first:
            if not what or found.what in what:
                raise found.error(self.version)
        return self

    def to_json(self) -> dict[str, Any]:
        """A plain value."""
        return {**asdict(self), "unverified": dict(self.unverified)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """The inverse of `to_json`."""
        return cls(**{**value, "first": tuple(Difference(**found) for found in value["first"])})

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Several findings as one."""
        first = sorted((found for part in parts for found in part.first), key=Difference.precedence)
        unverified = {name: reason for part in parts for name, reason in part.unverified.items()}
        return cls(
            max(part.version for part in parts),
            sum(part.boxes for part in parts),
            sum(part.nbytes for part in parts),
            sum(part.differing for part in parts),
            tuple(first),
            unverified,
        )


class Verifier:
    """Chooses and checks boxes of a refit's plans. Pure but for the ranks' own memory."""

    def __init__(self, plans: Iterable[TransferPlan], unverified: Mapping[str, str]) -> None:
        self._plans = tuple(plans)
        self.unverified = unverified

    def atoms(self, refit: int, *, share: str) -> list[Atoms]:
        """The boxes to compare at the refit of this number: all, or for "sample" every 16th, others each time."""
        step = 1 if share == "full" else max(1, min(SAMPLED_SHARE, sum(map(len, self._plans))))
        chosen: list[Atoms] = []
        first = 0
        for plan in self._plans:
            rows = np.arange((refit - first) % step, len(plan), step)
            first += len(plan)
            ends: dict[tuple[int, int], list[int]] = {}
            for row, holders, wanters in zip(
                rows.tolist(), plan.holders[rows].tolist(), plan.wanters[rows].tolist(), strict=True
            ):
                ends.setdefault((holders, wanters), []).append(row)
            for (holders, wanters), found in ends.items():
                sets = plan.rank_sets[holders], plan.rank_sets[wanters]
                chosen.append(Atoms(len(chosen), plan, *sets, tuple(found)))
        return chosen


# Of every copy of each box of a class, by the number of the class; a source has one copy.
SideSums = Mapping[int, Sequence[Sequence[int]]]


class BoxesHere:
    """A rank's part of the chosen boxes as one side has them, bound to the memory that it has now."""

    def __init__(self, chosen: Sequence[Atoms], copies_of: Callable[[Atoms, int], Sequence[Sequence[BoxView]]]) -> None:
        """`copies_of` gives every copy of a box, each as disjoint parts; none where the rank lacks a part of it."""
        views: list[Sequence[BoxView]] = []
        self._copies: dict[int, list[range]] = {}
        for atoms in chosen:
            self._copies[atoms.number] = []
            for row in atoms.rows:
                found = copies_of(atoms, row)
                self._copies[atoms.number].append(range(len(views), len(views) + len(found)))
                views += found
        self._checksums = Checksums(views)

    @classmethod
    def of_source(cls, binding: Binding, chosen: Sequence[Atoms]) -> Self:
        """What a source rank holds, once each, and converted as on its way into the target."""

        def held(atoms: Atoms, row: int) -> Sequence[Sequence[BoxView]]:
            tensor, box = atoms.plan.tensors[atoms.plan.tensor[row]], atoms.plan.box(row)
            dtypes = (tensor.source_dtype, tensor.wire_dtype, tensor.target_dtype)
            casts = [torch_dtype(dtype) for before, dtype in pairwise(dtypes) if dtype != before]
            return [_disjoint(binding.cover(tensor.name, box), tensor.shape, casts)]

        rank = binding.manifest.rank
        return cls([atoms for atoms in chosen if rank in atoms.holders], held)

    @classmethod
    def of_target(cls, binding: Binding, chosen: Sequence[Atoms]) -> Self:
        """What a target rank serves: each copy of what it wants."""

        def served(atoms: Atoms, row: int) -> Sequence[Sequence[BoxView]]:
            tensor, box = atoms.plan.tensors[atoms.plan.tensor[row]], atoms.plan.box(row)
            return [_disjoint(parts, tensor.shape) for parts in _copies(binding.parts(tensor.name, box), box)]

        rank = binding.manifest.rank
        return cls([atoms for atoms in chosen if rank in atoms.wanters], served)

    def checksums(self, is_over: Callable[[], bool] = lambda: False) -> SideSums:
        """As the memory is now; see `Checksums.compute`."""
        sums = self._checksums.compute(is_over)
        return {number: [[sums[copy] for copy in copies] for copies in found] for number, found in self._copies.items()}


def compare(
    channel: ControlChannel,
    chosen: Sequence[Atoms],
    *,
    held: SideSums | None,
    served: BoxesHere | None,
    sources: Sequence[int],
    topic: str,
    deadline: Deadline,
) -> Findings:
    """Compares this rank's part of the chosen boxes; every rank that has a side calls it, and none waits for targets.

    A box of which a target lacks a part (the engine keeps its own layout of it) is left out and listed.

    Args:
        channel: this rank's.
        chosen: the same on every rank.
        held: what this rank's source has; None where it is none.
        served: what its target has; likewise.
        sources: the ranks with sources.
        topic: a name that no other comparison on this channel has.
        deadline: until when the sources must have answered.
    """
    rank, found = channel.rank, Findings()
    own = {number: [copies[0] for copies in boxes] for number, boxes in (held or {}).items()}
    if held is not None:
        first = [atoms for atoms in chosen if atoms.holders[0] == rank]
        boxes = {str(atoms.number): own[atoms.number] for atoms in first}
        sums = {str(atoms.number): weighted(atoms.rows, own[atoms.number]) for atoms in first}
        # Whoever finds a difference reads the boxes too.
        channel.publish_all({f"boxes/{topic}": boxes, f"checksums/{topic}": sums})
    there = {} if served is None else served.checksums()
    parts = channel.collect(f"checksums/{topic}", sources, deadline=deadline)
    totals = {int(number): total for part in parts for number, total in part.items()}

    def in_detail(atoms: Atoms) -> list[int]:
        [boxes] = channel.collect(f"boxes/{topic}", (atoms.holders[0],), deadline=deadline)
        found_there: list[int] = boxes[str(atoms.number)]
        return found_there

    for atoms in chosen:
        total = totals[atoms.number]
        mine = own.get(atoms.number)
        if mine is not None and atoms.holders[0] != rank and weighted(atoms.rows, mine) != total:
            found.add_differences("replica", atoms, [[checksum] for checksum in mine], in_detail(atoms), rank)
        if (copies := there.get(atoms.number)) is not None:
            found.add_compared(atoms, copies, rank)
            if not _add_up(atoms, copies, total):
                found.add_differences("target", atoms, copies, in_detail(atoms), rank)
    return found


def compare_derived(target: Target, rank: int, *, every: int = 1, first: int = 0) -> Findings:
    """Compares what a target derives from its weights with what they give now: each `every`-th, from `first` on."""
    found = Findings()
    for derived in islice(target.derived(), first % every, None, every):
        found.boxes += 1
        found.nbytes += derived.served.nbytes
        if _whole_checksum(derived.served) != _whole_checksum(derived.recomputed):
            found.differing += 1
            box = str(Box.full(derived.served.shape))
            found.first.append(Difference("derived", derived.name, box, -1, rank))
    return found


@dataclass(slots=True)
class Findings:
    """What one rank has found so far; fields as in `Comparison`."""

    boxes: int = 0
    nbytes: int = 0
    differing: int = 0
    first: list[Difference] = field(default_factory=list)
    unverified: dict[str, str] = field(default_factory=dict)

    def add_compared(self, atoms: Atoms, copies: Sequence[Sequence[int]], rank: int) -> None:
        """Counts the boxes that were there, and lists the tensors of the others."""
        for row, found in zip(atoms.rows, copies, strict=True):
            tensor = atoms.plan.tensors[atoms.plan.tensor[row]]
            if found:
                self.boxes += 1
                self.nbytes += atoms.plan.box(row).numel * torch_dtype(tensor.target_dtype).itemsize
            else:
                self.unverified[tensor.name] = f"rank {rank}'s engine keeps its own layout of a part of it"

    def add_differences(
        self,
        what: Literal["replica", "target"],
        atoms: Atoms,
        copies: Sequence[Sequence[int]],
        expected: Sequence[int],
        rank: int,
    ) -> None:
        """Of boxes whose sum differs, or some of which are missing: those that differ one by one."""
        for row, found, checksum in zip(atoms.rows, copies, expected, strict=True):
            if any(copy != checksum for copy in found):
                self.differing += 1
                name, box = atoms.plan.name(row), str(atoms.plan.box(row))
                self.first.append(Difference(what, name, box, atoms.holders[0], rank))

    def comparison(self, version: int, unverified: Mapping[str, str]) -> Comparison:
        """As a value."""
        first = sorted(self.first, key=Difference.precedence)[:_LISTED]
        return Comparison(
            version, self.boxes, self.nbytes, self.differing, tuple(first), {**unverified, **self.unverified}
        )


def _add_up(atoms: Atoms, copies: Sequence[Sequence[int]], total: int) -> bool:
    """Whether all boxes are there and every copy of them has the sum."""
    if not all(copies):
        return False
    most = max(map(len, copies))
    nth = ([found[min(copy, len(found) - 1)] for found in copies] for copy in range(most))
    return all(weighted(atoms.rows, sums) == total for sums in nth)


def _copies(parts: Sequence[Part], box: Box) -> list[list[Part]]:
    """A target may keep a box twice (tied weights): each whole copy, and what is left if it makes up another."""
    whole = [part for part in parts if part.box == box]
    rest = [part for part in parts if part.box != box]
    complete = sum(part.box.numel for part in rest) >= box.numel
    return [[part] for part in whole] + ([rest] if complete else [])


def _disjoint(parts: Sequence[Part], shape: Sequence[int], casts: Sequence[torch.dtype] = ()) -> list[BoxView]:
    """Parts that overlap hold equal values, which must count once: of each, what those before leave."""
    found: list[BoxView] = []
    for part in parts:
        rest = [part.box]
        for before in found:
            rest = [left for box in rest for left in box.minus(before.box)]
        found += [BoxView(box_view(part.view, part.box, box), box, shape, casts) for box in rest]
    return found


def _whole_checksum(tensor: torch.Tensor) -> tuple[int, torch.Size, torch.dtype]:
    return box_checksum(tensor, Box.full(tensor.shape), tensor.shape), tensor.shape, tensor.dtype
