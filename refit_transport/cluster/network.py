"""Addresses and ports of this machine, for rendezvous between workers."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

from refit_transport.errors import TransferError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class PortRange:
    """The ports that may be listened on, both ends included; 0 to 0 means any that is free.

    `promised` are ports on which somebody is about to listen.
    """

    low: int = 0
    high: int = 0
    promised: frozenset[int] = frozenset()

    def promising(self, port: int) -> Self:
        """The range after one of its ports was given to somebody."""
        return replace(self, promised=self.promised | {port})

    def reserve(self) -> socket.socket:
        """Holds a port of the range that is free on every address of this machine, and that nobody was promised.

        While the socket is open the system gives the port to nobody who asks for any; whoever allows addresses to be
        reused, as torch's and our own stores do, may listen there beside it.

        Raises:
            TransferError: every port of the range is taken.
        """
        for port in self._candidates():
            held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            try:
                held.bind(("", port))
            except OSError:
                held.close()
                continue
            # After the bind: two that allow it before may hold the same port.
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if held.getsockname()[1] not in self.promised:
                return held
            held.close()
        reason = (
            f"every port from {self.low} to {self.high} is taken on {socket.gethostname()}: widen "
            "cluster.master_port_range_low and cluster.master_port_range_high, or set both to null"
        )
        raise TransferError(0, -1, "rendezvous", "", reason)

    def _candidates(self) -> Iterable[int]:
        if self.low:
            return (port for port in range(self.low, self.high + 1) if port not in self.promised)
        return [0] * (1 + len(self.promised))


class HeldPort:
    """A port of this machine for whoever is about to listen: held from when it is asked for until the next one is."""

    def __init__(self) -> None:
        self._held: socket.socket | None = None

    def renew(self, ports: PortRange) -> int:
        """Another port; errors as `PortRange.reserve`."""
        if self._held is not None:
            self._held.close()
        self._held = ports.reserve()
        return int(self._held.getsockname()[1])
