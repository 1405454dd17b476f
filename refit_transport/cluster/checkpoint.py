"""Reads boxes of logical tensors from a checkpoint folder, without loading more than the box."""

from __future__ import annotations

from pathlib import Path

import torch

from refit_transport.checkpoint import CheckpointFolder
from refit_transport.errors import ConfigError, LayoutError, Violation
from refit_transport.layout.box import Box
from refit_transport.layout.canonical import CheckpointEntry, checkpoint_entries
from refit_transport.layout.manifest import TensorSpec
from refit_transport.views import box_view


class CheckpointReader:
    """Copies boxes of logical tensors out of a checkpoint folder."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError when the folder holds no weights, or a file of it can't be read."""
        try:
            self._files = CheckpointFolder(folder)
        except FileNotFoundError as error:
            reason, remedy = "the checkpoint has no weights", "put the model's *.safetensors beside its config.json"
            violation = Violation(str(folder), "no *.safetensors", reason, remedy)
            raise ConfigError(str(folder), (violation,)) from error
        # A layer's experts are many entries, and each of its pieces asks for them.
        self._entries: dict[TensorSpec, tuple[CheckpointEntry, ...]] = {}

    def check(self) -> None:
        """Raises ConfigError, naming each file of the folder that is missing, damaged or incomplete."""
        self._files.check()

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
            self._check_shape(entry)
            target = box_view(view, box, common)
            stored = self._files.read(entry.name, entry.stored(common))
            if entry.fields > 1:
                fields = common.spans[-1]
                stored = stored.view(*stored.shape[:-1], -1, entry.fields)[..., fields.start : fields.stop]
            target.copy_(stored if entry.expert is None else stored[None])

    def _check_shape(self, entry: CheckpointEntry) -> None:
        shape = self._files.shape(entry.name)
        if shape is None:
            expected = f"a tensor of the checkpoint {self._files.folder}"
            quantized = self._files.shape(f"{entry.name}_blocks") is not None
            got = "MXFP4 blocks, which aren't supported: convert it to BF16" if quantized else "none of that name"
            raise LayoutError(entry.name, -1, expected, got)
        if shape != entry.shape:
            expected, got = f"shape {list(entry.shape)} (model config)", f"{list(shape)} in the checkpoint"
            raise LayoutError(entry.name, -1, expected, got)
