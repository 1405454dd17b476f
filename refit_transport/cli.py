"""The command line: `refit-transport COMMAND CONFIG`.

A command parses, calls the library and prints: a table for people, JSON for programs (`--json`). What it needs is
imported inside it, so that `--help` answers at once. Our own errors become one message on stderr and an exit code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from refit_transport.errors import (
    ConfigError,
    MissingDependencyError,
    RefitTransportError,
    UnknownTransportError,
    Violation,
)

if TYPE_CHECKING:
    from refit_transport.cluster.run import RefitRound
    from refit_transport.config.schema import RefitConfig


class ExitCode(IntEnum):
    """What the shell sees."""

    FINE = 0
    FAILED = 1
    WRONG_USAGE = 2
    HUNG_UP = 129
    INTERRUPTED = 130
    TERMINATED = 143


@contextmanager
def telling_errors() -> Iterator[None]:
    """Turns this package's errors into a message and an exit code."""
    try:
        yield
    except (ConfigError, UnknownTransportError, MissingDependencyError) as error:
        typer.echo(f"refit-transport: {error}", err=True)
        raise typer.Exit(ExitCode.WRONG_USAGE) from None
    except RefitTransportError as error:
        typer.echo(f"refit-transport: {error}", err=True)
        raise typer.Exit(ExitCode.FAILED) from None
    except KeyboardInterrupt:
        typer.echo("refit-transport: interrupted; everything that was started has ended", err=True)
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    except SystemExit as stop:
        if stop.code in (ExitCode.HUNG_UP, ExitCode.TERMINATED):
            typer.echo("refit-transport: terminated; everything that was started has ended", err=True)
        raise


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        with telling_errors():
            return super().invoke(ctx)


app = typer.Typer(
    name="refit-transport",
    cls=_Commands,
    help="Shard-to-shard weight refit from a Megatron policy to vLLM samplers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file with NeMo RL's keys.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Overrides a key, such as policy.precision=float32. Repeatable."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def main() -> None:
    """The console script."""
    app()


@app.command()
def validate(config: ConfigFile, *, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Check a configuration and say everything that is wrong with it."""
    try:
        checked = load(config, overrides)
    except ConfigError as error:
        if as_json:
            print_json({"ok": False, "source": error.source, "violations": [_fields(v) for v in error.violations]})
        raise
    if as_json:
        print_json(
            {"ok": True, "source": str(config), "summary": _summary(checked), "config": checked.model_dump(mode="json")}
        )
    else:
        print_table(f"{config}: fine", ("", ""), [(key, _text(value)) for key, value in _summary(checked).items()])


@app.command()
def transports(*, as_json: AsJson = False) -> None:
    """List the transports that `refit_transport` can name."""
    from refit_transport.transports.registry import DEFAULT_TRANSPORT, known_transports

    entries = list(known_transports().values())
    if as_json:
        keys = ("name", "target", "description", "extra", "provider")
        listed = [{key: getattr(entry, key) for key in keys} for entry in entries]
        print_json({"default": DEFAULT_TRANSPORT, "transports": listed})
    else:
        print_table("Transports", ("name", "what it does"), [(entry.name, entry.description) for entry in entries])


@app.command()
def plan(config: ConfigFile, *, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Show what each refit will move, from the configuration alone; nothing is started or written."""
    checked = load(config, overrides)
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
    checked = load(config, overrides)
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


def load(config: Path, overrides: list[str] | None) -> RefitConfig:
    """The checked configuration that a command runs on."""
    from refit_transport.config.load import load_config

    return load_config(config, resolve_transport=_usable_transport, overrides=overrides or ())


def _usable_transport(name: str | None) -> None:
    """Resolves a transport; another package's is imported too, which would fail on every rank otherwise.

    Raises:
        UnknownTransportError: it doesn't exist, can't be imported, or is no transport.
        MissingDependencyError: a package that it imports isn't installed.
    """
    from refit_transport.transports.registry import BUILT_IN, known_transports, load, resolve

    entry = resolve(name)
    if entry in BUILT_IN:
        return
    try:
        load(entry)
    except RefitTransportError:
        raise
    except Exception as error:
        reason = f"its import fails: {type(error).__name__}: {error}"
        raise UnknownTransportError(entry.name, tuple(known_transports()), reason) from error


def print_json(value: object) -> None:
    """One JSON document on stdout."""
    typer.echo(json.dumps(value, indent=2))


def print_table(title: str, headers: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """A table for people on stdout; a table without header texts is a list of keys and values."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=any(headers), box=None, padding=(0, 2, 0, 0))
    for header in headers:
        table.add_column(header, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(soft_wrap=False, markup=False, highlight=False).print(table)


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A spinner on stderr that says what is going on and for how long; yields the function that changes the text."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def announce(text: str) -> None:
            bar.update(task, description=text)
            if not console.is_terminal:
                console.print(text, markup=False, highlight=False)

        yield announce


def _summary(config: RefitConfig) -> dict[str, object]:
    megatron, vllm, settings = config.policy.megatron_cfg, config.policy.generation.vllm_cfg, config.settings
    return {
        "model": config.policy.model_name,
        "training ranks": config.training_ranks,
        "training layout": {
            "tensor": megatron.tensor_model_parallel_size,
            "pipeline": megatron.pipeline_model_parallel_size,
            "virtual pipeline": megatron.virtual_pipeline_model_parallel_size or 1,
            "context": megatron.context_parallel_size,
            "data": config.data_parallel_size,
            "expert": megatron.expert_model_parallel_size,
            "expert tensor": megatron.expert_tensor_ranks,
        },
        "generation ranks": config.generation_ranks,
        "generation layout": {
            "tensor": vllm.tensor_parallel_size,
            "pipeline": vllm.pipeline_parallel_size,
            "expert": vllm.expert_parallel_size,
            "engines": config.engines,
        },
        "precision": {"training": config.policy.precision, "generation": config.vllm_precision},
        "transport": config.transport,
        "fabric": settings.fabric,
        "domains": [list(ranks) for ranks in domains] if (domains := config.domains()) is not None else "one per host",
        "bytes": {"staging": settings.staging_bytes, "bucket": settings.bucket_bytes},
        "verify": settings.verify,
    }


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {inner}" for key, inner in value.items())
    return str(value)


def _fields(violation: Violation) -> dict[str, str]:
    return {key: getattr(violation, key) for key in ("path", "value", "reason", "remedy")}
