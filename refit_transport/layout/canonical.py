"""The canonical name space: Hugging Face checkpoint names, with the experts of a layer stacked per projection."""

from __future__ import annotations

import re
from dataclasses import dataclass

from refit_transport.layout.box import Box, Span
from refit_transport.layout.manifest import TensorSpec

_EXPERT = re.compile(r"^(?P<prefix>.*\.experts)\.(?P<index>\d+)\.(?P<rest>.+)$")
# Without a suffix behind the projection it is a stack in the checkpoint too: `experts.gate_up_proj`.
_STACKED = re.compile(r"^(?P<prefix>.*\.experts)\.(?P<rest>[A-Za-z_]\w*\..+)$")


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """One tensor of a checkpoint on disk and the box of the logical tensor that it is.

    `box` has the logical tensor's dims; the checkpoint tensor's shape is `shape`, which lacks the expert dim where
    `expert` is not None.
    """

    name: str
    tensor: str
    box: Box
    expert: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.box.shape if self.expert is None else self.box.shape[1:]


def checkpoint_entries(spec: TensorSpec) -> tuple[CheckpointEntry, ...]:
    """The checkpoint tensors that make up one logical tensor, in order.

    >>> [entry.name for entry in checkpoint_entries(TensorSpec("m.experts.up_proj.weight", (2, 3, 5), "float32"))]
    ['m.experts.0.up_proj.weight', 'm.experts.1.up_proj.weight']
    >>> checkpoint_entries(TensorSpec("m.norm.weight", (4,), "float32"))[0].name
    'm.norm.weight'
    >>> [entry.name for entry in checkpoint_entries(TensorSpec("m.experts.gate_up_proj", (2, 3, 10), "float32"))]
    ['m.experts.gate_up_proj']
    """
    match = _STACKED.match(spec.name)
    if match is None:
        return (CheckpointEntry(spec.name, spec.name, spec.box),)
    return tuple(
        CheckpointEntry(
            f"{match['prefix']}.{index}.{match['rest']}",
            spec.name,
            Box((Span(index, index + 1), *spec.box.spans[1:])),
            expert=index,
        )
        for index in range(spec.shape[0])
    )


@dataclass(frozen=True, slots=True)
class CanonicalName:
    """A logical tensor's name and, for a checkpoint's per-expert tensor, the expert's index in it."""

    tensor: str
    expert: int | None


def canonical_name(checkpoint_name: str) -> CanonicalName:
    """The logical tensor that a checkpoint name belongs to.

    >>> canonical_name("model.layers.1.mlp.experts.7.up_proj.weight")
    CanonicalName(tensor='model.layers.1.mlp.experts.up_proj.weight', expert=7)
    >>> canonical_name("model.norm.weight").expert is None
    True
    """
    match = _EXPERT.match(checkpoint_name)
    if match is None:
        return CanonicalName(checkpoint_name, None)
    return CanonicalName(f"{match['prefix']}.{match['rest']}", int(match["index"]))
