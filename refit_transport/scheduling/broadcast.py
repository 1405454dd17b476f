"""The schedule of a gather and pipelined chain broadcasts: what a refit without resharding does, done well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

from refit_transport.planning.plan import TransferPlan
from refit_transport.scheduling.demands import demands_of
from refit_transport.scheduling.routes import Flow, Hop, Route, Share
from refit_transport.scheduling.schedule import Schedule
from refit_transport.scheduling.scheduler import schedule_flows
from refit_transport.scheduling.topology import Topology

ChainKind = Literal["nic", "single"]


@dataclass(frozen=True, slots=True)
class Chain:
    """One chain: the source rank where it begins, and in each target domain the rank that receives it and passes it on.

    From that rank everything spreads to the other targets of its domain along a tree in which each rank hands it to
    `fan_out` others, as many as a local link serves while the NIC brings the next bytes.
    """

    root: int
    doors: tuple[int, ...]
    others: Mapping[int, tuple[int, ...]]
    fan_out: int

    @classmethod
    def all_of(cls, sources: Sequence[int], targets: Sequence[int], topology: Topology, kind: ChainKind) -> list[Self]:
        """One chain, or as many as a target domain has NICs, the k-th from NIC to NIC over the k-th of each domain.

        All roots are in the domain of the first source.
        """
        domains: dict[int, list[int]] = {}
        for rank in sorted(targets):
            domains.setdefault(topology.domain(rank), []).append(rank)
        home = [rank for rank in sorted(sources) if topology.is_local(rank, min(sources))]
        fronts = {domain: _one_per_nic(ranks, topology) for domain, ranks in domains.items()}
        roots = _one_per_nic(home, topology)
        count = 1 if kind == "single" else max(len(front) for front in fronts.values())
        chains = []
        for number in range(count):
            doors = tuple(front[number % len(front)] for _, front in sorted(fronts.items()))
            others = {
                door: _others(ranks, door) for door, (_, ranks) in zip(doors, sorted(domains.items()), strict=True)
            }
            rates = [topology.nics[topology.nic(door)].rate for door in doors]
            fan_out = max(2, int(topology.local_rate // max(rates)))
            chains.append(cls(roots[number % len(roots)], doors, others, fan_out))
        return chains

    def routes(self, holder: int) -> tuple[Route, ...]:
        """From a holder to the root, along the chain, and to the other targets of each domain.

        A rank that has the bytes already, as holder or root, is skipped; a holder that wants them copies.
        """
        hops: list[Hop] = []
        reached = {holder: -1}
        wants_own = holder in self.doors or any(holder in ranks for ranks in self.others.values())

        def pass_on(sender: int, receiver: int) -> None:
            if receiver not in reached:
                hops.append(Hop(sender, receiver, reached[sender]))
                reached[receiver] = len(hops) - 1

        pass_on(holder, self.root)
        front = self.root
        for door in self.doors:
            pass_on(front, door)
            front = door
        for door in self.doors:
            inside = (door, *self.others[door])
            for place, rank in enumerate(self.others[door]):
                pass_on(inside[place // self.fan_out], rank)
        copy = (Route((Hop(holder, holder),)),) if wants_own else ()
        return (Route(tuple(hops)), *copy) if hops else copy


def build_broadcast(plan: TransferPlan, topology: Topology, *, chains: ChainKind, bucket_bytes: int) -> Schedule:
    """Schedules a plan in which every target wants everything: the holders of a part send it to a chain's root.

    >>> from refit_transport.layout.layout import Layout, manifest_from_layouts
    >>> from refit_transport.layout.mesh import Mesh
    >>> from refit_transport.layout.placement import Replicate, Shard
    >>> from refit_transport.planning.planner import plan_transfer
    >>> source = manifest_from_layouts("source", {"w": Layout((8,), Mesh.of(tp=2), (Shard(0),))}, dtype="uint8")
    >>> full = Layout((8,), Mesh.of(first_rank=2, dp=4), (Replicate(),))
    >>> plan = plan_transfer(source, manifest_from_layouts("target", {"w": full}, dtype="uint8"))
    >>> topology = Topology.of(((0, 1), (2, 3), (4, 5)))
    >>> schedule = build_broadcast(plan, topology, chains="single", bucket_bytes=64)
    >>> schedule.check(plan)
    >>> schedule.traffic().network_received, schedule.traffic().local_received
    ({2: 8, 4: 8}, {0: 4, 3: 8, 5: 8})
    """
    demands = demands_of(plan, topology)
    sources = sorted({rank for demand in demands for rank in demand.holders})
    targets = sorted({rank for demand in demands for entry in demand.entries for rank in entry.wanters})
    found = Chain.all_of(sources, targets, topology, chains) if demands else []
    flows = [
        Flow(
            demand.atoms,
            tuple(Share(chain.routes(_holder(demand.holders, chain.root, topology)), 1) for chain in found),
        )
        for demand in demands
    ]
    return schedule_flows(plan, flows, topology, bucket_bytes=bucket_bytes)


def _others(ranks: Sequence[int], door: int) -> tuple[int, ...]:
    """The other ranks in turn from the door on, so that in each chain others stand high in the tree."""
    place = ranks.index(door)
    return (*ranks[place + 1 :], *ranks[:place])


def _one_per_nic(ranks: Sequence[int], topology: Topology) -> list[int]:
    return list({topology.nic(rank): rank for rank in reversed(ranks)}.values())[::-1]


def _holder(holders: Sequence[int], root: int, topology: Topology) -> int:
    """The root itself, else a holder of its domain, else the first."""
    return min(holders, key=lambda rank: (rank != root, not topology.is_local(rank, root), rank))
