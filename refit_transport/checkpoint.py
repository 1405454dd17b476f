"""A checkpoint folder on disk (Hugging Face's safetensors), read box by box: nothing more than the box is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from refit_transport.layout.box import Box

_INDEX = "model.safetensors.index.json"


class CheckpointFolder:
    """The tensors of a folder's safetensors files by checkpoint name; files stay mapped while this object lives."""

    def __init__(self, folder: Path) -> None:
        """Raises FileNotFoundError when the folder holds no safetensors."""
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

    def _slice(self, name: str) -> Any:
        return self._open(name).get_slice(name)

    def _open(self, name: str) -> Any:
        file = self._files[name]
        if file not in self._opened:
            self._opened[file] = safe_open(file, framework="pt")
        return self._opened[file]


def _file_of_each_tensor(folder: Path) -> Mapping[str, Path]:
    index = folder / _INDEX
    if index.is_file():
        weight_map: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / file for name, file in weight_map.items()}
    files: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            files.update(dict.fromkeys(opened.keys(), file))
    if not files:
        raise FileNotFoundError(f"no safetensors in {folder}")
    return files
