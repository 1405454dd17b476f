"""The cases of the lab as data: layouts, network, variants, and the figures that must hold."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from refit_transport.bench.figures import (
    BOUND,
    ExtraMemory,
    Limit,
    Overhead,
    Ratio,
    UplinkBytes,
    as_fast_as,
    at_least,
    time_over_bound,
)
from refit_transport.bench.lab import Nics, Wiring
from refit_transport.bench.variants import (
    FLAT,
    FLAT_TCP,
    GATHER_BROADCAST,
    OURS,
    SINGLE_CHAIN,
    VERIFIED,
    WITHOUT_BALANCE,
    WITHOUT_FORWARD,
    WITHOUT_SHARED_MEMORY,
    Variant,
)
from refit_transport.bench.workload import Model, Side, many, transformer
from refit_transport.errors import ConfigError, Violation
from refit_transport.layout.manifest import Manifest

# 64 tensors, 101 MB and 50 MB.
FULL = transformer(layers=16, hidden=512)
HALF = transformer(layers=8, hidden=512)
SMALL_TENSORS = many(30_000, rows=64, columns=32)
ONE_TENSOR = many(1, rows=30_000 * 64, columns=32)


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison: the same refit by several variants, interleaved on one network.

    Sources are ranks 0 to `source.ranks` - 1, targets follow. `variants` starts with the one whose memory counts.
    """

    name: str
    title: str
    model: Model
    source: Side
    target: Side
    wiring: Wiring
    variants: tuple[Variant, ...]
    limits: tuple[Limit, ...]

    def model_of(self, variant: Variant) -> Model:
        """What the variant refits."""
        return variant.model or self.model

    def source_manifest(self, variant: Variant) -> Manifest:
        """What the sources hold under a variant."""
        return self.source.manifest("source", self.model_of(variant), first_rank=0)

    def target_manifest(self, variant: Variant) -> Manifest:
        """What the targets need under a variant."""
        return self.target.manifest("target", self.model_of(variant), first_rank=self.source.ranks)


def nodes_of(sides: Sequence[tuple[Side, int]]) -> tuple[tuple[int, ...], ...]:
    """Consecutive ranks over each side's number of nodes.

    >>> nodes_of(((Side(tp=2), 1), (Side(tp=2, dp=2), 2)))
    ((0, 1), (2, 3), (4, 5))
    """
    nodes, first = [], 0
    for side, count in sides:
        each = side.ranks // count
        nodes += [tuple(range(first + each * n, first + each * (n + 1))) for n in range(count)]
        first += side.ranks
    return tuple(nodes)


def wired(
    source: Side, target: Side, *, nodes: tuple[int, int] = (2, 2), nics: Nics = "domain", mbit: float = 1000.0
) -> Wiring:
    """`nodes` source and target nodes, all of the same rate."""
    return Wiring(nodes_of(((source, nodes[0]), (target, nodes[1]))), nics, (mbit,) * sum(nodes))


@cache
def lab_cases() -> tuple[Case, ...]:
    """All cases, in the order in which they run."""
    return (
        *_replicated_cases(),
        *_spread_cases(),
        *_several_domains(),
        *_one_machine(),
        *_small_tensors(),
    )


def chosen_cases(names: Iterable[str]) -> tuple[Case, ...]:
    """The cases of these names, in their own order; all where none is named.

    Raises:
        ConfigError: there is no such case.
    """
    wanted, known = set(names), {case.name: case for case in lab_cases()}
    if unknown := sorted(wanted - known.keys()):
        raise ConfigError("bench --lab", tuple(_unknown(name, known) for name in unknown))
    return tuple(case for case in known.values() if not wanted or case.name in wanted)


def _unknown(name: str, known: Iterable[str]) -> Violation:
    near = difflib.get_close_matches(name, known, n=1)
    remedy = f"did you mean {near[0]!r}?" if near else f"choose of {', '.join(known)}"
    return Violation("--case", repr(name), "there is no such case", remedy)


def _replicated_cases() -> tuple[Case, ...]:
    source, target = Side(tp=4, dp=2), Side(tp=2, dp=4)
    return (
        Case(
            "tp4dp2-tp2dp4",
            "TP4 x DP2 -> TP2 x DP4",
            FULL,
            source,
            target,
            wired(source, target),
            (OURS, FLAT, WITHOUT_BALANCE, GATHER_BROADCAST),
            (
                time_over_bound(1.05),
                at_least("flat", 3.7),
                at_least("without balance", 1.9),
                as_fast_as("the best of the peers", 0.99),
                Limit(Ratio(("gather_broadcast",), ("ours",))),
            ),
        ),
        Case(
            "nic-per-rank",
            "TP4 x DP2 -> TP2 x DP4, a NIC per rank",
            FULL,
            source,
            target,
            wired(source, target, nics="rank", mbit=250.0),
            (OURS, SINGLE_CHAIN, GATHER_BROADCAST),
            (
                time_over_bound(1.06),
                at_least("gather_broadcast, single chain", 3.5),
                at_least("gather_broadcast", 1.0),
                as_fast_as("the best of the peers", 0.98),
            ),
        ),
    )


def _spread_cases() -> tuple[Case, ...]:
    one, two = Side(tp=4), Side(tp=4, dp=2)
    spread, replicas = Side(tp=8), Side(tp=1, dp=8)
    return (
        Case(
            "tp4-tp8",
            "TP4 -> TP8, the model spread over domains",
            FULL,
            one,
            spread,
            wired(one, spread),
            (OURS, FLAT, GATHER_BROADCAST, VERIFIED),
            (
                at_least("gather_broadcast", 1.9),
                Limit(Ratio(("ours",), ("flat",)), most=1.03),
                Limit(Ratio(("verified",), ("ours",)), most=1.15),
                Limit(Overhead("ours"), most=0.02),
                as_fast_as("the best of the peers", 0.985),
            ),
        ),
        Case(
            "tp4dp2-tp8",
            "TP4 x DP2 -> TP8",
            FULL,
            two,
            spread,
            wired(two, spread),
            (OURS, FLAT),
            (time_over_bound(1.06), as_fast_as("the best of the peers", 0.96)),
        ),
        Case(
            "tp4-tp1dp8",
            "TP4 -> TP1 x DP8",
            FULL,
            one,
            replicas,
            wired(one, replicas),
            (OURS, GATHER_BROADCAST),
            (time_over_bound(1.06), as_fast_as("the best of the peers", 0.975)),
        ),
    )


def _several_domains() -> tuple[Case, ...]:
    source, four, two = Side(tp=4), Side(tp=2, dp=4), Side(tp=2, dp=2)
    faster = Wiring(nodes_of(((source, 1), (two, 2))), "domain", (2000.0, 1000.0, 1000.0))
    return (
        Case(
            "one-to-four",
            "1 source node -> 4 target nodes, a replica in each",
            HALF,
            source,
            four,
            wired(source, four, nodes=(1, 4)),
            (OURS, WITHOUT_FORWARD, GATHER_BROADCAST),
            (time_over_bound(1.08), at_least("without forward", 2.5)),
        ),
        Case(
            "spare-egress",
            "1 source node of twice the rate -> 2 target nodes, a replica in each",
            FULL,
            source,
            two,
            faster,
            (OURS, WITHOUT_FORWARD, GATHER_BROADCAST),
            (
                Limit(Ratio(("ours",), ("without forward", "gather_broadcast")), most=1.02, why="feed all, chain"),
                Limit(Ratio(("ours",), (BOUND,))),
            ),
        ),
    )


def _one_machine() -> tuple[Case, ...]:
    small, source, target = Side(tp=2, dp=2), Side(tp=4, dp=2), Side(tp=2, dp=4)
    return (
        Case(
            "one-domain",
            "sources and targets in one domain",
            HALF,
            Side(tp=4),
            small,
            Wiring((tuple(range(8)),), "domain", (1000.0,)),
            (OURS,),
            (Limit(UplinkBytes("ours"), most=0),),
        ),
        Case(
            "one-host",
            "TP4 x DP2 -> TP2 x DP4 on one host, no shaping",
            FULL,
            source,
            target,
            Wiring((tuple(range(16)),), "domain", None),
            (OURS, FLAT_TCP, WITHOUT_SHARED_MEMORY, GATHER_BROADCAST),
            (at_least("flat over TCP", 1.2), Limit(ExtraMemory("ours"), most=16.0)),
        ),
    )


def _small_tensors() -> tuple[Case, ...]:
    source, target = Side(tp=4), Side(tp=8)
    one = Variant("one tensor", model=ONE_TENSOR)
    return (
        Case(
            "small-tensors",
            "30 000 tensors of 4 KiB, TP4 -> TP8",
            SMALL_TENSORS,
            source,
            target,
            wired(source, target),
            (OURS, one),
            (Limit(Ratio(("ours",), ("one tensor",)), most=2.0),),
        ),
    )
