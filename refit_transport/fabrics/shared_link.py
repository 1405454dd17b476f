"""One connection between two ranks of a host: small records that say what lies where, and what has been read."""

from __future__ import annotations

import math
import select
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from refit_transport.errors import PeerLateError, TransferError
from refit_transport.fabrics.deadline import Deadline

# Kind, hop, byte offset and bytes of a slot in the sender's segment; both last are 0 in an acknowledgement.
_RECORD = struct.Struct("<4Q")
_NOTICE, _ACKNOWLEDGEMENT = 1, 2
_READ_BYTES = 128 * _RECORD.size


class _Notice(NamedTuple):
    hop: int
    offset: int
    nbytes: int


class Link:
    """This rank's end of the connection to `peer`, whose segment is mapped as `memory`. Used by one thread.

    Why no fence is needed: the sender writes its slot, then calls `send`, where the kernel queues the record under a
    lock; the receiver takes the record off under the same lock, then reads the slot. Giving up and taking that lock
    order the two processors' accesses. So it is with an acknowledgement and the slot's next use.
    """

    def __init__(self, connection: socket.socket, *, rank: int, peer: int, memory: torch.Tensor) -> None:
        connection.setblocking(False)
        self._socket, self.memory = connection, memory
        self._rank, self._peer = rank, peer
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._unread = bytearray()
        self._notices: deque[_Notice] = deque()
        self._offered: set[int] = set()
        self._taken: set[int] = set()
        self._ended = False

    def offer(self, hop: int, *, offset: int, nbytes: int, deadline: Deadline) -> None:
        """Tells the peer that these bytes of this rank's segment are its to read; see `SharedExchange.offer`."""
        if hop in self._offered:
            raise self._failure(f"hop {hop} was offered before and isn't acknowledged yet")
        self._offered.add(hop)
        self._send(_RECORD.pack(_NOTICE, hop, offset, nbytes), deadline)

    def take(self, hop: int, *, deadline: Deadline) -> torch.Tensor:
        """The bytes of the peer's next offer; see `SharedExchange.take`."""
        self._await(lambda: bool(self._notices), f"offered hop {hop}", deadline)
        notice = self._notices.popleft()
        if notice.hop != hop:
            raise self._failure(f"it offered hop {notice.hop} where hop {hop} is due")
        self._taken.add(hop)
        return self.memory[notice.offset : notice.offset + notice.nbytes]

    def acknowledge(self, hop: int, *, deadline: Deadline) -> None:
        """Tells the peer that hop's bytes have been read; see `SharedExchange.acknowledge`."""
        if hop not in self._taken:
            raise self._failure(f"hop {hop} can't be acknowledged: it wasn't taken, or was acknowledged before")
        self._send(_RECORD.pack(_ACKNOWLEDGEMENT, hop, 0, 0), deadline)
        self._taken.remove(hop)

    def settle(self, hop: int, *, deadline: Deadline) -> None:
        """Waits until the peer has acknowledged the hop."""
        if hop in self._offered:
            self._await(lambda: hop not in self._offered, f"acknowledged hop {hop}", deadline)

    def is_settled(self, hop: int) -> bool:
        """Whether the peer has acknowledged the hop, without waiting."""
        if hop in self._offered:
            self._read()
        if hop in self._offered and self._ended:
            raise self._failure(f"the peer is gone and hasn't acknowledged hop {hop}")
        return hop not in self._offered

    def close(self) -> None:
        """Closes the connection, which the peer sees at once."""
        self._socket.close()

    def _await(self, came: Callable[[], bool], what: str, deadline: Deadline) -> None:
        if not came():
            self._read()
        while not came():
            if self._ended:
                raise self._failure(f"the peer is gone and hasn't {what}")
            self._sleep(select.POLLIN, f"the peer hasn't {what}", deadline)
            self._read()

    def _send(self, record: bytes, deadline: Deadline) -> None:
        unsent = memoryview(record)
        while unsent:
            try:
                unsent = unsent[self._socket.send(unsent) :]
            except BlockingIOError:
                self._sleep(select.POLLIN | select.POLLOUT, "the peer doesn't read its records", deadline)
                # Two ranks whose queues are both full would wait for each other for ever.
                self._read()
            except OSError as error:
                raise self._failure(f"the peer is gone: {error.strerror}") from error

    def _sleep(self, events: int, reason: str, deadline: Deadline) -> None:
        if deadline.passed:
            late = f"shared memory: {reason} within {deadline.seconds:g} s"
            raise PeerLateError(self._rank, self._peer, "transfer", "", late)
        self._poll.modify(self._socket, events)
        self._poll.poll(math.ceil(1e3 * min(60.0, deadline.remaining())))

    def _read(self) -> None:
        """Takes in every record that has arrived."""
        while not self._ended:
            try:
                arrived = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                arrived = b""
            self._ended = not arrived
            self._unread += arrived
            while len(self._unread) >= _RECORD.size:
                self._accept(*_RECORD.unpack_from(self._unread))
                del self._unread[: _RECORD.size]
            if len(arrived) < _READ_BYTES:
                return

    def _accept(self, kind: int, hop: int, offset: int, nbytes: int) -> None:
        if kind == _NOTICE:
            if offset + nbytes > len(self.memory):
                where = f"bytes {offset} to {offset + nbytes}"
                raise self._failure(f"it offered {where} of a segment of {len(self.memory)} as hop {hop}")
            self._notices.append(_Notice(hop, offset, nbytes))
        elif kind == _ACKNOWLEDGEMENT and hop in self._offered:
            self._offered.remove(hop)
        else:
            raise self._failure(f"an unexpected record came: kind {kind}, hop {hop}")

    def _failure(self, reason: str) -> TransferError:
        return TransferError(self._rank, self._peer, "transfer", "", f"shared memory: {reason}")
