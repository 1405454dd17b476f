"""The schedule: the payloads, what is in each, and which hops it takes, in one order that all ranks follow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refit_transport.layout.wire import digest
from refit_transport.planning.plan import Boxed, Ints, TransferPlan
from refit_transport.scheduling.proof import prove

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Parcels(Boxed):
    """Boxes as they travel, ordered by payload, then by place in it.

    Columns: `atom`, the row of the plan that the box is in, and `offset`, in bytes from the payload's beginning.
    """

    atom: Ints
    offset: Ints


@dataclass(frozen=True, slots=True)
class Payloads:
    """What is packed once and sent as it is, in the order in which every rank takes part in them.

    `size` is the bytes of all parcels and the gaps between them, `nbytes` those of the parcels alone. The parcels of
    payload i are rows `first_parcel[i]:first_parcel[i + 1]`, its hops rows `first_hop[i]:first_hop[i + 1]`.
    """

    size: Ints
    nbytes: Ints
    first_parcel: Ints
    first_hop: Ints

    def __len__(self) -> int:
        return len(self.size)


@dataclass(frozen=True, slots=True)
class Hops:
    """One row per transmission, ordered by payload, parents before children.

    `parent` is the row of the hop that brings the payload to `sender`, -1 where the sender packs it; `local` ones stay
    inside a topology domain. A hop from a rank to itself is a copy.
    """

    payload: Ints
    sender: Ints
    receiver: Ints
    parent: Ints
    local: Flags

    def __len__(self) -> int:
        return len(self.sender)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Payload bytes by rank: what a schedule moves over the network, inside domains, and by local copies."""

    network_sent: dict[int, int]
    network_received: dict[int, int]
    local_sent: dict[int, int]
    local_received: dict[int, int]
    copied: dict[int, int]

    @property
    def network(self) -> int:
        return sum(self.network_sent.values())

    @property
    def local(self) -> int:
        return sum(self.local_sent.values())


def total_traffic(parts: Iterable[Traffic]) -> Traffic:
    """The sum of several schedules' traffic, by rank."""
    totals: dict[str, dict[int, int]] = {name: defaultdict(int) for name in Traffic.__slots__}
    for part in parts:
        for name, total in totals.items():
            for rank, nbytes in getattr(part, name).items():
                total[rank] += nbytes
    return Traffic(**{name: dict(total) for name, total in totals.items()})


@dataclass(frozen=True, slots=True)
class Schedule:
    """A complete order of payloads and hops; equal on every rank.

    A rank takes part in payloads in ascending order. Whatever a rank waits for belongs to the payload it is at or to an
    earlier one, so the smallest unfinished payload can always go on: nothing can deadlock.
    """

    parcels: Parcels
    payloads: Payloads
    hops: Hops

    def digest(self) -> str:
        """Equal on every rank that computed the same schedule."""
        columns = [getattr(part, name) for part in (self.payloads, self.hops) for name in part.__slots__]
        columns += [self.parcels.tensor, self.parcels.lo, self.parcels.hi, self.parcels.atom, self.parcels.offset]
        return digest(repr(self.parcels.tensors), *(np.ascontiguousarray(column).tobytes() for column in columns))

    def traffic(self) -> Traffic:
        """Payload bytes per rank."""
        hops = self.hops
        nbytes = self.payloads.nbytes[hops.payload]
        copies = hops.sender == hops.receiver
        local, network = hops.local & ~copies, ~hops.local & ~copies
        return Traffic(
            sums(hops.sender, nbytes, network),
            sums(hops.receiver, nbytes, network),
            sums(hops.sender, nbytes, local),
            sums(hops.receiver, nbytes, local),
            sums(hops.receiver, nbytes, copies),
        )

    def check(self, plan: TransferPlan) -> None:
        """Proves delivery: every wanter of every atom of the plan gets each of its elements exactly once.

        Every payload's root must hold all that is in it, every other sender must have received the payload before, and
        parcels must lie inside their atoms and one after the other inside their payloads.

        Raises:
            PlanError: naming tensor, box and rank.
        """
        prove(self, plan)


def join(schedules: Sequence[Schedule]) -> Schedule:
    """One schedule of several, one after the other; its atoms are numbered per part, so only the parts can be checked.

    Raises:
        ValueError: there are none.
    """
    if not schedules:
        raise ValueError("at least one schedule is needed to join")
    dims = max(schedule.parcels.lo.shape[1] for schedule in schedules)
    tensors = _starts([len(schedule.parcels.tensors) for schedule in schedules])
    parcels = _starts([len(schedule.parcels) for schedule in schedules])
    payloads = _starts([len(schedule.payloads) for schedule in schedules])
    hops = _starts([len(schedule.hops) for schedule in schedules])
    return Schedule(
        Parcels(
            tuple(tensor for schedule in schedules for tensor in schedule.parcels.tensors),
            np.concatenate([s.parcels.tensor + first for s, first in zip(schedules, tensors, strict=False)]),
            np.concatenate([_widened(s.parcels.lo, dims, 0) for s in schedules]),
            np.concatenate([_widened(s.parcels.hi, dims, 1) for s in schedules]),
            np.concatenate([s.parcels.atom for s in schedules]),
            np.concatenate([s.parcels.offset for s in schedules]),
        ),
        Payloads(
            np.concatenate([s.payloads.size for s in schedules]),
            np.concatenate([s.payloads.nbytes for s in schedules]),
            _joined_starts([s.payloads.first_parcel for s in schedules], parcels),
            _joined_starts([s.payloads.first_hop for s in schedules], hops),
        ),
        Hops(
            np.concatenate([s.hops.payload + first for s, first in zip(schedules, payloads, strict=False)]),
            np.concatenate([s.hops.sender for s in schedules]),
            np.concatenate([s.hops.receiver for s in schedules]),
            np.concatenate(
                [np.where(s.hops.parent < 0, -1, s.hops.parent + f) for s, f in zip(schedules, hops, strict=False)]
            ),
            np.concatenate([s.hops.local for s in schedules]),
        ),
    )


def _starts(counts: Sequence[int]) -> list[int]:
    return [sum(counts[:number]) for number in range(len(counts) + 1)]


def _joined_starts(parts: Sequence[Ints], starts: Sequence[int]) -> Ints:
    moved = [part[:-1] + first for part, first in zip(parts, starts, strict=False)]
    return np.concatenate([*moved, np.array(starts[-1:], dtype=np.int64)])


def _widened(corners: Ints, dims: int, padding: int) -> Ints:
    return np.pad(corners, ((0, 0), (0, dims - corners.shape[1])), constant_values=padding)


def sums(keys: Ints, values: Ints, chosen: Flags) -> dict[int, int]:
    """The chosen rows' values added up by key, keys ascending.

    >>> sums(np.array([3, 1, 3]), np.array([5, 7, 9]), np.array([True, False, True]))
    {3: 14}
    """
    found, inverse = np.unique(keys[chosen], return_inverse=True)
    totals = np.zeros(len(found), dtype=np.int64)
    np.add.at(totals, inverse.reshape(-1), values[chosen])
    return dict(zip(found.tolist(), totals.tolist(), strict=True))
