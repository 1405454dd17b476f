"""How the ranks of one host find each other: Unix sockets in a private directory, proven by a secret on both ends."""

from __future__ import annotations

import hmac
import math
import os
import secrets
import select
import socket
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refit_transport.errors import TransferError
from refit_transport.fabrics.deadline import Deadline
from refit_transport.fabrics.shared_link import Link
from refit_transport.fabrics.shared_segment import REMEDY, SlotMemory, map_segment

# Magic, the writer's rank, bytes of its segment, and the secret that the reader published. The segment's descriptor
# rides along.
_HELLO = struct.Struct("<8sQQ32s")
_MAGIC = b"refitshm"
_INT = struct.Struct("@i")
# No process that another thread starts meanwhile inherits what arrives. `socket.recv_fds` of Python 3.11 drops flags;
# macOS has no such flag.
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_LOOK_UP_S = 0.5  # a rank that failed before it could call us tells that elsewhere
_LEFT = "the peer left, or another answers at its socket"
_STRANGERS = 16  # connections that may queue beside the peers' own


@dataclass(frozen=True, slots=True)
class _Hello:
    rank: int
    nbytes: int
    secret: bytes
    descriptors: tuple[int, ...]


def meet(
    memory: SlotMemory,
    *,
    rank: int,
    peers: Iterable[int],
    publish: Callable[[str, Any], None],
    collect: Callable[[str, Iterable[int]], list[Any]],
    failure: Callable[[], Exception | None],
    topic: str,
    deadline: Deadline,
) -> dict[int, Link]:
    """Connects this rank with every peer; collective. Leaves no file behind, and no connection if it raises.

    Raises:
        TransferError: phase connect; a peer didn't come, left, or the system lacks something.
        Exception: what `failure` returned while this rank waited.
    """
    others = sorted(set(peers) - {rank})
    with ExitStack() as undo, _refusals(rank, -1, "can't connect"):
        # A path, unlike an abstract name, reaches the socket from any network namespace.
        with _private_path() as path, socket.socket(socket.AF_UNIX) as listener:
            secret = secrets.token_bytes(32)
            listener.bind(path)
            listener.listen(len(others) + _STRANGERS)
            listener.setblocking(False)
            publish(topic, {"path": path, "secret": secret.hex()})
            published = dict(zip(others, collect(topic, others), strict=True))
            meeting = _Meeting(memory, rank=rank, secret=secret, published=published, listener=listener)
            undo.callback(meeting.abandon)
            meeting.run(failure, deadline)
        undo.pop_all()
    return meeting.links


class _Meeting:
    """Connects to each lower rank and is connected to by each higher one, in whatever order they come."""

    def __init__(
        self,
        memory: SlotMemory,
        *,
        rank: int,
        secret: bytes,
        published: dict[int, dict[str, str]],
        listener: socket.socket,
    ) -> None:
        self.links: dict[int, Link] = {}
        self._memory, self._rank, self._secret = memory, rank, secret
        self._published, self._listener = published, listener
        # Connections that have proven nothing yet, by file number, and whom we called on those that we made.
        self._open: dict[int, socket.socket] = {}
        self._called: dict[int, int] = {}
        self._poll = select.poll()

    def run(self, failure: Callable[[], Exception | None], deadline: Deadline) -> None:
        for peer in self._published:
            if peer < self._rank:
                self._call(peer, deadline)
        self._poll.register(self._listener, select.POLLIN)
        while missing := sorted(self._published.keys() - self.links.keys()):
            if deadline.passed:
                late = f"shared memory: ranks {missing} didn't connect within {deadline.seconds:g} s; {REMEDY}"
                raise TransferError(self._rank, missing[0], "connect", "", late)
            events = self._poll.poll(math.ceil(1e3 * min(_LOOK_UP_S, deadline.remaining())))
            if not events and (cause := failure()):
                raise cause
            for number, _ in events:
                if number == self._listener.fileno():
                    self._watch(self._listener.accept()[0])
                else:
                    self._hear(number)
        self._close_strangers()

    def abandon(self) -> None:
        """Closes every connection."""
        self._close_strangers()
        for link in self.links.values():
            link.close()
        self.links.clear()

    def _call(self, peer: int, deadline: Deadline) -> None:
        connection = socket.socket(socket.AF_UNIX)
        self._called[self._watch(connection)] = peer
        with _refusals(self._rank, peer, "can't reach its socket"):
            # While the listener's queue is full, `connect` waits so long. A Python timeout would make it fail at once.
            connection.setblocking(True)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(deadline.remaining()))
            connection.connect(self._published[peer]["path"])
            connection.setblocking(False)
        self._introduce(connection, peer)

    def _watch(self, connection: socket.socket) -> int:
        connection.setblocking(False)
        self._open[connection.fileno()] = connection
        self._poll.register(connection, select.POLLIN)
        return connection.fileno()

    def _introduce(self, connection: socket.socket, peer: int) -> None:
        hello = _HELLO.pack(_MAGIC, self._rank, self._memory.nbytes, bytes.fromhex(self._published[peer]["secret"]))
        with _refusals(self._rank, peer, _LEFT):
            socket.send_fds(connection, [hello], [self._memory.descriptor])

    def _hear(self, number: int) -> None:
        """Makes a link of a connection whose other end proves to be a peer; drops any other caller."""
        connection, called = self._open[number], self._called.get(number)
        self._poll.unregister(connection)
        with _hello_of(connection) as hello:
            if hello is not None and self._is_due(hello, called):
                self._link(connection, hello, called)
            elif called is None:
                connection.close()
            else:
                raise TransferError(self._rank, called, "connect", "", f"shared memory: {_LEFT}")
        del self._open[number]

    def _is_due(self, hello: _Hello, called: int | None) -> bool:
        """Whether the other end knows our secret and is one that we wait for."""
        if not hmac.compare_digest(hello.secret, self._secret):
            return False
        if called is not None:
            return hello.rank == called
        return hello.rank > self._rank and hello.rank in self._published and hello.rank not in self.links

    def _link(self, connection: socket.socket, hello: _Hello, called: int | None) -> None:
        with _refusals(self._rank, hello.rank, "can't map its segment"):
            if not hello.descriptors:
                raise ValueError("no file number is free for it (ulimit -n)")
            mapped = map_segment(hello.descriptors[0], hello.nbytes)
        if called is None:
            self._introduce(connection, hello.rank)
        self.links[hello.rank] = Link(connection, rank=self._rank, peer=hello.rank, memory=mapped)

    def _close_strangers(self) -> None:
        for connection in self._open.values():
            connection.close()
        self._open.clear()


@contextmanager
def _private_path() -> Iterator[str]:
    """A path for a socket that no other user reaches, for as long as the block runs."""
    directory = Path(tempfile.mkdtemp(prefix="refit-"))  # mode 0700
    try:
        yield str(directory / "s")
    finally:
        # `tempfile.TemporaryDirectory` would fail, and leave both, where no file number is free.
        (directory / "s").unlink(missing_ok=True)
        directory.rmdir()


@contextmanager
def _hello_of(connection: socket.socket) -> Iterator[_Hello | None]:
    """What the other end says of itself, and its descriptor for as long as the block runs.

    A hello is written at once, so what doesn't come whole, or is anything else, counts as none.
    """
    data, descriptors = b"", list[int]()
    try:
        data, ancillary, _, _ = connection.recvmsg(_HELLO.size, socket.CMSG_LEN(_INT.size), _CLOSE_ON_EXEC)
        descriptors = [
            number
            for level, kind, content in ancillary
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
            for (number,) in _INT.iter_unpack(content[: len(content) // _INT.size * _INT.size])
        ]
    except OSError:
        pass
    try:
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        if len(data) == _HELLO.size and data.startswith(_MAGIC):
            _, rank, nbytes, secret = _HELLO.unpack(data)
            yield _Hello(rank, nbytes, secret, tuple(descriptors))
        else:
            yield None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


@contextmanager
def _refusals(rank: int, peer: int, what: str) -> Iterator[None]:
    """Turns what the system refuses into one message that says what to do."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise TransferError(rank, peer, "connect", "", f"shared memory: {what}: {error}; {REMEDY}") from error


def _timeval(seconds: float) -> bytes:
    """C's `struct timeval`; zero would mean for ever."""
    return struct.pack("@ll", int(seconds), max(1, int(1e6 * (seconds % 1))))
