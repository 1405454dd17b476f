"""Bytes over TCP through a private ProcessGroupGloo, and through shared memory between ranks that have it."""

from __future__ import annotations

import socket
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroupGloo, Store, Work

from refit_transport.errors import PeerLateError, TransferError
from refit_transport.fabrics.base import Spent
from refit_transport.fabrics.deadline import Deadline
from refit_transport.fabrics.program import Program, Step, Transmission
from refit_transport.fabrics.secret import Secret
from refit_transport.fabrics.shared_memory import SharedExchange
from refit_transport.fabrics.slots import Slots
from refit_transport.fabrics.store_client import StoreGoneError

# Payloads, and bytes, that a rank has under way in each direction, whichever is more. More would only queue in the
# kernel, where all progress alike and so arrive late: what must be passed on last would come last. Fewer leave the NIC
# idle between two.
_PAYLOADS_UNDER_WAY = 4
_BYTES_UNDER_WAY = 512 << 10
_PROOF_BYTES = 64
_STRANGER = "that rank stopped, or a stranger reached this rank's port first"


def address_toward(host: str) -> str:
    """The address of the local interface from which `host` is reached; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


class GlooFabric:
    """A group of `world_size` ranks. Construction is collective: it connects every pair.

    torch.distributed's default group is never touched. Local hops between ranks that are connected by `exchange` go
    through shared memory, all others over TCP. `memory` is this rank's slot memory, the exchange's segment if there is
    an exchange.

    gloo takes whoever connects with the right number for a peer. So before anything else, the ranks of each pair prove
    to each other that they know `secret`, which all have from the authenticated store.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world_size: int,
        address: str,
        timeout_s: float,
        memory: torch.Tensor,
        secret: Secret,
        exchange: SharedExchange | None = None,
    ) -> None:
        deadline = Deadline(timeout_s)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        # A peer that is late has this long to come; one that dies while it connects holds the others up to five times.
        options._timeout = timedelta(seconds=timeout_s)
        self._rank, self._exchange = rank, exchange
        self._memory = Slots(memory, {} if exchange is None else exchange.memories)
        try:
            self._group: ProcessGroupGloo | None = ProcessGroupGloo(store, rank, world_size, options)
        except (RuntimeError, StoreGoneError, OSError) as error:
            # gloo's own errors, and those of the store that it asks for its peers' addresses.
            kind = PeerLateError if deadline.passed else TransferError
            raise kind(rank, -1, "connect", "", str(error).splitlines()[0]) from error
        try:
            self._prove(world_size, secret, deadline)
        except BaseException:
            self.close()
            raise

    def _prove(self, world_size: int, secret: Secret, deadline: Deadline) -> None:
        """Nothing else goes over a pair before both of its ends have done this."""
        group: Any = self._group
        peers = [peer for peer in range(world_size) if peer != self._rank]
        found = {peer: torch.zeros(_PROOF_BYTES, dtype=torch.uint8) for peer in peers}
        own = {peer: _as_tensor(secret.proof("gloo", self._rank, peer)) for peer in peers}
        receives = {peer: group.recv([found[peer]], peer, 0) for peer in peers}
        sends = {peer: group.send([own[peer]], peer, 0) for peer in peers}
        for peer in peers:
            try:
                receives[peer].wait(deadline.timedelta())
            except RuntimeError as error:
                late = f"it didn't prove itself within {deadline.seconds:g} s (timeout_s)"
                kind, what = (PeerLateError, late) if deadline.passed else (TransferError, str(error).splitlines()[0])
                raise kind(self._rank, peer, "connect", "", f"gloo: {what}; {_STRANGER}") from error
            proof = found[peer].numpy().tobytes().decode("latin-1")
            if not secret.accepts(proof, "gloo", peer, self._rank):
                reason = f"gloo: what answers there doesn't know the session's secret; {_STRANGER}"
                raise TransferError(self._rank, peer, "connect", "", reason)
        for peer, send in sends.items():
            try:
                send.wait(deadline.timedelta())
            except RuntimeError as error:
                raise TransferError(self._rank, peer, "connect", "", f"gloo: {str(error).splitlines()[0]}") from error

    @property
    def memory(self) -> Slots:
        """See `Fabric.memory`."""
        return self._memory

    def run(self, program: Program, *, deadline: Deadline) -> Spent:
        """Executes one rank's program; see `Fabric.run`."""
        if self._group is None:
            raise TransferError(self._rank, -1, "transfer", "", "the gloo fabric is closed")
        return _Execution(self._group, self._exchange, program, deadline).run()

    def close(self) -> None:
        """Closes every connection; a second call does nothing."""
        self._group = None
        if self._exchange is not None:
            self._exchange.close()


def _as_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


class _Execution:
    """One run of one program.

    gloo's point-to-point work only completes inside `wait`, and a wait that times out closes every pair. So each rank
    goes through its steps in order and waits against the refit's deadline, only for what belongs to the step it is at
    or to an earlier one. Before a step, everything that was sent `lag` steps earlier must have gone, and as many
    receives are posted ahead, into free slots; the peers' bytes leave when their receive is posted.
    """

    def __init__(
        self, group: ProcessGroupGloo, exchange: SharedExchange | None, program: Program, deadline: Deadline
    ) -> None:
        # torch's stub lacks the group's point-to-point calls.
        self._group: Any = group
        self._exchange, self._program, self._deadline = exchange, program, deadline
        self._receives: dict[int, Work] = {}
        self._sends: dict[int, list[tuple[Transmission, Work | None]]] = {}
        self._spent = Spent()
        # The step that the rank is at, for errors.
        self._at = 0
        largest = max((step.nbytes for step in program.steps), default=0)
        self._window = max(_PAYLOADS_UNDER_WAY, _BYTES_UNDER_WAY // max(1, largest))
        self._lag = min(self._window, program.slots - 1)

    def run(self) -> Spent:
        try:
            return self._execute()
        except TransferError as error:
            raise self._placed(error) from error.__cause__
        finally:
            # A raised error's frames keep this object alive, and with it the sockets, whose closing tells the peers.
            self._group, self._receives, self._sends = None, {}, {}

    def _execute(self) -> Spent:
        steps = self._program.steps
        posted = 0
        for index, step in enumerate(steps):
            if index >= self._lag:
                self._retire(index - self._lag, steps[index - self._lag])
            ahead = min(len(steps), index - self._lag + self._program.slots + 1)
            while posted < ahead and len(self._receives) < self._window:
                self._post(posted, steps[posted])
                posted += 1
            self._do(index, step)
        for index in sorted(self._sends):
            self._retire(index, steps[index])
        return self._spent

    def _post(self, index: int, step: Step) -> None:
        """Starts to receive what comes over TCP."""
        self._at = index
        if step.incoming is not None and step.shared is None:
            try:
                with self._spent.timing("network"):
                    self._receives[index] = self._group.recv([step.memory], step.incoming.peer, step.incoming.hop)
            except RuntimeError as error:
                raise self._failure(step, step.incoming, error) from error

    def _do(self, index: int, step: Step) -> None:
        self._at = index
        if step.incoming is None:
            with self._spent.timing("pack"):
                step.pack.make()
        else:
            self._receive(index, step, step.incoming)
        # What others wait for goes first.
        self._send(index, step)
        if step.incoming is not None:
            with self._spent.timing("unpack"):
                step.unpack.make()
            if self._exchange is not None and step.shared is not None and not step.sends:
                self._acknowledge(self._exchange, step.incoming)
        if step.then is not None:
            with self._spent.timing("load"):
                step.then()

    def _receive(self, index: int, step: Step, incoming: Transmission) -> None:
        if step.shared is None:
            with self._spent.timing("network"):
                self._wait(self._receives.pop(index), step, incoming)
        elif self._exchange is not None:
            with self._spent.timing("exchange"):
                self._exchange.take(incoming.peer, incoming.hop, deadline=self._deadline)
            if step.sends:
                with self._spent.timing("unpack"):
                    step.memory.copy_(step.shared)
                self._acknowledge(self._exchange, incoming)
        self._spent.received_bytes += step.nbytes

    def _acknowledge(self, exchange: SharedExchange, incoming: Transmission) -> None:
        with self._spent.timing("exchange"):
            exchange.acknowledge(incoming.peer, incoming.hop, deadline=self._deadline)

    def _send(self, index: int, step: Step) -> None:
        under_way = self._sends.setdefault(index, []) if step.sends else []
        for send in step.sends:
            under_way.append((send, self._start(step, send)))
            self._spent.sent_bytes += step.nbytes

    def _start(self, step: Step, send: Transmission) -> Work | None:
        """Starts one transmission; None when it is an offer of shared memory."""
        if send.shared and self._exchange is not None:
            offset = 0 if step.slot_offset is None else step.slot_offset
            size = step.memory.numel()
            with self._spent.timing("exchange"):
                self._exchange.offer(send.peer, send.hop, offset=offset, nbytes=size, deadline=self._deadline)
            return None
        try:
            # It writes to the socket as much as fits.
            with self._spent.timing("network"):
                work: Work = self._group.send([step.memory], send.peer, send.hop)
        except RuntimeError as error:
            raise self._failure(step, send, error) from error
        return work

    def _retire(self, index: int, step: Step) -> None:
        """Waits until everything that the step sent has gone."""
        self._at = index
        for send, work in self._sends.pop(index, ()):
            if work is not None:
                with self._spent.timing("network"):
                    self._wait(work, step, send)
            elif self._exchange is not None:
                with self._spent.timing("exchange"):
                    self._exchange.settle(send.peer, send.hop, deadline=self._deadline)

    def _wait(self, work: Work, step: Step, transmission: Transmission) -> None:
        try:
            work.wait(self._deadline.timedelta())
        except RuntimeError as error:
            raise self._failure(step, transmission, error) from error
        finally:
            del work

    def _placed(self, error: TransferError) -> TransferError:
        """The error, with the rank's round and the first tensor of its payload."""
        steps = self._program.steps
        reason = f"round {self._at + 1} of {len(steps)}: {error.reason}"
        return replace(error, tensor=error.tensor or steps[self._at].tensor, reason=reason)

    def _failure(self, step: Step, transmission: Transmission, error: RuntimeError) -> TransferError:
        rank, peer, reason = self._program.rank, transmission.peer, str(error).splitlines()[0]
        if self._deadline.passed:
            late = f"it was not done within {self._deadline.seconds:g} s"
            return PeerLateError(rank, peer, "transfer", step.tensor, late)
        return TransferError(rank, peer, "transfer", step.tensor, reason)
