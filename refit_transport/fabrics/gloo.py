"""Bytes over TCP through a private ProcessGroupGloo, never torch.distributed's default group."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import ProcessGroupGloo, Store, Work

from refit_transport.errors import TransferError
from refit_transport.fabrics.base import Spent
from refit_transport.fabrics.deadline import Deadline
from refit_transport.fabrics.program import Operation, Program


def address_toward(host: str) -> str:
    """The address of the local interface from which `host` is reached; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


class GlooFabric:
    """A group of `world_size` ranks. Construction is collective: it connects every pair.

    gloo's point-to-point work only completes inside `wait`, and a wait that times out closes every pair. So each rank
    posts its operations in message order, up to the program's window, and waits for the oldest one against the refit's
    deadline. Message order is total, hence the oldest unfinished message is always posted at both ends: no deadlock.
    """

    def __init__(self, store: Store, *, rank: int, world_size: int, address: str, timeout_s: float) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        # A peer that is late has this long to come; one that dies while it connects holds the others up to five times.
        options._timeout = timedelta(seconds=timeout_s)
        self._rank = rank
        try:
            self._group: ProcessGroupGloo | None = ProcessGroupGloo(store, rank, world_size, options)
        except RuntimeError as error:
            raise TransferError(rank, -1, "connect", "", str(error).splitlines()[0]) from error

    def run(self, program: Program, *, deadline: Deadline) -> Spent:
        """Executes one rank's program; see `Fabric.run`."""
        if self._group is None:
            raise TransferError(self._rank, -1, "transfer", "", "the gloo fabric is closed")
        return _Execution(self._group, program, deadline).run()

    def close(self) -> None:
        """Closes every pair; a second call does nothing."""
        self._group = None


class _Execution:
    """One run of one program."""

    def __init__(self, group: ProcessGroupGloo, program: Program, deadline: Deadline) -> None:
        # torch's stub lacks the group's point-to-point calls.
        self._group: Any = group
        self._program, self._deadline = program, deadline
        self._work: list[Work | None] = [None] * len(program.operations)
        self._done = 0
        self._spent = Spent()

    def run(self) -> Spent:
        try:
            return self._execute()
        finally:
            # A raised error's frames keep this object alive, and with it the sockets, whose closing tells the peers.
            self._group, self._work = None, []

    def _execute(self) -> Spent:
        operations, posted = self._program.operations, 0
        while self._done < len(operations):
            while posted < len(operations) and posted - self._done < self._program.window:
                if not self._is_ready(operations[posted]):
                    break
                self._post(posted, operations[posted])
                posted += 1
            self._wait(self._done, operations[self._done])
            self._done += 1
        return self._spent

    def _is_ready(self, operation: Operation) -> bool:
        """Whether everything that the operation passes on has arrived."""
        return operation.kind == "receive" or self._program.operations[self._done].message > operation.after

    def _post(self, index: int, operation: Operation) -> None:
        try:
            if operation.kind == "receive":
                self._work[index] = self._group.recv([operation.payload], operation.peer, operation.message)
                return
            began = time.perf_counter()
            if operation.kind == "copy":
                for move in operation.moves:
                    move.live.copy_(move.wire)
                self._spent.local += time.perf_counter() - began
                return
            for move in operation.moves:
                move.wire.copy_(move.live)
            self._spent.pack += time.perf_counter() - began
            self._work[index] = self._group.send([operation.payload], operation.peer, operation.message)
        except RuntimeError as error:
            raise self._failure(operation, error) from error

    def _wait(self, index: int, operation: Operation) -> None:
        if operation.kind == "copy":
            return
        began = time.perf_counter()
        self._complete(index, operation)
        arrived = time.perf_counter()
        self._spent.network += arrived - began
        if operation.kind == "send":
            self._spent.sent_bytes += operation.nbytes
            return
        self._spent.received_bytes += operation.nbytes
        for move in operation.moves:
            move.live.copy_(move.wire)
        self._spent.local += time.perf_counter() - arrived

    def _complete(self, index: int, operation: Operation) -> None:
        work, self._work[index] = self._work[index], None
        assert work is not None
        try:
            work.wait(self._deadline.timedelta())
        except RuntimeError as error:
            raise self._failure(operation, error) from error
        finally:
            del work

    def _failure(self, operation: Operation, error: RuntimeError) -> TransferError:
        if self._deadline.passed:
            reason = f"no {operation.kind} completed within {self._deadline.seconds:g} s"
        else:
            reason = str(error).splitlines()[0]
        return TransferError(self._program.rank, operation.peer, "transfer", operation.tensor, reason)
