"""The exchange through shared memory, between threads and between forked processes: every byte, and no remains."""

import ctypes
import gc
import os
import signal
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from forked_ranks import run_forked

from refit_transport.errors import TransferError
from refit_transport.fabrics.deadline import Deadline
from refit_transport.fabrics.shared_memory import SharedExchange
from refit_transport.fabrics.shared_segment import SlotMemory, host_identity
from refit_transport.testing.threads import run_ranks

SLOT, SLOTS = 5000, 3


def connected(channel, memory, *, topic="shm", seconds=20.0):
    deadline = Deadline(seconds)
    return SharedExchange.connect(
        memory,
        rank=channel.rank,
        peers=range(channel.world_size),
        publish=channel.publish,
        collect=partial(channel.collect, deadline=deadline),
        failure=channel.failure,
        deadline=deadline,
        topic=topic,
    )


def descriptors():
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def payload(hop, nbytes):
    return np.random.default_rng(hop).integers(0, 256, nbytes, dtype=np.uint8)


def random_hops(world, count):
    """(hop, sender, receivers, bytes) in one total order, which is what keeps ranks from waiting in a circle."""
    random = np.random.default_rng(world)
    for hop in range(count):
        sender, *others = (int(r) for r in random.permutation(world))
        yield hop, sender, others[: int(random.integers(1, len(others) + 1))], int(random.integers(0, SLOT + 1))


def exchange_all(channel, count=400):
    """Sends random slots to random sets of peers, through few slots, so each is used again and again."""
    memory = SlotMemory(SLOT * SLOTS, rank=channel.rank)
    exchange, deadline = connected(channel, memory), Deadline(30.0)
    on_offer = {slot: [] for slot in range(SLOTS)}
    wrong = []
    for hop, sender, receivers, nbytes in random_hops(channel.world_size, count):
        if channel.rank == sender:
            slot = hop % SLOTS
            for peer, earlier in on_offer[slot]:
                exchange.settle(peer, earlier, deadline=deadline)
            memory.tensor[slot * SLOT : slot * SLOT + nbytes] = torch.from_numpy(payload(hop, nbytes))
            for peer in receivers:
                exchange.offer(peer, hop, offset=slot * SLOT, nbytes=nbytes, deadline=deadline)
            on_offer[slot] = [(peer, hop) for peer in receivers]
        elif channel.rank in receivers:
            got = exchange.take(sender, hop, deadline=deadline)
            time.sleep(0.001 * (hop % 2))  # a sender that doesn't wait for the acknowledgement overwrites this
            if not np.array_equal(got.numpy(), payload(hop, nbytes)):
                wrong.append(hop)
            exchange.acknowledge(sender, hop, deadline=deadline)
    for slot in on_offer.values():
        for peer, hop in slot:
            exchange.settle(peer, hop, deadline=deadline)
            assert exchange.is_settled(peer, hop)
    exchange.close()
    memory.close()
    return wrong


@pytest.mark.parametrize("run", [run_ranks, run_forked])
def test_random_traffic_between_all_of_four_ranks(run):
    assert run(4, exchange_all) == [[]] * 4


def test_sixteen_forked_ranks():
    assert run_forked(16, exchange_all) == [[]] * 16


def test_two_ranks_whose_record_queues_are_full_get_on():
    """Each offers thousands of hops before it takes one: more than a socket holds."""
    count = 3000

    def main(channel):
        memory, deadline = SlotMemory(count, rank=channel.rank), Deadline(20.0)
        exchange, peer = connected(channel, memory), 1 - channel.rank
        for hop in range(count):
            exchange.offer(peer, hop, offset=hop, nbytes=1, deadline=deadline)
        for hop in range(count):
            assert len(exchange.take(peer, hop, deadline=deadline)) == 1
            exchange.acknowledge(peer, hop, deadline=deadline)
        for hop in range(count):
            exchange.settle(peer, hop, deadline=deadline)
        channel.agree("done", "", deadline=deadline)
        exchange.close()

    run_forked(2, main)


def test_acknowledgements_may_come_in_any_order():
    def main(channel):
        memory, deadline = SlotMemory(8, rank=channel.rank), Deadline(20.0)
        exchange = connected(channel, memory)
        if channel.rank == 0:
            for hop in (7, 8):
                exchange.offer(1, hop, offset=hop - 7, nbytes=1, deadline=deadline)
            exchange.settle(1, 8, deadline=deadline)
            early = exchange.is_settled(1, 7)
            channel.publish("seen", early)
            exchange.settle(1, 7, deadline=deadline)
            return early
        for hop in (7, 8):
            exchange.take(0, hop, deadline=deadline)
        exchange.acknowledge(0, 8, deadline=deadline)
        channel.collect("seen", [0], deadline=deadline)
        exchange.acknowledge(0, 7, deadline=deadline)
        return False

    assert run_ranks(2, main) == [False, False]


@pytest.mark.parametrize("waits_in", ["take", "settle"])
def test_a_killed_peer_is_named_within_a_second(waits_in):
    def main(channel):
        memory, deadline = SlotMemory(64, rank=channel.rank), Deadline(30.0)
        exchange = connected(channel, memory)
        channel.publish("pid", os.getpid())
        if channel.rank == 2:
            time.sleep(60.0)
        (victim,) = channel.collect("pid", [2], deadline=deadline)
        if waits_in == "settle":
            exchange.offer(2, 5, offset=0, nbytes=64, deadline=deadline)
        if channel.rank == 0:
            threading.Timer(0.2, os.kill, (victim, signal.SIGKILL)).start()
        began = time.monotonic()
        with pytest.raises(TransferError) as caught:
            getattr(exchange, waits_in)(2, 5, deadline=deadline)
        return time.monotonic() - began, caught.value.rank, caught.value.peer, caught.value.reason

    results = run_forked(3, main, lost=(2,))
    for rank in (0, 1):
        seconds, named_rank, named_peer, reason = results[rank]
        assert 0.15 < seconds < 5.0  # milliseconds after the kill; a busy machine takes its time
        assert (named_rank, named_peer) == (rank, 2)
        assert "is gone" in reason


def test_a_fork_of_a_rank_does_not_hide_its_death():
    def main(channel):
        exchange = connected(channel, SlotMemory(64, rank=channel.rank))
        if channel.rank == 1:
            if os.fork() == 0:
                time.sleep(6.0)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(TransferError, match="is gone"):
            exchange.take(1, 0, deadline=Deadline(20.0))
        return time.monotonic() - began

    assert run_forked(2, main, lost=(1,))[0] < 5.0


@pytest.mark.parametrize("waits_in", ["take", "settle"])
def test_a_silent_peer_ends_the_wait_at_the_deadline(waits_in):
    def main(channel):
        memory = SlotMemory(64, rank=channel.rank)
        exchange = connected(channel, memory)
        if channel.rank == 1:
            channel.collect("over", [0], deadline=Deadline(20.0))
            return
        exchange.offer(1, 3, offset=0, nbytes=1, deadline=Deadline(1.0))
        assert not exchange.is_settled(1, 3)
        began, cpu = time.monotonic(), time.thread_time()
        with pytest.raises(TransferError, match=r"with rank 1, phase transfer: .*hop 3 within 0.3 s"):
            getattr(exchange, waits_in)(1, 3, deadline=Deadline(0.3))
        assert 0.3 <= time.monotonic() - began < 5.0
        assert time.thread_time() - cpu < 0.1  # it slept
        channel.publish("over", "")

    run_ranks(2, main)


def test_a_segment_costs_only_what_is_written():
    def main(channel):
        memory, sizes = SlotMemory(16 << 20, rank=0), []
        for written in (0, 1 << 20, 16 << 20):
            memory.tensor[:written] = 1
            sizes.append(os.fstat(memory.descriptor).st_blocks * 512)
        return sizes

    empty, a_little, full = run_forked(1, main)[0]
    assert empty == 0
    assert 1 << 20 <= a_little <= 2 << 20
    assert full == 16 << 20


def test_nothing_is_left_after_many_connects(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gate = threading.Barrier(2)

    def main(channel):
        for turn in range(200):
            memory, deadline = SlotMemory(4096, rank=channel.rank), Deadline(20.0)
            exchange = connected(channel, memory, topic=f"turn{turn}")
            exchange.offer(1 - channel.rank, turn, offset=0, nbytes=4096, deadline=deadline)
            exchange.take(1 - channel.rank, turn, deadline=deadline)
            exchange.acknowledge(1 - channel.rank, turn, deadline=deadline)
            exchange.settle(1 - channel.rank, turn, deadline=deadline)
            exchange.close()
            exchange.close()
            memory.close()
            memory.close()
            gate.wait(20.0)
            if turn in (0, 199) and channel.rank == 0:
                counts.append(descriptors())
            gate.wait(20.0)

    counts = []
    run_ranks(2, main)
    assert counts[0] == counts[1]
    assert list(tmp_path.iterdir()) == []


def test_without_memfd_an_unlinked_file_does(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert run_ranks(3, partial(exchange_all, count=60)) == [[]] * 3
    assert list(tmp_path.iterdir()) == []


def test_a_peers_segment_is_mapped_read_only():
    def main(channel):
        memory = SlotMemory(123457, rank=channel.rank)
        exchange = connected(channel, memory)
        maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "refit-slots" in line]
        channel.agree("seen", "", deadline=Deadline(20.0))
        exchange.close()
        return sorted(fields[1] for fields in maps)

    assert run_forked(3, main) == [["r--s", "r--s", "rw-s"]] * 3


def test_ranks_in_network_namespaces_of_their_own():
    def main(channel):
        clone_new_network = 0x40000000
        if ctypes.CDLL(None).unshare(clone_new_network):
            return "refused"
        return exchange_all(channel, count=20)

    results = run_forked(3, main)
    if "refused" in results:
        pytest.skip("only root may make a network namespace")
    assert results == [[]] * 3


def test_views_outlive_the_exchange_and_the_segment():
    def main(channel):
        memory, deadline = SlotMemory(16, rank=channel.rank), Deadline(20.0)
        exchange, peer = connected(channel, memory), 1 - channel.rank
        memory.tensor[:] = channel.rank + 1
        exchange.offer(peer, 0, offset=0, nbytes=16, deadline=deadline)
        view = exchange.take(peer, 0, deadline=deadline)
        channel.agree("taken", "", deadline=deadline)
        exchange.close()
        memory.close()
        channel.agree("closed", "", deadline=deadline)
        return view.tolist()

    assert run_forked(2, main) == [[2] * 16, [1] * 16]


def test_a_host_knows_itself_and_another_temporary_directory_is_another_place(tmp_path, monkeypatch):
    here = host_identity()
    assert run_forked(1, lambda channel: host_identity()) == [here]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert host_identity() != here
