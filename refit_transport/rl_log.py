"""What a GRPO or PPO job leaves to look at: a line of JSON per step, TensorBoard's files, and a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from refit_transport.errors import ConfigError, Violation
from refit_transport.optional import optional_module

if TYPE_CHECKING:
    from refit_transport.cluster.rl_loop import StepReport

_REWARD, _REFIT, _ERROR = "#2a6fbb", "#c0392b", "#7d3c98"


class StepLog:
    """Writes `steps.jsonl` and, if asked, TensorBoard's files into one folder; each step is on the disk at once.

    A resumed job appends; the lines of steps that it repeats come again, later.
    """

    def __init__(self, folder: Path, *, tensorboard: bool) -> None:
        """Opens the files.

        Raises:
            ConfigError: the folder can't be written.
            MissingDependencyError: TensorBoard is wanted and tensorboardX isn't installed.
        """
        self._board: Any = None
        if tensorboard:
            self._board = optional_module(
                "tensorboardX", needed_for="logger.tensorboard_enabled", extra="rl"
            ).SummaryWriter(str(folder))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lines = (folder / "steps.jsonl").open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            remedy = "name a folder that can be written"
            violation = Violation("logger.log_dir", str(folder), f"can't be written: {error}", remedy)
            raise ConfigError("logger", (violation,)) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()
        if self._board is not None:
            self._board.close()

    def write(self, report: StepReport) -> None:
        """One step."""
        self._lines.write(json.dumps(report.to_json()) + "\n")
        if self._board is not None:
            for name, value in report.scalars().items():
                self._board.add_scalar(name, value, report.step)
            self._board.flush()


def plot_steps(reports: Sequence[StepReport], path: Path) -> None:
    """Writes a picture: the reward, the refit's share of the step, and how far trainer and sampler were apart.

    Raises:
        MissingDependencyError: matplotlib isn't installed.
    """
    figure = optional_module("matplotlib.figure", needed_for="--plot", extra="rl").Figure(
        figsize=(9.0, 7.5), layout="constrained"
    )
    panels = figure.subplots(3, 1, sharex=True)
    steps = [report.step for report in reports]
    curves = (
        ("mean reward", [report.rollout.mean_reward() for report in reports], _REWARD),
        ("refit, % of the step's time", [100 * report.refit_share for report in reports], _REFIT),
        ("|log-probability error|, nats", [report.logprob_error.mean for report in reports], _ERROR),
    )
    for panel, (label, values, colour) in zip(panels, curves, strict=True):
        panel.plot(steps, values, color=colour, linewidth=1.6)
        panel.set_ylabel(label)
        panel.grid(visible=True, alpha=0.3)
        if label.startswith("|") and any(value > 0 for value in values):
            panel.set_yscale("log")
        else:
            panel.set_ylim(bottom=0)
    panels[-1].set_xlabel("step")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
