"""Reads boxes of logical tensors from a checkpoint folder, without loading more than the box."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open

from refit_transport.errors import ConfigError, LayoutError, Violation
from refit_transport.layout.box import Box
from refit_transport.layout.canonical import CheckpointEntry, checkpoint_entries
from refit_transport.layout.manifest import TensorSpec

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class CheckpointReader:
    """A folder of safetensors files, opened lazily; use it as a context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = _file_of_each_tensor(folder)
        self._open: dict[str, Any] = {}
        # A layer's experts are many entries, and each of its pieces asks for them.
        self._entries: dict[TensorSpec, tuple[CheckpointEntry, ...]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def copy_into(self, view: torch.Tensor, spec: TensorSpec, box: Box) -> None:
        """Copies `spec[box]` from the checkpoint into `view`, which has the box's shape; casts to its dtype.

        Raises:
            LayoutError: the checkpoint lacks the tensor, or has it in another shape.
        """
        if spec not in self._entries:
            self._entries[spec] = checkpoint_entries(spec)
        entries = self._entries[spec]
        if entries[0].expert is not None:
            entries = entries[box.spans[0].start : box.spans[0].stop]
        for entry in entries:
            common = entry.box.intersect(box)
            if common is None:
                continue
            inside = tuple(
                slice(s.start - b.start, s.stop - b.start) for s, b in zip(common.spans, box.spans, strict=True)
            )
            stored = self._slice(entry)
            index = tuple(slice(span.start, span.stop) for span in common.spans)
            target = view[inside]
            if entry.expert is not None:
                index, target = index[1:], target[0]
            target.copy_(stored[index])

    def _slice(self, entry: CheckpointEntry) -> Any:
        file = self._files.get(entry.name)
        if file is None:
            raise LayoutError(entry.name, -1, f"a tensor of the checkpoint {self._folder}", "none of that name")
        if file not in self._open:
            self._open[file] = self._stack.enter_context(safe_open(str(self._folder / file), framework="pt"))
        stored = self._open[file].get_slice(entry.name)
        if tuple(stored.get_shape()) != entry.shape:
            raise LayoutError(
                entry.name, -1, f"shape {list(entry.shape)} (model config)", f"{stored.get_shape()} in the checkpoint"
            )
        return stored


def _file_of_each_tensor(folder: Path) -> Mapping[str, str]:
    if (folder / _INDEX).is_file():
        weight_map: Mapping[str, str] = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        return weight_map
    if not (folder / _SINGLE).is_file():
        raise ConfigError(str(folder), (Violation(_SINGLE, "no such file", "the checkpoint has no weights", ""),))
    with safe_open(str(folder / _SINGLE), framework="pt") as file:
        return dict.fromkeys(file.keys(), _SINGLE)
