"""How `refit-transport plan` shows a preview to people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Group
from rich.table import Table

from refit_transport.preview import Preview, RankLoad
from refit_transport.report import render_summary, sized

_MOST_RANKS = 8
_MOST_OF_A_SIDE = _MOST_RANKS // 2


def render_preview(found: Preview) -> Group:
    """Tables of bytes, ranks and routes, and what the plan rests on."""
    return Group(
        render_summary(found.summary),
        _routes(found),
        _heaviest(found.ranks),
        _against_old_way([load for load in found.ranks if load.role == "target"]),
        "payloads: " + ", ".join(f"{count} by {name}" for name, count in found.payloads.items()),
        "checked: plan and schedules deliver every element that a generation rank needs, once",
        *(f"assumed: {assumption}" for assumption in found.assumptions),
    )


def _routes(found: Preview) -> Table:
    table = _table("Tensors by route", "transport", "reason", numbers=("tensors",))
    for (transport, reason), count in Counter((route.transport, route.reason) for route in found.routes).items():
        table.add_row(transport, reason, str(count))
    return table


def _heaviest(ranks: Sequence[RankLoad]) -> Table:
    """Of each side, those that send or receive most."""
    numbers = ("sent: network", "inside domains", "received: network", "inside domains", "staging at most")
    table = _table(f"Heaviest ranks of each side, of {len(ranks)}", "rank", "role", numbers=numbers)
    for role in ("source", "target"):
        side = [load for load in ranks if load.role == role]
        for load in sorted(side, key=lambda load: (-max(load.sent, load.received), load.rank))[:_MOST_OF_A_SIDE]:
            sizes = (load.network_sent, load.local_sent, load.network_received, load.local_received, load.staging)
            table.add_row(str(load.rank), load.role, *map(sized, sizes))
    return table


def _against_old_way(ranks: Sequence[RankLoad]) -> Table:
    """The generation ranks that gain least."""
    chosen = sorted(ranks, key=lambda load: (load.old_way_ratio, load.rank))[:_MOST_RANKS]
    title = f"Received, least gain first ({len(chosen)} of {len(ranks)} generation ranks)"
    table = _table(title, "rank", numbers=("planned", "all by gather_broadcast", "ratio"))
    for load in chosen:
        ratio = f"{load.old_way_ratio:.2f}x" if load.received else "nothing to receive"
        table.add_row(str(load.rank), sized(load.received), sized(load.old_way_received), ratio)
    return table


def _table(title: str, *texts: str, numbers: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left")
    for text in texts:
        table.add_column(text, overflow="fold")
    for number in numbers:
        table.add_column(number, justify="right")
    return table
