"""Ports for rendezvous: from the configured range, each promised to one group only, and held until they are used."""

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from datetime import timedelta

import pytest
import torch.distributed as dist

from refit_transport.cluster.network import LOOPBACK, HeldPort, PortRange
from refit_transport.errors import TransferError


def test_a_promised_port_is_not_given_again():
    with PortRange().reserve() as probe:
        low = probe.getsockname()[1]
    ports = PortRange(low, low + 5)
    given = []
    for _ in range(3):
        with ports.reserve() as held:
            given.append(held.getsockname()[1])
        ports = ports.promising(given[-1])
    assert len(set(given)) == 3
    assert all(low <= port <= low + 5 for port in given)


@pytest.mark.parametrize("address", [LOOPBACK, "", "127.0.0.2"])
def test_a_port_that_is_taken_on_any_address_is_not_free(address):
    with socket.create_server((address, 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(TransferError, match=r"cluster\.master_port_range_low"):
            PortRange(port, port).reserve()


@pytest.mark.parametrize("low", [0, 23456])
def test_ports_that_are_held_at_once_differ(low):
    """Also between jobs that know nothing of each other's promises."""
    with ExitStack() as stack:
        held = [stack.enter_context(PortRange(low, low and low + 200).reserve()) for _ in range(50)]
        assert len({one.getsockname()[1] for one in held}) == len(held)


def test_the_holder_leaves_room_for_those_who_listen():
    with PortRange().reserve() as held:
        port = held.getsockname()[1]
        for libuv in (True, False):
            store = dist.TCPStore(LOOPBACK, port, 1, True, timeout=timedelta(seconds=10), use_libuv=libuv)
            del store
        with socket.create_server((LOOPBACK, port)):
            pass


CONNECTIONS = """
import pathlib, socket
from refit_transport.cluster.network import PortRange
pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("30000 30007")
with PortRange().reserve() as held, socket.create_server(("127.0.0.1", 2000)):
    port, connections = held.getsockname()[1], []
    try:
        while True:
            connections.append(socket.create_connection(("127.0.0.1", 2000)))
    except OSError:
        assert len(connections) == 7
    assert port not in [connection.getsockname()[1] for connection in connections]
"""


@pytest.mark.skipif(os.getuid() != 0, reason="a network namespace needs root")
def test_no_connection_takes_a_port_that_is_held():
    """In a namespace of its own every port but the held one goes to connections."""
    command = 'ip link set lo up && exec "$0" -c "$1"'
    subprocess.run(
        ["unshare", "--net", "bash", "-c", command, sys.executable, CONNECTIONS],
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_the_port_before_is_let_go():
    holder, first = HeldPort(), PortRange().reserve()
    low = first.getsockname()[1]
    first.close()
    ports = PortRange(low, low)
    assert [holder.renew(ports) for _ in range(3)] == [low] * 3
    with pytest.raises(TransferError, match="is taken"):
        ports.reserve()
