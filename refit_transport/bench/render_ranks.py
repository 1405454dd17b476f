"""The comparison on a job's ranks for people: times and bytes, what couldn't run, and the advice."""

from __future__ import annotations

import yaml
from rich.console import Group, RenderableType
from rich.table import Table

from refit_transport.bench.advice import Advice, Measured
from refit_transport.bench.ranks import RanksResult
from refit_transport.bench.render import milliseconds
from refit_transport.bench.results import MIB
from refit_transport.report import sized

_NAME_WIDTH = 22


def render_ranks_result(result: RanksResult) -> Group:
    """Everything.

    Columns: median time of the slowest rank; slowest less fastest, of the median; planned bytes over the network and
    inside domains; memory of the rank that takes most beyond its weights.
    """
    domains, nics = result.topology.domains, result.topology.nics
    parts: list[RenderableType] = [
        _table(result),
        *(f"not run: {name}: {why}" for name, why in result.missing.items()),
        f"topology: {len(domains)} domains of {', '.join(str(len(d)) for d in domains)} ranks, {len(nics)} NICs",
        f"medians of {result.repetitions} interleaved repetitions after a warm-up; {result.elements} elements compared "
        "after each refit",
        "",
        *_advice(result.advice),
    ]
    return Group(*parts)


def _table(result: RanksResult) -> Table:
    title = f"{result.title}: {sized(result.nbytes)}, {result.ranks} ranks"
    table = Table(title=title, title_justify="left")
    table.add_column("variant", overflow="fold", min_width=_NAME_WIDTH)
    with_bound = any(each.result.bound.seconds for each in result.measured)
    columns = ["time", "spread", "network", "inside", "memory", "delivered"]
    for column in columns[:2] + ["of bound"] * with_bound + columns[2:]:
        table.add_column(column, justify="right")
    for each in result.measured:
        table.add_row(each.variant.name, *_times(each, of_bound=with_bound), *_amounts(each))
    return table


def _times(each: Measured, *, of_bound: bool) -> list[str]:
    share = each.result.of_bound
    shown = [milliseconds(each.result.seconds), f"{each.result.spread:.0%}"]
    return [*shown, "" if share is None else f"{share:.1%}"] if of_bound else shown


def _amounts(each: Measured) -> list[str]:
    wrong = len(each.result.wrong)
    return [
        sized(each.network_bytes),
        sized(each.local_bytes),
        f"{max(each.result.extra_memory) / MIB:.1f} MiB",
        f"{wrong} PIECES WRONG" if wrong else "exactly",
    ]


def _advice(advice: Advice) -> list[str]:
    if not advice.snippet:
        return [f"advice: {reason}" for reason in advice.reasons]
    text = yaml.safe_dump({"policy": {"generation": advice.snippet}}, sort_keys=False)
    return [f"Advice: {advice.variant}", *(f"  {reason}" for reason in advice.reasons), "", text.rstrip()]
