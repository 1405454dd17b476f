"""Lowering: one rank's share of a schedule as an ordered list of operations on bound views and message slots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import torch

from refit_transport.layout.manifest import RankManifest
from refit_transport.scheduling.schedule import Schedule

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
        buffer, dtype = self.buffers[described.buffer], self.dtypes[described.tensor]
        if buffer.dtype != dtype:
            buffer = buffer.view(dtype)
        return torch.as_strided(
            buffer, described.box.shape, described.strides, buffer.storage_offset() + described.offset
        )

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
    staging_bytes: int


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype of this name, such as "bfloat16"."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def lower(
    schedule: Schedule,
    rank: int,
    *,
    source: Binding | None,
    target: Binding | None,
    staging_bytes: int,
    device: torch.device | None = None,
) -> Program:
    """Binds the rank's messages to its memory and allocates message slots; `run` then neither allocates nor computes.

    Message i of the rank uses slot i modulo `window`, so the window (as many messages as `staging_bytes` holds, 2 at
    least) also bounds the memory.
    """
    messages = schedule.messages
    mine = [m for m in range(len(messages)) if rank in (int(messages.sender[m]), int(messages.receiver[m]))]
    slot_bytes = max((int(messages.nbytes[m]) for m in mine), default=0)
    window = min(max(2, staging_bytes // slot_bytes if slot_bytes else 2), max(2, len(mine)))
    slots = _Slots(slot_bytes, window, device or torch.device("cpu"))
    lowering = _Lowering(schedule, rank, source, target)
    operations = tuple(lowering.operation(message, slots) for message in mine)
    return Program(rank, operations, window, slots.allocated)


class _Slots:
    """Message slots, allocated when first needed."""

    def __init__(self, nbytes: int, count: int, device: torch.device) -> None:
        self._nbytes, self._device = nbytes, device
        self._slots: list[torch.Tensor | None] = [None] * count
        self._next = 0

    def take(self, nbytes: int) -> torch.Tensor:
        index = self._next % len(self._slots)
        slot = self._slots[index]
        if slot is None:
            slot = self._slots[index] = torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
        self._next += 1
        return slot[:nbytes]

    def skip(self) -> None:
        """An operation without a slot still counts, so that a slot is reused only `window` operations later."""
        self._next += 1

    @property
    def allocated(self) -> int:
        return sum(slot.numel() for slot in self._slots if slot is not None)


class _Lowering:
    """Geometry of one `lower` call."""

    def __init__(self, schedule: Schedule, rank: int, source: Binding | None, target: Binding | None) -> None:
        self._schedule, self._rank = schedule, rank
        self._source, self._target = source, target
        self._views: dict[tuple[bool, int], torch.Tensor] = {}
        legs = schedule.legs
        self._first = np.searchsorted(legs.message, np.arange(len(schedule.messages) + 1)).tolist()

    def operation(self, message: int, slots: _Slots) -> Operation:
        m = self._schedule.messages
        sender, receiver = int(m.sender[message]), int(m.receiver[message])
        nbytes = int(m.nbytes[message])
        legs = range(self._first[message], self._first[message + 1])
        tensor = self._schedule.parcels.name(int(self._schedule.legs.parcel[legs[0]]))
        if sender == receiver:
            slots.skip()
            moves = tuple(Move(self._live(leg, sending=False), self._live(leg, sending=True)) for leg in legs)
            kind: Kind = "copy"
            payload = torch.empty(0, dtype=torch.uint8)
        else:
            kind = "send" if sender == self._rank else "receive"
            live = [self._live(leg, sending=kind == "send") for leg in legs]
            payload, moves = self._payload(legs, live, nbytes, slots)
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
        if (from_source, index) not in self._views:
            self._views[from_source, index] = binding.view(index)
        box, piece = self._schedule.parcels.box(int(legs.parcel[leg])), binding.manifest.pieces[index]
        view = self._views[from_source, index]
        for dim, (inner, outer) in enumerate(zip(box.spans, piece.box.spans, strict=True)):
            view = view.narrow(dim, inner.start - outer.start, inner.size)
        return view

    def _payload(
        self, legs: Sequence[int], live: Sequence[torch.Tensor], nbytes: int, slots: _Slots
    ) -> tuple[torch.Tensor, tuple[Move, ...]]:
        offsets = [int(self._schedule.legs.offset[leg]) for leg in legs]
        dtypes = [torch_dtype(self._schedule.parcels.tensors[t].wire_dtype) for t in self._tensors(legs)]
        direct = _contiguous_range(live, offsets, dtypes)
        if direct is not None:
            slots.skip()
            return direct, ()
        slot = slots.take(nbytes)
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
        end = offset + view.numel() * dtype.itemsize
    if any(view.untyped_storage().data_ptr() != live[0].untyped_storage().data_ptr() for view in live):
        return None
    storage = live[0].untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=live[0].device).set_(storage)
    first = base - storage.data_ptr()
    return whole[first : first + end]
