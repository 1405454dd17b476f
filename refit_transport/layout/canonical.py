"""The canonical name space: Hugging Face checkpoint names, with the experts of a layer stacked per projection.

gpt-oss stacks them itself, with the columns of gate and up in turn. Since boxes have no steps, gate and up are a dim of
their own in the logical tensor: a checkpoint's [E, H, 2 x I] is [E, H, I, 2], the same elements in the same order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from refit_transport.layout.box import Box, Span
from refit_transport.layout.manifest import TensorSpec

_EXPERT = re.compile(r"^(?P<prefix>.*\.experts)\.(?P<index>\d+)\.(?P<rest>.+)$")
# Without a suffix behind the projection it is a stack in the checkpoint too: `experts.gate_up_proj`.
_STACKED = re.compile(r"^(?P<prefix>.*\.experts)\.(?P<rest>[A-Za-z_]\w*\..+)$")
_IN_TURN = {"experts.gate_up_proj": 4, "experts.gate_up_proj_bias": 3}


def has_fields_in_turn(name: str, shape: tuple[int, ...]) -> bool:
    """Whether the last dim of a logical tensor counts fields that a checkpoint has in turn, in one dim with the last
    but one.

    >>> has_fields_in_turn("m.experts.gate_up_proj", (8, 4, 6, 2))
    True
    >>> has_fields_in_turn("m.experts.gate_up_proj", (8, 12, 4))
    False
    """
    return _IN_TURN.get(name[name.rfind("experts.") :]) == len(shape)


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """One tensor of a checkpoint on disk and the box of the logical tensor that it is.

    `box` has the logical tensor's dims; the checkpoint tensor's shape is `shape`, which lacks the expert dim where
    `expert` is not None, and has the last two dims as one where `fields` of them are in turn.
    """

    name: str
    tensor: str
    box: Box
    expert: int | None = None
    fields: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.box.shape
        if self.fields > 1:
            return (*shape[:-2], shape[-2] * self.fields)
        return shape if self.expert is None else shape[1:]

    def stored(self, box: Box) -> Box:
        """A box of the logical tensor, which lies in this one's, as a box of the checkpoint tensor.

        Where fields are in turn, it has all of them.

        >>> CheckpointEntry("w", "w", Box.full((2, 6, 2)), fields=2).stored(Box.of((0, 1), (1, 3), (1, 2)))
        Box.of((0, 1), (2, 6))
        """
        spans = box.spans if self.expert is None else box.spans[1:]
        if self.fields > 1:
            *outer, rows, _ = spans
            return Box((*outer, Span(rows.start * self.fields, rows.stop * self.fields)))
        return Box(spans)


def checkpoint_entries(spec: TensorSpec) -> tuple[CheckpointEntry, ...]:
    """The checkpoint tensors that make up one logical tensor, in order.

    >>> [entry.name for entry in checkpoint_entries(TensorSpec("m.experts.up_proj.weight", (2, 3, 5), "float32"))]
    ['m.experts.0.up_proj.weight', 'm.experts.1.up_proj.weight']
    >>> checkpoint_entries(TensorSpec("m.norm.weight", (4,), "float32"))[0].name
    'm.norm.weight'
    >>> [entry.name for entry in checkpoint_entries(TensorSpec("m.experts.gate_up_proj", (2, 3, 10), "float32"))]
    ['m.experts.gate_up_proj']
    >>> checkpoint_entries(TensorSpec("m.experts.gate_up_proj", (2, 3, 5, 2), "float32"))[0].shape
    (2, 3, 10)
    """
    if has_fields_in_turn(spec.name, spec.shape):
        return (CheckpointEntry(spec.name, spec.name, spec.box, fields=spec.shape[-1]),)
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


def stacks_in_turn(checkpoint_names: Iterable[str]) -> frozenset[str]:
    """The stacked experts of a checkpoint whose last dim has gate and up in turn: those that have biases.

    >>> sorted(stacks_in_turn(["a.experts.gate_up_proj", "b.experts.gate_up_proj", "b.experts.gate_up_proj_bias"]))
    ['b.experts.gate_up_proj', 'b.experts.gate_up_proj_bias']
    """
    biases = [name for name in checkpoint_names if name.endswith(".experts.gate_up_proj_bias")]
    return frozenset((*biases, *(name.removesuffix("_bias") for name in biases)))


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
