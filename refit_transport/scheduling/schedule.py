"""The schedule: who sends which box to whom, in which message, after what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refit_transport.errors import PlanError
from refit_transport.layout.box import Box
from refit_transport.layout.manifest import Manifest
from refit_transport.layout.wire import digest
from refit_transport.planning.plan import Ints, Parcels

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Legs:
    """One row per parcel and hop, ordered by message, then by place in it.

    `sender_piece` is a piece of the sender's source manifest or, where `relayed`, of its target manifest;
    `receiver_piece` is one of the receiver's target manifest; `offset` is in bytes from the message's beginning.
    """

    parcel: Ints
    sender: Ints
    sender_piece: Ints
    relayed: Flags
    receiver: Ints
    receiver_piece: Ints
    message: Ints
    offset: Ints


@dataclass(frozen=True, slots=True)
class Messages:
    """One row per message; the index is a total order that every rank follows, which is why nothing can deadlock.

    `nbytes` is payload plus alignment gaps; `after` is the message that the sender must have received before (with all
    earlier ones that it receives), -1 when the payload is present from the start; `local` ones stay inside a topology
    domain. A message from a rank to itself is a copy.
    """

    sender: Ints
    receiver: Ints
    nbytes: Ints
    payload: Ints
    after: Ints
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
    """A complete order of messages; equal on every rank."""

    parcels: Parcels
    legs: Legs
    messages: Messages

    def digest(self) -> str:
        """Equal on every rank that computed the same schedule."""
        columns = [getattr(part, name) for part in (self.legs, self.messages) for name in part.__slots__]
        return digest(
            repr(self.parcels.tensors),
            *(np.ascontiguousarray(c).tobytes() for c in (self.parcels.tensor, self.parcels.lo, self.parcels.hi)),
            *(np.ascontiguousarray(c).tobytes() for c in columns),
        )

    def traffic(self) -> Traffic:
        """Payload bytes per rank."""
        m = self.messages
        copies = m.sender == m.receiver
        local, network = m.local & ~copies, ~m.local & ~copies
        return Traffic(
            _sums(m.sender, m.payload, network),
            _sums(m.receiver, m.payload, network),
            _sums(m.sender, m.payload, local),
            _sums(m.receiver, m.payload, local),
            _sums(m.receiver, m.payload, copies),
        )

    def check(self, source: Manifest, target: Manifest) -> None:
        """Proves delivery: replays the messages in order on boxes alone.

        Every leg's sender must hold the box (in a source piece, or received completely by message `after` at the
        latest), and in the end every target piece of a scheduled tensor has each element exactly once.

        Raises:
            PlanError: naming tensor, box and rank.
        """
        _Replay(self, source, target).run()


def _sums(ranks: Ints, payload: Ints, chosen: Flags) -> dict[int, int]:
    sums: dict[int, int] = defaultdict(int)
    for rank, nbytes in zip(ranks[chosen].tolist(), payload[chosen].tolist(), strict=True):
        sums[rank] += nbytes
    return dict(sums)


class _Replay:
    """The state of one `check`: which boxes each target piece has received, and by which message."""

    def __init__(self, schedule: Schedule, source: Manifest, target: Manifest) -> None:
        self._schedule = schedule
        self._source = {manifest.rank: manifest.pieces for manifest in source.ranks}
        self._target = {manifest.rank: manifest.pieces for manifest in target.ranks}
        self._received: dict[tuple[int, int], list[tuple[int, Box]]] = defaultdict(list)

    def run(self) -> None:
        legs, messages = self._schedule.legs, self._schedule.messages
        if np.any(np.diff(legs.message) < 0):
            raise PlanError("", "", -1, "legs are not ordered by message")
        for leg in range(len(legs.parcel)):
            message, parcel = int(legs.message[leg]), int(legs.parcel[leg])
            box = self._schedule.parcels.box(parcel)
            if legs.sender[leg] != messages.sender[message] or legs.receiver[leg] != messages.receiver[message]:
                receiver = int(legs.receiver[leg])
                raise PlanError(self._name(parcel), str(box), receiver, "lies in a message of other ranks")
            self._check_sender(leg, parcel, box, int(messages.after[message]))
            self._receive(int(legs.receiver[leg]), int(legs.receiver_piece[leg]), parcel, box, message)
        self._check_extents()
        self._check_complete()

    def _name(self, parcel: int) -> str:
        return self._schedule.parcels.name(parcel)

    def _check_sender(self, leg: int, parcel: int, box: Box, after: int) -> None:
        legs = self._schedule.legs
        sender, piece = int(legs.sender[leg]), int(legs.sender_piece[leg])
        if legs.relayed[leg]:
            present = [got for message, got in self._received[sender, piece] if message <= after]
            common = (box.intersect(got) for got in present)
            if box not in present and sum(part.numel for part in common if part is not None) != box.numel:
                raise PlanError(self._name(parcel), str(box), sender, f"is passed on before message {after} brings it")
            return
        held = self._source[sender][piece]
        if held.tensor != self._name(parcel) or not held.box.contains(box):
            raise PlanError(self._name(parcel), str(box), sender, "isn't in the sender's source piece")

    def _receive(self, rank: int, index: int, parcel: int, box: Box, message: int) -> None:
        piece = self._target[rank][index]
        if piece.tensor != self._name(parcel) or not piece.box.contains(box):
            raise PlanError(self._name(parcel), str(box), rank, f"lies outside the target piece {piece.box}")
        self._received[rank, index].append((message, box))

    def _check_extents(self) -> None:
        """In each message the parcels lie one after the other inside `nbytes`, and `payload` is their sum."""
        legs, messages, parcels = self._schedule.legs, self._schedule.messages, self._schedule.parcels
        sizes = parcels.nbytes()
        end, message = 0, -1
        payload = np.zeros(len(messages), dtype=np.int64)
        for leg, parcel in enumerate(legs.parcel.tolist()):
            end = 0 if int(legs.message[leg]) != message else end
            message, offset = int(legs.message[leg]), int(legs.offset[leg])
            payload[message] += sizes[parcel]
            if offset < end or offset + sizes[parcel] > messages.nbytes[message]:
                where = f"lies at {offset} in message {message}, over another parcel or the message's end"
                raise PlanError(self._name(parcel), str(parcels.box(parcel)), int(legs.receiver[leg]), where)
            end = offset + int(sizes[parcel])
        if not np.array_equal(payload, messages.payload):
            wrong = int(np.flatnonzero(payload != messages.payload)[0])
            reason = f"message {wrong} declares {messages.payload[wrong]} bytes and has {payload[wrong]}"
            raise PlanError("", "", int(messages.receiver[wrong]), reason)

    def _check_complete(self) -> None:
        names = {tensor.name for tensor in self._schedule.parcels.tensors}
        for rank, pieces in self._target.items():
            for index, piece in enumerate(pieces):
                if piece.tensor not in names:
                    continue
                boxes = [box for _, box in self._received[rank, index]]
                got = sum(box.numel for box in boxes)
                if got != piece.box.numel or _overlap(boxes):
                    raise PlanError(
                        piece.tensor, str(piece.box), rank, f"receives {got} of {piece.box.numel} elements, each once"
                    )


def _overlap(boxes: list[Box]) -> bool:
    """Whether two of the boxes share an element."""
    if len(set(boxes)) != len(boxes):
        return True
    ordered = sorted(box for box in boxes if box.numel)
    return any(
        a.intersect(b) is not None
        for i, a in enumerate(ordered)
        for b in ordered[i + 1 :]
        if not a.spans or b.spans[0].start < a.spans[0].stop
    )
