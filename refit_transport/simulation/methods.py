"""The ways to refit that are compared, and what the scheduler and the time model say of each.

The only place of the simulation that calls planner, scheduler, bound and time model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from refit_transport.layout.canonical import checkpoint_entries
from refit_transport.layout.layout import piece_of_its_own
from refit_transport.layout.manifest import DTYPE_BYTES, Manifest, RankManifest
from refit_transport.planning.planner import plan_transfer
from refit_transport.scheduling.bound import bound
from refit_transport.scheduling.broadcast import ChainKind, build_broadcast
from refit_transport.scheduling.makespan import simulate
from refit_transport.scheduling.schedule import Schedule
from refit_transport.scheduling.scheduler import PassName, build_schedule
from refit_transport.simulation.case import Case

Method = Literal["broadcast_single", "broadcast", "flat", "hybrid", "full"]

METHODS: Mapping[Method, str] = {
    "broadcast_single": "gather and broadcast, one chain",
    "broadcast": "gather and broadcast, a chain per NIC",
    "flat": "flat point-to-point",
    "hybrid": "coverage ffn",
    "full": "coverage all",
}

STAGING_BYTES = 128 << 20
# What crosses a NIC comes in 256 payloads or more where that leaves 1 MiB each: few large ones can't be divided evenly.
_LARGEST_CHUNK, _SMALLEST_CHUNK, _CHUNKS = 16 << 20, 1 << 20, 256
# A chain of hundreds of ranks repeats each chunk on each: coarser chunks keep the schedule small, and cost a chain its
# length over this number of its time.
_BROADCAST_CHUNKS = 2000
_FLAT: frozenset[PassName] = frozenset({"local", "deduplicate", "stripe", "forward", "balance"})


@dataclass(frozen=True, slots=True)
class Prediction:
    """One method's figures. `nic_bytes`: payload of the busiest NIC in its busier direction; `network_bytes`: of all
    NICs, out; `staging_bytes`: extra memory of a rank at most; `bound`: the least possible seconds of any method."""

    method: Method
    seconds: float
    bound: float
    nic_bytes: int
    network_bytes: int
    staging_bytes: int

    @property
    def over_bound(self) -> float:
        """Seconds as a multiple of the bound."""
        return self.seconds / self.bound if self.bound else float("inf")


def lower_bound(case: Case) -> float:
    """Seconds below which no method can stay, at the rates of the case's machine."""
    plan = plan_transfer(case.source, case.target, tensors=case.names)
    return float(bound(plan, case.topology).seconds)


def predict(method: Method, case: Case, *, least: float) -> Prediction:
    """Schedules a method and plays it in the time model; `least` is the case's lower bound.

    A method of two transports runs one after the other, as a refit does.
    """
    schedules, whole = [], 0
    if method in ("broadcast", "broadcast_single"):
        chains: ChainKind = "nic" if method == "broadcast" else "single"
        schedules.append(_broadcast(case, case.names, chains))
        whole = _largest_whole(case, case.names)
    elif method == "hybrid":
        rest = [name for name in case.names if name not in case.ffn]
        if case.ffn:
            schedules.append(_reshard(case, case.ffn))
        if rest:
            schedules.append(_broadcast(case, rest, "nic"))
            whole = _largest_whole(case, rest)
    else:
        schedules.append(_reshard(case, case.names, disabled=_FLAT if method == "flat" else frozenset()))
    loads = _nic_loads(case, schedules)
    return Prediction(
        method,
        sum(simulate(schedule, case.topology).seconds for schedule in schedules),
        least,
        max(loads.values(), default=0),
        sum(schedule.traffic().network for schedule in schedules),
        STAGING_BYTES + whole,
    )


def _reshard(case: Case, names: Iterable[str], *, disabled: Collection[PassName] = ()) -> Schedule:
    plan = plan_transfer(case.source, case.target, tensors=names)
    return build_schedule(plan, case.topology, bucket_bytes=_chunk(case), disabled=disabled)


def _broadcast(case: Case, names: Iterable[str], chains: ChainKind) -> Schedule:
    """Every target rank receives every tensor whole."""
    chosen = frozenset(names)
    specs = tuple(spec for spec in case.target.tensors if spec.name in chosen)
    first = case.target.ranks[0].rank
    whole = RankManifest(first, "target", specs, tuple(piece_of_its_own(spec.name, spec.box) for spec in specs))
    target = Manifest.of(whole.replica(ranked.rank) for ranked in case.target.ranks)
    total = sum(spec.box.numel * DTYPE_BYTES[spec.dtype] for spec in specs)
    plan = plan_transfer(case.source, target)
    chunk = max(_chunk(case), total // _BROADCAST_CHUNKS)
    return build_broadcast(plan, case.topology, chains=chains, bucket_bytes=chunk)


def _chunk(case: Case) -> int:
    """The payload size, in bytes."""
    return min(max(case.bytes // (len(case.target.ranks) * _CHUNKS), _SMALLEST_CHUNK), _LARGEST_CHUNK)


def _largest_whole(case: Case, names: Iterable[str]) -> int:
    """The bytes of the largest checkpoint tensor, which the engine's loader takes whole."""
    chosen = frozenset(names)
    return max(
        checkpoint_entries(spec)[0].box.numel * DTYPE_BYTES[spec.dtype]
        for spec in case.target.tensors
        if spec.name in chosen
    )


def _nic_loads(case: Case, schedules: Iterable[Schedule]) -> dict[int, int]:
    """Payload bytes of each NIC in its busier direction."""
    out: dict[int, int] = {}
    into: dict[int, int] = {}
    for schedule in schedules:
        traffic = schedule.traffic()
        for totals, by_rank in ((out, traffic.network_sent), (into, traffic.network_received)):
            for rank, nbytes in by_rank.items():
                nic = case.topology.nic(rank)
                totals[nic] = totals.get(nic, 0) + nbytes
    return {nic: max(out.get(nic, 0), into.get(nic, 0)) for nic in out.keys() | into.keys()}
