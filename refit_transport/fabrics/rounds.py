"""Rounds: the groups in which a fabric without a message window of its own moves a schedule's payloads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Self

import numpy as np

from refit_transport.fabrics.program import Program, Step
from refit_transport.planning.plan import Ints
from refit_transport.scheduling.schedule import Schedule

# A slot rests for one round after its last use. So a round can be packed, and the one before it unpacked, while the one
# between them is on its way.
RESTING_ROUNDS = 1

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Rounds:
    """The round of each hop, shape [hops]; -1 for copies. Equal on every rank of a schedule.

    All of a round's hops can be posted as one group on every rank: none of them sends what another one brings.
    """

    of_hop: Ints

    @classmethod
    def of(cls, schedule: Schedule, *, slots: int) -> Self:
        """Cuts the schedule's total order into blocks of consecutive payloads, as the slots of all ranks allow.

        Block b starts in round b: its payloads leave their roots then, and go one hop further in each round after that,
        while the next blocks start. So a chain of ranks works like a pipeline.

        The i-th payload of a rank uses slot i modulo `slots`, from the round in which it arrives there or is packed to
        the round of its last onward hop, and a round of rest. A payload joins a block only when the slots that it
        needs are free by then on every rank, and no rank fills all its slots in one round.

        Args:
            schedule: any schedule; pure, and quick enough to be called on every rank.
            slots: payload slots of each rank, at least 1.
        """
        hops = schedule.hops
        depth = _depths(hops.parent)
        travels = np.flatnonzero(hops.sender != hops.receiver)
        rounds = np.full(len(hops), -1, dtype=np.int64)
        if len(travels):
            block = _Uses.of(schedule, depth, travels).blocks(len(schedule.payloads), slots)
            rounds[travels] = block[hops.payload[travels]] + depth[travels]
        return cls(rounds)


@dataclass(frozen=True, slots=True)
class Operation:
    """One end of a hop in a round."""

    kind: Literal["send", "receive"]
    hop: int
    peer: int
    step: Step


@dataclass(slots=True)
class Round:
    """One rank's part of a round.

    packed: the steps to pack before it. operations: in the order of the hops, so that both ends of a pair of ranks have
    theirs in the same order. arrived: the steps to unpack after it.
    """

    number: int
    packed: list[Step] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    arrived: list[Step] = field(default_factory=list)


def rounds_of(program: Program) -> tuple[Round, ...]:
    """The rank's part of every round that concerns it, ascending. Copies from the rank to itself are in none."""
    number = Rounds.of(program.schedule, slots=program.slots).of_hop.tolist()
    found: dict[int, Round] = {}

    def at(hop: int) -> Round:
        return found.setdefault(number[hop], Round(number[hop]))

    for step in program.steps:
        if step.incoming is not None:
            at(step.incoming.hop).operations.append(Operation("receive", step.incoming.hop, step.incoming.peer, step))
            at(step.incoming.hop).arrived.append(step)
        elif step.sends:
            at(step.sends[0].hop).packed.append(step)
        for send in step.sends:
            at(send.hop).operations.append(Operation("send", send.hop, send.peer, step))
    for part in found.values():
        part.operations.sort(key=lambda operation: operation.hop)
    return tuple(found[key] for key in sorted(found))


def copies_of(program: Program) -> tuple[Step, ...]:
    """The steps that only copy from the rank to itself."""
    return tuple(step for step in program.steps if step.incoming is None and not step.sends)


def _depths(parent: Ints) -> Ints:
    """How many hops come before each one on its way from the root; parents stand before their children."""
    depth = np.zeros(len(parent), dtype=np.int64)
    children = np.flatnonzero(parent >= 0)
    while len(children):
        found = depth[parent[children]] + 1
        children = children[found != depth[children]]
        depth[children] = depth[parent[children]] + 1
    return depth


@dataclass(frozen=True, slots=True)
class _Uses:
    """A row per payload and rank that takes part in it, by payload, then rank.

    first, last: the rounds of the use, counted from the beginning of the payload's block. rank_order: the rows by rank,
    then payload.
    """

    payload: Ints
    rank: Ints
    first: Ints
    last: Ints
    rank_order: Ints

    @classmethod
    def of(cls, schedule: Schedule, depth: Ints, travels: Ints) -> Self:
        hops = schedule.hops
        payload = np.tile(hops.payload[travels], 2)
        ranks = np.concatenate((hops.sender[travels], hops.receiver[travels]))
        most = int(ranks.max()) + 1
        # A root packs in the round of its hops; whoever passes on has the payload one round earlier.
        begins = np.concatenate((np.maximum(depth[travels] - 1, 0), depth[travels]))
        keys, row = np.unique(payload * most + ranks, return_inverse=True)
        row = row.reshape(-1)
        first, last = np.full(len(keys), _NEVER), np.zeros(len(keys), dtype=np.int64)
        np.minimum.at(first, row, begins)
        np.maximum.at(last, row, np.tile(depth[travels], 2))
        payload, rank = keys // most, keys % most
        return cls(payload, rank, first, last, np.lexsort((payload, rank)))

    def blocks(self, payloads: int, slots: int) -> Ints:
        """The block of each payload, shape [payloads]."""
        same_slot, next_block = self._later(slots), self._later(self._payloads_per_block(slots))
        # The block from which on each use finds its slot free, and the one in which its turn comes.
        free = np.zeros(len(self.payload), dtype=np.int64)
        turn = np.full(len(self.payload), _NEVER)
        turn[np.setdiff1d(np.arange(len(turn)), next_block)] = 0
        start_of = np.searchsorted(self.payload, np.arange(payloads + 1))
        block_of = np.zeros(payloads, dtype=np.int64)
        block = begin = 0
        while begin < len(self.payload):
            end = self._first_waiting(turn, begin, block)
            if end == begin:
                # All that the payload waits for is in earlier blocks.
                block = int(turn[begin : start_of[self.payload[begin] + 1]].max())
                end = self._first_waiting(turn, begin, block)
            block_of[self.payload[begin:end]] = block
            used = np.arange(begin, end)
            before, then = _pairs(used, same_slot)
            free[then] = block + self.last[before] + RESTING_ROUNDS + 1 - self.first[then]
            _, then = _pairs(used, next_block)
            turn[then] = np.maximum(free[then], block + 1)
            begin, block = end, block + 1
        return block_of

    def _payloads_per_block(self, slots: int) -> Ints:
        """How many payloads of a block each use's rank takes part in at most, shape [uses].

        So many that its slots are taken evenly: with more, a round would fill them all and the next ones be empty.
        """
        longest = np.zeros(int(self.rank.max()) + 1, dtype=np.int64)
        np.maximum.at(longest, self.rank, self.last - self.first + 1 + RESTING_ROUNDS)
        share: Ints = np.maximum(slots // longest[self.rank], 1)
        return share

    def _first_waiting(self, turn: Ints, begin: int, block: int) -> int:
        """The first row of the first payload from `begin` on that can't be in this block."""
        step = 256
        for start in range(begin, len(turn), step):
            waiting = np.flatnonzero(turn[start : start + step] > block)
            if len(waiting):
                return int(np.searchsorted(self.payload, self.payload[start + int(waiting[0])]))
        return len(turn)

    def _later(self, distance: Ints | int) -> Ints:
        """For each row the one of the same rank that comes so many later, -1 where there is none."""
        order, later = self.rank_order, np.full(len(self.payload), -1, dtype=np.int64)
        place = np.arange(len(order)) + (distance if isinstance(distance, int) else distance[order])
        here = np.flatnonzero(place < len(order))
        here = here[self.rank[order[here]] == self.rank[order[place[here]]]]
        later[order[here]] = order[place[here]]
        return later


def _pairs(rows: Ints, later: Ints) -> tuple[Ints, Ints]:
    """The rows that have a later one, and those."""
    before = rows[later[rows] >= 0]
    return before, later[before]
