"""What a job leaves on disk so that it can go on: checkpoints of its steps, and the last version that it published."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from refit_transport.cluster.training_checkpoint import begin_folder, publish_folder
from refit_transport.errors import ConfigError, Violation

_PREFIX, _STATE, _PUBLISHED = "step_", "run.json", "published.json"


@dataclass(frozen=True, slots=True)
class RunState:
    """Where a job stands after `step`: `version` is what the engines served then; `reward` the step's mean reward."""

    step: int
    version: int
    reward: float


class RunFolder:
    """The folder of one job's checkpoints.

    Each is a folder `step_N` that has its name only once it is whole. What one write left half done is removed by the
    next.
    """

    def __init__(
        self, folder: Path, fingerprint: str, *, keep: int | None, best: bool, higher_is_better: bool = True
    ) -> None:
        """`keep` checkpoints stay (None: all): the latest, or with `best` the last one and those of the best reward.

        `fingerprint` is of everything that decides the job's course, so that another job doesn't go on from here.
        """
        self._fingerprint = fingerprint
        self._folder, self._keep, self._best, self._sign = folder, keep, best, 1 if higher_is_better else -1

    def latest(self) -> tuple[Path, RunState] | None:
        """The checkpoint of the highest step.

        Raises:
            ConfigError: it can't be read, or is another job's.
        """
        found = self._checkpoints()
        return found[-1] if found else None

    def save(self, state: RunState, write: Callable[[Path], None]) -> Path:
        """Writes a checkpoint: `write` puts what workers hold into the folder that it gets."""
        folder = self._folder / f"{_PREFIX}{state.step}"
        aside = begin_folder(folder)
        write(aside)
        written = {"fingerprint": self._fingerprint, **asdict(state)}
        (aside / _STATE).write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
        publish_folder(aside, folder)
        for old in self._superseded():
            shutil.rmtree(old)
        return folder

    def published(self) -> int:
        """The highest version that any earlier run of this job may have published; -1 if there was none.

        Raises:
            ConfigError: the record can't be read.
        """
        path = self._folder / _PUBLISHED
        if not path.exists():
            return -1
        if not isinstance(version := _read(path).get("version"), int):
            raise _unreadable(path, "it has no version")
        return version

    def publishing(self, version: int) -> None:
        """Notes a version before it is published, so that no later run publishes it again."""
        self._folder.mkdir(parents=True, exist_ok=True)
        partial = self._folder / f".{_PUBLISHED}"
        partial.write_text(json.dumps({"version": version}) + "\n", encoding="utf-8")
        partial.replace(self._folder / _PUBLISHED)

    def _checkpoints(self) -> list[tuple[Path, RunState]]:
        """By step."""
        folders = [path for path in self._folder.glob(f"{_PREFIX}*") if path.name[len(_PREFIX) :].isdecimal()]
        found = []
        for path in folders:
            fields = _read(path / _STATE)
            if fields.pop("fingerprint", None) != self._fingerprint:
                reason = "has the checkpoint of another job: its model, data, algorithm or seeds differ"
                raise _refused(path, reason, "name another folder, or remove this one")
            try:
                found.append((path, RunState(**fields)))
            except TypeError as error:
                raise _unreadable(path / _STATE, str(error).partition("() ")[2]) from error
        return sorted(found, key=lambda each: each[1].step)

    def _superseded(self) -> list[Path]:
        found = self._checkpoints()
        if self._keep is None:
            return []
        by_worth = found[:-1]
        if self._best:
            by_worth = sorted(by_worth, key=lambda each: (self._sign * each[1].reward, each[1].step))
        return [path for path, _ in by_worth[: len(found) - self._keep]]


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unreadable(path, str(error)) from error
    if not isinstance(found, dict):
        raise _unreadable(path, "no JSON object")
    return found


def _unreadable(path: Path, reason: str) -> ConfigError:
    return _refused(path, f"can't be read: {reason}", "remove it to go on from an earlier one, or name another folder")


def _refused(path: Path, reason: str, remedy: str) -> ConfigError:
    violation = Violation("checkpointing.checkpoint_dir", str(path), reason, remedy)
    return ConfigError("checkpointing", (violation,))
