"""The command line: `refit-transport COMMAND CONFIG`.

A command parses, calls the library and prints: a table for people, JSON for programs (`--json`). What it needs is
imported inside it, so that `--help` answers at once. Our own errors become one message on stderr and an exit code.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from refit_transport.cli_common import AsJson, Commands, ConfigFile, ExitCode, Overrides, load, print_json, progress
from refit_transport.errors import ConfigError, Violation

if TYPE_CHECKING:
    from refit_transport.cluster.run import RefitRound

app = typer.Typer(
    name="refit-transport",
    cls=Commands,
    help="Shard-to-shard weight refit from a Megatron policy to vLLM samplers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """The console script."""
    app()


@app.command()
def validate(config: ConfigFile, *, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Check a configuration and say everything that is wrong with it."""
    from refit_transport.cli_validate import invalid_json, show_valid, valid_json

    try:
        checked = load(config, overrides)
    except ConfigError as error:
        if as_json:
            print_json(invalid_json(error))
        raise
    if as_json:
        print_json(valid_json(checked, str(config)))
    else:
        show_valid(checked, f"{config}: fine")


@app.command()
def transports(*, as_json: AsJson = False) -> None:
    """List the transports that `refit_transport` can name."""
    from refit_transport.cli_validate import show_transports, transports_json

    if as_json:
        print_json(transports_json())
    else:
        show_transports()


@app.command()
def plan(config: ConfigFile, *, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Show what each refit will move, from the configuration alone; nothing is started or written."""
    checked = load(config, overrides, purpose="plan")
    from rich.console import Console

    from refit_transport.cli_plan import render_preview
    from refit_transport.preview import preview

    with progress() as announce:
        found = preview(checked, announce=announce)
    if as_json:
        print_json(found.to_json())
    else:
        Console(markup=False, highlight=False).print(render_preview(found))


@app.command()
def explain(
    config: ConfigFile,
    *,
    param: Annotated[
        str | None, typer.Option("--param", metavar="PATTERN", help="Only these: a glob on names, or re:REGEX.")
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Say of each parameter how it goes, between which ranks, in which boxes, and why; nothing is started."""
    checked = load(config, overrides, purpose="plan")
    from refit_transport.cli_explain import explain_config, render_explained

    with progress() as announce:
        found = explain_config(checked, param, announce=announce)
    if as_json:
        # On one line: of a model of full size it has a hundred thousands of ways.
        typer.echo(json.dumps(found.to_json()))
    else:
        for line in render_explained(found):
            typer.echo(line)


@app.command()
def simulate(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A model that ships, or a folder or config.json of one.")
    ] = None,
    *,
    source: Annotated[str | None, typer.Option(help="Training layout, such as 'pp16 ep16'.")] = None,
    target: Annotated[str | None, typer.Option(help="Generation layout, such as 'tp32 dp8'.")] = None,
    system: Annotated[str, typer.Option(help="The machine, such as dgx-h100.")] = "dgx-h100",
    sources: Annotated[int | None, typer.Option(help="Training ranks; as few as the layout needs.")] = None,
    targets: Annotated[int | None, typer.Option(help="Generation ranks; as few as the layout needs.")] = None,
    domain: Annotated[int | None, typer.Option(min=1, help="GPUs with fast links, if not the system's own.")] = None,
    published: Annotated[bool, typer.Option("--published", help="Run every published row instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """Predict a refit of a full-size model by every method; nothing is started or loaded."""
    from rich.console import Console

    from refit_transport.cli_simulate import ask_of, render_comparisons, render_study
    from refit_transport.simulation.study import compare_published, simulate_refit

    console = Console(markup=False, highlight=False)
    if published:
        with progress() as announce:
            rows = list(compare_published(announce=announce))
        if as_json:
            print_json([row.to_json() for row in rows])
        else:
            console.print(render_comparisons(rows))
        return
    ask = ask_of(model, source, target, system=system, sources=sources, targets=targets, domain=domain)
    with progress() as announce:
        study = simulate_refit(ask, announce=announce)
    if as_json:
        print_json(study.to_json())
    else:
        console.print(render_study(study))


@app.command()
def run(config: ConfigFile, *, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Train, refit and compare both sides, as often as `refit_run` says, on Ray."""
    checked = load(config, overrides)
    from rich.console import Console

    from refit_transport.cli_run import report_of, show_end, show_round, write_report
    from refit_transport.cluster.run import run_rounds

    console = Console(markup=False, highlight=False)
    rounds: list[RefitRound] = []
    if checked.refit_run.report is not None:
        # Tells at once that it can't be written, and leaves no report of an earlier run to be taken for this one's.
        write_report(rounds, Path(checked.refit_run.report))
    with progress() as announce:
        for finished in run_rounds(checked, ray_address=os.environ.get("RAY_ADDRESS"), announce=announce):
            rounds.append(finished)
            if checked.refit_run.report is not None:
                write_report(rounds, Path(checked.refit_run.report))
            if not as_json:
                show_round(finished, checked, console)
    if as_json:
        print_json(report_of(rounds))
    else:
        show_end(rounds, console)


@app.command()
def verify(config: ConfigFile, *, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Start the job, refit once, and prove by checksums that every engine serves the trainer's weights."""
    checked = load(config, overrides)
    from refit_transport.cli_verify import render_verified
    from refit_transport.cluster.run import verify_job

    with progress() as announce:
        found = verify_job(checked, ray_address=os.environ.get("RAY_ADDRESS"), announce=announce)
    if as_json:
        print_json(found.to_json())
    else:
        for line in render_verified(found):
            typer.echo(line)
    found.after.require_equal()


@app.command()
def doctor(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="Also check what this job needs of the machine.")
    ] = None,
    *,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine: versions, ports, interfaces, shared memory, limits, NCCL, Ray, vLLM's plugin."""
    from rich.console import Console

    from refit_transport.cli_doctor import has_failed, render_findings
    from refit_transport.doctor import Environment, diagnose

    checked = load(config, overrides) if config is not None else None
    findings = diagnose(Environment.here(os.environ), checked)
    if as_json:
        print_json({"checks": [finding.to_json() for finding in findings], "failed": has_failed(findings)})
    else:
        Console(markup=False, highlight=False).print(render_findings(findings))
    if has_failed(findings):
        raise typer.Exit(ExitCode.FAILED)


@app.command()
def bench(
    *,
    lab: Annotated[bool, typer.Option("--lab", help="Refits in rate-limited network namespaces; needs root.")] = False,
    gpu: Annotated[bool, typer.Option("--gpu", help="Packing on this machine's GPU, and an NCCL group.")] = False,
    planning: Annotated[bool, typer.Option("--plan", help="Seconds and memory of planning full-size models.")] = False,
    ranks: Annotated[
        Path | None,
        typer.Option("--ranks", metavar="CONFIG", help="All ways of refitting on the ranks of a job, on Ray; advises."),
    ] = None,
    overrides: Overrides = None,
    step_seconds: Annotated[
        float | None, typer.Option(min=0.0, help="With --ranks: seconds of a step without its refit.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --ranks: take a step's seconds from this report of run.")
    ] = None,
    cases: Annotated[
        list[str] | None, typer.Option("--case", metavar="NAME", help="Only this case of the lab. Repeatable.")
    ] = None,
    repetitions: Annotated[int, typer.Option("--reps", min=1, help="Measured repetitions of each variant.")] = 5,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="DIR", help="Write JSON, tables and plots into this folder.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure refits against their lower bound, and planning; fails where a figure misses its limit."""
    if not (lab or planning or gpu or ranks):
        remedy = "give --lab, --plan, --gpu or --ranks CONFIG, or several"
        raise ConfigError("bench", (Violation("what", "nothing", "there is no default", remedy),))
    from rich.console import Console

    from refit_transport.cli_bench import bench_gpu, bench_lab, bench_planning, bench_ranks, step_time

    console = None if as_json else Console(markup=False, highlight=False)
    found: dict[str, dict[str, Any]] = {}
    checked, step = (load(ranks, overrides) if ranks is not None else None), step_time(step_seconds, report)
    with progress() as announce:
        if planning:
            found["planning"] = bench_planning(output=output, console=console, announce=announce)
        if gpu:
            found["gpu"] = bench_gpu(output=output, console=console, announce=announce)
        if lab:
            found["lab"] = bench_lab(
                cases or (), repetitions=repetitions, output=output, console=console, announce=announce
            )
        if checked is not None:
            found["ranks"] = bench_ranks(
                checked,
                title=str(ranks),
                repetitions=repetitions,
                step=step,
                ray_address=os.environ.get("RAY_ADDRESS"),
                output=output,
                console=console,
                announce=announce,
            )
    if as_json:
        print_json(found)
    misses = [line for part in found.values() for line in part["misses"]]
    for line in misses:
        typer.echo(f"missed: {line}", err=True)
    if misses:
        raise typer.Exit(ExitCode.FAILED)
