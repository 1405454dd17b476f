"""Passes 2 to 4: which holder sends, which rank of a domain a byte enters through, and who passes it on to whom.

The quantity to minimise is the busiest NIC's time. What the targets receive is given (each domain its bytes once), so
the choice is about senders: every byte must leave some holder once; further copies may come from holders too, or from
the rank where the first copy entered ("forward"). Holders are preferred while their NICs have time to spare within what
the busiest receiver needs anyway, because a forwarded byte arrives later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from refit_transport.scheduling.demands import Demand, Entry
from refit_transport.scheduling.loads import Loads
from refit_transport.scheduling.routes import Flow, Hop, Route, Share
from refit_transport.scheduling.topology import Topology

# A demand is divided over several ways in steps of no less than this.
SMALLEST_STRIPE = 64 << 10
_STEPS = 2048
_FINEST_STEPS = 256


@dataclass(frozen=True, slots=True)
class Choices:
    """Which of the passes are on; see `scheduler.PASSES`."""

    balance: bool
    stripe: bool
    forward: bool
    relay: bool


@dataclass(frozen=True, slots=True)
class _Step:
    """A part of one network demand that goes one way: its first copy, and the entries that still need one."""

    demand: int
    nbytes: float
    sender: int
    doors: tuple[int, ...]
    first: int


def choose_routes(demands: Sequence[Demand], topology: Topology, choices: Choices, *, bucket_bytes: int) -> list[Flow]:
    """The flows of all demands, in their order; pure and deterministic."""
    chooser = _Chooser(demands, topology, choices, bucket_bytes)
    steps = [step for index, demand in enumerate(demands) for step in chooser.first_copies(index, demand)]
    found: list[dict[tuple[Route, ...], int]] = [chooser.inside(demand) for demand in demands]
    for step in steps:
        routes = chooser.further_copies(step, demands[step.demand])
        found[step.demand][routes] = found[step.demand].get(routes, 0) + 1
    return [
        Flow(demand.atoms, tuple(Share(routes, weight) for routes, weight in shares.items()))
        for demand, shares in zip(demands, found, strict=True)
    ]


class _Chooser:
    """Greedy choice on the loads so far, first copies of everything before further ones."""

    def __init__(self, demands: Sequence[Demand], topology: Topology, choices: Choices, bucket_bytes: int) -> None:
        self._topology, self._choices = topology, choices
        self._loads = Loads(topology)
        network = [demand for demand in demands if demand.kind == "network"]
        total = sum(demand.nbytes for demand in network)
        self._step = max(SMALLEST_STRIPE, min(bucket_bytes, total / _FINEST_STEPS), total / _STEPS)
        self._limit = _busiest_receiver(network, topology)
        self._forwards: dict[int, float] = {}

    def first_copies(self, index: int, demand: Demand) -> list[_Step]:
        """Divides a network demand into steps, and gives each a holder and the ranks through which it enters."""
        if demand.kind != "network":
            return []
        count = 1
        if self._choices.stripe and self._choices.balance:
            count = max(1, min(_STEPS, round(demand.nbytes / self._step)))
        nbytes = demand.nbytes / count
        steps = []
        for _ in range(count):
            doors = tuple(self._door(entry, demand.holders, nbytes) for entry in demand.entries)
            first = min(range(len(doors)), key=lambda number: (self._forwards.get(doors[number], 0.0), number))
            self._forwards[doors[first]] = self._forwards.get(doors[first], 0.0) + nbytes
            sender = self._holder(demand.holders, nbytes)
            self._loads.send(sender, doors[first], nbytes)
            steps.append(_Step(index, nbytes, sender, doors, first))
        return steps

    def further_copies(self, step: _Step, demand: Demand) -> tuple[Route, ...]:
        """Chooses who sends a step's other copies, a holder or the rank where the first entered: a route per root."""
        entered = step.doors[step.first]
        senders = dict.fromkeys(range(len(step.doors)), step.sender)
        for number, door in enumerate(step.doors):
            if number != step.first:
                senders[number] = self._further_sender(step, demand)
                self._loads.send(senders[number], door, step.nbytes)
        roots = dict.fromkeys((step.sender, *(sender for sender in senders.values() if sender != entered)))
        return tuple(_route(root, step, demand.entries, senders) for root in roots)

    def inside(self, demand: Demand) -> dict[tuple[Route, ...], int]:
        """Copies, and what is served inside one domain: each holder in turn serves all wanters."""
        if demand.kind == "network":
            return {}
        (entry,) = demand.entries
        if demand.kind == "copy":
            return {(Route((Hop(entry.wanters[0], entry.wanters[0]),)),): 1}
        count = 1
        if self._choices.stripe and self._choices.balance:
            count = max(1, min(len(demand.holders), demand.nbytes // SMALLEST_STRIPE))
        shares: dict[tuple[Route, ...], int] = {}
        for _ in range(count):
            sender = demand.holders[0]
            if self._choices.balance:
                sender = min(demand.holders, key=lambda rank: (self._loads.local_out[rank], rank))
            self._loads.local_out[sender] += demand.nbytes / count * len(entry.wanters)
            routes = (Route(tuple(Hop(sender, wanter) for wanter in entry.wanters)),)
            shares[routes] = shares.get(routes, 0) + 1
        return shares

    def _door(self, entry: Entry, holders: Sequence[int], nbytes: float) -> int:
        """The rank through which a step enters a domain: a wanter, or with "relay" another rank with an idle NIC.

        A holder is no relay: where it stands in the same domain and yet mustn't serve it ("local" is off), bytes that
        it hands to itself would go nowhere.
        """
        door = min(entry.wanters, key=self._entry_order)
        if self._choices.relay and self._loads.inn(door) + self._loads.seconds(door, nbytes) > self._limit:
            door = min(
                (rank for rank in self._topology.domains[entry.domain] if rank not in holders),
                key=lambda rank: (self._loads.inn(rank), rank not in entry.wanters, self._loads.entered[rank], rank),
            )
        self._loads.enter(door, nbytes)
        return door

    def _entry_order(self, rank: int) -> tuple[float, float, int]:
        return self._loads.inn(rank), self._loads.entered[rank], rank

    def _holder(self, holders: Sequence[int], nbytes: float) -> int:
        """The holder whose NIC has sent least, then the one that has packed least."""
        if not self._choices.balance:
            return holders[0]
        sender = min(holders, key=lambda rank: (self._loads.out(rank), self._loads.packed[rank], rank))
        self._loads.packed[sender] += nbytes
        return sender

    def _further_sender(self, step: _Step, demand: Demand) -> int:
        if not self._choices.balance:
            return demand.holders[0]
        loads, nbytes = self._loads, step.nbytes
        # The first copy's sender has the payload packed; another holder would pack it again.
        holder = min(demand.holders, key=lambda rank: (loads.out(rank), rank != step.sender, rank))
        entered = step.doors[step.first]
        within_limit = loads.out(holder) + loads.seconds(holder, nbytes) <= self._limit * (1 + 1e-9)
        if not self._choices.forward or within_limit or loads.out(holder) <= loads.out(entered):
            return holder
        return entered


def _route(root: int, step: _Step, entries: Sequence[Entry], senders: dict[int, int]) -> Route:
    """The hops of one root: to the doors that it feeds, onward from the first door, then inside each domain."""
    hops: list[Hop] = []
    at_door: dict[int, int] = {}
    entered = step.doors[step.first]
    numbers = sorted(senders, key=lambda number: (number != step.first, number))
    for number in numbers:
        forwarded = senders[number] == entered and number != step.first
        if senders[number] == root or (forwarded and root == step.sender):
            at_door[number] = len(hops)
            hops.append(Hop(senders[number], step.doors[number], 0 if forwarded else -1))
    for number, parent in at_door.items():
        door = step.doors[number]
        hops += [Hop(door, wanter, parent) for wanter in entries[number].wanters if wanter != door]
    return Route(tuple(hops))


def _busiest_receiver(demands: Sequence[Demand], topology: Topology) -> float:
    """Seconds that the busiest domain needs to take in its bytes over all its NICs."""
    entering = [0.0] * len(topology.domains)
    for demand in demands:
        for entry in demand.entries:
            entering[entry.domain] += demand.nbytes
    rates = [sum(topology.nics[nic].rate for nic in nics) for nics in topology.nics_of_domains]
    return max((nbytes / rate for nbytes, rate in zip(entering, rates, strict=True)), default=0.0)
