"""Passes 0 and 1: what of a plan stays where it is, what stays in its domain, and what must enter which domain."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from refit_transport.planning.plan import RankSet, TransferPlan
from refit_transport.scheduling.topology import Topology

Kind = Literal["copy", "local", "network"]


@dataclass(frozen=True, slots=True)
class Entry:
    """Ranks of one domain that want the same bytes, which enter the domain once and are passed on inside it."""

    domain: int
    wanters: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Demand:
    """Atoms with the same holders and wanters, and the wanters that are served together.

    copy: the one wanter is a holder itself. local: holders and wanters are in one domain. network: anything else.
    `nbytes` is the payload of all atoms together, once.
    """

    atoms: tuple[int, ...]
    nbytes: int
    kind: Kind
    holders: RankSet
    entries: tuple[Entry, ...]


def demands_of(plan: TransferPlan, topology: Topology) -> list[Demand]:
    """One demand per distinct pair of holders and wanters, each wanter an entry of its own; in order of first atom."""
    nbytes = plan.nbytes()
    pairs = plan.holders * len(plan.rank_sets) + plan.wanters
    order = np.argsort(pairs, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(pairs[order])) + 1) if len(order) else []
    found = []
    for atoms in sorted(groups, key=lambda rows: int(rows[0])):
        holders, wanters = plan.rank_sets[plan.holders[atoms[0]]], plan.rank_sets[plan.wanters[atoms[0]]]
        entries = tuple(Entry(topology.domain(rank), (rank,)) for rank in wanters)
        found.append(Demand(tuple(atoms.tolist()), int(nbytes[atoms].sum()), "network", holders, entries))
    return found


def split_copies(demands: Iterable[Demand]) -> list[Demand]:
    """Takes the wanters that hold the bytes themselves out of each demand: a transfer to itself is a local copy."""
    result = []
    for demand in demands:
        holders = frozenset(demand.holders)
        result += [
            replace(demand, kind="copy", holders=entry.wanters, entries=(entry,))
            for entry in demand.entries
            if entry.wanters[0] in holders
        ]
        result += _rest(demand, [entry for entry in demand.entries if entry.wanters[0] not in holders])
    return result


def split_local(demands: Iterable[Demand], topology: Topology) -> list[Demand]:
    """Pass "local": wanters with a holder in their own domain are served from there, the others over the network."""
    result = []
    for demand in demands:
        if demand.kind != "network":
            result.append(demand)
            continue
        near: dict[int, list[int]] = {}
        for rank in demand.holders:
            near.setdefault(topology.domain(rank), []).append(rank)
        for domain in sorted({entry.domain for entry in demand.entries} & near.keys()):
            wanters = tuple(entry.wanters[0] for entry in demand.entries if entry.domain == domain)
            result.append(replace(demand, kind="local", holders=tuple(near[domain]), entries=(Entry(domain, wanters),)))
        result += _rest(demand, [entry for entry in demand.entries if entry.domain not in near])
    return result


def deduplicate(demands: Iterable[Demand]) -> list[Demand]:
    """Pass "deduplicate": wanters of one domain share an entry, so that the bytes cross the network once for all."""
    result = []
    for demand in demands:
        if demand.kind == "network":
            by_domain: dict[int, list[int]] = {}
            for entry in demand.entries:
                by_domain.setdefault(entry.domain, []).extend(entry.wanters)
            entries = tuple(Entry(domain, tuple(sorted(ranks))) for domain, ranks in sorted(by_domain.items()))
            result.append(replace(demand, entries=entries))
        else:
            result.append(demand)
    return result


def separate(demands: Iterable[Demand]) -> list[Demand]:
    """One demand per network entry, each served from a holder: what is left where nothing may be passed on."""
    return [
        replace(demand, entries=(entry,))
        for demand in demands
        for entry in (demand.entries if demand.kind == "network" else demand.entries[:1])
    ]


def _rest(demand: Demand, entries: list[Entry]) -> list[Demand]:
    return [replace(demand, entries=tuple(entries))] if entries else []
