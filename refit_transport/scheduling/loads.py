"""Accounts of who has how much to send and receive, on which the passes choose."""

from __future__ import annotations

from collections import defaultdict

from refit_transport.scheduling.topology import Topology


class Loads:
    """Seconds that each NIC and rank is busy so far, in each direction, in the fluid model (bytes over rate)."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self.nic_out = [0.0] * len(topology.nics)
        self.nic_in = [0.0] * len(topology.nics)
        # Bytes of packing, so that of equal NICs' ranks the idle one is taken.
        self.packed: dict[int, float] = defaultdict(float)
        self.entered: dict[int, float] = defaultdict(float)
        self.local_out: dict[int, float] = defaultdict(float)

    def seconds(self, rank: int, nbytes: float) -> float:
        """How long the rank's NIC takes for these bytes."""
        return nbytes / self._topology.nics[self._topology.nic(rank)].rate

    def out(self, rank: int) -> float:
        """Seconds that the rank's NIC already has to send."""
        return self.nic_out[self._topology.nic(rank)]

    def inn(self, rank: int) -> float:
        """Seconds that the rank's NIC already has to receive."""
        return self.nic_in[self._topology.nic(rank)]

    def send(self, sender: int, receiver: int, nbytes: float) -> None:
        """Books what the sender has to do for the receiver."""
        if self._topology.is_local(sender, receiver):
            self.local_out[sender] += nbytes
        else:
            self.nic_out[self._topology.nic(sender)] += self.seconds(sender, nbytes)

    def enter(self, receiver: int, nbytes: float) -> None:
        """Books bytes that enter a domain through this rank."""
        self.nic_in[self._topology.nic(receiver)] += self.seconds(receiver, nbytes)
        self.entered[receiver] += nbytes
