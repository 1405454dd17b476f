"""What one rank does in the lab: holds weights, prepares a session per variant, refits, and compares every element."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import torch

from refit_transport.bench.cases import Case
from refit_transport.bench.variants import Variant, settings_of
from refit_transport.fabrics.binding import Binding
from refit_transport.fabrics.rendezvous import ControlChannel
from refit_transport.layout.manifest import Manifest, RankManifest
from refit_transport.report import RankReport
from refit_transport.scheduling.schedule import Traffic, total_traffic
from refit_transport.session import RefitSession
from refit_transport.testing.oracle import HeldSide, box_of, coordinate_tensor
from refit_transport.testing.sides import HeldSource, HeldTarget

_CONNECT_SECONDS = 60.0
_DISTINCT_VALUES = 251
_STEP = 101
_RENO = Path("/proc/sys/net/ipv4/tcp_congestion_control")


@dataclass(frozen=True, slots=True)
class Ran:
    """One refit on one rank: when it began and ended (CLOCK_MONOTONIC, seconds) and the CPU seconds that it took.

    `ranks` are all ranks' own reports, on rank 0 only.
    """

    began: float
    ended: float
    cpu: float
    ranks: tuple[RankReport, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """A model's refit before it is forked to the ranks: both sides' manifests, and what is true.

    `truth`: full tensors by name, the oracle's values of version 0, in uint8.
    """

    ranks: Mapping[int, RankManifest]
    truth: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, case: Case, variant: Variant) -> Self:
        """What the variant refits."""
        sides = (case.source_manifest(variant), case.target_manifest(variant))
        truth = {w.name: coordinate_tensor(w.name, w.shape, "uint8") for w in case.model_of(variant).weights}
        return cls({ranked.rank: ranked for side in sides for ranked in side.ranks}, truth)


@dataclass(slots=True)
class _Held:
    """One variant on this rank."""

    binding: Binding
    sample: Sample
    channel: ControlChannel | None = None
    session: RefitSession | None = None
    version: int = 0


@dataclass(slots=True)
class LabRank:
    """Serves `bench.crew.Crew`. Every method but the checks is collective over the ranks of the case.

    samples: by variant; variants that refit the same model have the same one.
    """

    case: Case
    rank: int
    samples: Mapping[str, Sample]
    _held: dict[str, _Held] = field(default_factory=dict)

    def hold(self) -> None:
        """Allocates the weights; variants that refit the same model share them."""
        # No pacing, and the same on every machine. It is the namespace's own setting.
        _RENO.write_text("reno")
        bindings: dict[int, Binding] = {}
        for name, sample in self.samples.items():
            if id(sample) not in bindings:
                own = Manifest.of((sample.ranks[self.rank],))
                bindings[id(sample)] = HeldSide.of(own).bindings[self.rank]
            self._held[name] = _Held(bindings[id(sample)], sample)

    def listen(self, name: str) -> int:
        """Rank 0 opens the variant's control channel; returns its port."""
        address, size = self.case.wiring.address_of(0), self.case.wiring.world_size
        channel = ControlChannel.listen(host=address, port=0, world_size=size, timeout_s=_CONNECT_SECONDS)
        self._held[name].channel = channel
        return channel.port

    def prepare(self, name: str, port: int) -> float:
        """Prepares the variant's session; returns the seconds that it took."""
        held = self._held[name]
        variant = next(variant for variant in self.case.variants if variant.name == name)
        began = time.monotonic()
        if held.channel is None:
            held.channel = ControlChannel.join(
                host=self.case.wiring.address_of(0),
                port=port,
                rank=self.rank,
                world_size=self.case.wiring.world_size,
                timeout_s=_CONNECT_SECONDS,
            )
        held.session = RefitSession.prepare(
            held.channel,
            settings=settings_of(variant, self.case.wiring) if self.rank == 0 else None,
            source=HeldSource(held.binding) if self._is_source else None,
            target=None if self._is_source else HeldTarget(held.binding),
        )
        return time.monotonic() - began

    def planned(self, name: str) -> Traffic:
        """What the variant's schedules move at each refit."""
        return total_traffic(transport.traffic() for transport in self._session(name).plan.transports.values())

    def fill(self, name: str, version: int) -> None:
        """Gives a source the values of a version; a target keeps those that it has."""
        if self._is_source:
            held = self._held[name]
            for index, piece in enumerate(held.binding.manifest.pieces):
                box = box_of(held.sample.truth[piece.tensor], piece.box.offset, piece.box.shape)
                held.binding.view(index).copy_(of_version(box, version))

    def run(self, name: str, start: float) -> Ran:
        """Refits once; all ranks begin at the same reading of the clock."""
        held, session = self._held[name], self._session(name)
        held.version += 1
        time.sleep(max(0.0, start - time.monotonic()))
        cpu, began = time.process_time(), time.monotonic()
        report = session.run(held.version)
        ended = time.monotonic()
        return Ran(began, ended, time.process_time() - cpu, () if report is None else report.ranks)

    def differences(self, name: str, version: int) -> list[str]:
        """The pieces of a target that aren't exactly the version's."""
        if self._is_source:
            return []
        held, wrong = self._held[name], []
        for index, piece in enumerate(held.binding.manifest.pieces):
            view = held.binding.view(index)
            box = box_of(held.sample.truth[piece.tensor], piece.box.offset, piece.box.shape)
            if not torch.equal(view, of_version(box, version).to(view.dtype)):
                wrong.append(f"rank {self.rank}: {piece.tensor}{piece.box}")
        return wrong

    def trim(self) -> None:
        """Gives freed memory back to the kernel: what a refit takes then shows, even where others had it before."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)

    def memory(self) -> int:
        """Bytes of this process that hold data: its own pages, and its share of pages shared with others.

        A page that was shared by forking counts before and after it is written, so that writing it isn't growth.
        """
        fields = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
        return sum(int(fields[name].split()[0]) for name in ("Anonymous", "Pss_Shmem")) * 1024

    def close(self) -> None:
        """Leaves all sessions."""
        for held in self._held.values():
            if held.session is not None:
                held.session.close()

    @property
    def _is_source(self) -> bool:
        return self.rank < self.case.source.ranks

    def _session(self, name: str) -> RefitSession:
        session = self._held[name].session
        assert session is not None
        return session


def of_version(base: torch.Tensor, version: int) -> torch.Tensor:
    """The oracle's values of a version, from those of version 0 (both integers below 251).

    >>> base = coordinate_tensor("w", (600,), "uint8")
    >>> torch.equal(of_version(base, 7), coordinate_tensor("w", (600,), "int16", version=7))
    True
    """
    return (base.to(torch.int16) + version * _STEP % _DISTINCT_VALUES) % _DISTINCT_VALUES
