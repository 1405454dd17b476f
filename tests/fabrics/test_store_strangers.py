"""Who doesn't belong to a session: what it is told, what it can do, and that the session goes on."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from store_sessions import HOST, SECRET, SOON_S, Stranger, counted, oversized, works

from refit_transport.errors import TransferError
from refit_transport.fabrics import frames, store_server
from refit_transport.fabrics.frames import FrameReader, pack
from refit_transport.fabrics.rendezvous import ControlChannel, Meeting

WRONG: dict[str, tuple[str, Callable[[Stranger], bytes]]] = {
    "another secret": ("secret", lambda s: s.hello(secret="guessed")),
    "no proof": ("secret", lambda s: pack({**_fields(), "proof": None})),
    "an empty proof": ("secret", lambda s: pack({**_fields(), "proof": ""})),
    "a proof that isn't ASCII": ("secret", lambda s: pack({**_fields(), "proof": "\u00e9" * 64})),
    "half a surrogate": ("secret", lambda s: pack({**_fields(), "nonce": "\ud800", "proof": "0"})),
    "the proof of the other side": ("secret", lambda s: s.hello(side="store")),
    "a proof for another challenge": ("secret", lambda s: s.hello(nonce="0" * 64)),
    "its own challenge as proof": ("secret", lambda s: pack({**_fields(), "proof": s.nonce})),
    "a hello without fields": ("garbage", lambda s: pack({"proof": "0" * 64})),
    "a rank that is a text": ("garbage", lambda s: s.hello(rank="2")),
    "a rank that is a list": ("garbage", lambda s: s.hello(rank=[2])),
    "a rank that is true": ("garbage", lambda s: s.hello(rank=True)),
    "an incarnation that is none": ("garbage", lambda s: s.hello(incarnation=None)),
    "a request instead": ("garbage", lambda s: pack({"op": "get", "keys": ["topic/0"], "patience": 1.0})),
    "a leave instead": ("garbage", lambda s: pack({"op": "leave"})),
    "HTTP": ("garbage", lambda s: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
    "TLS": ("garbage", lambda s: bytes.fromhex("1603010200010001fc0303") + os.urandom(64)),
    "zeros": ("garbage", lambda s: bytes(4096)),
    "garbage behind a wrong hello": ("secret", lambda s: s.hello(secret="guessed") + b"garbage" * 10),
    "two wrong hellos": ("secret", lambda s: 2 * s.hello(secret="guessed")),
    "another schema": ("schema", lambda s: struct.pack("!4sHHII", b"RFTC", frames.SCHEMA + 1, 0, 2, 0) + b"{}"),
    "a large header": ("oversized", lambda s: oversized(frames.STRANGER_BYTES + 1, 0)),
    "a huge header": ("oversized", lambda s: oversized(2**32 - 1, 0)),
    "a payload": ("oversized", lambda s: oversized(20, 1)),
    "a hello with a payload": ("oversized", lambda s: pack({**_fields(), "proof": "0" * 64}, [b"x"])),
    "a megabyte": ("garbage", lambda s: b"x" * (1 << 20)),
}  # fmt: skip


def _fields() -> dict[str, Any]:
    return {"nonce": "n", "rank": 2, "incarnation": 0, "process": "p", "host": "h"}


@pytest.mark.parametrize("name", WRONG)
def test_a_stranger_is_dropped_counted_and_learns_nothing(session: ControlChannel, name: str) -> None:
    kind, message = WRONG[name]
    session.publish("topic", "of value")
    stranger = Stranger(session).challenged()
    with contextlib.suppress(ConnectionError):
        stranger.socket.sendall(message(stranger))
    heard = stranger.rest()
    # A random number is all that it ever heard.
    assert json.loads(heard[16:]) == {"nonce": stranger.nonce, "sizes": []}
    counted(session, kind)
    assert sum(session.refused.values()) == 1
    works(session)


def test_a_replayed_hello_is_refused(session: ControlChannel) -> None:
    member = Stranger(session).challenged()
    hello = member.hello()
    member.socket.sendall(hello)
    assert "welcome" in member.receive()
    again = Stranger(session).challenged()
    again.socket.sendall(hello)
    assert "welcome" not in again.rest().decode("latin-1")
    counted(session, "secret")
    assert again.nonce != member.nonce


def test_what_the_store_proves_is_no_proof_of_a_rank(session: ControlChannel) -> None:
    """A reflected answer: the store's own proof of one connection is of no use on another, or as a rank's."""
    member = Stranger(session).challenged()
    member.socket.sendall(member.hello())
    welcome = member.receive()["welcome"]
    other = Stranger(session).challenged()
    other.socket.sendall(pack({**_fields(), "nonce": "of mine", "proof": welcome}))
    assert "welcome" not in other.rest().decode("latin-1")
    counted(session, "secret")


class Impostor:
    """Listens like a store, and answers every hello with what `answer` makes of it."""

    def __init__(self, answer: Callable[[dict[str, Any]], bytes], *, challenge: bytes | None = None) -> None:
        self.listener = socket.create_server((HOST, 0))
        self.answer, self.heard = answer, b""
        self.challenge = pack({"nonce": "chosen by me"}) if challenge is None else challenge
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    @property
    def meeting(self) -> Meeting:
        return Meeting(HOST, self.listener.getsockname()[1], SECRET)

    def _serve(self) -> None:
        connection, _ = self.listener.accept()
        with contextlib.suppress(OSError), connection:
            connection.settimeout(SOON_S)
            connection.sendall(self.challenge)
            reader = FrameReader()
            while data := connection.recv(1 << 16):
                self.heard += data
                for frame in reader.feed(data):
                    connection.sendall(self.answer(frame.header))


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (lambda hello: pack({"welcome": "0" * 64}), "couldn't prove"),
        (lambda hello: pack({"welcome": None}), "couldn't prove"),
        (lambda hello: pack({}), "couldn't prove"),
        # Reflected: what the rank said itself.
        (lambda hello: pack({"welcome": hello["proof"]}), "couldn't prove"),
        (lambda hello: b"garbage" * 100, "doesn't begin as a message"),
        (lambda hello: oversized(2**31, 2**31), "a message of"),
    ],
)
def test_a_rank_that_met_an_impostor_says_nothing_more(answer, what) -> None:
    impostor = Impostor(answer)
    with pytest.raises(TransferError, match=what) as caught:
        ControlChannel.join(impostor.meeting, rank=1, world_size=2, timeout_s=SOON_S)
    assert caught.value.peer == 0
    impostor.thread.join(SOON_S)
    assert SECRET.encode() not in impostor.heard
    assert len(list(FrameReader().feed(impostor.heard))) == 1  # the hello


@pytest.mark.parametrize("challenge", [b"", b"SSH-2.0-OpenSSH_9.6\r\n", pack({"nonce": None}), pack({})])
def test_whatever_listens_instead_of_a_store_is_an_error_in_time(challenge: bytes) -> None:
    impostor = Impostor(lambda hello: b"", challenge=challenge)
    began = time.monotonic()
    with pytest.raises(TransferError, match="didn't let this rank in"):
        ControlChannel.join(impostor.meeting, rank=1, world_size=2, timeout_s=0.5)
    assert time.monotonic() - began < 3.0


def test_silent_strangers_are_dropped_in_time_and_counted(
    session: ControlChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_server, "_HANDSHAKE_S", 0.3)
    silent = [Stranger(session) for _ in range(5)]
    slow = Stranger(session).challenged()
    began = time.monotonic()
    with contextlib.suppress(ConnectionError):
        for byte in slow.hello():  # a byte now and then doesn't win it time
            slow.socket.sendall(bytes([byte]))
            time.sleep(0.05)
    assert time.monotonic() - began < 2.0
    counted(session, "silent", 6)
    for stranger in silent:
        stranger.rest()
    works(session)


def test_strangers_that_go_at_once_are_counted(session: ControlChannel) -> None:
    for linger in (None, struct.pack("ii", 1, 0)):
        stranger = Stranger(session)
        if linger is not None:  # resets the connection
            stranger.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        stranger.socket.close()
    half_open = Stranger(session)
    half_open.socket.shutdown(socket.SHUT_WR)
    counted(session, "left", 3)
    works(session)


def test_a_flood_of_connections_keeps_nobody_out(session: ControlChannel) -> None:
    held: list[socket.socket] = []
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError):
                held.append(socket.create_connection((HOST, session.meeting.port), timeout=1.0))
            if len(held) > 400:
                held.pop(0).close()

    threads = [threading.Thread(target=flood, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        counted(session, "crowd", 50)
        works(session)
    finally:
        stop.set()
        for thread in threads:
            thread.join(SOON_S)
        for connection in held:
            connection.close()


def test_a_flood_drops_its_own_connections_before_those_of_others(session: ControlChannel) -> None:
    early = socket.create_connection((HOST, session.meeting.port), timeout=SOON_S, source_address=("127.0.0.2", 0))
    flood = [
        socket.create_connection((HOST, session.meeting.port), timeout=SOON_S, source_address=("127.0.0.3", 0))
        for _ in range(200)
    ]
    counted(session, "crowd", 100)
    early.setblocking(False)
    assert len(early.recv(1 << 16)) > 0
    with pytest.raises(BlockingIOError):
        early.recv(1)  # still open, though it is the oldest
    for connection in (early, *flood):
        connection.close()


DESCRIPTORS = """
import os, resource, time
from refit_transport.fabrics.deadline import Deadline
from refit_transport.fabrics.rendezvous import ControlChannel
channel = ControlChannel.listen(host="127.0.0.1", port=0, world_size=2, timeout_s=5.0, secret="s")
used = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (used + 8, used + 8))
print(channel.meeting.port, flush=True)
channel.collect("topic", (1,), deadline=Deadline(20.0))
print("joined", channel.refused["crowd"] > 20, flush=True)
time.sleep(20)
"""


def test_where_descriptors_are_scarce_strangers_give_theirs_up() -> None:
    with subprocess.Popen([sys.executable, "-c", DESCRIPTORS], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            held = [socket.create_connection((HOST, port), timeout=SOON_S) for _ in range(40)]
            channel = ControlChannel.join(Meeting(HOST, port, "s"), rank=1, world_size=2, timeout_s=SOON_S)
            channel.publish("topic", 1)
            assert process.stdout.readline() == "joined True\n"
            channel.close()
            for connection in held:
                connection.close()
        finally:
            process.kill()
