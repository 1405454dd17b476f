"""What `refit-transport bench` measures, writes and shows."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from refit_transport.bench.cases import chosen_cases
from refit_transport.bench.gpu import check_gpu, measure_gpu, render_gpu
from refit_transport.bench.isolation import Announce
from refit_transport.bench.measure import LabRequest, run_lab
from refit_transport.bench.planning import measure_planning, planning_to_json, render_planning
from refit_transport.bench.plot import check_plotting, plot_lab
from refit_transport.bench.render import render_lab
from refit_transport.errors import ConfigError, Violation

_TABLE_WIDTH = 160


def bench_lab(
    names: Iterable[str], *, repetitions: int, output: Path | None, console: Console | None, announce: Announce
) -> dict[str, Any]:
    """Runs the lab's cases; writes lab.json, lab.txt and lab.png into `output`, shows tables; returns the JSON value.

    Raises:
        ConfigError: no such case, not root, a tool is missing, or the folder can't be written.
        MissingDependencyError: there is a folder for plots but no matplotlib.
    """
    request = LabRequest(chosen_cases(names), repetitions)
    if output is not None:
        check_plotting()
        _make(output)
    result = run_lab(request, announce=announce)
    shown = render_lab(result)
    if output is not None:
        _write(output, "lab", result.to_json(), shown)
        plot_lab(result, output / "lab.png")
    if console is not None:
        console.print(shown)
    return result.to_json()


def bench_planning(*, output: Path | None, console: Console | None, announce: Announce) -> dict[str, Any]:
    """Measures planning; writes planning.json and planning.txt into `output`, shows a table; returns the JSON value.

    Raises:
        ConfigError: the folder can't be written.
        WorkerError: a measuring process failed.
    """
    if output is not None:
        _make(output)
    parts = measure_planning(announce=announce)
    found, shown = planning_to_json(parts), render_planning(parts)
    if output is not None:
        _write(output, "planning", found, shown)
    if console is not None:
        console.print(shown)
    return found


def bench_gpu(*, output: Path | None, console: Console | None, announce: Announce) -> dict[str, Any]:
    """Measures what one GPU can show; writes gpu.json and gpu.txt into `output`, shows a table; returns the JSON value.

    Raises:
        ConfigError: no GPU, or the folder can't be written.
        TransferError: no process group can be made.
    """
    check_gpu()
    if output is not None:
        _make(output)
    result = measure_gpu(announce=announce)
    found, shown = result.to_json(), render_gpu(result)
    if output is not None:
        _write(output, "gpu", found, shown)
    if console is not None:
        console.print(shown)
    return found


def _make(output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        violation = Violation("--output", str(output), f"can't be made: {error}", "name another folder")
        raise ConfigError("bench", (violation,)) from error


def _write(output: Path, name: str, found: dict[str, Any], shown: RenderableType) -> None:
    (output / f"{name}.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    with (output / f"{name}.txt").open("w", encoding="utf-8") as file:
        Console(file=file, width=_TABLE_WIDTH, markup=False, highlight=False).print(shown)
