"""What one rank does in the lab: holds weights, prepares a session per variant, refits, and compares every element."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from refit_transport.bench.cases import Case
from refit_transport.bench.session_rank import Ran, SessionRank
from refit_transport.bench.variants import Variant, settings_of
from refit_transport.fabrics.binding import Binding
from refit_transport.fabrics.rendezvous import Meeting
from refit_transport.layout.manifest import Manifest, RankManifest
from refit_transport.testing.oracle import HeldSide, box_of, coordinate_tensor

_DISTINCT_VALUES = 251
_STEP = 101
_RENO = Path("/proc/sys/net/ipv4/tcp_congestion_control")


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


@dataclass(frozen=True, slots=True)
class _Held:
    """One variant's weights on this rank."""

    binding: Binding
    sample: Sample


class LabRank(SessionRank):
    """Serves `bench.crew.Crew`. Every method but the checks is collective over the ranks of the case."""

    def __init__(self, case: Case, rank: int, samples: Mapping[str, Sample]) -> None:
        """`samples` are by variant; variants that refit the same model have the same one."""
        super().__init__(rank, world_size=case.wiring.world_size)
        self.case, self._samples = case, samples
        self._held: dict[str, _Held] = {}

    def hold(self) -> None:
        """Allocates the weights; variants that refit the same model share them."""
        # No pacing, and the same on every machine. It is the namespace's own setting.
        _RENO.write_text("reno")
        bindings: dict[int, Binding] = {}
        for name, sample in self._samples.items():
            if id(sample) not in bindings:
                own = Manifest.of((sample.ranks[self.rank],))
                bindings[id(sample)] = HeldSide.of(own).bindings[self.rank]
            self._held[name] = _Held(bindings[id(sample)], sample)

    def listen(self, name: str) -> Meeting:
        """Rank 0 opens the variant's control channel; how the others join it."""
        return self.open_channel(name, self.case.wiring.address_of(0), 0)

    def prepare(self, name: str, meeting: Meeting) -> float:
        """Prepares the variant's session; returns the seconds that it took."""
        wiring = self.case.wiring
        variant = next(variant for variant in self.case.variants if variant.name == name)
        settings = settings_of(variant, wiring)
        return self.join(name, meeting, settings, binding=self._held[name].binding, node="")

    def fill(self, name: str, version: int) -> None:
        """Gives a source the values of a version; a target keeps those that it has."""
        if self._is_source:
            held = self._held[name]
            for index, piece in enumerate(held.binding.manifest.pieces):
                box = box_of(held.sample.truth[piece.tensor], piece.box.offset, piece.box.shape)
                held.binding.view(index).copy_(of_version(box, version))

    def run(self, name: str, start: float) -> Ran:
        """Refits once; all ranks begin at the same reading of the clock."""
        time.sleep(max(0.0, start - time.monotonic()))
        return self.refit(name)

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

    @property
    def _is_source(self) -> bool:
        return self.rank < self.case.source.ranks


def of_version(base: torch.Tensor, version: int) -> torch.Tensor:
    """The oracle's values of a version, from those of version 0 (both integers below 251).

    >>> base = coordinate_tensor("w", (600,), "uint8")
    >>> torch.equal(of_version(base, 7), coordinate_tensor("w", (600,), "int16", version=7))
    True
    """
    return (base.to(torch.int16) + version * _STEP % _DISTINCT_VALUES) % _DISTINCT_VALUES
