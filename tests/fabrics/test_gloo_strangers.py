"""Strangers on gloo's own ports, which nothing protects: a refit succeeds or ends in time, without a byte of theirs.

gloo takes whoever connects first with a pair's number for the peer. A stranger here knows gloo's protocol, finds the
port in the kernel's list, and comes before the peers: the peers wait until it has.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import run_forked
from torch._C._distributed_c10d import Store

from refit_transport.errors import TransferError
from refit_transport.fabrics.deadline import Deadline
from refit_transport.fabrics.gloo import GlooFabric
from refit_transport.fabrics.rendezvous import ControlChannel
from refit_transport.fabrics.secret import Secret
from refit_transport.testing.threads import run_ranks

HOST, TIMEOUT_S, PAIRS = "127.0.0.1", 3.0, 4
# gloo's message: its size, what it is, slot, offset, length, offset there; and the kinds that it has.
MESSAGE = struct.Struct("=QQQQQQ")
SEND_UNBOUND, NOTIFY_SEND, NOTIFY_RECEIVE = 1, 2, 3
SECRET = Secret("of this test")


class Late(Store):
    """Keeps its rank from connecting until the stranger is there; the rank listens already."""

    def __init__(self, inner: Store, published: threading.Barrier, go: threading.Event) -> None:
        super().__init__()
        self._inner, self._published, self._go = inner, published, go

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._inner.set(key, value)
        self._published.wait(10.0)
        assert self._go.wait(10.0)

    def get(self, key: str) -> bytes:
        return self._inner.get(key)

    def wait(self, keys: Any, timeout: Any = None) -> None:
        self._inner.wait(keys) if timeout is None else self._inner.wait(keys, timeout)

    def check(self, keys: Any) -> bool:
        return bool(self._inner.check(keys))

    def has_extended_api(self) -> bool:
        return False


def own_ports() -> set[int]:
    """The ports on which this process listens."""
    inodes = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(entry.readlink())
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    lines = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return {int(line[1].split(":")[1], 16) for line in lines if line[3] == "0A" and line[9] in inodes}


def callers(ports: set[int]) -> list[socket.socket]:
    """A connection for each pair that a listener could have, in place of a peer's."""
    found = []
    for port in ports:
        for number in range(PAIRS):
            caller = socket.create_connection((HOST, port), timeout=TIMEOUT_S)
            caller.sendall(number.to_bytes(8, "little"))
            found.append(caller)
    return found


class Connected:
    """Two ranks as threads, which connect and then exchange; and the stranger between them."""

    def __init__(self) -> None:
        self.published, self.go = threading.Barrier(3), threading.Event()
        self.heard: dict[int, torch.Tensor] = {}
        self.before = own_ports()

    def rank(self, channel: ControlChannel) -> None:
        store = Late(channel.group_store("gloo"), self.published, self.go)
        fabric = GlooFabric(
            store,
            rank=channel.rank,
            world_size=2,
            address=HOST,
            timeout_s=TIMEOUT_S,
            memory=torch.zeros(64, dtype=torch.uint8),
            secret=SECRET,
        )
        group: Any = fabric._group
        mine, heard = torch.full((8,), channel.rank + 1, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
        receiving = group.recv([heard], 1 - channel.rank, 0)
        sending = group.send([mine], 1 - channel.rank, 0)
        receiving.wait(Deadline(TIMEOUT_S).timedelta())
        sending.wait(Deadline(TIMEOUT_S).timedelta())
        self.heard[channel.rank] = heard
        channel.agree("done/0", "", deadline=Deadline(TIMEOUT_S))

    def run(self, stranger: Callable[[list[socket.socket]], None], *, seconds: float) -> list[TransferError]:
        """Both ranks' errors."""
        errors: list[TransferError] = []

        def rank(channel: ControlChannel) -> None:
            if channel.rank == 0:
                self.before |= own_ports()
                ready.set()
            else:
                assert ready.wait(10.0)
            began = time.monotonic()
            try:
                self.rank(channel)
            except TransferError as error:
                errors.append(error)
            assert time.monotonic() - began < seconds

        ready = threading.Event()
        found: list[socket.socket] = []

        def act() -> None:
            self.published.wait(10.0)
            found.extend(callers(own_ports() - self.before))
            early = threading.Thread(target=stranger, args=(found,), daemon=True)
            early.start()
            time.sleep(0.3)
            self.go.set()
            early.join(20.0)

        acting = threading.Thread(target=act, daemon=True)
        acting.start()
        try:
            run_ranks(2, rank)
        finally:
            acting.join(20.0)
            for caller in found:
                caller.close()
        assert len(found) >= 2 * PAIRS
        return errors


def silent(found: list[socket.socket]) -> None:
    """Holds the connections."""


def closing(found: list[socket.socket]) -> None:
    for caller in found:
        caller.close()


def garbage(found: list[socket.socket]) -> None:
    for caller in found:
        caller.sendall(os.urandom(8) + b"\xff" * 8 + os.urandom(4080))


def forging(found: list[socket.socket]) -> None:
    """Waits until a rank is ready to receive, and sends what it asked for, as a peer would: but not the proof."""

    def answer(caller: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := caller.recv(1 << 12):
                for begin in range(0, len(data) - MESSAGE.size + 1, MESSAGE.size):
                    _, kind, slot, _, length, _ = MESSAGE.unpack_from(data, begin)
                    if kind == NOTIFY_RECEIVE:
                        size = MESSAGE.size + length
                        caller.sendall(MESSAGE.pack(size, SEND_UNBOUND, slot, 0, length, 0) + b"E" * length)

    threads = [threading.Thread(target=answer, args=(caller,), daemon=True) for caller in found]
    for thread in threads:
        thread.start()


@pytest.mark.parametrize("stranger", [silent, closing, garbage, forging])
def test_a_stranger_in_a_peers_place_ends_the_refit_in_time_and_nothing_of_it_arrives(stranger) -> None:
    connected = Connected()
    errors = connected.run(stranger, seconds=2 * TIMEOUT_S + 2.0)
    assert errors
    assert connected.heard == {}
    assert all(error.phase in ("connect", "peer failure") for error in errors)
    if stranger is forging:
        assert any("doesn't know the session's secret" in error.reason for error in errors)


def test_without_a_stranger_the_same_ranks_connect() -> None:
    """The test's own control: what fails above fails because of the stranger."""
    connected = Connected()
    connected.published = threading.Barrier(2)
    connected.go.set()
    errors: list[Exception] = []
    run_ranks(2, connected.rank)
    assert errors == []
    assert {rank: heard.tolist() for rank, heard in connected.heard.items()} == {0: [2] * 8, 1: [1] * 8}


@contextlib.contextmanager
def pestering(ports: set[int]) -> Iterator[list[int]]:
    """Strangers that call at these ports all the while, with garbage, with numbers of pairs, or with nothing."""
    stop, calls, held = threading.Event(), [0], list[socket.socket]()

    def pester() -> None:
        kinds = (b"", os.urandom(4096), (0).to_bytes(8, "little"), (1).to_bytes(8, "little") + os.urandom(200))
        while not stop.is_set():
            for port in ports:
                with contextlib.suppress(OSError):
                    caller = socket.create_connection((HOST, port), timeout=1.0)
                    caller.sendall(kinds[calls[0] % len(kinds)])
                    held.append(caller)
                    calls[0] += 1
            if len(held) > 100:
                held.pop(0).close()
            time.sleep(0.001)

    thread = threading.Thread(target=pester, daemon=True)
    thread.start()
    try:
        yield calls
    finally:
        stop.set()
        thread.join(5.0)
        for caller in held:
            caller.close()


def test_strangers_disturb_no_group_that_is_connected() -> None:
    before, go, done = own_ports(), threading.Event(), threading.Event()

    def rank(channel: ControlChannel) -> bool:
        if channel.rank == 0:
            before.update(own_ports())
        channel.agree("counted/0", "", deadline=Deadline(10.0))
        fabric = GlooFabric(
            channel.group_store("gloo"),
            rank=channel.rank,
            world_size=2,
            address=HOST,
            timeout_s=10.0,
            memory=torch.zeros(64, dtype=torch.uint8),
            secret=SECRET,
        )
        channel.agree("connected/0", "", deadline=Deadline(10.0))
        if channel.rank == 0:
            ports = own_ports() - before
            assert ports
            with pestering(ports) as calls:
                while calls[0] < 50:
                    time.sleep(0.01)
                go.set()
                self_check = exchange(fabric, channel.rank)
                assert done.wait(20.0)
                return self_check
        assert go.wait(20.0)
        exact = exchange(fabric, channel.rank)
        done.set()
        return exact

    def exchange(fabric: GlooFabric, rank: int) -> bool:
        group: Any = fabric._group
        for number in range(200):
            mine = torch.full((5000,), (number + rank) % 251, dtype=torch.uint8)
            heard = torch.zeros(5000, dtype=torch.uint8)
            receiving, sending = group.recv([heard], 1 - rank, 3), group.send([mine], 1 - rank, 3)
            receiving.wait(Deadline(10.0).timedelta())
            sending.wait(Deadline(10.0).timedelta())
            if not bool((heard == (number + 1 - rank) % 251).all()):
                return False
        return True

    assert run_ranks(2, rank) == [True, True]


def test_a_process_that_gloo_ends_is_told_of_at_once() -> None:
    """gloo ends its process where a stranger in a peer's place sends what nobody waits for; the others hear of it."""

    def rank(channel: ControlChannel) -> str:
        began = time.monotonic()
        if channel.rank == 0:  # only looks on
            with pytest.raises(TransferError) as caught:
                channel.collect("never", (1,), deadline=Deadline(20.0))
            assert time.monotonic() - began < TIMEOUT_S + 2.0
            return str(caught.value)
        before, held = own_ports(), list[socket.socket]()
        store = Late(channel.group_store("gloo"), threading.Barrier(2), threading.Event())

        def act() -> None:
            store._published.wait(10.0)
            held.extend(callers(own_ports() - before))
            for caller in held:
                caller.sendall(MESSAGE.pack(MESSAGE.size + 8, SEND_UNBOUND, 7, 0, 8, 0) + bytes(8))
            time.sleep(0.3)
            store._go.set()

        threading.Thread(target=act, daemon=True).start()
        try:
            GlooFabric(
                store,
                rank=channel.rank - 1,
                world_size=2,
                address=HOST,
                timeout_s=TIMEOUT_S,
                memory=torch.zeros(64, dtype=torch.uint8),
                secret=SECRET,
            )
        except TransferError as error:
            assert time.monotonic() - began < 2 * TIMEOUT_S + 2.0
            return str(error)
        return "connected"

    told, *others = run_forked(3, rank, lost={1, 2})
    assert "its process ended" in told
    assert None in others
    assert "connected" not in others
