"""What a configuration's refits will move, planned from presets: no worker, engine or GPU is started."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from refit_transport.config.model import logical_model
from refit_transport.config.rules_limits import TRAINED
from refit_transport.config.schema import RefitConfig
from refit_transport.config.settings import FabricName
from refit_transport.layout.manifest import RankRole
from refit_transport.layout.presets.megatron import source_manifest
from refit_transport.layout.presets.vllm import EngineParallelism, target_manifest
from refit_transport.places import Place, topology_of
from refit_transport.planning.routing import Route
from refit_transport.refit_plan import RefitPlan
from refit_transport.report import PlanSummary
from refit_transport.scheduling.schedule import Traffic, total_traffic
from refit_transport.sources.naming import check_complete
from refit_transport.transports.base import Job

Announce = Callable[[str], None]

_ENGINE_DECIDES = (
    "as far as known without the engine: a tensor that vLLM's loader can't take in parts goes by gather_broadcast, and "
    "a layer that keeps its own weight layout is staged on its rank, which takes that layer's memory once more; both "
    "show only when the engine runs"
)

# What `topology_of` makes of `auto` NICs without asking anybody.
_NICS: Mapping[FabricName, str] = {
    "auto": "one NIC per domain, as without GPUs; with a GPU for each rank a run takes one NIC per rank",
    "gloo": "one NIC per domain, as always with gloo",
    "nccl": "one NIC per rank, as always between GPUs",
    "nccl_m2n": "one NIC per rank, as always between GPUs",
}


@dataclass(frozen=True, slots=True)
class RankLoad:
    """One rank's bytes in each refit: payload over the network and inside its domain, and extra memory at most.

    `old_way_received` is what the rank would receive if every tensor were gathered and broadcast.
    """

    rank: int
    role: RankRole
    network_sent: int
    network_received: int
    local_sent: int
    local_received: int
    old_way_received: int
    staging: int

    @property
    def sent(self) -> int:
        return self.network_sent + self.local_sent

    @property
    def received(self) -> int:
        return self.network_received + self.local_received

    @property
    def old_way_ratio(self) -> float:
        """How many times the planned bytes the old way would bring here; infinite where nothing needs to come."""
        return self.old_way_received / self.received if self.received else float("inf")


@dataclass(frozen=True, slots=True)
class Preview:
    """A checked plan. `payloads` counts by transport; `assumptions` say what only a run can tell."""

    summary: PlanSummary
    routes: tuple[Route, ...]
    ranks: tuple[RankLoad, ...]
    payloads: dict[str, int]
    assumptions: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """A plain value for programs."""
        ranks = [
            {
                **asdict(load),
                "sent": load.sent,
                "received": load.received,
                "old_way_ratio": load.old_way_ratio if load.received else None,
            }
            for load in self.ranks
        ]
        totals = {key: getattr(self.summary, key) for key in ("shard_to_shard", "network_bytes", "received_bytes")}
        return {
            "summary": {**asdict(self.summary), **totals},
            "routes": [asdict(route) for route in self.routes],
            "ranks": ranks,
            "payloads": self.payloads,
            "checked": True,
            "assumptions": list(self.assumptions),
        }


def preview(config: RefitConfig, *, announce: Announce) -> Preview:
    """Plans, schedules and checks the refits of a configuration.

    Args:
        config: the job.
        announce: called with what comes next, in a few words.

    Raises:
        ConfigError: the model's `config.json` can't be read or isn't supported, or the model can't be cut so.
        LayoutError: the engines' side can't be known beforehand.
        PlanError: a plan or schedule doesn't deliver every element once.
    """
    announce("describing both sides")
    job = preset_job(config)
    announce(f"planning {len(job.target.tensors)} tensors for {len(job.ranks)} ranks")
    plan = RefitPlan(job)
    announce("planning the same by gather and broadcast")
    summary = plan.summary()
    summary = replace(summary, skipped={**summary.skipped, **logical_model(config).left_out()})
    for name, transport in plan.transports.items():
        announce(f"checking the schedule of {name}")
        transport.check()
    return Preview(
        summary,
        plan.routes,
        _loads(job, plan),
        {name: footprint.payloads for name, footprint in plan.footprints.items()},
        assumptions_of(config),
    )


def preset_job(config: RefitConfig) -> Job:
    """What the ranks of a run would agree on, from presets of both sides.

    Raises:
        ConfigError, LayoutError: as `preview`.
    """
    model = logical_model(config)
    source = source_manifest(
        model,
        config.policy.megatron_cfg.parallelism,
        world_size=config.training_ranks,
        dtype=config.policy.precision,
        make_vocab_size_divisible_by=config.policy.megatron_cfg.make_vocab_size_divisible_by,
        spec="local",  # as training workers build it
    )
    check_complete(source, model)
    vllm = config.policy.generation.vllm_cfg
    tensor = vllm.tensor_parallel_size
    target = target_manifest(
        model,
        EngineParallelism(
            tensor,
            config.engines,
            expert=tensor if vllm.expert_parallel_size > 1 else 1,
            pipeline=vllm.pipeline_parallel_size,
        ),
        first_rank=config.training_ranks,
        dtype=config.vllm_precision,
    )
    settings = config.refit_settings()
    return Job(source, target, topology_of(_assumed_places(config), settings), settings)


def _assumed_places(config: RefitConfig) -> dict[int, Place]:
    """Whole nodes in rank order; a critic lies between training and generation."""
    found = {}
    for rank in range(config.refit_ranks):
        gpu = rank if rank < config.training_ranks else rank + config.critic_ranks
        found[rank] = Place(f"node {gpu // config.cluster.gpus_per_node}")
    return found


def assumptions_of(config: RefitConfig) -> tuple[str, ...]:
    """What a plan from presets rests on."""
    found = [_ENGINE_DECIDES]
    model = logical_model(config)
    if model.architecture not in TRAINED:
        found.append(f"training ranks of {model.architecture} as Megatron-core builds them; `run` can't train it yet")
    if any(each.row.trained_locally is not None for each in model.main):
        found.append(
            "Megatron's own layers, which divide latent down projections; TransformerEngine's have them whole on each "
            "rank"
        )
    if config.domains() is None:
        node = config.cluster.gpus_per_node
        found.append(
            f"one fast domain per node of {node} ranks, in rank order; a run asks each rank for its host or node, and "
            "for the NVLink domain of its GPU"
        )
    if config.settings.topology.nics == "auto":
        found.append(f"{_NICS[config.settings.fabric]} (topology.nics: auto)")
    return tuple(found)


def _loads(job: Job, plan: RefitPlan) -> tuple[RankLoad, ...]:
    total: Traffic = total_traffic(transport.traffic() for transport in plan.transports.values())
    old = plan.old_way
    roles: dict[int, RankRole] = {ranked.rank: side.role for side in (job.source, job.target) for ranked in side.ranks}
    return tuple(
        RankLoad(
            rank,
            roles[rank],
            total.network_sent.get(rank, 0),
            total.network_received.get(rank, 0),
            total.local_sent.get(rank, 0),
            total.local_received.get(rank, 0),
            old.network_received.get(rank, 0) + old.local_received.get(rank, 0),
            plan.extra_bytes(rank),
        )
        for rank in job.ranks
    )
