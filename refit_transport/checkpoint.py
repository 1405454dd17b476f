"""A checkpoint folder on disk (Hugging Face's safetensors), read box by box: nothing more than the box is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from refit_transport.errors import ConfigError, Violation
from refit_transport.layout.box import Box
from refit_transport.layout.canonical import CheckpointEntry

_INDEX = "model.safetensors.index.json"


class CheckpointFolder:
    """The tensors of a folder's safetensors files by checkpoint name; files stay mapped while this object lives."""

    def __init__(self, folder: Path) -> None:
        """Reads the files' headers.

        Raises:
            FileNotFoundError: the folder holds no safetensors.
            ConfigError: a file is missing, damaged or incomplete; names it.
        """
        self.folder = folder
        self._files = _file_of_each_tensor(folder)
        self._opened: dict[Path, Any] = {}

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor on disk; None when there is none of that name."""
        return tuple(self._slice(name).get_shape()) if name in self._files else None

    def read(self, name: str, box: Box) -> torch.Tensor:
        """One box of a tensor, in the dtype on disk."""
        if not box.spans:
            return self._open(name).get_tensor(name)  # type: ignore[no-any-return]
        return self._slice(name)[tuple(slice(span.start, span.stop) for span in box.spans)]  # type: ignore[no-any-return]

    def read_part(self, entry: CheckpointEntry, box: Box) -> torch.Tensor | None:
        """One box of a checkpoint tensor, which lies on disk by itself or in its stack; None when neither is there."""
        if self.shape(entry.name) == entry.shape:
            return self.read(entry.name, box)
        stack = self.shape(entry.tensor) if entry.expert is not None else None
        if stack is None or stack[1:] != entry.shape or not Box.full(stack).contains(entry.box):
            return None
        return self.read(entry.tensor, Box((entry.box.spans[0], *box.spans)))[0]

    def check(self) -> None:
        """Opens every file.

        Raises:
            ConfigError: a file is missing, damaged or incomplete; one violation for each.
        """
        problems: list[Violation] = []
        for file in sorted(set(self._files.values())):
            try:
                _open(file)
            except ConfigError as error:
                problems += error.violations
        if problems:
            raise ConfigError(str(self.folder), tuple(problems))

    def _slice(self, name: str) -> Any:
        return self._open(name).get_slice(name)

    def _open(self, name: str) -> Any:
        file = self._files[name]
        if file not in self._opened:
            self._opened[file] = _open(file)
        return self._opened[file]


def _file_of_each_tensor(folder: Path) -> Mapping[str, Path]:
    index = folder / _INDEX
    if index.is_file():
        return {name: folder / file for name, file in _weight_map(index).items()}
    files: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        files.update(dict.fromkeys(_open(file).keys(), file))
    if not files:
        raise FileNotFoundError(f"no safetensors in {folder}")
    return files


def _weight_map(index: Path) -> Mapping[str, str]:
    try:
        found = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unreadable(index, f"can't be read: {error}") from error
    names = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise _unreadable(index, "has no weight_map from tensor names to file names")
    return names


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError as error:
        raise _unreadable(file, f"is missing, though {_INDEX} names it") from error
    except (OSError, SafetensorError) as error:
        raise _unreadable(file, f"is damaged or incomplete: {error}") from error


def _unreadable(file: Path, reason: str) -> ConfigError:
    got = f"{file.stat().st_size} bytes" if file.is_file() else "no file"
    violation = Violation(file.name, got, reason, "copy or download the checkpoint again")
    return ConfigError(str(file.parent), (violation,))
