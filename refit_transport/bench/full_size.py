"""The full-size refit whose planning is measured: both sides' manifests, from presets alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from refit_transport.layout.manifest import Manifest
from refit_transport.scheduling.topology import Topology
from refit_transport.simulation.presets import preset_manifests

_GPUS_PER_NODE = 8


@dataclass(frozen=True, slots=True)
class FullSize:
    """A refit of a published model; each node of eight ranks is a domain, and each rank has a NIC."""

    source: Manifest
    target: Manifest

    @property
    def topology(self) -> Topology:
        ranks = sorted(ranked.rank for side in (self.source, self.target) for ranked in side.ranks)
        nodes = (ranks[first : first + _GPUS_PER_NODE] for first in range(0, len(ranks), _GPUS_PER_NODE))
        return Topology.of(nodes, nics="rank")


def deepseek_v3() -> FullSize:
    """DeepSeek-V3, PP16 EP16 on 256 ranks -> TP32 x DP8 on 256."""
    return FullSize(*preset_manifests("DeepSeek-V3", source="pp16 ep16", target="tp32 dp8", sources=256, targets=256))


FULL_SIZE: Mapping[str, Callable[[], FullSize]] = {"DeepSeek-V3, PP16 EP16 (256) -> TP32 x DP8 (256)": deepseek_v3}
