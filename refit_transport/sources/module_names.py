"""The entries of a transformers module's state dict, with the canonical tensors in them and their sizes. Pure.

What a checkpoint has is in the model's outline; how a module names and stacks it, in `layout.module_entries`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from refit_transport.errors import LayoutError
from refit_transport.layout.fusion import Fusion, Part
from refit_transport.layout.manifest import Piece, TensorSpec
from refit_transport.layout.module_entries import by_entry, renamed
from refit_transport.layout.pieces import split_last
from refit_transport.layout.presets.model import LogicalModel, LogicalTensor


@dataclass(frozen=True, slots=True)
class ModuleTensor:
    """One entry of a module's state dict: its true shape, and the canonical tensors in it, stacked along dim 1.

    Fields in turn are a dim of their own in the canonical tensor only.
    """

    name: str
    shape: tuple[int, ...]
    tensors: tuple[LogicalTensor, ...]

    def parts(self, pieces: Iterable[Piece]) -> tuple[Piece, ...]:
        """Pieces of the entry as pieces of the canonical tensors."""
        if len(self.tensors) == 1:
            (tensor,) = self.tensors
            named = (replace(piece, tensor=tensor.name) for piece in pieces)
            if tensor.row.in_turn:
                return tuple(part for piece in named for part in split_last(piece, tensor.shape[-1]))
            return tuple(named)
        return Fusion(1, tuple(Part(tensor.name, tensor.shape[1]) for tensor in self.tensors)).unfuse(pieces)

    def specs(self, dtype: str) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(tensor.name, tensor.shape, dtype) for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """The entries of a module's state dict by name, and those that a refit leaves out (a vision tower)."""

    architecture: str
    entries: Mapping[str, ModuleTensor]
    left_out: frozenset[str]

    @classmethod
    def of(cls, model: LogicalModel) -> Self:
        """
        >>> config = {"architectures": ["MixtralForCausalLM"], "hidden_size": 8, "num_hidden_layers": 1}
        >>> config |= {"num_attention_heads": 2, "intermediate_size": 6, "vocab_size": 9, "num_local_experts": 4}
        >>> names = ModuleNames.of(LogicalModel.from_config(config))
        >>> names.entries["model.layers.0.mlp.experts.gate_up_proj"].shape
        (4, 12, 8)
        """
        known = {tensor.name: tensor for tensor in model.main}
        grouped = {entry: tuple(known[name] for name in names) for entry, names in by_entry(known).items()}
        entries = {name: ModuleTensor(name, _stacked(tensors), tensors) for name, tensors in grouped.items()}
        others = (tensor for tensor in model.tensors if tensor.part == "vision")
        return cls(model.architecture, entries, frozenset(renamed(tensor.name) for tensor in others))

    def check_shape(self, name: str, shape: tuple[int, ...], rank: int) -> ModuleTensor:
        """The entry of that name.

        Raises:
            LayoutError: the model has no such tensor, or has it in another shape.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise LayoutError(name, rank, f"a tensor of {self.architecture}", "a name that its outline doesn't have")
        if entry.shape != shape:
            raise LayoutError(name, rank, f"shape {list(entry.shape)} (model config)", f"{list(shape)} in the module")
        return entry

    def check_all(self, names: Iterable[str], rank: int) -> None:
        """
        Raises:
            LayoutError: the module lacks an entry.
        """
        lost = self.entries.keys() - frozenset(names)
        if lost:
            raise LayoutError(
                min(lost), rank, "an entry of the module's state dict", f"none, like {len(lost) - 1} more"
            )


def _stacked(tensors: Sequence[LogicalTensor]) -> tuple[int, ...]:
    shape = list(tensors[0].shape)
    if tensors[0].row.in_turn:
        return (*shape[:-2], shape[-2] * shape[-1])
    if len(tensors) > 1:
        shape[1] = sum(tensor.shape[1] for tensor in tensors)
    return tuple(shape)
