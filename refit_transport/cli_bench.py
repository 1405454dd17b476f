"""What `refit-transport bench` measures, writes and shows."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from refit_transport.bench.advice import StepTime
from refit_transport.bench.cases import chosen_cases
from refit_transport.bench.cluster_rank import ClusterRank
from refit_transport.bench.gpu import check_gpu, measure_gpu, render_gpu
from refit_transport.bench.isolation import Announce
from refit_transport.bench.measure import LabRequest, run_lab
from refit_transport.bench.planning import measure_planning, planning_to_json, render_planning
from refit_transport.bench.plot import check_plotting, plot_lab
from refit_transport.bench.ranks import RanksRequest, measure_ranks
from refit_transport.bench.render import render_lab
from refit_transport.bench.render_ranks import render_ranks_result
from refit_transport.config.schema import RefitConfig
from refit_transport.errors import ConfigError, MissingDependencyError, Violation
from refit_transport.preview import preset_job

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


def bench_ranks(
    config: RefitConfig,
    *,
    title: str,
    repetitions: int,
    step: StepTime | None,
    ray_address: str | None,
    output: Path | None,
    console: Console | None,
    announce: Announce,
) -> dict[str, Any]:
    """Compares all variants on the ranks of a job; writes ranks.json and ranks.txt, shows a table; the JSON value.

    Raises:
        ConfigError: the model can't be described beforehand, or the folder can't be written.
        MissingDependencyError: there is no Ray.
        WorkerError: a worker failed; everything is released first.
    """
    ray_cluster, running_crew = _ray_parts()
    if output is not None:
        _make(output)
    announce("describing both sides")
    job = preset_job(config)
    manifests = {ranked.rank: ranked for side in (job.source, job.target) for ranked in side.ranks}

    def arguments(rank: int) -> dict[str, Any]:
        return {"rank": rank, "world_size": len(manifests), "manifest": manifests[rank]}

    request = RanksRequest(title, job, repetitions, step, config.refit_run.worker_timeout_s)
    announce(f"starting {len(manifests)} ranks on Ray")
    with (
        ray_cluster(address=ray_address) as scratch,
        running_crew(config, ClusterRank, arguments, scratch=scratch) as crew,
    ):
        result = measure_ranks(request, crew, announce=announce)
    shown = render_ranks_result(result)
    if output is not None:
        _write(output, "ranks", result.to_json(), shown)
    if console is not None:
        console.print(shown)
    return result.to_json()


def _ray_parts() -> tuple[Any, Any]:
    try:
        from refit_transport.cluster.crew import running_crew
        from refit_transport.cluster.job import ray_cluster
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise MissingDependencyError("ray", "bench --ranks", "ray") from error
    return ray_cluster, running_crew


def step_time(seconds: float | None, report: Path | None) -> StepTime | None:
    """What a step takes without its refit: as given, or the median of a report of `run`.

    Raises:
        ConfigError: both are given, or the report can't be read or has no step times.
    """
    if seconds is not None and report is not None:
        raise _refused("--step-seconds", f"{seconds:g}", "says the same as --report", "give one of them")
    if seconds is not None:
        return StepTime(seconds, "--step-seconds")
    if report is None:
        return None
    try:
        rounds = json.loads(report.read_text(encoding="utf-8"))["rounds"]
        return StepTime(statistics.median(float(each["step_seconds"]) for each in rounds), str(report))
    except (OSError, ValueError, KeyError, TypeError, statistics.StatisticsError) as error:
        reason = f"is no report of `run` with step times ({type(error).__name__}: {error})"
        raise _refused("--report", str(report), reason, "name the file of refit_run.report") from error


def _refused(option: str, value: str, reason: str, remedy: str) -> ConfigError:
    return ConfigError("bench --ranks", (Violation(option, value, reason, remedy),))


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
