"""The lower bound: how long any schedule of a plan takes at least in the fluid model, where bytes flow without delay.

Derivation, for a transfer that lasts T seconds. (1) Each domain must take in, over its NICs, every byte that some rank
of it wants and none of it holds: T >= those bytes / the sum of its NICs' rates. (2) Each of these bytes leaves a domain
that holds it at least once, and some domain once for every domain that it enters; what doesn't leave a holding domain
is forwarded by one that wants it too. The least T for which the bytes can be divided so that no domain sends more than
T times the rate of its NICs is the value of a linear program. Without forwarding all copies leave holding domains. (3)
What a rank wants and doesn't hold reaches it over its NIC or its local link: T >= those bytes / (the NIC's rate + the
local rate). The bound is the largest of the three. It ignores latency, pipelines that fill and empty, and which ranks
of a domain share the work inside: they may relay for each other. Rates are of payload.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from refit_transport.errors import PlanError
from refit_transport.planning.plan import TransferPlan
from refit_transport.scheduling.demands import Demand, deduplicate, demands_of, split_copies, split_local
from refit_transport.scheduling.topology import Topology

Forwarding = Literal["allowed", "none"]


@dataclass(frozen=True, slots=True)
class Bound:
    """Seconds: of the busiest domain to receive, of the senders to send, of the busiest rank inside its domain."""

    receiving: float
    sending: float
    inside: float

    @property
    def seconds(self) -> float:
        return max(self.receiving, self.sending, self.inside)


@dataclass(frozen=True, slots=True)
class _Group:
    """Bytes that the same domains hold and the same domains must take in."""

    nbytes: int
    holding: tuple[int, ...]
    entering: tuple[int, ...]


def bound(plan: TransferPlan, topology: Topology, *, forwarding: Forwarding = "allowed") -> Bound:
    """The lower bound of a plan on a topology; see the module for its derivation.

    Two domains that want everything, fed by one: forwarding halves what the source must send.

    >>> from refit_transport.layout.layout import Layout, manifest_from_layouts
    >>> from refit_transport.layout.mesh import Mesh
    >>> from refit_transport.layout.placement import Replicate
    >>> from refit_transport.planning.planner import plan_transfer
    >>> source = manifest_from_layouts("source", {"w": Layout((100,), Mesh.of(dp=1), (Replicate(),))}, dtype="uint8")
    >>> both = Layout((100,), Mesh.of(first_rank=1, dp=2), (Replicate(),))
    >>> plan = plan_transfer(source, manifest_from_layouts("target", {"w": both}, dtype="uint8"))
    >>> topology = Topology.of(((0,), (1,), (2,)), nic_rate=100.0, local_rate=1000.0)
    >>> bound(plan, topology).seconds, bound(plan, topology, forwarding="none").seconds
    (1.0, 2.0)
    """
    demands = deduplicate(split_local(split_copies(demands_of(plan, topology)), topology))
    network = [demand for demand in demands if demand.kind == "network"]
    rates = [sum(topology.nics[nic].rate for nic in nics) for nics in topology.nics_of_domains]
    entering: dict[int, int] = defaultdict(int)
    for demand in network:
        for entry in demand.entries:
            entering[entry.domain] += demand.nbytes
    receiving = max((nbytes / rates[domain] for domain, nbytes in entering.items()), default=0.0)
    return Bound(receiving, _sending(_groups(network, topology), rates, forwarding), _inside(demands, topology))


def _groups(demands: Sequence[Demand], topology: Topology) -> list[_Group]:
    total: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = defaultdict(int)
    for demand in demands:
        holding = tuple(sorted({topology.domain(rank) for rank in demand.holders}))
        total[holding, tuple(entry.domain for entry in demand.entries)] += demand.nbytes
    return [_Group(nbytes, holding, entering) for (holding, entering), nbytes in total.items() if nbytes]


def _inside(demands: Sequence[Demand], topology: Topology) -> float:
    wanted: dict[int, int] = defaultdict(int)
    for demand in demands:
        for entry in demand.entries if demand.kind != "copy" else ():
            for rank in entry.wanters:
                wanted[rank] += demand.nbytes
    return max(
        (nbytes / (topology.nics[topology.nic(rank)].rate + topology.local_rate) for rank, nbytes in wanted.items()),
        default=0.0,
    )


def _sending(groups: Sequence[_Group], rates: Sequence[float], forwarding: Forwarding) -> float:
    """The least time in which all copies can leave, by linear programming; column 0 is the time.

    Bytes are counted in units of the largest group, rates in units of the fastest domain, which keeps the numbers tame.
    """
    if not groups:
        return 0.0
    # scipy takes a while to import, and plans are made without it.
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    unit, fastest = float(max(group.nbytes for group in groups)), max(rates)
    # Rows of the inequalities: what each domain sends, then what must leave the holders of each group.
    upper: list[tuple[int, int, float]] = [(domain, 0, -rate / fastest) for domain, rate in enumerate(rates)]
    equal: list[tuple[int, int, float]] = []
    column = 1
    for number, group in enumerate(groups):
        forwards = forwarding == "allowed" and len(group.entering) > 1
        for domain in (*group.holding, *(group.entering if forwards else ())):
            upper.append((domain, column, 1.0))
            equal.append((number, column, 1.0))
            if domain in group.holding:
                upper.append((len(rates) + number, column, -1.0))
            column += 1
    at_least = [0.0] * len(rates) + [-group.nbytes / unit for group in groups]
    copies = [len(group.entering) * group.nbytes / unit for group in groups]
    cost = np.zeros(column)
    cost[0] = 1.0
    solved = linprog(
        cost,
        A_ub=_matrix(upper, (len(at_least), column), coo_array),
        b_ub=at_least,
        A_eq=_matrix(equal, (len(groups), column), coo_array),
        b_eq=copies,
        method="highs",
    )
    if not solved.success:
        raise PlanError("", "", -1, f"the bound's linear program has no solution: {solved.message}")
    return float(solved.x[0]) * unit / fastest


def _matrix(entries: Sequence[tuple[int, int, float]], shape: tuple[int, int], kind: type) -> object:
    rows, columns, values = zip(*entries, strict=True)
    return kind((values, (rows, columns)), shape=shape).tocsr()
