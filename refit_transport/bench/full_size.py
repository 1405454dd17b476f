"""Full-size refits whose planning is measured: both sides' manifests, from presets alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from refit_transport.layout.manifest import Manifest
from refit_transport.layout.model_shape import ModelShape
from refit_transport.layout.parallelism import MegatronParallelism
from refit_transport.scheduling.topology import Topology
from refit_transport.sources.megatron_preset import megatron_manifest
from refit_transport.targets.vllm_preset import vllm_manifest

_GPUS_PER_NODE = 8


@dataclass(frozen=True, slots=True)
class FullSize:
    """A refit of a published model; each node of eight ranks is a domain."""

    source: Manifest
    target: Manifest

    @property
    def topology(self) -> Topology:
        ranks = sorted(ranked.rank for side in (self.source, self.target) for ranked in side.ranks)
        return Topology.of(ranks[first : first + _GPUS_PER_NODE] for first in range(0, len(ranks), _GPUS_PER_NODE))


def qwen3_30b_a3b() -> FullSize:
    """Qwen3-30B-A3B, PP2 EP8 on 16 ranks -> TP4 x DP4 on 16."""
    model = ModelShape(
        architecture="Qwen3MoeForCausalLM",
        layers=48,
        hidden=2048,
        vocab=151936,
        heads=32,
        kv_heads=4,
        head_dim=128,
        intermediate=6144,
        experts=128,
        moe_intermediate=768,
        moe_layers=tuple(range(48)),
        qk_norm=True,
    )
    source = megatron_manifest(model, MegatronParallelism(pipeline=2, expert=8), world_size=16, dtype="bfloat16")
    target = vllm_manifest(source.tensors, model, tensor_parallel=4, engines=4, first_rank=16, dtype="bfloat16")
    return FullSize(source, target)


FULL_SIZE: Mapping[str, Callable[[], FullSize]] = {"Qwen3-30B-A3B, PP2 EP8 (16) -> TP4 x DP4 (16)": qwen3_30b_a3b}
