"""The sizes that a Hugging Face `config.json` implies: everything that the shapes of a model's tensors depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from refit_transport.errors import ConfigError, Violation


@dataclass(frozen=True, slots=True)
class Family:
    """One supported architecture and what its layers have beyond the common parts."""

    architecture: str
    qk_norm: bool
    qkv_bias: bool
    has_experts: bool


FAMILIES: tuple[Family, ...] = (
    Family("Qwen2ForCausalLM", qk_norm=False, qkv_bias=True, has_experts=False),
    Family("Qwen3ForCausalLM", qk_norm=True, qkv_bias=False, has_experts=False),
    Family("Qwen3MoeForCausalLM", qk_norm=True, qkv_bias=False, has_experts=True),
)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Counts and sizes (in elements) of a decoder-only transformer; 0 for what the model doesn't have.

    `moe_layers` lists the layers whose MLP is a mixture of experts; the other layers have a dense MLP of
    `intermediate`.
    """

    architecture: str
    layers: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    experts: int = 0
    moe_intermediate: int = 0
    shared_intermediate: int = 0
    moe_layers: tuple[int, ...] = ()
    qk_norm: bool = False
    qkv_bias: bool = False
    tied: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, source: str = "config.json") -> Self:
        """Reads a checkpoint's `config.json`, as written by transformers 4 or 5.

        Raises:
            ConfigError: the architecture isn't supported, or a size is missing; `source` names the file in it.
        """
        family = _family(config, source)
        sizes = {name: config.get(name) for name in _REQUIRED}
        sizes |= {name: config[name] for name in _OPTIONAL if config.get(name)}
        experts = 0
        if family.has_experts:
            experts = sizes[_EXPERT_COUNT[0]] = _first(config, *_EXPERT_COUNT)
            sizes |= {name: config.get(name) for name in _REQUIRED_OF_EXPERTS}
        problems = [_not_a_size(name, value) for name, value in sizes.items() if not _is_size(value)]
        if not isinstance(config.get("mlp_only_layers") or [], list):
            problems.append(Violation("mlp_only_layers", repr(config["mlp_only_layers"]), "must be a list", ""))
        if problems:
            raise ConfigError(source, tuple(problems))
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        return cls(
            architecture=family.architecture,
            layers=config["num_hidden_layers"],
            hidden=hidden,
            vocab=config["vocab_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            intermediate=config["intermediate_size"],
            experts=experts,
            moe_intermediate=config["moe_intermediate_size"] if experts else 0,
            shared_intermediate=config.get("shared_expert_intermediate_size") or 0 if experts else 0,
            moe_layers=_moe_layers(config) if experts else (),
            qk_norm=family.qk_norm,
            qkv_bias=family.qkv_bias,
            tied=bool(config.get("tie_word_embeddings", False)),
        )

    @property
    def q_rows(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def untied(self) -> bool:
        return not self.tied

    def size(self, name: str) -> int:
        """The size called `name`, as the naming table spells it; `"1"` is the literal one; a flag counts 0 or 1.

        >>> shape = ModelShape("Qwen3ForCausalLM", 2, 64, 256, 4, 2, 16, 96)
        >>> shape.size("q_rows"), shape.size("kv_rows"), shape.size("1")
        (64, 32, 1)
        """
        return 1 if name == "1" else int(getattr(self, name))

    def dims(self, names: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(self.size(name) for name in names)


_REQUIRED = ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "intermediate_size")
_REQUIRED_OF_EXPERTS = ("moe_intermediate_size", "num_experts_per_tok")
_EXPERT_COUNT = ("num_experts", "num_local_experts")
_OPTIONAL = ("num_key_value_heads", "head_dim", "shared_expert_intermediate_size", "decoder_sparse_step")


def _is_size(value: object) -> bool:
    return type(value) is int and value >= 1


def _not_a_size(name: str, value: object) -> Violation:
    return Violation(name, "nothing" if value is None else repr(value), "must be a whole number, at least 1", "")


def _family(config: Mapping[str, Any], source: str) -> Family:
    named = config.get("architectures") or []
    for family in FAMILIES:
        if isinstance(named, list) and family.architecture in named:
            return family
    supported = ", ".join(family.architecture for family in FAMILIES)
    raise ConfigError(
        source,
        (Violation("architectures", str(named), f"no supported architecture; supported: {supported}", ""),),
    )


def _first(config: Mapping[str, Any], *names: str) -> Any:
    """transformers 5 may write an attribute under its mapped name; the first one present counts."""
    return next((config[name] for name in names if config.get(name)), None)


def _moe_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    dense = frozenset(config.get("mlp_only_layers") or ())
    step = config.get("decoder_sparse_step") or 1
    layers = range(config["num_hidden_layers"])
    return tuple(layer for layer in layers if layer not in dense and (layer + 1) % step == 0)
