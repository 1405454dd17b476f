"""Sessions of a store for its tests, and callers that say what the test wants."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from typing import Any

from refit_transport.fabrics import frames
from refit_transport.fabrics.deadline import Deadline
from refit_transport.fabrics.frames import FrameReader, pack
from refit_transport.fabrics.rendezvous import ControlChannel
from refit_transport.fabrics.secret import Secret

HOST, SECRET, SIZE = "127.0.0.1", "the session's own secret", 3
SOON_S = 5.0


def joined(session: ControlChannel, rank: int, *, incarnation: int = 0) -> ControlChannel:
    return ControlChannel.join(session.meeting, rank=rank, world_size=SIZE, timeout_s=SOON_S, incarnation=incarnation)


class Stranger:
    """A raw connection to a store."""

    def __init__(self, session: ControlChannel) -> None:
        self.socket = socket.create_connection((HOST, session.meeting.port), timeout=SOON_S)
        self.reader, self.heard = FrameReader(), b""
        self.nonce = ""

    def challenged(self) -> Stranger:
        self.nonce = self.receive()["nonce"]
        return self

    def receive(self) -> dict[str, Any]:
        while True:
            data = self.socket.recv(1 << 16)
            if not data:
                raise EOFError
            self.heard += data
            for frame in self.reader.feed(data):
                return frame.header

    def hello(self, *, secret: str = SECRET, side: str = "rank", nonce: str | None = None, **changes: Any) -> bytes:
        fields = {"nonce": "of mine", "rank": 2, "incarnation": 0, "process": "p", "host": "h"} | changes
        names = ("nonce", "rank", "incarnation", "process", "host")
        facts = (self.nonce if nonce is None else nonce, *(fields.get(name) for name in names))
        return pack({**fields, "proof": Secret(secret).proof(side, *facts)})

    def rest(self) -> bytes:
        """All that it still hears until the store closes the connection."""
        with contextlib.suppress(ConnectionResetError):
            while data := self.socket.recv(1 << 16):
                self.heard += data
        return self.heard


def counted(session: ControlChannel, kind: str, at_least: int = 1) -> None:
    end = time.monotonic() + SOON_S
    while session.refused.get(kind, 0) < at_least:
        assert time.monotonic() < end, (kind, session.refused)
        time.sleep(0.01)


def works(session: ControlChannel) -> None:
    """The session does all that it is for."""
    channels = [session, joined(session, 1, incarnation=4), joined(session, 2)]
    deadline = Deadline(SOON_S)
    threads = [
        threading.Thread(target=channel.agree, args=("w/0", "x"), kwargs={"deadline": deadline}) for channel in channels
    ]
    for channel, thread in zip(channels, threads, strict=True):
        channel.publish("topic", channel.rank)
        thread.start()
    assert session.collect("topic", range(SIZE), deadline=deadline) == [0, 1, 2]
    for thread in threads:
        thread.join(SOON_S)
        assert not thread.is_alive()
    assert session.failure() is None
    for channel in channels[1:]:
        channel.close()


def oversized(header: int, payload: int) -> bytes:
    return struct.pack("!4sHHII", b"RFTC", frames.SCHEMA, 0, header, payload)
