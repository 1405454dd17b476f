"""The launchers of GRPO and PPO jobs: `python recipes/run_grpo.py CONFIG`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from refit_transport.cli_common import AsJson, ConfigFile, Overrides, print_json, telling_errors, usable_transport
from refit_transport.errors import ConfigError, Violation

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from refit_transport.cluster.rl_loop import StepReport
    from refit_transport.config.rl import RlConfig

Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw reward and refit share when it ends.")]

_LAST = 5


def launch(algorithm: Literal["grpo", "ppo"]) -> None:
    """Runs a launcher's command line."""

    def command(config: ConfigFile, *, overrides: Overrides = None, plot: Plot = None, as_json: AsJson = False) -> None:
        with telling_errors():
            _run(algorithm, config, overrides or [], plot, as_json=as_json)

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(help=f"Train a policy with {algorithm.upper()} on Ray: Megatron trains, vLLM samples.")(command)
    app()


def _run(algorithm: str, path: Path, overrides: Sequence[str], plot: Path | None, *, as_json: bool) -> None:
    from rich.console import Console

    from refit_transport.compatibility import check_installed

    check_installed()
    from refit_transport.cluster.rl_job import run_steps
    from refit_transport.config.rl import load_rl_config
    from refit_transport.optional import optional_module
    from refit_transport.rl_log import StepLog, plot_steps

    config = load_rl_config(path, resolve_transport=usable_transport, overrides=overrides)
    _require(config, algorithm, path)
    if plot is not None:
        optional_module("matplotlib", needed_for="--plot", extra="rl")
    console = Console(stderr=as_json, markup=False, highlight=False)
    reports: list[StepReport] = []
    steps = config.sections.rollouts.max_num_steps
    with (
        StepLog(Path(config.sections.logger.log_dir), tensorboard=config.sections.logger.tensorboard_enabled) as log,
        _progress(steps) as (announce, done),
    ):
        try:
            for report in run_steps(config, ray_address=os.environ.get("RAY_ADDRESS"), announce=announce):
                reports.append(report)
                log.write(report)
                done(report)
                if not as_json:
                    _show_step(report, console, kl=config.sections.loss_fn.reference_policy_kl_penalty)
        finally:
            # Also after a failure or Ctrl-C: of the steps that there were.
            if plot is not None and reports:
                plot_steps(reports, plot)
            if as_json:
                print_json({"steps": [report.to_json() for report in reports]})
            elif reports:
                _show_end(reports, config, console)
    if not as_json and not reports:
        where = config.sections.checkpointing.checkpoint_dir
        console.print(f"There is nothing to do: the checkpoints in {where} have all {steps} steps behind them.")
    if wrong := [error for report in reports if (error := report.apart())]:
        raise max(wrong, key=lambda error: error.difference)


def _require(config: RlConfig, algorithm: str, path: Path) -> None:
    own = "ppo" if config.sections.ppo is not None else "grpo"
    if own != algorithm:
        violation = Violation(own, "a section", f"this launcher runs {algorithm.upper()}", f"use recipes/run_{own}.py")
        raise ConfigError(str(path), (violation,))


@contextmanager
def _progress(steps: int) -> Iterator[tuple[Callable[[str], None], Callable[[StepReport], None]]]:
    """A bar of steps on stderr that says which phase is running; yields what to call for a phase, and for a step."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("step"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=steps)
        yield (
            lambda text: bar.update(task, description=text),
            lambda report: bar.update(task, completed=report.step),
        )


_COLUMNS = ("step", "reward", "length", "KL", "entropy", "|log-prob error|", "generate", "train", "refit", "moved")
_WIDTHS = (6, 7, 7, 9, 8, 16, 9, 8, 9, 10)


def _show_step(report: StepReport, console: Console, *, kl: float) -> None:
    """A row of the step table; its head comes with the first step and every twenty.

    `kl` is the weight of the divergence from the reference policy in the loss; where it is 0 that isn't known.
    """
    from refit_transport.report import sized

    if report.step % 20 == 1 or report.step == 1:
        console.print(_row(_COLUMNS), soft_wrap=True)
    found, seconds = report.scalars(), report.seconds
    console.print(
        _row(
            (
                str(report.step),
                f"{found['reward']:.3f}",
                f"{found['length']:.1f}",
                f"{found['policy/kl_penalty'] / kl:.1e}" if kl and "policy/kl_penalty" in found else "",
                f"{found['policy/entropy']:.3f}" if "policy/entropy" in found else "",
                f"{found['logprob_error']:.1e}",
                f"{seconds['generate']:.2f} s",
                f"{seconds['score'] + seconds['train']:.2f} s",
                f"{seconds['refit'] * 1e3:.0f} ms",
                sized(report.refit.summary.received_bytes),
            )
        ),
        soft_wrap=True,
    )
    for each in report.validations:
        when = f"after step {each.step}" if each.step else "before the first step"
        console.print(
            f"validation {when}: reward {each.reward:.3f}, length {each.length:.1f}, {each.samples} samples in "
            f"{each.seconds:.2f} s",
            soft_wrap=True,
        )
    if error := report.apart():
        console.print(
            f"WARNING: step {report.step}: trainer and samplers differ by {error.difference:.1e} nats on average "
            f"(allowed: {error.tolerance:.0e}). The samplers do not have the trainer's weights.",
            style="bold red",
            soft_wrap=True,
        )


def _row(cells: Sequence[str]) -> str:
    return " ".join(cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True))


def _show_end(reports: Sequence[StepReport], config: RlConfig, console: Console) -> None:
    console.print(_summary(reports))
    folder = Path(config.sections.logger.log_dir)
    console.print(f"Every step is a line of {folder / 'steps.jsonl'}.", soft_wrap=True)


def _summary(reports: Sequence[StepReport]) -> Table:
    from rich.table import Table

    def mean(of: Sequence[float]) -> float:
        return sum(of) / len(of)

    rewards = [report.rollout.mean_reward() for report in reports]
    total = sum(report.seconds["total"] for report in reports)
    table = Table(title=f"{len(reports)} steps", show_header=False)
    table.add_row(f"reward of the first {min(_LAST, len(rewards))} steps", f"{mean(rewards[:_LAST]):.3f}")
    table.add_row(f"reward of the last {min(_LAST, len(rewards))} steps", f"{mean(rewards[-_LAST:]):.3f}")
    worst = max(report.logprob_error.mean for report in reports)
    table.add_row("largest mean |log-probability error| of a step", f"{worst:.1e}")
    table.add_row("refits' share of the time", f"{sum(report.seconds['refit'] for report in reports) / total:.1%}")
    overlaps = [report.overlap for report in reports if report.overlap is not None]
    if overlaps:
        both = sum(each.both_s for each in overlaps) / sum(each.wall_s for each in overlaps)
        table.add_row("generation and training at once", f"{both:.0%} of the time")
    table.add_row("seconds per step", f"{total / len(reports):.2f}")
    return table
