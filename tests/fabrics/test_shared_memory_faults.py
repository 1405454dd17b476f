"""What the exchange through shared memory refuses: strangers, impossible records, and a system that lacks something."""

import contextlib
import errno
import gc
import itertools
import os
import resource
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from forked_ranks import run_forked

from refit_transport.errors import TransferError
from refit_transport.fabrics.deadline import Deadline
from refit_transport.fabrics.shared_link import Link
from refit_transport.fabrics.shared_memory import SharedExchange
from refit_transport.fabrics.shared_segment import SlotMemory
from refit_transport.testing.threads import run_ranks

REMEDY = "shared_memory: off"


def connect(channel, memory, *, seconds=20.0, publish=None):
    deadline = Deadline(seconds)
    return SharedExchange.connect(
        memory,
        rank=channel.rank,
        peers=range(channel.world_size),
        publish=publish or channel.publish,
        collect=partial(channel.collect, deadline=deadline),
        failure=channel.failure,
        deadline=deadline,
    )


def held(name):
    """How many file numbers of this process are of files of that name."""
    gc.collect()
    return sum(name in str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink())


@pytest.fixture
def wire():
    """A link of rank 1 to rank 0, whose segment has 100 bytes, and rank 0's bare socket."""
    theirs, ours = socket.socketpair(socket.AF_UNIX)
    with theirs, ours:
        yield Link(ours, rank=1, peer=0, memory=torch.zeros(100, dtype=torch.uint8)), theirs


def record(kind, hop, offset, nbytes):
    return struct.pack("<QQQQ", kind, hop, offset, nbytes)


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(0, 101), (101, 0), (100, 1), (1 << 63, 1), ((1 << 64) - 1, 2), (0, (1 << 64) - 1)]
)
def test_bytes_outside_the_segment_are_refused(wire, offset, nbytes):
    link, peer = wire
    peer.send(record(1, 4, offset, nbytes))
    with pytest.raises(TransferError, match=r"rank 1 with rank 0, phase transfer: .*of a segment of 100 as hop 4"):
        link.take(4, deadline=Deadline(1.0))


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 100), (100, 0), (99, 1)])
def test_bytes_up_to_the_end_of_the_segment_are_taken(wire, offset, nbytes):
    link, peer = wire
    peer.send(record(1, 4, offset, nbytes))
    assert len(link.take(4, deadline=Deadline(1.0))) == nbytes


def test_another_hop_than_the_due_one_is_refused(wire):
    link, peer = wire
    peer.send(record(1, 5, 0, 1) + record(1, 4, 0, 1))
    with pytest.raises(TransferError, match="it offered hop 5 where hop 4 is due"):
        link.take(4, deadline=Deadline(1.0))


@pytest.mark.parametrize("junk", [record(2, 9, 0, 0), record(0, 0, 0, 0), record(3, 4, 0, 1), b"\x80\x04" * 16])
def test_records_that_nobody_can_mean_are_refused(wire, junk):
    link, peer = wire
    link.offer(4, offset=0, nbytes=1, deadline=Deadline(1.0))
    peer.send(junk)
    with pytest.raises(TransferError, match="an unexpected record came"):
        link.settle(4, deadline=Deadline(1.0))


def test_a_record_that_comes_in_parts_is_one_record(wire):
    link, peer = wire
    whole = record(1, 4, 10, 20)
    peer.send(whole[:7])
    with pytest.raises(TransferError, match=r"within 0.05 s"):
        link.take(4, deadline=Deadline(0.05))
    peer.send(whole[7:] + record(1, 5, 30, 1)[:31])
    assert len(link.take(4, deadline=Deadline(1.0))) == 20


def test_what_was_sent_before_the_end_still_counts(wire):
    link, peer = wire
    link.offer(8, offset=0, nbytes=1, deadline=Deadline(1.0))
    peer.send(record(1, 4, 10, 20) + record(2, 8, 0, 0))
    peer.close()
    assert len(link.take(4, deadline=Deadline(1.0))) == 20
    assert link.is_settled(8)
    with pytest.raises(TransferError, match="the peer is gone and hasn't offered hop 5"):
        link.take(5, deadline=Deadline(1.0))
    with pytest.raises(TransferError, match="the peer is gone: Broken pipe"):
        link.acknowledge(4, deadline=Deadline(1.0))


def test_asking_whether_a_dead_peer_has_read_fails_rather_than_says_no(wire):
    link, peer = wire
    link.offer(8, offset=0, nbytes=1, deadline=Deadline(1.0))
    peer.close()
    with pytest.raises(TransferError, match="hasn't acknowledged hop 8"):
        link.is_settled(8)


def test_a_peer_that_reads_nothing_ends_an_offer_at_the_deadline(wire):
    link, deadline = wire[0], Deadline(0.3)

    def offer_without_end():
        for hop in itertools.count():
            link.offer(hop, offset=0, nbytes=0, deadline=deadline)

    with pytest.raises(TransferError, match=r"the peer doesn't read its records within 0.3 s"):
        offer_without_end()


def test_misuse_is_told(wire):
    link = wire[0]
    link.offer(4, offset=0, nbytes=1, deadline=Deadline(1.0))
    with pytest.raises(TransferError, match="hop 4 was offered before"):
        link.offer(4, offset=0, nbytes=1, deadline=Deadline(1.0))
    with pytest.raises(TransferError, match="hop 4 can't be acknowledged: it wasn't taken"):
        link.acknowledge(4, deadline=Deadline(1.0))
    exchange = SharedExchange({0: link}, rank=1)
    exchange.close()
    with pytest.raises(TransferError, match="not connected to this rank, or closed"):
        exchange.take(0, 4, deadline=Deadline(1.0))


def hello(rank, secret, nbytes=64, magic=b"refitshm"):
    return struct.pack("<8sQQ32s", magic, rank, nbytes, secret)


def forgeries(path):
    """What a stranger of the same user might send; each connection stays open until the caller closes it."""
    junk = os.open("/dev/null", os.O_RDONLY)
    for words in (None, b"", b"GET / HTTP/1.0\r\n\r\n", hello(1, bytes(32)), hello(9, bytes(32)), b"x" * 5000):
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(path)
        if words:
            socket.send_fds(stranger, [words], [junk])
        elif words is not None:
            stranger.close()
        yield stranger
    os.close(junk)


def test_strangers_without_the_secret_are_dropped_and_disturb_nobody():
    before, strangers = (held("/dev/null"), held("refit-slots")), []

    def main(channel):
        def publish(topic, value):
            if channel.rank == 0:  # the strangers come before any peer knows where
                strangers.extend(forgeries(value["path"]))
            channel.publish(topic, value)

        memory, deadline = SlotMemory(64, rank=channel.rank), Deadline(20.0)
        exchange = connect(channel, memory, publish=publish)
        for peer in {0, 1, 2} - {channel.rank}:
            memory.tensor[:] = channel.rank
            exchange.offer(peer, 0, offset=0, nbytes=64, deadline=deadline)
        got = {}
        for peer in {0, 1, 2} - {channel.rank}:
            got[peer] = set(exchange.take(peer, 0, deadline=deadline).tolist())
        channel.agree("done", "", deadline=deadline)
        exchange.close()
        memory.close()
        return got

    assert run_ranks(3, main) == [{1: {1}, 2: {2}}, {0: {0}, 2: {2}}, {0: {0}, 1: {1}}]
    for stranger in strangers[2:]:
        stranger.settimeout(2.0)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) == b""  # no answer, hence no descriptor
    for stranger in strangers:
        stranger.close()
    assert len(strangers) == 6
    assert (held("/dev/null"), held("refit-slots")) == before


def test_a_peer_that_never_comes_is_named_at_the_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def main(channel):
        memory = SlotMemory(64, rank=channel.rank)
        if channel.rank == 1:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(tmp_path / "silent"))
                listener.listen()
                channel.publish("shared_memory", {"path": str(tmp_path / "silent"), "secret": bytes(32).hex()})
                channel.collect("over", [0], deadline=Deadline(20.0))
            return
        with pytest.raises(
            TransferError, match=rf"rank 0 with rank 1, phase connect: .*\[1\].* within 0.5 s; {REMEDY}"
        ):
            connect(channel, memory, seconds=0.5)
        channel.publish("over", "")

    run_ranks(2, main)
    assert [path.name for path in tmp_path.iterdir()] == ["silent"]


@pytest.mark.parametrize("before_our_hello", [False, True])
@pytest.mark.parametrize("answer", [b"", hello(0, bytes(32)), b"junk"])
def test_a_listener_that_is_not_the_peer_ends_the_connect(tmp_path, monkeypatch, answer, before_our_hello):
    closed, send_fds = threading.Event(), socket.send_fds

    def send_late(*arguments):
        assert closed.wait(20.0)
        return send_fds(*arguments)

    if before_our_hello:
        monkeypatch.setattr(socket, "send_fds", send_late)

    def main(channel):
        memory = SlotMemory(64, rank=channel.rank)
        if channel.rank == 0:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(tmp_path / "s"))
                listener.listen()
                channel.publish("shared_memory", {"path": str(tmp_path / "s"), "secret": bytes(32).hex()})
                caller, _ = listener.accept()
                caller.send(answer)
                caller.close()
                closed.set()
                channel.collect("over", [1], deadline=Deadline(20.0))
            return
        began = time.monotonic()
        with pytest.raises(
            TransferError, match=r"rank 1 with rank 0, phase connect: .*the peer left, or another answers"
        ):
            connect(channel, memory)
        assert time.monotonic() - began < 10.0
        channel.publish("over", "")

    run_ranks(2, main)


def test_a_temporary_directory_with_too_long_a_path(tmp_path, monkeypatch):
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(TransferError, match=rf"rank 0, phase connect: .*path too long; {REMEDY}"):
        run_ranks(1, lambda channel: connect(channel, SlotMemory(64, rank=0)))
    assert list(deep.iterdir()) == []


def test_a_temporary_directory_that_a_peer_cannot_see():
    def main(channel):
        def publish(topic, value):
            channel.publish(topic, {**value, "path": "/nowhere/s"})

        connect(channel, SlotMemory(64, rank=channel.rank), seconds=1.0, publish=publish)

    with pytest.raises(
        TransferError, match=r".*(can't reach its socket.*No such file|didn't connect).*shared_memory: off"
    ):
        run_ranks(2, main)


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EMFILE, errno.ENFILE])
@pytest.mark.parametrize("call", ["memfd_create", "ftruncate"])
def test_a_system_that_gives_no_memory(monkeypatch, call, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    before = held("refit-slots")
    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(TransferError, match=f"rank 3, phase connect: .*64 bytes: .*{os.strerror(number)}; {REMEDY}"):
        SlotMemory(64, rank=3)
    assert held("refit-slots") == before


def test_more_memory_than_there_are_addresses():
    before = held("refit-slots")
    for nbytes in (1 << 62, 1 << 70):
        with pytest.raises(TransferError, match=REMEDY):
            SlotMemory(nbytes, rank=0)
    assert held("refit-slots") == before


def test_a_limit_on_open_files_is_one_clear_message(tmp_path, monkeypatch):
    """A rank with too few free file numbers says so, wherever it fails, and leaves nothing; peers don't wait for it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def main(channel, spare):
        memory = SlotMemory(64, rank=channel.rank)
        try:
            channel.agree("ready", "", deadline=Deadline(20.0))
            if channel.rank == 1:
                used = sorted(int(path.name) for path in Path("/proc/self/fd").iterdir())
                limit = next(n for n in itertools.count() if n - sum(number < n for number in used) == spare)
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
            connect(channel, memory)
        except TransferError as error:
            channel.report_failure(error)
            return str(error)
        return ""

    began = time.monotonic()
    limited = [run_forked(3, partial(main, spare=spare))[1] for spare in range(10)]
    assert time.monotonic() - began < 60.0
    assert "" not in limited[:5]
    assert all(REMEDY in message and " file" in message for message in limited if message), limited
    assert limited[-1] == ""
    assert list(tmp_path.iterdir()) == []


def test_a_started_process_inherits_nothing():
    code = "import os; print([os.readlink(entry.path) for entry in os.scandir('/proc/self/fd') if entry.is_file()])"

    def main(channel):
        before = held("refit-slots")
        memory = SlotMemory(64, rank=channel.rank)
        exchange = connect(channel, memory)
        assert held("refit-slots") == before + 4  # the segment, its mapping and two peers' mappings
        started = subprocess.run(
            [sys.executable, "-c", code], close_fds=False, capture_output=True, text=True, check=True
        )
        channel.agree("done", "", deadline=Deadline(20.0))
        exchange.close()
        return started.stdout

    for listing in run_forked(3, main):
        assert "refit-slots" not in listing


def test_an_inheritable_descriptor_would_be_seen():
    """The test above can fail: it reads what a child really holds."""
    memory = SlotMemory(64, rank=0)
    os.set_inheritable(memory.descriptor, True)
    code = f"import os; print(os.readlink('/proc/self/fd/{memory.descriptor}'))"
    started = subprocess.run([sys.executable, "-c", code], close_fds=False, capture_output=True, text=True, check=True)
    assert "refit-slots" in started.stdout
    memory.close()
