"""A network of rate-limited namespaces on one machine: nodes, their NICs, and counters of what crosses them.

It is built inside namespaces of its own (see `bench.isolation`), and vanishes with the last process in them. A switch
namespace holds a bridge. A node with one NIC is a namespace whose link is limited both ways by tbf. A node with a NIC
per rank is a namespace per rank: addresses of the same node pass at full speed, all others through an htb class. The
kernel sends what stays inside a namespace over its loopback, so that never counts.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import Literal, Self

from refit_transport.errors import TransferError

Nics = Literal["domain", "rank"]

MTU = 9000
# Of each full packet of 9000 + 14 bytes, 52 are headers of IP and TCP and 14 of Ethernet.
GOODPUT = (MTU - 52) / (MTU + 14)
_LOCAL_MBIT = 40_000
# A bucket of tokens must hold a whole unsegmented packet of 64 KiB, twice.
_LEAST_BURST = 128 * 1024
_BURST_SECONDS = 0.002
_QUEUE_SECONDS = 0.2
_COMMAND_SECONDS = 30.0
_SWITCH = "switch"
_SENT = re.compile(r"Sent (\d+) bytes")


@dataclass(frozen=True, slots=True)
class Wiring:
    """Which rank is on which node, and how fast the nodes are.

    nodes: the ranks of each node. nics: one NIC for a node ("domain") or one for each of its ranks ("rank").
    mbit: the rate of one NIC of each node, each direction, in 10^6 bit/s on the wire; None: not limited.

    >>> wiring = Wiring(((0, 1), (2, 3)), "domain", (1000.0, 1000.0))
    >>> wiring.nic_ranks, wiring.address_of(3), wiring.namespace_of(3)
    (((0, 1), (2, 3)), '10.77.2.1', 'nic1')
    >>> railed = Wiring(((0, 1), (2, 3)), "rank", (250.0, 250.0))
    >>> railed.nic_ranks, railed.address_of(3), railed.namespace_of(3)
    (((0,), (1,), (2,), (3,)), '10.77.2.2', 'nic3')
    """

    nodes: tuple[tuple[int, ...], ...]
    nics: Nics
    mbit: tuple[float, ...] | None

    @property
    def world_size(self) -> int:
        return sum(map(len, self.nodes))

    @property
    def nic_ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks behind each NIC, in the order of all counters."""
        if self.nics == "domain":
            return self.nodes
        return tuple((rank,) for ranks in self.nodes for rank in ranks)

    def node_of(self, rank: int) -> int:
        """The index of the rank's node."""
        return next(index for index, ranks in enumerate(self.nodes) if rank in ranks)

    def namespace_of(self, rank: int) -> str:
        """The namespace that the rank runs in: one per NIC."""
        return _namespace(next(index for index, ranks in enumerate(self.nic_ranks) if rank in ranks))

    def address_of(self, rank: int) -> str:
        """The address of the rank's NIC."""
        node = self.node_of(rank)
        place = self.nodes[node].index(rank) if self.nics == "rank" else 0
        return f"10.77.{node + 1}.{place + 1}"

    def bytes_per_second(self, node: int) -> float | None:
        """Payload that all NICs of a node carry in one direction; None: not limited."""
        if self.mbit is None:
            return None
        return self.mbit[node] * 1e6 / 8 * GOODPUT * (len(self.nodes[node]) if self.nics == "rank" else 1)


@dataclass(frozen=True, slots=True)
class Counters:
    """Bytes with headers that have crossed each NIC, in the order of `Wiring.nic_ranks`."""

    sent: tuple[int, ...]
    received: tuple[int, ...]

    def since(self, earlier: Counters) -> Counters:
        """What crossed between two readings."""
        return Counters(
            tuple(a - b for a, b in zip(self.sent, earlier.sent, strict=True)),
            tuple(a - b for a, b in zip(self.received, earlier.received, strict=True)),
        )


class Lab:
    """The network of one wiring. A context manager: leaving it removes its namespaces."""

    def __init__(self, wiring: Wiring) -> None:
        self.wiring = wiring
        self._namespaces: list[str] = []

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Removes the namespaces; the kernel keeps each until its last process has ended."""
        while self._namespaces:
            _run("ip", "netns", "del", self._namespaces.pop())

    def counters(self) -> Counters:
        """The present readings. Where ranks have NICs of their own, what stays inside a node doesn't count."""
        numbers = range(len(self.wiring.nic_ranks))
        if self.wiring.nics == "rank" and self.wiring.mbit is not None:
            sent = tuple(_class_bytes(_namespace(n), "eth0") for n in numbers)
            return Counters(sent, tuple(_class_bytes(_SWITCH, _port(n)) for n in numbers))
        links = json.loads(_run("ip", "-n", _SWITCH, "-s", "-j", "link"))
        stats = {link["ifname"]: link["stats64"] for link in links}
        return Counters(
            tuple(stats[_port(n)]["rx"]["bytes"] for n in numbers),
            tuple(stats[_port(n)]["tx"]["bytes"] for n in numbers),
        )

    def _build(self) -> None:
        self._add_namespace(_SWITCH)
        _run("ip", "-n", _SWITCH, "link", "add", "br0", "type", "bridge", "stp_state", "0", "forward_delay", "0")
        # Without an IPv6 address of its own no link says anything by itself: idle counters stay at 0.
        _run("ip", "-n", _SWITCH, "link", "set", "br0", "mtu", str(MTU), "addrgenmode", "none", "up")
        numbers = count()
        for node, ranks in enumerate(self.wiring.nodes):
            for rank in ranks if self.wiring.nics == "rank" else ranks[:1]:
                self._add_nic(next(numbers), node, self.wiring.address_of(rank))

    def _add_namespace(self, name: str) -> None:
        _run("ip", "netns", "add", name)
        self._namespaces.append(name)
        _run("ip", "-n", name, "link", "set", "lo", "up")

    def _add_nic(self, number: int, node: int, address: str) -> None:
        name, port, mtu = _namespace(number), _port(number), str(MTU)
        self._add_namespace(name)
        peer = ("peer", "name", "eth0", "mtu", mtu, "netns", name)
        _run("ip", "-n", _SWITCH, "link", "add", port, "mtu", mtu, "type", "veth", *peer)
        _run("ip", "-n", _SWITCH, "link", "set", port, "addrgenmode", "none", "master", "br0", "up")
        _run("ip", "-n", name, "addr", "add", f"{address}/16", "dev", "eth0")
        _run("ip", "-n", name, "link", "set", "eth0", "addrgenmode", "none", "up")
        if self.wiring.mbit is None:
            return
        mbit = self.wiring.mbit[node]
        if self.wiring.nics == "domain":
            _limit_all(name, "eth0", mbit)
            _limit_all(_SWITCH, port, mbit)
        else:
            same_node = f"10.77.{node + 1}.0/24"
            _limit_others(name, "eth0", mbit, same_node=("dst", same_node))
            _limit_others(_SWITCH, port, mbit, same_node=("src", same_node))


def _namespace(number: int) -> str:
    return f"nic{number}"


def _port(number: int) -> str:
    return f"port{number}"


def _burst(mbit: float) -> int:
    return int(max(_LEAST_BURST, mbit * 1e6 / 8 * _BURST_SECONDS))


def _limit_all(namespace: str, device: str, mbit: float) -> None:
    burst = _burst(mbit)
    limit = burst + int(mbit * 1e6 / 8 * _QUEUE_SECONDS)
    shape = ("rate", f"{mbit:g}mbit", "burst", str(burst), "limit", str(limit))
    _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *shape)


def _limit_others(namespace: str, device: str, mbit: float, *, same_node: tuple[str, str]) -> None:
    """Class 1:10 carries the same node's traffic, class 1:20 everything else."""
    tc = ("tc", "-n", namespace)
    where = ("dev", device, "parent", "1:")
    _run(*tc, "qdisc", "replace", "dev", device, "root", "handle", "1:", "htb", "default", "20", "r2q", "1000")
    for number, rate, burst in (("1:10", _LOCAL_MBIT, 4 << 20), ("1:20", mbit, _burst(mbit))):
        speed = ("rate", f"{rate:g}mbit", "ceil", f"{rate:g}mbit")
        size = ("burst", str(burst), "cburst", str(burst), "quantum", "131072")
        _run(*tc, "class", "add", *where, "classid", number, "htb", *speed, *size)
    match = ("u32", "match", "ip", *same_node, "flowid", "1:10")
    _run(*tc, "filter", "add", *where, "protocol", "ip", "prio", "1", *match)


def _class_bytes(namespace: str, device: str) -> int:
    shown = _run("tc", "-n", namespace, "-s", "class", "show", "dev", device, "classid", "1:20")
    found = _SENT.search(shown)
    if found is None:
        raise TransferError(-1, -1, "lab", "", f"no counter of class 1:20 on {device} in {shown!r}")
    return int(found[1])


def _run(*command: str) -> str:
    return run_command(command)


def run_command(command: Sequence[str]) -> str:
    """The output of a system command.

    Raises:
        TransferError: it failed; gives its own words.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False)
    if done.returncode:
        raise TransferError(-1, -1, "lab", "", f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
