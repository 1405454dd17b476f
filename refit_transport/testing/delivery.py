"""Manifests in, delivered bytes out: the one place where tests of layouts meet planner, scheduler and fabric."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from refit_transport.fabrics.loopback import run_all
from refit_transport.fabrics.program import lower
from refit_transport.fabrics.slots import Slots, SlotSizes
from refit_transport.layout.manifest import Manifest
from refit_transport.planning.planner import plan_transfer
from refit_transport.scheduling.scheduler import build_schedule
from refit_transport.scheduling.topology import Topology
from refit_transport.testing.oracle import HeldSide, coordinate_tensor


@dataclass(frozen=True, slots=True)
class Delivery:
    """What arrived and what it took.

    `differences` are pieces that aren't the full tensors', `strays` buffers written outside of pieces (of buffers that
    `deliver` made).
    """

    target: HeldSide
    differences: list[str]
    strays: list[str]
    network_bytes: int
    copied_bytes: int
    messages: int


def deliver(
    source: Manifest,
    target: Manifest,
    *,
    tensors: Mapping[str, torch.Tensor] | None = None,
    held: HeldSide | None = None,
    wanted: HeldSide | None = None,
    domains: Iterable[Iterable[int]] | None = None,
    bucket_bytes: int = 1 << 20,
) -> Delivery:
    """Runs one refit in this process, proves plan and schedule on the way.

    `tensors` are the full tensors (coordinate tensors when None), `held` and `wanted` buffers that exist already,
    `domains` the ranks of each domain (sources and targets apart when None; both in one where they share ranks).
    """
    if tensors is None:
        tensors = {spec.name: coordinate_tensor(spec.name, spec.shape, spec.dtype) for spec in source.tensors}
    held = HeldSide.of(source, tensors) if held is None else held
    filled = HeldSide.of(target) if wanted is None else wanted
    if domains is None:
        sending, receiving = held.bindings.keys(), filled.bindings.keys()
        domains = [sending | receiving] if sending & receiving else [sending, receiving]
    plan = plan_transfer(source, target)
    plan.check(source, target)
    schedule = build_schedule(plan, Topology.of(domains), bucket_bytes=bucket_bytes)
    schedule.check(plan)
    sizes = SlotSizes.of([schedule], staging_bytes=1 << 20)
    run_all(
        lower(
            schedule,
            rank,
            source=held.bindings.get(rank),
            target=filled.bindings.get(rank),
            memory=Slots.private(sizes.nbytes),
            sizes=sizes,
        )
        for rank in sorted(held.bindings.keys() | filled.bindings.keys())
    )
    traffic, hops = schedule.traffic(), schedule.hops
    return Delivery(
        filled,
        filled.differences(tensors),
        filled.strays() if wanted is None else [],
        network_bytes=sum(traffic.network_sent.values()),
        copied_bytes=sum(traffic.copied.values()),
        messages=int((hops.sender != hops.receiver).sum()),
    )
