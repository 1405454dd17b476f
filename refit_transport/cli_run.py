"""What `refit-transport run` shows people: a line per refit, and a final report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from refit_transport.cluster.run import RefitRound
from refit_transport.config.schema import RefitConfig
from refit_transport.errors import ConfigError, Violation
from refit_transport.report import render_notes, render_ranks, render_summary, sized


def report_of(rounds: Sequence[RefitRound]) -> dict[str, Any]:
    """The rounds so far as one JSON document."""
    return {"rounds": [finished.to_json() for finished in rounds]}


def write_report(rounds: Sequence[RefitRound], path: Path) -> None:
    """Writes the report file anew, before the first and after each round, so that a failure loses nothing.

    Raises:
        ConfigError: the file can't be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path.resolve(), json.dumps(report_of(rounds), indent=2) + "\n")
    except OSError as error:
        violation = Violation("refit_run.report", str(path), f"can't be written: {error}", "name another file, or null")
        raise ConfigError("refit_run", (violation,)) from error


def _replace(path: Path, text: str) -> None:
    """Writes a file in one step: without room for the new text, the old one stays."""
    if path.exists() and not path.is_file():
        # A device or a pipe; a folder raises.
        path.write_text(text, encoding="utf-8")
        return
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def show_round(finished: RefitRound, config: RefitConfig, console: Console) -> None:
    """One finished round in three lines."""
    report = finished.report
    phases = ", ".join(f"{phase} {seconds * 1e3:.1f}" for phase, seconds in report.seconds.items())
    console.print(
        f"version {finished.version} of {config.refit_run.refits}: loss {finished.loss:.4f}, refit "
        f"{report.total_seconds * 1e3:.1f} ms"
    )
    console.print(f"  ms of the slowest rank: {phases}", soft_wrap=True)
    console.print(
        f"  log-probabilities of trainer and vLLM differ by {finished.largest_difference:.1e} (allowed: "
        f"{config.refit_run.logprob_tolerance:.0e})"
    )
    console.print(f"  log-probabilities moved since the last version by {finished.largest_change:.1e}\n")


def show_end(rounds: Sequence[RefitRound], console: Console) -> None:
    """The final report: what every refit moved, by transport and rank, and the verdict."""
    report, summary = rounds[-1].report, rounds[-1].report.summary
    console.print(render_summary(summary))
    console.print(render_ranks(report))
    for note in render_notes(report):
        console.print(note)
    table = Table(title="Refits")
    for column in ("version", "loss", "refit", "network", "load", "verify", "differs", "changed"):
        table.add_column(column, justify="right")
    for finished in rounds:
        spent = finished.report.seconds
        table.add_row(
            str(finished.version),
            f"{finished.loss:.4f}",
            *(f"{s * 1e3:.1f} ms" for s in (finished.report.total_seconds, *(spent[p] for p in _SHOWN))),
            f"{finished.largest_difference:.1e}",
            f"{finished.largest_change:.1e}",
        )
    console.print(table)
    received = summary.received_bytes
    ratio = f", {summary.old_way_received_bytes / received:.2f} times as much" if received else ""
    console.print(
        f"vLLM served the trainer's weights after each of {len(rounds)} refits. Each moved {sized(received)} between "
        f"ranks; gathering and broadcasting would have moved {sized(summary.old_way_received_bytes)}{ratio}."
    )


_SHOWN = ("network", "load", "verify")
