"""Lowering: one rank's share of a schedule as an ordered list of steps on bound views and payload slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from refit_transport.fabrics.binding import Binding, Part
from refit_transport.fabrics.slots import Slots, SlotSizes
from refit_transport.layout.box import Box
from refit_transport.layout.layout import row_major_strides
from refit_transport.scheduling.schedule import Schedule
from refit_transport.views import box_view, torch_dtype

ReceiveInto = Literal["live memory", "slots"]


@dataclass(frozen=True, slots=True)
class Moves:
    """Copies to make one after the other: `into[i]` becomes `out_of[i]`, of the same shape, converted if need be."""

    into: tuple[torch.Tensor, ...] = ()
    out_of: tuple[torch.Tensor, ...] = ()

    def make(self) -> None:
        """Copies."""
        if self.into:
            # One call for all: thousands of small copies would else spend their time in Python.
            torch._foreach_copy_(list(self.into), list(self.out_of))


@dataclass(frozen=True, slots=True)
class Transmission:
    """A hop as one of its ends sees it; `shared` says that the receiver reads the payload in the sender's slot."""

    hop: int
    peer: int
    shared: bool


@dataclass(frozen=True, slots=True)
class Step:
    """One payload as this rank takes part in it, in this order: it arrives or is packed, is sent on, is unpacked.

    `then` is called when it is unpacked, before the next payload is.

    `memory` is the contiguous uint8 tensor that the payload occupies here: `slot_offset` says where in the slot memory,
    None that it is live memory itself, in which case there is nothing to pack or unpack. `shared` is the sender's slot,
    where this rank can read it; then `unpack` reads from there, unless the payload is sent on too.
    """

    payload: int
    nbytes: int
    incoming: Transmission | None
    sends: tuple[Transmission, ...]
    memory: torch.Tensor
    slot_offset: int | None
    shared: torch.Tensor | None
    pack: Moves
    unpack: Moves
    tensor: str
    then: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Program:
    """One rank's steps in the schedule's order, and how many slots there are."""

    rank: int
    steps: tuple[Step, ...]
    slots: int
    schedule: Schedule = field(repr=False)


def lower(
    schedule: Schedule,
    rank: int,
    *,
    source: Binding | None,
    target: Binding | None,
    memory: Slots,
    sizes: SlotSizes,
    receive: ReceiveInto = "live memory",
) -> Program:
    """Binds the rank's payloads to its memory and slots; running the program then computes no geometry.

    Payloads may arrive ahead of their turn: where live memory isn't free before it, `receive` must be "slots".

    Raises:
        LayoutError: the rank's pieces don't hold what the schedule has it send.
    """
    lowering = _Lowering(schedule, rank, source, target, memory, sizes, receive)
    return Program(rank, tuple(lowering.steps()), sizes.count, schedule)


class _Lowering:
    """Geometry of one `lower` call."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        source: Binding | None,
        target: Binding | None,
        memory: Slots,
        sizes: SlotSizes,
        receive: ReceiveInto,
    ) -> None:
        self._schedule, self._rank = schedule, rank
        self._source, self._target = source, target
        self._memory, self._sizes = memory, sizes
        self._receives_in_slots = receive == "slots"
        hops = schedule.hops
        mine = np.flatnonzero((hops.sender == rank) | (hops.receiver == rank))
        self._hops = mine[hops.sender[mine] != hops.receiver[mine]].tolist()
        self._copies = mine[hops.sender[mine] == hops.receiver[mine]].tolist()
        self._dtypes = [torch_dtype(tensor.wire_dtype) for tensor in schedule.parcels.tensors]
        self._boxes: dict[tuple[int, ...], Box] = {}
        self._payloads_of: dict[int, npt.NDArray[np.int64]] = {}

    def steps(self) -> list[Step]:
        """The rank's own steps, ascending; copies use no slot."""
        hops = self._schedule.hops
        steps = [self._copy(int(hops.payload[hop])) for hop in self._copies]
        by_payload: dict[int, list[int]] = {}
        for hop in self._hops:
            by_payload.setdefault(int(hops.payload[hop]), []).append(hop)
        steps += [self._step(number, *payload) for number, payload in enumerate(by_payload.items())]
        return sorted(steps, key=lambda step: step.payload)

    def _copy(self, payload: int) -> Step:
        into: list[torch.Tensor] = []
        out_of: list[torch.Tensor] = []
        for row in self._parcels(payload):
            held, wanted = self._cover(row), self._wanted(row)
            for there in wanted:
                for here in held:
                    common = there.box.intersect(here.box)
                    if common is not None:
                        into.append(box_view(there.view, there.box, common))
                        out_of.append(box_view(here.view, here.box, common))
        nothing = torch.empty(0, dtype=torch.uint8)
        return Step(
            payload, 0, None, (), nothing, None, None, Moves(tuple(into), tuple(out_of)), Moves(), self._name(payload)
        )

    def _step(self, number: int, payload: int, members: Sequence[int]) -> Step:
        hops, payloads = self._schedule.hops, self._schedule.payloads
        incoming, sends = None, []
        for hop in members:
            arrives = hops.receiver[hop] == self._rank
            peer = int(hops.sender[hop] if arrives else hops.receiver[hop])
            found = Transmission(hop, peer, bool(hops.local[hop]) and peer in self._memory.peers)
            if arrives:
                incoming = found
            else:
                sends.append(found)
        size, offset = int(payloads.size[payload]), self._sizes.offset(number)
        rows = list(self._parcels(payload))
        parts = [self._cover(row) if incoming is None else self._wanted(row) for row in rows]
        shared = self._shared(payload, incoming, size)
        exchanged = shared is not None or any(send.shared for send in sends)
        in_slot = exchanged or (incoming is not None and self._receives_in_slots)
        place = None if in_slot else self._in_place(rows, parts, size)
        memory = self._memory.own[offset : offset + size] if place is None else place
        moves = (
            Moves() if place is not None else self._moves(rows, parts, memory if shared is None or sends else shared)
        )
        packing = Moves(moves.out_of, moves.into) if incoming is None else Moves()
        return Step(
            payload,
            int(payloads.nbytes[payload]),
            incoming,
            tuple(sends),
            memory,
            offset if place is None else None,
            shared,
            packing,
            Moves() if incoming is None else moves,
            self._name(payload),
        )

    def _parcels(self, payload: int) -> range:
        first = self._schedule.payloads.first_parcel
        return range(int(first[payload]), int(first[payload + 1]))

    def _name(self, payload: int) -> str:
        return self._schedule.parcels.name(self._parcels(payload)[0])

    def _cover(self, row: int) -> list[Part]:
        if self._source is None:
            return []
        parcels = self._schedule.parcels
        return self._source.cover(parcels.name(row), self._box(row))

    def _wanted(self, row: int) -> list[Part]:
        """Nothing where this rank only relays."""
        if self._target is None:
            return []
        parcels = self._schedule.parcels
        return self._target.parts(parcels.name(row), self._box(row))

    def _box(self, row: int) -> Box:
        """The parcel's box; equal ones, of which a model of many small tensors has many, are one object."""
        parcels = self._schedule.parcels
        dims = len(parcels.tensors[parcels.tensor[row]].shape)
        key = (*parcels.lo[row, :dims].tolist(), *parcels.hi[row, :dims].tolist())
        if key not in self._boxes:
            self._boxes[key] = parcels.box(row)
        return self._boxes[key]

    def _shared(self, payload: int, incoming: Transmission | None, size: int) -> torch.Tensor | None:
        """The sender's slot, where this rank can read it."""
        if incoming is None or not incoming.shared:
            return None
        offset = self._sizes.offset(self._step_number(payload, incoming.peer))
        return self._memory.peers[incoming.peer][offset : offset + size]

    def _step_number(self, payload: int, rank: int) -> int:
        """The number of payloads before this one in which another rank takes part."""
        if rank not in self._payloads_of:
            hops = self._schedule.hops
            mine = ((hops.sender == rank) | (hops.receiver == rank)) & (hops.sender != hops.receiver)
            self._payloads_of[rank] = np.unique(hops.payload[mine])
        return int(np.searchsorted(self._payloads_of[rank], payload))

    def _moves(self, rows: Sequence[int], parts: Sequence[Sequence[Part]], memory: torch.Tensor) -> Moves:
        """Copies from a payload in `memory` to live views."""
        live: list[torch.Tensor] = []
        wire: list[torch.Tensor] = []
        parcels = self._schedule.parcels
        typed: dict[torch.dtype, torch.Tensor] = {}
        for row, found in zip(rows, parts, strict=True):
            if not found:
                continue
            box, dtype = self._box(row), self._dtypes[parcels.tensor[row]]
            if dtype not in typed:
                whole_elements = memory.numel() // dtype.itemsize * dtype.itemsize
                typed[dtype] = memory[:whole_elements].view(dtype)
            start = typed[dtype].storage_offset() + int(parcels.offset[row]) // dtype.itemsize
            shape = box.shape
            whole = typed[dtype].as_strided(shape, row_major_strides(shape), start)
            for part in found:
                live.append(part.view)
                wire.append(box_view(whole, box, part.box))
        return Moves(tuple(live), tuple(wire))

    def _in_place(self, rows: Sequence[int], parts: Sequence[Sequence[Part]], size: int) -> torch.Tensor | None:
        """The live memory of a payload as one uint8 tensor, when it already has the payload's layout; else None."""
        parcels = self._schedule.parcels
        first: torch.Tensor | None = None
        end = begin = 0
        for row, found in zip(rows, parts, strict=True):
            if len(found) != 1 or found[0].box.shape != self._box(row).shape:
                return None
            view, dtype = found[0].view, self._dtypes[parcels.tensor[row]]
            if view.device != self._memory.own.device or view.dtype != dtype or not view.is_contiguous():
                return None
            here = view.storage_offset() * dtype.itemsize
            if first is None:
                first, begin = view, here
            # A gap between parcels holds alignment bytes of the payload but other data of the buffer.
            if parcels.offset[row] != end or here - begin != end:
                return None
            if view.untyped_storage()._cdata != first.untyped_storage()._cdata:
                return None
            end += view.numel() * dtype.itemsize
        if first is None or end != size:
            return None
        whole = torch.empty(0, dtype=torch.uint8, device=first.device).set_(first.untyped_storage())
        return whole[begin : begin + end]
