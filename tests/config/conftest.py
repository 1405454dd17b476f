"""A valid configuration, and what the checker says about changed ones."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from refit_transport.config.load import config_from
from refit_transport.config.schema import RefitConfig
from refit_transport.errors import ConfigError, UnknownTransportError, Violation

MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "vocab_size": 256,
}
REMOVED = "<removed>"

Check = Callable[[Mapping[str, Any]], tuple[Violation, ...]]


def know_two(name: str | None) -> object:
    if name not in (None, "nccl_reshard", "gather_broadcast", "their.module:Class"):
        raise UnknownTransportError(name, ("nccl_reshard", "gather_broadcast"), "did you mean 'nccl_reshard'?")
    return name


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL))
    return folder


@pytest.fixture
def document(model_folder: Path) -> dict[str, Any]:
    """MoE, TP2 EP2 DP2 on four training ranks, two TP2 engines on four generation ranks."""
    return {
        "policy": {
            "model_name": str(model_folder),
            "precision": "float32",
            "megatron_cfg": {
                "enabled": True,
                "tensor_model_parallel_size": 2,
                "expert_model_parallel_size": 2,
                "expert_tensor_parallel_size": 1,
                "sequence_parallel": True,
            },
            "generation": {
                "backend": "vllm",
                "colocated": {"enabled": False, "resources": {"gpus_per_node": 4, "num_nodes": None}},
                "vllm_cfg": {"tensor_parallel_size": 2, "max_model_len": 64},
                "refit_transport": "nccl_reshard",
            },
        },
        "cluster": {"num_nodes": 1, "gpus_per_node": 8},
    }


def changed(document: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with some dotted keys set or removed."""
    result = copy.deepcopy(dict(document))
    for path, value in changes.items():
        *sections, key = path.split(".")
        inner = result
        for section in sections:
            inner = inner.setdefault(section, {})
        if value == REMOVED:
            del inner[key]
        else:
            inner[key] = value
    return result


@pytest.fixture
def change() -> Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]:
    return changed


@pytest.fixture
def accept(document: dict[str, Any]) -> Callable[[Mapping[str, Any]], RefitConfig]:
    return lambda changes: config_from(changed(document, changes), resolve_transport=know_two)


@pytest.fixture
def violations(accept: Callable[[Mapping[str, Any]], RefitConfig]) -> Check:
    def check(changes: Mapping[str, Any]) -> tuple[Violation, ...]:
        try:
            accept(changes)
        except ConfigError as error:
            return error.violations
        return ()

    return check
