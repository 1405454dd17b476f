"""The sizes of a model that its parallel sizes must divide, read from a Hugging Face config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of one model; `experts` and `expert_width` are 0 for a dense one."""

    layers: int
    heads: int
    kv_heads: int
    width: int
    ffn_width: int
    experts: int
    expert_width: int
    vocab: int

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelShape:
        """
        Raises:
            KeyError: a size that every language model has isn't there.

        >>> sizes = dict(num_hidden_layers=2, num_attention_heads=4, hidden_size=64, intermediate_size=96)
        >>> ModelShape.from_hf(sizes | {"vocab_size": 100}).kv_heads
        4
        """
        config = config.get("text_config") or config
        experts = next((config[key] for key in _EXPERT_COUNT_KEYS if config.get(key)), 0)
        return cls(
            layers=int(config["num_hidden_layers"]),
            heads=int(config["num_attention_heads"]),
            kv_heads=int(config.get("num_key_value_heads") or config["num_attention_heads"]),
            width=int(config["hidden_size"]),
            ffn_width=int(config.get("intermediate_size") or 0),
            experts=int(experts),
            expert_width=int(config.get("moe_intermediate_size") or config.get("intermediate_size") or 0)
            * bool(experts),
            vocab=int(config["vocab_size"]),
        )

    @classmethod
    def from_folder(cls, folder: Path) -> ModelShape:
        """
        Raises:
            OSError: there is no config.json to read.
            ValueError: it isn't a JSON object.
            KeyError: a size is missing from it.
        """
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("is not a JSON object")
        return cls.from_hf(config)


_EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
