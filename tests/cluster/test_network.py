"""Ports for rendezvous: from the configured range, each promised to one group only."""

import socket
from pathlib import Path

import pytest

from refit_transport.cluster.network import LOOPBACK, PortRange
from refit_transport.errors import TransferError


def test_a_promised_port_is_not_given_again():
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        low = probe.getsockname()[1]
    ports = PortRange(low, low + 5)
    given = []
    for _ in range(3):
        given.append(ports.free_port(LOOPBACK))
        ports = ports.promising(given[-1])
    assert len(set(given)) == 3
    assert all(low <= port <= low + 5 for port in given)


def test_an_exhausted_range_names_the_settings():
    with socket.socket() as holder:
        holder.bind((LOOPBACK, 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(TransferError, match=r"cluster\.master_port_range_low"):
            PortRange(port, port).free_port(LOOPBACK)


def test_without_a_range_a_port_is_none_that_a_connection_could_take_first():
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    for _ in range(20):
        port = PortRange().free_port(LOOPBACK)
        assert port > 1024
        assert not first <= port <= last
    promised = PortRange(promised=frozenset(range(20000, first - 1)))
    assert promised.free_port(LOOPBACK) == first - 1
