"""How `refit-transport simulate` shows predictions to people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from rich.console import Group
from rich.table import Table

from refit_transport.errors import ConfigError, Violation
from refit_transport.report import sized
from refit_transport.simulation.case import Ask
from refit_transport.simulation.catalog import model_names
from refit_transport.simulation.methods import METHODS, Method
from refit_transport.simulation.published import Status
from refit_transport.simulation.study import Comparison, Study

_SHORT: Mapping[Method, str] = {
    "broadcast_single": "1 chain",
    "broadcast": "chains",
    "flat": "flat",
    "hybrid": "ffn",
    "full": "all",
}
_STATUS: Mapping[Status, str] = {
    "read": "read in the source",
    "retold": "retold by others",
    "summary": "known from summaries only",
}
_LEGEND = (
    "flat: from the first holder, no pass of the schedule; coverage ffn: FFN projections shard-to-shard, then the rest "
    "gathered and broadcast; coverage all: everything shard-to-shard"
)


_COLUMNS = (
    "1 chain, chains: gather and broadcast by one chain, by a chain per NIC; flat: point-to-point from the first "
    "holder; ffn, all: the coverages. ratio: published over ours, by the method that is nearest. NCCL's broadcast uses "
    "several NICs of a node: NeMo RL's published baselines lie between 1 chain and chains"
)


def ask_of(
    model: str | None,
    source: str | None,
    target: str | None,
    *,
    system: str,
    sources: int | None,
    targets: int | None,
    domain: int | None,
) -> Ask:
    """The command line's words as one value.

    Raises:
        ConfigError: the model or a layout isn't given; what is missing, all at once.
    """
    given = {"MODEL": model, "--source": source, "--target": target}
    known = f"one of {', '.join(model_names())}, or the path of a config.json"
    examples = {"MODEL": known, "--source": "a layout such as 'pp16 ep16'", "--target": "a layout such as 'tp32 dp8'"}
    missing = [
        Violation(name, "nothing", f"must be {examples[name]}", "") for name, value in given.items() if not value
    ]
    if not (model and source and target):
        raise ConfigError("simulate", tuple(missing))
    return Ask(model, source, target, system, sources, targets, domain)


def render_study(study: Study) -> Group:
    """One table of methods, and what it rests on."""
    ask = study.ask
    title = f"{study.title}: {ask.source} on {study.sources} ranks -> {ask.target} on {study.targets}, {ask.system}"
    table = Table(title=title, title_justify="left")
    table.add_column("method", overflow="fold")
    for column in ("busiest NIC", "network", "seconds", "of the bound", "staging at most"):
        table.add_column(column, justify="right")
    for each in study.predictions:
        table.add_row(
            METHODS[each.method],
            sized(each.nic_bytes),
            sized(each.network_bytes),
            f"{each.seconds:.3f}",
            f"{each.over_bound:.2f}x",
            sized(each.staging_bytes),
        )
    moved = f"moved: {sized(study.nbytes)}, FFN projections {study.ffn_share:.1%}; bound {study.bound:.3f} s"
    lines = [moved, _LEGEND, f"assumed: {study.domains} fast domains, a NIC per rank, payload at the full link rate"]
    return Group(table, *lines, *_marks([study]))


def render_comparisons(found: list[Comparison]) -> Group:
    """The published rows beside our figures, and the likely reason of each deviation."""
    title = "Published refits and the time model, in seconds"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("row", no_wrap=True)
    for column in ("published", *_SHORT.values(), "bound", "ratio"):
        table.add_column(column, justify="right", no_wrap=True)
    for number, each in enumerate(found, 1):
        low, high = each.row.seconds
        table.add_row(
            str(number),
            f"{low:.3g}" if low == high else f"{low:.3g}-{high:.3g}",
            *(f"{each.study.of(method).seconds:.3g}" for method in _SHORT),
            f"{each.study.bound:.3g}",
            f"{each.deviation:.2f}x {_SHORT[each.row.nearest]}",
        )
    return Group(table, _COLUMNS, *_reasons(found), *_marks(each.study for each in found))


def _reasons(found: Iterable[Comparison]) -> Iterator[str]:
    for number, each in enumerate(found, 1):
        row, ask = each.row, each.row.ask
        layouts = f"{ask.source} on {ask.sources} -> {ask.target} on {ask.targets}, {ask.system}, {ask.dtype}"
        yield f"{number}. {row.id}: {each.study.title}, {layouts}; {row.what}; {row.source}, {_STATUS[row.status]}"
        yield f"  likely reason: {row.why}"
        if row.note:
            yield f"  as read: {row.note}"
        if row.baseline:
            ours = each.study.of(row.baseline_nearest).seconds
            yield f"  its baseline ({row.baseline}): {row.baseline_seconds:g} s, ours {ours:.3f} s"


def _marks(studies: Iterable[Study]) -> Iterator[str]:
    for study in studies:
        if study.stand_in:
            yield f"{study.model} is a stand-in: {study.stand_in}"
