"""A whole session with strangers at its rendezvous: the refits are exact, and its report tells of them."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time

from clusters import SOURCES, WORLD, Cluster, settings, weights

from refit_transport.fabrics.deadline import Deadline
from refit_transport.fabrics.frames import SCHEMA, pack
from refit_transport.report import render_notes
from refit_transport.testing.threads import run_ranks

HOST = "127.0.0.1"
MESSAGES = (
    b"GET / HTTP/1.1\r\n\r\n",
    os.urandom(2000),
    pack({"op": "get", "keys": ["settings/0"], "patience": 1.0}),
    pack({"nonce": "n", "rank": 5, "incarnation": 0, "process": "p", "host": "h", "proof": "0" * 64}),
    struct.pack("!4sHHII", b"RFTC", SCHEMA, 0, 2**31, 2**31),
    b"",
)


def pester(port: int, stop: threading.Event, heard: set[bytes]) -> None:
    """Calls without end; keeps what it is told, less the random number."""
    number = 0
    while not stop.is_set():
        with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1.0) as stranger:
            stranger.sendall(MESSAGES[number % len(MESSAGES)])
            if MESSAGES[number % len(MESSAGES)]:
                while data := stranger.recv(1 << 16):
                    heard.add(data[16:26])
        number += 1
        time.sleep(0.002)


def test_refits_succeed_with_strangers_around_and_the_report_counts_them() -> None:
    cluster, stop, heard = Cluster(settings(verify="full", shared_memory="off")), threading.Event(), set[bytes]()
    threads: list[threading.Thread] = []

    def rank_main(channel):
        if channel.rank == 0:
            port = channel.meeting.port
            threads.extend(threading.Thread(target=pester, args=(port, stop, heard), daemon=True) for _ in range(2))
            for thread in threads:
                thread.start()
            time.sleep(0.3)
        session = cluster.prepare(channel)
        reports = []
        for version in (1, 2, 3):
            if channel.rank == 0:
                cluster.set_version(version)
            channel.agree(f"ready/{version}", "", deadline=Deadline(20.0))
            reports.append(session.run(version))
            channel.agree(f"checked/{version}", "", deadline=Deadline(20.0))
            if channel.rank == SOURCES:
                assert cluster.wanted.differences(weights(version)) == []
            channel.agree(f"compared/{version}", "", deadline=Deadline(20.0))
        return reports

    try:
        [reports, *_] = run_ranks(WORLD, rank_main)
    finally:
        stop.set()
        for thread in threads:
            thread.join(5.0)
    last = reports[-1]
    assert [report.version for report in reports] == [1, 2, 3]
    assert all(last.refused[kind] > 0 for kind in ("garbage", "secret", "oversized", "left"))
    assert any(note.startswith("refused at the rendezvous") for note in render_notes(last))
    assert heard <= {b'{"nonce":"'}
