"""Lowering: one rank's share of a schedule as an ordered list of operations on bound views and message slots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import torch

from refit_transport.layout.box import Box
from refit_transport.layout.manifest import RankManifest
from refit_transport.scheduling.schedule import Schedule
from refit_transport.views import box_view, piece_view, torch_dtype

Kind = Literal["send", "receive", "copy"]


@dataclass(frozen=True, slots=True)
class Binding:
    """A rank's manifest of one role together with the live buffers that its pieces point into."""

    manifest: RankManifest
    buffers: Mapping[str, torch.Tensor]
    dtypes: Mapping[str, torch.dtype]

    @classmethod
    def of(cls, manifest: RankManifest, buffers: Mapping[str, torch.Tensor]) -> Self:
        return cls(manifest, buffers, {spec.name: torch_dtype(spec.dtype) for spec in manifest.tensors})

    def view(self, piece: int) -> torch.Tensor:
        """The strided view of a whole piece, shaped like its box, in the dtype that the manifest declares."""
        described = self.manifest.pieces[piece]
        return piece_view(described, self.buffers, dtype=self.dtypes[described.tensor])

    def box_view(self, piece: int, box: Box) -> torch.Tensor:
        """The strided view of a box inside a piece, shaped like the box."""
        return box_view(self.view(piece), self.manifest.pieces[piece].box, box)

    def addresses(self) -> tuple[int, ...]:
        """Where the buffers lie; when it changes, programs bound to them are void."""
        return tuple(buffer.data_ptr() for buffer in self.buffers.values())


@dataclass(frozen=True, slots=True)
class Move:
    """One parcel of an operation: the live view and the view of the message that stands for it."""

    live: torch.Tensor
    wire: torch.Tensor


@dataclass(frozen=True, slots=True)
class Operation:
    """One message as this rank takes part in it.

    `payload` is the contiguous uint8 tensor that crosses the fabric: a message slot, or live memory itself when the
    message is one contiguous range there (then `moves` is empty). The moves of a copy go from `wire` to `live`, both
    of them live memory.
    """

    message: int
    kind: Kind
    peer: int
    local: bool
    after: int
    nbytes: int
    payload: torch.Tensor
    moves: tuple[Move, ...]
    tensor: str


@dataclass(frozen=True, slots=True)
class Program:
    """One rank's operations in message order; at most `window` of them are in flight at a time."""

    rank: int
    operations: tuple[Operation, ...]
    window: int


class SlotPool:
    """Message slots of one rank, shared by programs that run one after the other.

    `window` slots (as many messages as `staging_bytes` holds, 2 at least) of the largest message's size, allocated when
    first needed. The i-th operation of a program uses slot i modulo `window`, so the window bounds the memory too.
    """

    def __init__(self, schedules: Iterable[Schedule], *, staging_bytes: int) -> None:
        self._slot_bytes = max((int(s.messages.nbytes.max()) for s in schedules if len(s.messages)), default=1)
        self.window = max(2, staging_bytes // self._slot_bytes)
        self._slots: dict[int, torch.Tensor] = {}

    def slot(self, operation: int, nbytes: int) -> torch.Tensor:
        """The first `nbytes` of the slot that a program's operation of this index uses."""
        index = operation % self.window
        if index not in self._slots:
            self._slots[index] = torch.empty(self._slot_bytes, dtype=torch.uint8)
        return self._slots[index][:nbytes]

    def most_bytes(self, schedule: Schedule, rank: int) -> int:
        """The bytes that the rank's part of a schedule allocates at most: messages sent in place need no slot."""
        messages = schedule.messages
        operations = int(np.count_nonzero((messages.sender == rank) | (messages.receiver == rank)))
        return self._slot_bytes * min(self.window, operations)

    @property
    def allocated(self) -> int:
        """Bytes allocated so far."""
        return self._slot_bytes * len(self._slots)


def lower(schedule: Schedule, rank: int, *, source: Binding | None, target: Binding | None, pool: SlotPool) -> Program:
    """Binds the rank's messages to its memory and to message slots; running the program then computes no geometry."""
    messages = schedule.messages
    mine = np.flatnonzero((messages.sender == rank) | (messages.receiver == rank)).tolist()
    lowering = _Lowering(schedule, rank, source, target, pool)
    operations = tuple(lowering.operation(index, message) for index, message in enumerate(mine))
    return Program(rank, operations, pool.window)


class _Lowering:
    """Geometry of one `lower` call."""

    def __init__(
        self, schedule: Schedule, rank: int, source: Binding | None, target: Binding | None, pool: SlotPool
    ) -> None:
        self._schedule, self._rank = schedule, rank
        self._source, self._target, self._pool = source, target, pool
        legs = schedule.legs
        self._first = np.searchsorted(legs.message, np.arange(len(schedule.messages) + 1)).tolist()

    def operation(self, index: int, message: int) -> Operation:
        m = self._schedule.messages
        sender, receiver = int(m.sender[message]), int(m.receiver[message])
        nbytes = int(m.nbytes[message])
        legs = range(self._first[message], self._first[message + 1])
        tensor = self._schedule.parcels.name(int(self._schedule.legs.parcel[legs[0]]))
        if sender == receiver:
            moves = tuple(Move(self._live(leg, sending=False), self._live(leg, sending=True)) for leg in legs)
            kind: Kind = "copy"
            payload = torch.empty(0, dtype=torch.uint8)
        else:
            kind = "send" if sender == self._rank else "receive"
            live = [self._live(leg, sending=kind == "send") for leg in legs]
            payload, moves = self._payload(legs, live, index, nbytes)
        return Operation(
            message,
            kind,
            receiver if kind == "send" else sender,
            bool(m.local[message]),
            int(m.after[message]),
            int(m.payload[message]),
            payload,
            moves,
            tensor,
        )

    def _live(self, leg: int, *, sending: bool) -> torch.Tensor:
        """The live view of a leg's parcel at this rank."""
        legs = self._schedule.legs
        from_source = sending and not legs.relayed[leg]
        binding = self._source if from_source else self._target
        assert binding is not None
        index = int(legs.sender_piece[leg] if sending else legs.receiver_piece[leg])
        return binding.box_view(index, self._schedule.parcels.box(int(legs.parcel[leg])))

    def _payload(
        self, legs: Sequence[int], live: Sequence[torch.Tensor], index: int, nbytes: int
    ) -> tuple[torch.Tensor, tuple[Move, ...]]:
        offsets = [int(self._schedule.legs.offset[leg]) for leg in legs]
        dtypes = [torch_dtype(self._schedule.parcels.tensors[t].wire_dtype) for t in self._tensors(legs)]
        direct = _contiguous_range(live, offsets, dtypes)
        if direct is not None:
            return direct, ()
        slot = self._pool.slot(index, nbytes)
        moves = tuple(
            Move(view, slot[offset : offset + view.numel() * dtype.itemsize].view(dtype).view(view.shape))
            for view, offset, dtype in zip(live, offsets, dtypes, strict=True)
        )
        return slot, moves

    def _tensors(self, legs: Sequence[int]) -> Iterator[int]:
        return (int(self._schedule.parcels.tensor[self._schedule.legs.parcel[leg]]) for leg in legs)


def _contiguous_range(
    live: Sequence[torch.Tensor], offsets: Sequence[int], dtypes: Sequence[torch.dtype]
) -> torch.Tensor | None:
    """The live memory of a message as one uint8 tensor, when it already has the message's layout; else None."""
    base = live[0].data_ptr()
    end = 0
    for view, offset, dtype in zip(live, offsets, dtypes, strict=True):
        # A gap between parcels holds alignment bytes of the message but other data of the buffer: not the same layout.
        if not view.is_contiguous() or view.dtype != dtype or view.data_ptr() != base + offset or offset != end:
            return None
        # Message slots are host memory; what lives on a device is staged there.
        if view.device.type != "cpu":
            return None
        end = offset + view.numel() * dtype.itemsize
    if any(view.untyped_storage().data_ptr() != live[0].untyped_storage().data_ptr() for view in live):
        return None
    storage = live[0].untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8).set_(storage)
    first = base - storage.data_ptr()
    return whole[first : first + end]
