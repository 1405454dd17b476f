"""What one rank of a real job does in a benchmark: it holds made-up weights of the job's layouts and refits them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from refit_transport.bench.session_rank import Ran, SessionRank
from refit_transport.bench.synthetic import fill_box, is_version
from refit_transport.config.settings import RefitSettings
from refit_transport.errors import TransferError
from refit_transport.fabrics.binding import Binding
from refit_transport.fabrics.deadline import Deadline
from refit_transport.fabrics.rendezvous import Meeting
from refit_transport.layout.manifest import RankManifest
from refit_transport.scheduling.topology import Topology
from refit_transport.views import make_buffers

# What a machine may lack; these fabrics say so when they connect.
_OPTIONAL = ("nccl", "nccl_m2n")


@dataclass(frozen=True, slots=True)
class Prepared:
    """How long it took, or why the variant's fabric can't be used here."""

    seconds: float
    obstacle: str = ""


class ClusterRank(SessionRank):
    """Built in the process of one rank, on the GPU where there is one. All variants refit the same weights."""

    def __init__(self, *, rank: int, world_size: int, manifest: RankManifest, node: str = "") -> None:
        super().__init__(rank, world_size=world_size)
        self._manifest, self._node = manifest, node
        self._refits = 0

    @cached_property
    def _binding(self) -> Binding:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        buffers = make_buffers(self._manifest, device=device)
        for buffer in buffers.values():
            buffer.zero_()
        return Binding.of(self._manifest, buffers)

    def hold(self) -> None:
        """Allocates the weights."""
        self._binding.addresses()

    def prepare(self, name: str, meeting: Meeting, settings: RefitSettings) -> Prepared:
        """Prepares the variant's session."""
        if settings.fabric == "gloo" and any(buffer.is_cuda for buffer in self._binding.buffers.values()):
            return Prepared(0.0, "the weights are in GPU memory, and gloo sends from host memory")
        try:
            return Prepared(self.join(name, meeting, settings, binding=self._binding, node=self._node))
        except TransferError as error:
            if settings.fabric not in _OPTIONAL:
                raise
            return Prepared(0.0, error.reason)

    def topology(self, name: str) -> Topology:
        """What all ranks agreed on."""
        return self.session(name).plan.job.topology

    def fill(self, version: int) -> None:
        """Gives a source the values of a version; a target keeps those that it has."""
        if self._manifest.role == "source":
            for index, piece in enumerate(self._manifest.pieces):
                fill_box(self._binding.view(index), piece.tensor, piece.box, version=version)

    def run(self, name: str) -> Ran:
        """Refits once. Clocks of hosts differ, so the ranks start when all are here."""
        self._refits += 1
        channel = self.channel(name)
        channel.agree(f"start/{self._refits}", "", deadline=Deadline(channel.timeout_s))
        return self.refit(name)

    def differences(self, version: int) -> list[str]:
        """The pieces of a target that aren't exactly the version's."""
        if self._manifest.role == "source":
            return []
        return [
            f"rank {self.rank}: {piece.tensor}{piece.box}"
            for index, piece in enumerate(self._manifest.pieces)
            if not is_version(self._binding.view(index), piece.tensor, piece.box, version=version)
        ]
