"""The rendezvous of one session: a listener that lets in only who proves that it belongs, and the board behind it."""

from __future__ import annotations

import errno
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from refit_transport.errors import TransferError
from refit_transport.fabrics.board import Board
from refit_transport.fabrics.frames import Frame, FrameError, FrameReader, pack
from refit_transport.fabrics.secret import Secret, new_nonce

# A stranger may keep a connection this long, and so many may be open beside the ranks' own. Beyond that the oldest goes
# of the address that has most, so that a flood from one address leaves the others alone.
_HANDSHAKE_S = 5.0
_MOST_STRANGERS = 64
_READ_BYTES = 1 << 18
_EVERY_INTERFACE = ("", "0.0.0.0", "::")
# No descriptor is free, and no stranger has one: somebody else may close one.
_NO_DESCRIPTOR_S = 0.01
# A longer pause is more than the system's calls take.
_LONGEST_PAUSE_S = 3600.0
# After `close`, answers that are under way get this long, and so long hears who comes late why the session failed.
_GRACE_S = 2.0
_LINGER_S = 30.0


class _Peer:
    """One connection; `rank` is -1 until it has proved what it says."""

    def __init__(self, connection: socket.socket, address: str, wake: Any) -> None:
        self.socket, self.address, self._wake = connection, address, wake
        self.reader, self.nonce = FrameReader(), new_nonce()
        self.out = bytearray()
        self.rank, self.host, self.process = -1, "", ""
        self.until = time.monotonic() + _HANDSHAKE_S
        self.is_closed = False

    def answer(self, header: dict[str, Any], parts: Sequence[bytes] = ()) -> None:
        """See `board.Caller`: what the kernel doesn't take at once follows when it can."""
        if self.is_closed:
            return
        data = pack(header, parts)
        if not self.out:
            try:
                data = data[self.socket.send(data) :]
            except BlockingIOError:
                pass
            except OSError:
                return  # its end is noticed when it is read from
        if data:
            self.out += data
            self._wake(self)


class StoreServer:
    """Serves one session in a thread of its own.

    A peer proves that it knows the secret before it learns anything but a random number, and says which rank of which
    incarnation it is. One process holds a rank for the session's whole life: a second one, or an older incarnation, is
    refused. Whoever sends anything else is dropped and counted in `refused`.
    """

    def __init__(
        self, *, host: str, port: int, secret: Secret, world_size: int, incarnations: Mapping[int, int] | None = None
    ) -> None:
        """Listens on this address alone.

        Args:
            host, port: where; port 0 is any free one.
            secret: of the session.
            world_size: ranks from 0.
            incarnations: which incarnation of a rank belongs to the session; any, for ranks that it lacks.

        Raises:
            TransferError: the port is taken, the address isn't ours, or it means every interface.
        """
        if host in _EVERY_INTERFACE:
            reason = f"{host!r} listens on every interface: give the address of the one that the ranks share"
            raise TransferError(0, -1, "rendezvous", "", reason)
        self._secret, self._incarnations = secret, dict(incarnations or {})
        self._board = Board(world_size)
        self._owners: dict[int, str] = {}
        self._peers: dict[int, set[_Peer]] = {}
        self._strangers: list[_Peer] = []
        self._selector = selectors.DefaultSelector()
        try:
            self._listener = socket.create_server((host, port), backlog=1024)
        except OSError as error:
            reason = f"can't listen on {host}:{port}: {error.strerror or error}; give another host or port"
            raise TransferError(0, -1, "rendezvous", "", reason) from error
        self.port = int(self._listener.getsockname()[1])
        self.refused: Counter[str] = Counter()
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._bell, bell = socket.socketpair()
        bell.setblocking(False)
        self._selector.register(bell, selectors.EVENT_READ)
        self._ends: float | None = None
        threading.Thread(target=self._serve, args=(bell,), name="refit-store", daemon=True).start()

    def close(self) -> None:
        """Ends the service as soon as every rank has left; at the latest a little later."""
        self._ends = time.monotonic() + (_LINGER_S if self._is_owed_a_cause else _GRACE_S)
        try:
            self._bell.send(b"!")
        except OSError:
            return  # it has ended

    def _serve(self, bell: socket.socket) -> None:
        try:
            while not self._is_over():
                for key, events in self._selector.select(self._pause()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is bell:
                        bell.recv(64)
                    elif not key.data.is_closed:
                        self._turn(key.data, events)
                now = time.monotonic()
                self._board.expire(now)
                for peer in [peer for peer in self._strangers if peer.until <= now]:
                    self._refuse(peer, "silent")
        finally:
            for peer in [*self._strangers, *(peer for peers in self._peers.values() for peer in peers)]:
                peer.socket.close()
            for end in (self._listener, self._bell, bell):
                end.close()
            self._selector.close()

    def _is_over(self) -> bool:
        if self._ends is None:
            return False
        return time.monotonic() > self._ends or not (self._is_owed_a_cause or any(self._peers.values()))

    @property
    def _is_owed_a_cause(self) -> bool:
        """Whether the session has failed and a rank that hasn't come yet doesn't know why."""
        return self._board.failure is not None and len(self._owners) < self._board.world_size

    def _pause(self) -> float | None:
        times = [self._board.next_expiry(), self._ends, *(peer.until for peer in self._strangers)]
        found = [time for time in times if time is not None]
        return min(_LONGEST_PAUSE_S, max(0.0, min(found) - time.monotonic())) if found else None

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and not self._thin_out():
                time.sleep(_NO_DESCRIPTOR_S)
            return  # else it went before it was served
        peer = _Peer(connection, str(address[0]), self._watch)
        self._selector.register(connection, selectors.EVENT_READ, peer)
        self._strangers.append(peer)
        if len(self._strangers) > _MOST_STRANGERS + self._board.world_size:
            self._thin_out()
        peer.answer({"nonce": peer.nonce})

    def _thin_out(self) -> bool:
        """Drops the oldest stranger of the address that has most, which may call again; whether there was one."""
        if not self._strangers:
            return False
        crowds = Counter(peer.address for peer in self._strangers)
        [(most, _)] = crowds.most_common(1)
        oldest = next(peer for peer in self._strangers if peer.address == most)
        self._refuse(oldest, "crowd", farewell={"busy": True})
        return True

    def _turn(self, peer: _Peer, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                del peer.out[: peer.socket.send(peer.out)]
                self._watch(peer)
            if events & selectors.EVENT_READ:
                data = peer.socket.recv(_READ_BYTES)
                if not data:
                    self._lose(peer)
                    return
                for frame in peer.reader.feed(data):
                    self._take(peer, frame)
                    if peer.is_closed:
                        break
        except BlockingIOError:
            return
        except FrameError as error:
            self._refuse(peer, error.kind)
        except OSError:
            self._lose(peer)

    def _take(self, peer: _Peer, frame: Frame) -> None:
        if peer.rank < 0:
            self._admit(peer, frame)
        elif frame.header.get("op") == "leave":
            self._board.leave(peer.rank)
        else:
            self._board.request(peer, frame, time.monotonic())

    def _admit(self, peer: _Peer, frame: Frame) -> None:
        try:
            nonce, rank, incarnation, process, host = (
                frame.header[name] for name in ("nonce", "rank", "incarnation", "process", "host")
            )
        except (KeyError, TypeError) as error:
            raise FrameError("garbage", "it isn't a hello") from error
        if not all(type(number) is int for number in (rank, incarnation)) or not all(
            isinstance(text, str) for text in (nonce, process, host)
        ):
            raise FrameError("garbage", "it isn't a hello")
        facts = (peer.nonce, nonce, rank, incarnation, process, host)
        if not self._secret.accepts(frame.header.get("proof"), "rank", *facts):
            self._refuse(peer, "secret")
            return
        reason = self._objection(rank, incarnation, process)
        if reason:
            self._refuse(peer, "member", farewell={"refused": reason})
            return
        self._strangers.remove(peer)
        self._owners[rank] = process
        self._peers.setdefault(rank, set()).add(peer)
        peer.rank, peer.process, peer.host = rank, process, host
        peer.reader.trust()
        peer.answer({"welcome": self._secret.proof("store", peer.nonce, nonce)})

    def _objection(self, rank: int, incarnation: int, process: str) -> str:
        """Why a peer that knows the secret isn't let in all the same; "" when it is."""
        size = self._board.world_size
        if not 0 <= rank < size:
            return f"the session has ranks 0 to {size - 1}, not {rank}"
        expected = self._incarnations.get(rank, incarnation)
        if incarnation != expected:
            return f"rank {rank} is incarnation {expected} of its worker now; this one is incarnation {incarnation}"
        if self._owners.get(rank, process) != process:
            return f"another process has joined as rank {rank}"
        return ""

    def _refuse(self, peer: _Peer, kind: str, *, farewell: dict[str, Any] | None = None) -> None:
        """Drops a peer that doesn't belong. A member that sends what can't be understood ends the session."""
        # Counted before anybody can know of it.
        self.refused[kind] += 1
        if farewell is not None:
            peer.answer(farewell)
        self._drop(peer)
        if peer.rank >= 0:
            self._board.fail(peer.rank, peer.host, f"it sent rank 0 what isn't a message of the session ({kind})")

    def _lose(self, peer: _Peer) -> None:
        """A connection has ended from the other side."""
        self._drop(peer)
        if peer.rank < 0:
            self.refused["left"] += 1
            return
        if not self._peers[peer.rank] and not self._board.has_left(peer.rank):
            # A process that ends, or whose connection breaks, says nothing before.
            self._board.fail(peer.rank, peer.host, "its process ended, or lost its connection to rank 0")

    def _drop(self, peer: _Peer) -> None:
        peer.is_closed = True
        self._selector.unregister(peer.socket)
        peer.socket.close()
        if peer.rank < 0:
            self._strangers.remove(peer)
        else:
            self._peers[peer.rank].discard(peer)

    def _watch(self, peer: _Peer) -> None:
        if not peer.is_closed:
            writing = selectors.EVENT_WRITE if peer.out else 0
            self._selector.modify(peer.socket, selectors.EVENT_READ | writing, peer)
