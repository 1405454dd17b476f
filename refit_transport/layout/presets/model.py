"""A model as its logical tensors: what a checkpoint holds, by role, with how each side divides it."""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from refit_transport.errors import ConfigError
from refit_transport.layout.presets.facts import Facts
from refit_transport.layout.presets.families import FAMILIES, Outline
from refit_transport.layout.presets.rows import Group, Row

Part = Literal["main", "drafter", "vision"]
Home = Literal["first", "layer", "last", "ends"]


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """One tensor: its row under the canonical name, and where a pipeline has it.

    `home` is the first or last stage, both ends of the pipeline (tied embeddings), or the stage of layer number
    `layer`. A refit moves the part "main".
    """

    row: Row
    home: Home
    layer: int = -1
    part: Part = "main"

    @property
    def name(self) -> str:
        return self.row.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.row.shape

    @property
    def group(self) -> Group:
        """What it is for; everything of a drafter is "mtp"."""
        return "mtp" if self.part == "drafter" else self.row.group

    @property
    def numel(self) -> int:
        return math.prod(self.row.shape)


@dataclass(frozen=True, slots=True)
class LogicalModel:
    """Every tensor of a model in canonical order, and its number of layers (without drafter)."""

    architecture: str
    layers: int
    tensors: tuple[LogicalTensor, ...]

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, source: str = "config.json") -> Self:
        """Reads a checkpoint's `config.json`, as written by transformers 4 or 5.

        Raises:
            ConfigError: the architecture isn't supported, or a size is missing; `source` names the file in it.

        >>> config = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2}
        >>> config |= {"num_attention_heads": 4, "head_dim": 16, "intermediate_size": 96, "vocab_size": 250}
        >>> model = LogicalModel.from_config(config)
        >>> len(model.tensors), model.parameters()["ffn"]
        (25, 36864)
        """
        facts = Facts(config, source, [])
        named = config.get("architectures") or []
        architecture = next((name for name in FAMILIES if isinstance(named, list) and name in named), None)
        if architecture is None:
            raise facts.error("architectures", str(named), _unsupported(named))
        outline = FAMILIES[architecture](facts)
        if facts.problems:
            raise ConfigError(source, tuple(facts.problems))
        return cls(architecture, len(outline.layers), tuple(_tensors(outline)))

    @property
    def main(self) -> tuple[LogicalTensor, ...]:
        """What a refit moves: no drafter, no vision tower."""
        return tuple(tensor for tensor in self.tensors if tensor.part == "main")

    def left_out(self) -> Mapping[str, tuple[str, ...]]:
        """The tensors of the checkpoint that a refit doesn't move, by the reason."""
        reasons: Mapping[Part, str] = {
            "drafter": "multi-token prediction: the policy has no drafter",
            "vision": "vision tower: the policy has the language model",
        }
        found = {reason: tuple(t.name for t in self.tensors if t.part == part) for part, reason in reasons.items()}
        return {reason: names for reason, names in found.items() if names}

    @property
    def vocab(self) -> int:
        """The number of tokens, without padding."""
        return next(tensor.shape[0] for tensor in self.main if tensor.group == "embedding")

    @property
    def experts(self) -> int:
        """The number of routed experts of a layer; 0 where the model has none."""
        return max((tensor.shape[0] for tensor in self.main if tensor.row.experts), default=0)

    def parameters(self, *, part: Part = "main") -> Counter[Group]:
        """The number of elements by group."""
        found: Counter[Group] = Counter()
        for tensor in self.tensors:
            if tensor.part == part:
                found[tensor.group] += tensor.numel
        return found


def _tensors(outline: Outline) -> Iterator[LogicalTensor]:
    for row in outline.first:
        yield LogicalTensor(row, "ends" if outline.tied else "first")
    for number, rows in enumerate(outline.layers):
        for row in rows:
            yield LogicalTensor(row.named(f"{outline.prefix}{number}."), "layer", number)
    for row in outline.last:
        yield LogicalTensor(row, "last")
    for row in outline.drafter:
        yield LogicalTensor(row, "last", part="drafter")
    for row in outline.vision:
        yield LogicalTensor(row, "first", part="vision")


def _unsupported(named: object) -> str:
    first = str(named[0]) if isinstance(named, list) and named else ""
    near = difflib.get_close_matches(first, FAMILIES, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"no supported architecture; {hint}supported: {', '.join(FAMILIES)}"
