"""Bars of the lab's medians against each case's bound. matplotlib is optional and imported here only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from refit_transport.bench.results import CaseResult, LabResult
from refit_transport.optional import optional_module

_PLOT = "the plot of a benchmark"
_OURS, _OTHERS, _BOUND = "#2a6fbb", "#b8bfc9", "#c0392b"
_BAR_INCHES, _HEAD_INCHES, _WIDTH_INCHES = 0.32, 0.75, 9.0


def plot_lab(result: LabResult, path: Path) -> None:
    """Writes one picture: a panel per case, a bar per variant with its fastest and slowest repetition.

    Raises:
        MissingDependencyError: matplotlib isn't installed.
    """
    figure_class = optional_module("matplotlib.figure", needed_for=_PLOT, extra="bench").Figure
    cases = [case for case in result.cases if case.variants]
    if not cases:
        return
    heights = [_HEAD_INCHES + _BAR_INCHES * len(case.variants) for case in cases]
    figure = figure_class(figsize=(_WIDTH_INCHES, sum(heights)), layout="constrained")
    panels = figure.subplots(len(cases), 1, squeeze=False, height_ratios=heights)
    for panel, case in zip(panels[:, 0], cases, strict=True):
        _draw(panel, case)
    figure.savefig(path, dpi=150)


def check_plotting() -> None:
    """Whether plots can be drawn; to be asked before minutes of measuring.

    Raises:
        MissingDependencyError: matplotlib isn't installed.
    """
    optional_module("matplotlib", needed_for=_PLOT, extra="bench")


def _draw(panel: Any, case: CaseResult) -> None:
    names = [variant.name for variant in case.variants]
    medians = [variant.seconds * 1e3 for variant in case.variants]
    below, above = [], []
    for variant, median in zip(case.variants, medians, strict=True):
        times = [repetition.seconds * 1e3 for repetition in variant.repetitions]
        below.append(median - min(times))
        above.append(max(times) - median)
    colours = [_OURS if name == "ours" else _OTHERS for name in names]
    bars = panel.barh(names, medians, color=colours, xerr=(below, above), ecolor="#555555", capsize=2)
    panel.bar_label(bars, [f" {median:.0f}" for median in medians], padding=4)
    bound = case.variants[0].bound.seconds * 1e3
    if bound:
        panel.axvline(bound, color=_BOUND, linestyle="--", linewidth=1.2)
        panel.set_title(f"lower bound {bound:.0f} ms", loc="right", fontsize="small", color=_BOUND)
    panel.invert_yaxis()
    panel.margins(x=0.12)
    panel.set_title(f"{case.title} ({case.nbytes / 1e6:.0f} MB)", loc="left", fontsize="medium")
    panel.set_xlabel("ms", fontsize="small")
    panel.spines[["top", "right"]].set_visible(False)
