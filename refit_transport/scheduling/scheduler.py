"""From a transfer plan to a schedule, in named passes: choose senders, pack into messages, order."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from refit_transport.planning.plan import Parcels, TransferPlan
from refit_transport.scheduling.schedule import Legs, Messages, Schedule
from refit_transport.scheduling.topology import Topology

ALIGNMENT = 16


def aligned(nbytes: int) -> int:
    """The next multiple of the alignment of parcels in messages and staging.

    >>> aligned(0), aligned(1), aligned(16)
    (0, 16, 16)
    """
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Passes:
    """Off switches of the scheduling passes.

    local: a holder inside the target's own domain is preferred, so the box never crosses the network.
    deduplicate: a box that several ranks of a domain want enters the domain once and is passed on inside.
    balance: among equal holders the one whose domain, then itself, has sent least is taken; else the first.
    """

    local: bool = True
    deduplicate: bool = True
    balance: bool = True


@dataclass(frozen=True, slots=True)
class Leg:
    """One hop of one parcel, before it has a place in a message.

    A relayed leg takes the parcel from the sender's target piece; `parent` is the leg that brought it there.
    """

    parcel: int
    sender: int
    sender_piece: int
    receiver: int
    receiver_piece: int
    relayed: bool = False
    parent: int | None = None


@dataclass(frozen=True, slots=True)
class Draft:
    """A message under construction: its legs, its sort key, and the drafts that must have arrived at its sender.

    Keys order all messages; a draft's key must be above those of its parents.
    """

    legs: tuple[int, ...]
    key: tuple[int, ...]
    parents: tuple[int, ...] = ()


def build_schedule(
    plan: TransferPlan, topology: Topology, *, bucket_bytes: int, passes: Passes | None = None
) -> Schedule:
    """Schedules a plan in messages of at most `bucket_bytes` (one element at least); pure and deterministic.

    TP4 -> TP2 x DP2 with both replicas in one domain: each element enters that domain once.

    >>> from refit_transport.layout.layout import Layout, manifest_from_layouts
    >>> from refit_transport.layout.mesh import Mesh
    >>> from refit_transport.layout.placement import Replicate, Shard
    >>> from refit_transport.planning.planner import plan_transfer
    >>> train = Layout((8, 8), Mesh.of(tp=4), (Shard(0),))
    >>> serve = Layout((8, 8), Mesh.of(first_rank=4, dp=2, tp=2), (Replicate(), Shard(0)))
    >>> source = manifest_from_layouts("source", {"w": train}, dtype="uint8")
    >>> target = manifest_from_layouts("target", {"w": serve}, dtype="uint8")
    >>> topology = Topology.of(((0, 1, 2, 3), (4, 5, 6, 7)))
    >>> schedule = build_schedule(plan_transfer(source, target), topology, bucket_bytes=1024)
    >>> schedule.check(source, target)
    >>> schedule.traffic().network, schedule.traffic().local
    (64, 64)
    >>> schedule.traffic().network_received
    {4: 16, 6: 16, 5: 16, 7: 16}
    """
    plan = plan.split(max_bytes=bucket_bytes)
    nbytes = plan.nbytes().tolist()
    legs = choose_senders(plan, topology, passes or Passes())
    drafts = pack(legs, nbytes, bucket_bytes)
    return assemble(Parcels(plan.tensors, plan.tensor, plan.lo, plan.hi), nbytes, legs, drafts, topology)


def choose_senders(plan: TransferPlan, topology: Topology, passes: Passes) -> list[Leg]:
    """The passes local, deduplicate and balance: a leg per atom and wanter."""
    chooser = _Chooser(topology, passes)
    for atom, nbytes in enumerate(plan.nbytes().tolist()):
        chooser.add(atom, nbytes, list(plan.holders.of(atom)), list(plan.wanters.of(atom)))
    return chooser.legs


class _Chooser:
    """Greedy choice in atom order, on the bytes that each rank and domain already has to send or receive."""

    def __init__(self, topology: Topology, passes: Passes) -> None:
        self.legs: list[Leg] = []
        self._passes = passes
        self._domain = {rank: index for index, ranks in enumerate(topology.domains) for rank in ranks}
        self._topology = topology
        self._sent: dict[int, int] = defaultdict(int)
        self._domain_sent: dict[int, int] = defaultdict(int)
        self._received: dict[int, int] = defaultdict(int)

    def add(self, atom: int, nbytes: int, holders: list[tuple[int, int]], wanters: list[tuple[int, int]]) -> None:
        domains: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for wanter in wanters:
            domains[self._domain_of(wanter[0])].append(wanter)
        for domain, wants in domains.items():
            near = [holder for holder in holders if self._domain_of(holder[0]) == domain]
            if self._passes.local and near:
                for want in wants:
                    own = [holder for holder in near if holder[0] == want[0]]
                    self._send(atom, nbytes, self._sender(own or near), want)
            elif self._passes.deduplicate:
                self._enter_once(atom, nbytes, self._sender(holders), wants)
            else:
                for want in wants:
                    self._send(atom, nbytes, self._sender(holders), want)

    def _domain_of(self, rank: int) -> int:
        return self._domain[rank] if rank in self._domain else self._topology.domain(rank)

    def _sender(self, holders: list[tuple[int, int]]) -> tuple[int, int]:
        if not self._passes.balance:
            return holders[0]
        return min(
            holders,
            key=lambda holder: (self._domain_sent[self._domain_of(holder[0])], self._sent[holder[0]], holder),
        )

    def _enter_once(self, atom: int, nbytes: int, holder: tuple[int, int], wants: list[tuple[int, int]]) -> None:
        first = min(wants, key=lambda want: (self._received[want[0]], want))
        entry = len(self.legs)
        self._send(atom, nbytes, holder, first)
        for want in wants:
            if want != first:
                self.legs.append(Leg(atom, *first, *want, relayed=True, parent=entry))
                if want[0] != first[0]:
                    self._sent[first[0]] += nbytes

    def _send(self, atom: int, nbytes: int, holder: tuple[int, int], want: tuple[int, int]) -> None:
        self.legs.append(Leg(atom, *holder, *want))
        if holder[0] == want[0]:
            return
        self._sent[holder[0]] += nbytes
        if self._domain_of(holder[0]) != self._domain_of(want[0]):
            self._domain_sent[self._domain_of(holder[0])] += nbytes
            self._received[want[0]] += nbytes


def pack(legs: list[Leg], nbytes: list[int], bucket_bytes: int) -> list[Draft]:
    """The passes pack and order: fills messages per (sender, receiver), then repeats each inside the domain.

    The k-th messages of all pairs come before the (k + 1)-th, so every sender serves its receivers in turn; a message
    that is passed on follows the one that brings it.
    """
    drafts: list[Draft] = []
    open_legs: dict[tuple[int, int], list[int]] = {}
    filled: dict[tuple[int, int], int] = defaultdict(int)
    count: dict[tuple[int, int], int] = defaultdict(int)
    draft_of: dict[int, int] = {}

    def close(pair: tuple[int, int]) -> None:
        for leg in open_legs[pair]:
            draft_of[leg] = len(drafts)
        drafts.append(Draft(tuple(open_legs.pop(pair)), (count[pair], 0, *pair)))
        count[pair] += 1
        filled[pair] = 0

    for index, leg in enumerate(legs):
        if leg.parent is not None:
            continue
        pair = (leg.sender, leg.receiver)
        if pair in open_legs and aligned(filled[pair]) + nbytes[leg.parcel] > bucket_bytes:
            close(pair)
        open_legs.setdefault(pair, []).append(index)
        filled[pair] = aligned(filled[pair]) + nbytes[leg.parcel]
    for pair in sorted(open_legs):
        close(pair)

    relays: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, leg in enumerate(legs):
        if leg.parent is not None:
            relays[draft_of[leg.parent], leg.receiver].append(index)
    for (parent, receiver), members in relays.items():
        sender = legs[members[0]].sender
        drafts.append(Draft(tuple(members), (drafts[parent].key[0], 1, sender, receiver, parent), (parent,)))
    return drafts


def assemble(parcels: Parcels, nbytes: list[int], legs: list[Leg], drafts: list[Draft], topology: Topology) -> Schedule:
    """Numbers the drafts by their keys and lays the parcels out in each message, aligned to 16 bytes."""
    order = sorted(range(len(drafts)), key=lambda draft: drafts[draft].key)
    number = {draft: message for message, draft in enumerate(order)}
    rows: list[tuple[int, ...]] = []
    heads: list[tuple[int, ...]] = []
    for message, draft in enumerate(order):
        end = payload = 0
        members = drafts[draft].legs
        for index in members:
            leg = legs[index]
            ends = (leg.sender, leg.sender_piece, leg.relayed, leg.receiver, leg.receiver_piece)
            offset = aligned(end)
            rows.append((leg.parcel, *ends, message, offset))
            payload += nbytes[leg.parcel]
            end = offset + nbytes[leg.parcel]
        sender, receiver = legs[members[0]].sender, legs[members[0]].receiver
        after = max((number[parent] for parent in drafts[draft].parents), default=-1)
        heads.append((sender, receiver, end, payload, after, topology.is_local(sender, receiver)))
    cols = np.array(rows, dtype=np.int64).reshape(-1, 8).T
    head = np.array(heads, dtype=np.int64).reshape(-1, 6).T
    return Schedule(
        parcels,
        Legs(cols[0], cols[1], cols[2], cols[3].astype(bool), cols[4], cols[5], cols[6], cols[7]),
        Messages(head[0], head[1], head[2], head[3], head[4], head[5].astype(bool)),
    )
