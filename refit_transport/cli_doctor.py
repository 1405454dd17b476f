"""What `refit-transport doctor` shows: a row for each check."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from refit_transport.doctor import Finding

_STYLES = {"fine": "green", "warning": "yellow", "failed": "bold red"}


def render_findings(findings: Sequence[Finding]) -> Table:
    """The table for people."""
    table = Table(title="This machine", show_lines=False)
    for column in ("check", "found", "verdict", "remedy"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        row = (finding.check, finding.found, finding.verdict, finding.remedy)
        table.add_row(*row, style=_STYLES[finding.verdict])
    return table


def has_failed(findings: Sequence[Finding]) -> bool:
    """Whether any check says that a refit won't work."""
    return any(finding.verdict == "failed" for finding in findings)
