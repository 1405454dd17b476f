"""Addresses and ports of this machine, for rendezvous between workers."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from refit_transport.errors import TransferError

LOOPBACK = "127.0.0.1"
_SYSTEMS_OWN = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Above those of Ray's workers.
_FIRST, _USUAL_END = 20000, 32768


@dataclass(frozen=True, slots=True)
class PortRange:
    """The ports that may be listened on, both ends included; 0 to 0 means any that is free.

    `promised` are ports on which somebody is about to listen. Until then any connection that the machine makes could
    take one that the system hands out itself, so of all ports those are avoided.
    """

    low: int = 0
    high: int = 0
    promised: frozenset[int] = frozenset()

    def promising(self, port: int) -> Self:
        """The range after one of its ports was given to somebody."""
        return replace(self, promised=self.promised | {port})

    def free_port(self, host: str) -> int:
        """A port of the range on which nobody listens at this moment, and nobody is about to.

        Raises:
            TransferError: every port of the range is taken.
        """
        for port in self._candidates():
            if port in self.promised:
                continue
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((host, port))
                except OSError:
                    continue
                return int(probe.getsockname()[1])
        reason = (
            f"every port from {self.low} to {self.high} is taken on {host}: widen cluster.master_port_range_low and "
            "cluster.master_port_range_high, or set both to null"
        )
        raise TransferError(0, -1, "rendezvous", "", reason)

    def _candidates(self) -> Iterable[int]:
        if self.low:
            return range(self.low, self.high + 1)
        # In random order, because other jobs on this machine choose too.
        below = range(_FIRST, _first_of_the_systems_own())
        return [*random.sample(below, len(below)), 0]


def _first_of_the_systems_own() -> int:
    """The first port that the system gives to connections by itself."""
    try:
        return int(_SYSTEMS_OWN.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return _USUAL_END
