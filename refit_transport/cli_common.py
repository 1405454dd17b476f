"""What all commands share: exit codes, arguments, how a configuration is read, and how JSON and progress are shown."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
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
    UnsupportedVersionError,
)

if TYPE_CHECKING:
    from refit_transport.config.rules import Purpose
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
    except (ConfigError, UnknownTransportError, MissingDependencyError, UnsupportedVersionError) as error:
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


class Commands(TyperGroup):
    """`telling_errors` for every command."""

    def invoke(self, ctx: Any) -> Any:
        with telling_errors():
            return super().invoke(ctx)


ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file with NeMo RL's keys.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Overrides a key, such as policy.precision=float32. Repeatable."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def load(config: Path, overrides: list[str] | None, *, purpose: Purpose = "run") -> RefitConfig:
    """The configuration that a command runs on, checked for what the command does with it.

    What is to run is refused where an installed package has an unsupported version.
    """
    from refit_transport.compatibility import check_installed
    from refit_transport.config.load import load_config

    if purpose == "run":
        check_installed()
    return load_config(config, resolve_transport=usable_transport, overrides=overrides or (), purpose=purpose)


def usable_transport(name: str | None) -> None:
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
