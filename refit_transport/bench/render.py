"""The lab's results for people: a table per case, the figures, and what was missed."""

from __future__ import annotations

import statistics

from rich.console import Group, RenderableType
from rich.table import Table

from refit_transport.bench.results import MIB, CaseResult, LabResult, VariantResult, Verdict
from refit_transport.report import sized


def render_lab(result: LabResult) -> Group:
    """Everything, case by case.

    Columns: median time; slowest less fastest, of the median; bytes out of all NICs; memory of the rank that takes most
    beyond its weights; cores that others kept busy meanwhile, the kernel's network among them.
    """
    before, after = result.load
    note = f"medians of {result.repetitions} interleaved repetitions after a warm-up; load average {before:.1f} before"
    parts = [part for case in result.cases for part in (*render_case(case), "")]
    counted = [r for case in result.cases for variant in case.variants for r in variant.repetitions]
    worst = max((repetition.stolen for repetition in counted), default=0.0)
    stolen = f"most that the machine's host took away in a repetition: {worst:.2f} cores"
    return Group(*parts, f"{note}, {after:.1f} after; {stolen}")


def render_case(case: CaseResult) -> list[RenderableType]:
    """The case's times and its figures."""
    title = f"{case.name}: {case.title}, {sized(case.nbytes)}, {case.ranks} ranks"
    if case.error:
        return [title, f"failed: {case.error}"]
    return [
        _times(title, case.variants),
        *(f"not run: {name}: {why}" for name, why in case.missing.items()),
        _figures(case.verdicts),
    ]


def _times(title: str, variants: tuple[VariantResult, ...]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("variant", overflow="fold")
    for column in ("time", "spread", "bound", "of bound", "uplinks", "memory", "others"):
        table.add_column(column, justify="right")
    for variant in variants:
        table.add_row(
            variant.name,
            milliseconds(variant.seconds),
            f"{variant.spread:.0%}",
            milliseconds(variant.bound.seconds) if variant.bound.seconds else "",
            f"{share:.1%}" if (share := variant.of_bound) is not None else "",
            sized(sum(uplink.measured for uplink in variant.uplinks if uplink.direction == "out")),
            f"{max(variant.extra_memory) / MIB:.1f} MiB",
            f"{statistics.median(r.other_cpu for r in variant.repetitions):.1f} CPU",
        )
    return table


def _figures(verdicts: tuple[Verdict, ...]) -> Table:
    table = Table(show_header=True, box=None, padding=(0, 2, 0, 0))
    table.add_column("figure", overflow="fold")
    for column in ("value", "limit"):
        table.add_column(column, justify="right")
    table.add_column("")
    table.add_column("note", overflow="fold")
    for verdict in verdicts:
        value = "not measured" if verdict.value is None else f"{verdict.value:.3f}".rstrip("0").rstrip(".")
        mark = "" if verdict.limit == "reported" else "holds" if verdict.holds else "MISSED"
        table.add_row(verdict.figure, value, verdict.limit, mark, verdict.why)
    return table


def milliseconds(seconds: float) -> str:
    """A time for tables."""
    return f"{seconds * 1e3:.0f} ms"
