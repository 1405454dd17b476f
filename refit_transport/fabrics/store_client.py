"""One rank's way to the session's store: authenticated connections, each request with a deadline."""

from __future__ import annotations

import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from refit_transport.errors import TransferError
from refit_transport.fabrics.deadline import Deadline
from refit_transport.fabrics.frames import Frame, FrameError, FrameReader, pack
from refit_transport.fabrics.secret import Secret, new_nonce

_READ_BYTES = 1 << 18
_TIMEVAL = struct.Struct("@ll")
_TRY_AGAIN_S = 0.02
# An answer takes a millisecond, or much longer where all cores are busy; a short timeout isn't meant for it.
LEAST_PATIENCE_S = 1.0


@dataclass(frozen=True, slots=True)
class Membership:
    """Who a process is in a session. `process` tells two processes that claim the same rank apart."""

    rank: int
    incarnation: int
    process: str
    host: str

    @classmethod
    def of(cls, rank: int, incarnation: int) -> Membership:
        """This process's, as of now."""
        return cls(rank, incarnation, secrets.token_hex(8), socket.gethostname())


class StoreGoneError(Exception):
    """The store doesn't answer, or not as a store would."""


class _BusyError(Exception):
    """Too many others wait for the store to let them in."""


class _Connection:
    """A socket to the store, after both ends have proved that they know the secret."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        self._socket, self._reader = connection, FrameReader()
        self._frames: list[Frame] = []

    def greet(self, secret: Secret, member: Membership, deadline: Deadline) -> str:
        """Proves who this is, and has the store prove itself; why it refused, or ""."""
        challenge = self._receive(deadline).header.get("nonce")
        nonce = new_nonce()
        facts = (challenge, nonce, member.rank, member.incarnation, member.process, member.host)
        names = ("nonce", "rank", "incarnation", "process", "host")
        hello = dict(zip(names, facts[1:], strict=True))
        self.send(pack({**hello, "proof": secret.proof("rank", *facts)}), deadline)
        answer = self._receive(deadline).header
        if "busy" in answer:
            raise _BusyError("strangers crowd it")
        if "refused" in answer:
            return str(answer["refused"])
        if not secret.accepts(answer.get("welcome"), "store", challenge, nonce):
            raise StoreGoneError("it couldn't prove that it knows the session's secret")
        self._reader.trust()
        return ""

    def request(self, message: bytes, deadline: Deadline) -> Frame:
        """The answer to a request."""
        self.send(message, deadline)
        return self._receive(deadline)

    def send(self, message: bytes, deadline: Deadline) -> None:
        with self._within(socket.SO_SNDTIMEO, deadline):
            self._socket.sendall(message)

    def _receive(self, deadline: Deadline) -> Frame:
        while not self._frames:
            with self._within(socket.SO_RCVTIMEO, deadline):
                data = self._socket.recv(_READ_BYTES)
            if not data:
                raise StoreGoneError("it closed the connection")
            self._frames += self._reader.feed(data)
        return self._frames.pop(0)

    @contextmanager
    def _within(self, option: int, deadline: Deadline) -> Iterator[None]:
        """The kernel keeps the time: Python's own timeouts poll, which fails where no file number is free.

        Raises:
            TimeoutError: the deadline passed.
        """
        microseconds = max(1, int(deadline.remaining() * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(*divmod(microseconds, 1_000_000)))
        try:
            yield
        except BlockingIOError as error:
            raise TimeoutError from error

    def close(self) -> None:
        self._socket.close()


class StoreClient:
    """Requests to the store of a session; threads may ask at the same time, each over a connection of its own."""

    def __init__(self, *, host: str, port: int, secret: Secret, member: Membership) -> None:
        self.host, self.port, self.member = host, port, member
        self._secret = secret
        self._free: list[_Connection] = []
        self._lock = threading.Lock()
        self._gone = ""
        self._close = weakref.finalize(self, _leave, self._free, self._lock)

    def join(self, timeout_s: float) -> None:
        """Connects, waiting for the store to be there.

        Raises:
            TransferError: nobody listens there within `timeout_s`, or it doesn't let this rank in; says which.
        """
        deadline = Deadline(timeout_s)
        self._put_back(self._connect(deadline))

    def request(self, header: dict[str, Any], parts: Sequence[bytes] = (), *, patience: float) -> Frame:
        """The answer, which a store that works gives within `patience` seconds and a little.

        Raises:
            StoreGoneError: it doesn't; no later request is tried.
            FrameError: the request is larger than a message may be; nothing was sent.
        """
        if self._gone:
            raise StoreGoneError(self._gone)
        message, deadline = pack(header, parts), Deadline(patience + LEAST_PATIENCE_S)
        try:
            connection = self._take(deadline)
            answer = connection.request(message, deadline)
        except TimeoutError:
            self._gone = f"no answer within {deadline.seconds:g} s"
        except TransferError as error:
            self._gone = error.reason
        except (OSError, StoreGoneError, FrameError) as error:
            self._gone = str(error)
        if self._gone:
            raise StoreGoneError(self._gone)
        self._put_back(connection)
        return answer

    def tell(self, header: dict[str, Any]) -> None:
        """Sends what needs no answer; where the store is gone, the next request says so."""
        if self._gone:
            return
        deadline = Deadline(LEAST_PATIENCE_S)
        with suppress(OSError, StoreGoneError, TransferError):
            connection = self._take(deadline)
            connection.send(pack(header), deadline)
            self._put_back(connection)

    def close(self) -> None:
        """Leaves the session; a second call does nothing."""
        self._gone = self._gone or "this rank has left the refit"
        self._close()

    def _take(self, deadline: Deadline) -> _Connection:
        with self._lock:
            if self._free:
                return self._free.pop()
        return self._connect(deadline)

    def _put_back(self, connection: _Connection) -> None:
        with self._lock:
            self._free.append(connection)

    def _connect(self, deadline: Deadline) -> _Connection:
        while True:
            connection = self._open(deadline)
            try:
                refused = connection.greet(self._secret, self.member, deadline)
            except (_BusyError, ConnectionResetError, BrokenPipeError) as error:
                # A store that drops a caller unheard resets the connection.
                connection.close()
                if deadline.remaining() < _TRY_AGAIN_S:
                    raise self._not_let_in(str(error)) from error
                time.sleep(_TRY_AGAIN_S)
                continue
            except (OSError, StoreGoneError, FrameError) as error:
                connection.close()
                late = f"no answer within {deadline.seconds:g} s (timeout_s)"
                raise self._not_let_in(late if isinstance(error, TimeoutError) else str(error)) from error
            if refused:
                connection.close()
                raise TransferError(
                    self.member.rank, 0, "rendezvous", "", f"the {self._where} refuses this rank: {refused}"
                )
            return connection

    def _open(self, deadline: Deadline) -> _Connection:
        """A connection that has proved nothing yet."""
        while True:
            try:
                opened = socket.create_connection((self.host, self.port), timeout=max(1e-3, deadline.remaining()))
                break
            except OSError as error:
                if deadline.remaining() < _TRY_AGAIN_S:
                    reason = f"no {self._where} within {deadline.seconds:g} s (timeout_s): {error.strerror or error}"
                    raise TransferError(self.member.rank, 0, "rendezvous", "", reason) from error
                time.sleep(_TRY_AGAIN_S)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return _Connection(opened)

    @property
    def _where(self) -> str:
        return f"refit rendezvous at {self.host}:{self.port}"

    def _not_let_in(self, what: str) -> TransferError:
        remedy = "it is another session's, or this rank has an old session's secret"
        reason = f"the {self._where} didn't let this rank in: {what}; {remedy}"
        return TransferError(self.member.rank, 0, "rendezvous", "", reason)


def _leave(free: list[_Connection], lock: threading.Lock) -> None:
    """What is left of a client that nobody uses any more."""
    with lock:
        for number, connection in enumerate(free):
            if number == 0:
                with suppress(OSError):
                    connection.send(pack({"op": "leave"}), Deadline(LEAST_PATIENCE_S))
            connection.close()
        free.clear()


class GroupStore(Store):
    """The session's store as torch's process groups want it, in a name space of their own."""

    def __init__(self, client: StoreClient, prefix: str, *, timeout_s: float) -> None:
        super().__init__()
        self._client, self._prefix, self._timeout_s = client, prefix, timeout_s

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # torch hands over bytes
        """Sets a value."""
        self._client.request({"op": "set", "keys": [self._name(key)]}, [bytes(value)], patience=self._timeout_s)

    def get(self, key: str) -> bytes:
        """A value, as soon as it is there."""
        return self._values([key], self._timeout_s)[0]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Returns when there are values for all keys."""
        self._values(keys, self._timeout_s if timeout is None else timeout.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        """Whether there are values for all keys."""
        names = [self._name(key) for key in keys]
        return all(self._client.request({"op": "check", "keys": names}, patience=self._timeout_s).header["there"])

    def add(self, key: str, amount: int) -> int:
        """Adds to a number, which begins at 0."""
        header = {"op": "add", "key": self._name(key), "amount": amount}
        return int(self._client.request(header, patience=self._timeout_s).header["total"])

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:  # type: ignore[override]  # as `set`
        """Sets a value if it is as expected; the value afterwards."""
        header = {"op": "exchange", "key": self._name(key)}
        return self._client.request(header, [bytes(expected), bytes(desired)], patience=self._timeout_s).parts[0]

    def delete_key(self, key: str) -> bool:
        """Removes a value; whether there was one."""
        header = {"op": "delete", "keys": [self._name(key)]}
        return bool(self._client.request(header, patience=self._timeout_s).header["count"])

    def has_extended_api(self) -> bool:
        """Whether torch may ask for several values at once."""
        return False

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _values(self, keys: Sequence[str], patience: float) -> tuple[bytes, ...]:
        header = {"op": "get", "keys": [self._name(key) for key in keys], "patience": patience}
        answer = self._client.request(header, patience=patience)
        if "late" in answer.header:
            raise TimeoutError(f"no value for {', '.join(keys)} within {patience:g} s")
        if "failure" in answer.header:
            raise ConnectionAbortedError(f"the refit failed: {answer.header['failure']['reason']}")
        return answer.parts
