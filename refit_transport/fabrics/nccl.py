"""Bytes between GPUs: a private ProcessGroupNCCL, grouped messages, packing on a stream beside them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal
from weakref import WeakKeyDictionary

import torch

from refit_transport.errors import TransferError
from refit_transport.fabrics.base import Spent
from refit_transport.fabrics.cuda import Device, Event, Group, GroupWork, Streams
from refit_transport.fabrics.deadline import Deadline
from refit_transport.fabrics.guard import Guard
from refit_transport.fabrics.program import Moves, Program
from refit_transport.fabrics.rounds import RESTING_ROUNDS, Round, copies_of, rounds_of
from refit_transport.fabrics.slots import Slots

# Rounds that the host starts ahead of the oldest one that isn't done: enough that the device never waits for the host,
# few enough that an error can name the peers which it is about.
_ROUNDS_AHEAD = 4


class NcclFabric:
    """A group of ranks with a GPU each. `memory` is this rank's slot memory on its GPU; no peer reads it.

    Args:
        group: a connected private group, see `fabrics.cuda.make_group`.
        device: this rank's GPU.
        rank: this rank.
        memory: slot memory on the GPU, uint8.
        failure: the first failure that another rank reported, if any.
    """

    def __init__(
        self,
        group: Group,
        *,
        device: Device,
        rank: int,
        memory: torch.Tensor,
        failure: Callable[[], TransferError | None],
    ) -> None:
        self._group: Group | None = group
        self.rank, self._failure = rank, failure
        self._memory = Slots(memory)
        self.streams = Streams.of(device)
        self._rounds: WeakKeyDictionary[Program, tuple[Round, ...]] = WeakKeyDictionary()

    @property
    def memory(self) -> Slots:
        """See `Fabric.memory`."""
        return self._memory

    def run(self, program: Program, *, deadline: Deadline) -> Spent:
        """Executes one rank's program; see `Fabric.run`.

        Seconds of `pack` and `unpack` are the device's, and overlap with `network`, for which the host waits.
        """
        if program not in self._rounds:
            self._rounds[program] = rounds_of(program)
        with self.guarded(deadline) as (group, guard):
            return _Execution(group, guard, self.streams, program).run(self._rounds[program])

    @contextmanager
    def guarded(self, deadline: Deadline) -> Iterator[tuple[Group, Guard]]:
        """The group, for a block that ends when the deadline passes or another rank fails; then it is closed.

        Raises:
            TransferError: the fabric is closed.
        """
        if self._group is None:
            raise TransferError(self.rank, -1, "transfer", "", "the nccl fabric is closed")
        group = self._group
        try:
            with Guard(group.abort, deadline=deadline, failure=self._failure) as guard:
                yield group, guard
        except BaseException:
            self._group = None
            raise

    def close(self) -> None:
        """Ends the group without waiting for anyone; a second call does nothing."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()


class _Execution:
    """One run of one program.

    For each round: pack on the side stream, send and receive as one group, unpack on the side stream. Round k + 1 is
    packed before round k is unpacked, so both go on beside messages. That is safe because slots rest for a round (see
    `fabrics.rounds`): what is packed or received now lies in slots whose last use was two rounds ago, and every use of
    that age is before this one on the side stream.
    """

    def __init__(self, group: Group, guard: Guard, streams: Streams, program: Program) -> None:
        self._group, self._guard, self._program = group, guard, program
        self._streams = streams
        self._device, self._side, self._wire = streams.device, streams.side, streams.wire
        self._under_way: deque[tuple[Round, GroupWork]] = deque()
        self._not_unpacked: tuple[Round, Event] | None = None
        self._copied: list[tuple[Literal["pack", "unpack"], Event, Event]] = []
        self._spent = Spent()

    def run(self, rounds: tuple[Round, ...]) -> Spent:
        self._streams.follow_caller()
        copies = copies_of(self._program)
        if copies and any(step.then is not None for step in self._program.steps):
            # Copies come first here, and would overwrite what a later bucket's place holds before it is loaded.
            reason = "gather_broadcast to a rank that is a source too needs fabric: gloo"
            raise TransferError(self._program.rank, -1, "transfer", copies[0].tensor, reason)
        self._move("pack", [step.pack for step in copies])
        for part in rounds:
            self._advance(part)
        self._unpack_before(None)
        done = self._streams.marked(self._side)
        while self._under_way:
            self._settle()
        self._await(done.query, None)
        self._device.current_stream().wait_event(done)
        for phase, begin, end in self._copied:
            setattr(self._spent, phase, getattr(self._spent, phase) + begin.elapsed_time(end) / 1e3)
        return self._spent

    def _advance(self, part: Round) -> None:
        self._unpack_before(part.number - RESTING_ROUNDS)
        self._move("pack", [step.pack for step in part.packed])
        self._wire.wait_event(self._streams.marked(self._side))
        arrived = self._post(part)
        self._unpack_before(part.number)
        self._not_unpacked = part, arrived
        while len(self._under_way) > _ROUNDS_AHEAD:
            self._settle()

    def _post(self, part: Round) -> Event:
        """Starts a round's messages as one group; the event after them."""
        try:
            with self._device.using(self._wire):
                self._group._start_coalescing()
                for operation in part.operations:
                    call = self._group.send if operation.kind == "send" else self._group.recv
                    call([operation.step.memory], operation.peer, 0)
                work = self._group._end_coalescing()
                # The host goes on: only the stream waits.
                work.wait()
        except RuntimeError as error:
            raise self._failed(part, str(error).splitlines()[0]) from error
        self._under_way.append((part, work))
        return self._streams.marked(self._wire)

    def _unpack_before(self, number: int | None) -> None:
        """Unpacks the round that is left to unpack if it is before this one, or whatever it is."""
        if self._not_unpacked is None or (number is not None and self._not_unpacked[0].number >= number):
            return
        part, arrived = self._not_unpacked
        self._not_unpacked = None
        # Also where there is nothing to unpack: what is packed next may lie in a slot that the messages used.
        self._side.wait_event(arrived)
        moves: list[Moves] = []
        for step in part.arrived:
            moves.append(step.unpack)
            if step.then is not None:
                self._move("unpack", moves)
                moves = []
                with self._spent.timing("load"), self._device.using(self._side):
                    step.then()
        self._move("unpack", moves)

    def _move(self, phase: Literal["pack", "unpack"], moves: list[Moves]) -> None:
        if not any(move.into for move in moves):
            return
        begin = self._streams.marked(self._side)
        with self._device.using(self._side):
            for move in moves:
                move.make()
        self._copied.append((phase, begin, self._streams.marked(self._side)))

    def _settle(self) -> None:
        """Waits until the oldest round under way is done."""
        part, work = self._under_way.popleft()
        self._await(work.is_completed, part)
        try:
            # Work that NCCL gave up counts as completed; this raises its error.
            with self._device.using(self._wire):
                work.wait()
        except RuntimeError as error:
            raise self._failed(part, str(error).splitlines()[0]) from error
        for operation in part.operations:
            if operation.kind == "send":
                self._spent.sent_bytes += operation.step.nbytes
            else:
                self._spent.received_bytes += operation.step.nbytes

    def _await(self, is_done: Callable[[], bool], part: Round | None) -> None:
        with self._spent.timing("network"):
            in_time = self._guard.wait_until(is_done)
        if not in_time:
            raise self._failed(part, "")

    def _failed(self, part: Round | None, reason: str) -> TransferError:
        """The error that names the peers and the first tensor of the round at which it failed."""
        if part is None:
            return self._guard.failed(self._program.rank, reason)
        peers = sorted({operation.peer for operation in part.operations})
        return self._guard.failed(
            self._program.rank,
            reason,
            peer=peers[0] if len(peers) == 1 else -1,
            tensor=part.operations[0].step.tensor,
            where=f" (round {part.number}, ranks {', '.join(map(str, peers))})",
        )
