"""The proof that a schedule delivers a plan: see `Schedule.check`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import numpy as np
import numpy.typing as npt

from refit_transport.errors import PlanError
from refit_transport.planning.overlap import are_disjoint
from refit_transport.planning.plan import Ints, TransferPlan

if TYPE_CHECKING:
    from refit_transport.scheduling.schedule import Schedule


def prove(schedule: Schedule, plan: TransferPlan) -> None:
    """Raises PlanError unless the schedule delivers every atom of the plan to each of its wanters, once."""
    if schedule.parcels.tensors != plan.tensors:
        raise PlanError("", "", -1, "the schedule is of other tensors than the plan")
    _prove_structure(schedule)
    _prove_parcels(schedule, plan)
    _prove_senders(schedule, plan)
    _prove_delivery(schedule, plan)


def _fail(schedule: Schedule, parcel: int, rank: int, reason: str) -> NoReturn:
    raise PlanError(schedule.parcels.name(parcel), str(schedule.parcels.box(parcel)), rank, reason)


def _prove_structure(schedule: Schedule) -> None:
    """Rows are grouped by payload; a hop's parent is an earlier hop of its payload that ends where it begins."""
    payloads, hops = schedule.payloads, schedule.hops
    for first, rows, what in (
        (payloads.first_parcel, len(schedule.parcels), "parcels"),
        (payloads.first_hop, len(hops), "hops"),
    ):
        if len(first) != len(payloads) + 1 or first[0] != 0 or first[-1] != rows or np.any(np.diff(first) < 1):
            raise PlanError("", "", -1, f"{what} are not grouped by payload")
    if not np.array_equal(hops.payload, np.repeat(np.arange(len(payloads)), np.diff(payloads.first_hop))):
        raise PlanError("", "", -1, "hops are not ordered by payload")
    children = np.flatnonzero(hops.parent >= 0)
    parents = hops.parent[children]
    wrong = (parents >= children) | (hops.payload[parents % max(1, len(hops))] != hops.payload[children])
    wrong |= hops.receiver[parents % max(1, len(hops))] != hops.sender[children]
    if wrong.any():
        hop = int(children[np.flatnonzero(wrong)[0]])
        parcel = int(payloads.first_parcel[hops.payload[hop]])
        _fail(schedule, parcel, int(hops.sender[hop]), "is passed on before it has arrived")


def _prove_parcels(schedule: Schedule, plan: TransferPlan) -> None:
    """Parcels lie in their atoms, and in each payload one after the other inside its size; `nbytes` is their sum."""
    parcels, payloads = schedule.parcels, schedule.payloads
    atom = parcels.atom
    inside = (parcels.lo >= plan.lo[atom]).all(axis=1) & (parcels.hi <= plan.hi[atom]).all(axis=1)
    inside &= (parcels.tensor == plan.tensor[atom]) & (parcels.lo < parcels.hi).all(axis=1)
    if not inside.all():
        _fail(schedule, int(np.flatnonzero(~inside)[0]), -1, "lies outside the plan's atom")
    sizes = parcels.nbytes()
    payload = np.repeat(np.arange(len(payloads)), np.diff(payloads.first_parcel))
    ends = parcels.offset + sizes
    begins = np.zeros(len(parcels), dtype=np.int64)
    begins[1:] = np.where(payload[1:] == payload[:-1], ends[:-1], 0)
    wrong = (parcels.offset < begins) | (ends > payloads.size[payload])
    if wrong.any():
        parcel = int(np.flatnonzero(wrong)[0])
        where = (
            f"lies at {parcels.offset[parcel]} in payload {payload[parcel]}, over another parcel or the payload's end"
        )
        _fail(schedule, parcel, -1, where)
    total = np.add.reduceat(sizes, payloads.first_parcel[:-1]) if len(payloads) else sizes
    if not np.array_equal(total, payloads.nbytes):
        bad = int(np.flatnonzero(total != payloads.nbytes)[0])
        parcel = int(payloads.first_parcel[bad])
        _fail(schedule, parcel, -1, f"payload {bad} declares {payloads.nbytes[bad]} bytes and has {total[bad]}")


def _prove_senders(schedule: Schedule, plan: TransferPlan) -> None:
    """A payload has one root, which holds all its parcels; it reaches no rank twice."""
    hops, payloads, parcels = schedule.hops, schedule.payloads, schedule.parcels
    root = hops.sender[payloads.first_hop[:-1]]
    first = hops.parent < 0
    if np.any(hops.sender[first] != root[hops.payload[first]]):
        hop = int(np.flatnonzero(first & (hops.sender != root[hops.payload]))[0])
        parcel = int(payloads.first_parcel[hops.payload[hop]])
        _fail(schedule, parcel, int(hops.sender[hop]), "is packed by two ranks")
    pairs = np.stack((np.repeat(root, np.diff(payloads.first_parcel)), plan.holders[parcels.atom]), axis=1)
    distinct, example = np.unique(pairs, axis=0, return_index=True)
    for (rank, holders), parcel in zip(distinct.tolist(), example.tolist(), strict=True):
        if rank not in plan.rank_sets[holders]:
            _fail(schedule, parcel, rank, "is not held by the rank that packs it")
    order = np.lexsort((hops.receiver, hops.payload))
    payload, receiver = hops.payload[order], hops.receiver[order]
    again = np.flatnonzero((payload[1:] == payload[:-1]) & (receiver[1:] == receiver[:-1]))
    if len(again):
        parcel = int(payloads.first_parcel[payload[again[0]]])
        _fail(schedule, parcel, int(receiver[again[0]]), "arrives twice")


def _prove_delivery(schedule: Schedule, plan: TransferPlan) -> None:
    """For each atom and wanter, the parcels that arrive are disjoint and make up the atom."""
    parcels, payloads, hops = schedule.parcels, schedule.payloads, schedule.hops
    # One row per parcel and receiver.
    parcel_counts, hop_counts = np.diff(payloads.first_parcel), np.diff(payloads.first_hop)
    payload = np.repeat(np.arange(len(payloads)), parcel_counts)
    parcel = np.repeat(np.arange(len(parcels)), hop_counts[payload])
    nth = np.arange(len(parcel)) - np.repeat(np.cumsum(hop_counts[payload]) - hop_counts[payload], hop_counts[payload])
    receiver = hops.receiver[payloads.first_hop[payload[parcel]] + nth]
    most = int(max(receiver.max(initial=0), max((max(ranks, default=0) for ranks in plan.rank_sets), default=0))) + 1
    arrived = parcels.atom[parcel] * most + receiver
    expected, volume = _expected(plan, most)
    found, inverse = np.unique(arrived, return_inverse=True)
    total = np.zeros(len(found), dtype=np.int64)
    np.add.at(total, inverse.reshape(-1), parcels.elements()[parcel])
    place = np.minimum(np.searchsorted(found, expected), max(0, len(found) - 1))
    got = np.where(found[place] == expected, total[place], 0) if len(found) else np.zeros_like(expected)
    if np.any(got != volume):
        bad = int(np.flatnonzero(got != volume)[0])
        atom, rank = divmod(int(expected[bad]), most)
        reason = f"{got[bad]} of {volume[bad]} elements arrive"
        raise PlanError(plan.name(atom), str(plan.box(atom)), rank, f"is not delivered exactly once: {reason}")
    _prove_disjoint(schedule, parcel, arrived, most)


def _expected(plan: TransferPlan, most: int) -> tuple[Ints, Ints]:
    """A key per atom and wanter, ascending, and the atom's elements."""
    counts = np.array([len(ranks) for ranks in plan.rank_sets], dtype=np.int64)[plan.wanters]
    atom = np.repeat(np.arange(len(plan)), counts)
    flat = [np.array(ranks, dtype=np.int64) for ranks in plan.rank_sets]
    wanter = np.concatenate([np.zeros(0, dtype=np.int64), *(flat[index] for index in plan.wanters.tolist())])
    return atom * most + wanter, plan.elements()[atom]


def _prove_disjoint(schedule: Schedule, parcel: Ints, arrived: Ints, most: int) -> None:
    """No two parcels of one atom that reach the same rank share an element."""
    parcels = schedule.parcels
    order = np.lexsort((*(parcels.lo[parcel, dim] for dim in reversed(range(parcels.lo.shape[1]))), arrived))
    key, row = arrived[order], parcel[order]
    together = np.flatnonzero(key[1:] == key[:-1])
    lo, hi = parcels.lo, parcels.hi
    before, after = row[together], row[together + 1]
    # In lexicographic order, neighbours that don't touch in the dim where they differ first leave no overlap at all
    # when they agree in every other dim; whatever is cut otherwise is looked at pair by pair.
    differs = (lo[before] != lo[after]) | (hi[before] != hi[after])
    dim = np.argmax(differs, axis=1)
    each = np.arange(len(together))
    simple = (differs.sum(axis=1) == 1) & (hi[before][each, dim] <= lo[after][each, dim])
    for bad in np.unique(key[together[~simple]]).tolist():
        members = row[key == bad]
        if not are_disjoint(_boxes(schedule, members)):
            _fail(schedule, int(members[0]), bad % most, "is not delivered exactly once: elements arrive twice")


def _boxes(schedule: Schedule, rows: Ints) -> npt.NDArray[np.int64]:
    return np.stack((schedule.parcels.lo[rows], schedule.parcels.hi[rows]), axis=2)
