"""The lower bound of a case's time, at the rates of its lab."""

from __future__ import annotations

from dataclasses import dataclass

from refit_transport.bench.cases import Case
from refit_transport.bench.lab import GOODPUT, Wiring
from refit_transport.bench.variants import Variant
from refit_transport.planning.plan import TransferPlan
from refit_transport.planning.planner import plan_transfer
from refit_transport.scheduling.bound import bound
from refit_transport.scheduling.topology import Nic, Topology


@dataclass(frozen=True, slots=True)
class LowerBound:
    """Seconds, 0 where no rate is limited, and what needs them."""

    seconds: float
    binds: str


def lower_bound(case: Case, variant: Variant) -> LowerBound:
    """No schedule is faster; see `scheduling.bound`."""
    if case.wiring.mbit is None:
        return LowerBound(0.0, "nothing")
    plan = plan_transfer(case.source_manifest(variant), case.target_manifest(variant))
    return network_bound(plan, wired_topology(case.wiring))


def network_bound(plan: TransferPlan, topology: Topology) -> LowerBound:
    """Of what crosses the network alone: how fast ranks are inside a domain isn't known."""
    found = bound(plan, topology)
    network = {"receiving": found.receiving, "sending": found.sending}
    return LowerBound(max(network.values()), max(network, key=lambda side: network[side]))


def wired_topology(wiring: Wiring) -> Topology:
    """The machine graph of a lab whose rates are limited; a NIC's rate is of payload."""
    assert wiring.mbit is not None
    rates = [wiring.mbit[wiring.node_of(ranks[0])] * 1e6 / 8 * GOODPUT for ranks in wiring.nic_ranks]
    nics = tuple(Nic(ranks, rate) for ranks, rate in zip(wiring.nic_ranks, rates, strict=True))
    return Topology(wiring.nodes, nics)
