"""What the support matrix calls architectures and layouts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from support_records import supports

from refit_transport.layout.parallelism import MegatronParallelism
from refit_transport.layout.presets.vllm import EngineParallelism

# By the kinds of `megatron_models`.
_ARCHITECTURES = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE",
    "mixtral": "Mixtral",
    "deepseek_v2": "DeepSeek-V2",
    "deepseek_v3": "DeepSeek-V3",
    "glm": "GLM-4.5",
    "gpt_oss": "gpt-oss",
    "qwen3_next": "Qwen3-Next",
    "nemotron": "Nemotron-H",
    "nemotron_moe": "Nemotron-H with experts",
    "gemma": "Gemma 1",
}
# By the kinds of `targets/vllm_refits.py`.
_VLLM_KINDS = {
    "llama": "Llama",
    "llama of 5 layers": "Llama, 5 layers",
    "llama of 1003 rows": "Llama, vocabulary 1003",
    "llama with biases": "Llama with biases",
    "mistral": "Mistral",
    "qwen2 tied": "Qwen2, vocabulary 151, tied embeddings",
    "qwen3 tied": "Qwen3, tied embeddings",
    "qwen3 of one kv head": "Qwen3, 1 KV head",
    "qwen3 moe": "Qwen3-MoE",
    "qwen3 moe of 7 experts": "Qwen3-MoE, 7 experts, vocabulary 151",
    "qwen3 next": "Qwen3-Next",
    "qwen3 next with a drafter": "Qwen3-Next, with a drafter that isn't loaded",
    "mixtral": "Mixtral",
    "deepseek": "DeepSeek-V3",
    "deepseek with a drafter": "DeepSeek-V3, with a drafter that isn't loaded",
    "deepseek without q lora": "DeepSeek-V3, queries not compressed",
    "deepseek v2": "DeepSeek-V2",
    "glm": "GLM-4.5",
    "glm with a drafter": "GLM-4.5, with a drafter that isn't loaded",
    "gpt-oss": "gpt-oss",
    "nemotron dense": "Nemotron-H",
    "gemma text": "Gemma 3",
    "gemma of one kv head": "Gemma 3, 1 KV head, vocabulary 1003",
    "gemma 1": "Gemma 1",
    "gemma 2": "Gemma 2",
}
_SPECIAL = {
    "num_hidden_layers": "{} layers",
    "vocab_size": "vocabulary {}",
    "num_key_value_heads": "{} KV heads",
    "num_experts": "{} experts",
    "num_local_experts": "{} experts",
    "n_routed_experts": "{} experts",
    "hybrid_override_pattern": "layers {}",
    "tie_word_embeddings": "tied embeddings",
    "rope_parameters": "Llama 3's rotary scaling",
}


def architecture(kind: str, unusual: Mapping[str, Any]) -> str:
    """The family's name, and what of its config is unusual: "Llama, 5 layers, tied embeddings"."""
    special = (_SPECIAL[key].format(value) for key, value in unusual.items())
    return ", ".join((_ARCHITECTURES[kind], *special)).replace(" 1 KV heads", " 1 KV head")


def training_layout(cut: MegatronParallelism, *, ranks: int) -> str:
    """The sizes that say something, such as "TP2 EP2 ETP1"."""
    etp = cut.experts_over if cut.experts_over != cut.tensor else 0
    replicas = ranks // (cut.tensor * cut.pipeline)
    sizes = {"PP": cut.pipeline, "VPP": cut.virtual_pipeline, "EP": cut.expert}
    sizes |= {"DP": replicas} if cut.expert == 1 and not etp else {}
    named = [f"{name}{size}" for name, size in sizes.items() if size > 1] + ([f"ETP{etp}"] if etp else [])
    uneven = f", last stage of {cut.last_stage_layers}" if cut.last_stage_layers else ""
    tensor = [f"TP{cut.tensor}"] if cut.tensor > 1 or etp or not named else []
    return " ".join(tensor + named) + uneven


def serving_layout(cut: EngineParallelism) -> str:
    """The sizes that say something, such as "TP2 EP, 2 engines"."""
    sizes = [f"TP{cut.tensor}"] if cut.tensor > 1 or cut.pipeline == 1 else []
    sizes += [f"PP{cut.pipeline}"] if cut.pipeline > 1 else []
    sizes += ["EP"] if cut.expert > 1 else []
    return " ".join(sizes) + (f", {cut.data} engines" if cut.data > 1 else "")


def _named(kind: str, *, drafts: bool) -> str:
    name = _VLLM_KINDS[kind]
    return name.replace("with a drafter that isn't loaded", "with its drafter") if drafts else name


def vllm_rows(kinds: Iterable[str], *, ranks: int, plain: str = "1") -> list[pytest.MarkDecorator]:
    """A row for each kind, filled from a state dict on the ranks that serve it."""
    layouts = {"": f"TP{ranks}", "spread": f"TP{ranks} EP", "stages": f"PP{ranks}", "drafts": f"TP{ranks}, drafting"}
    kernels = ", stock kernels" if plain == "0" else ""
    source = f"state dict, rows over {ranks} ranks" if ranks > 1 else "state dict"
    return [
        supports(architecture=_named(name, drafts=spread == "drafts"), source=source, target=layouts[spread] + kernels)
        for name, _, spread in (kind.partition("/") for kind in kinds)
    ]
