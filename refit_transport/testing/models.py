"""Tiny random models, saved as ordinary Hugging Face checkpoint folders.

The folder holds `config.json` and `model.safetensors` with the names that checkpoints have on disk (one tensor per
expert). There is no tokenizer: run vLLM with `skip_tokenizer_init=True` and token ids. Needs `transformers` and
`safetensors`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import torch

Kind = Literal["dense", "moe"]

_SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "dtype": "float32",
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}
_FUSED = re.compile(r"^(?P<prefix>.*\.experts)\.(?P<projection>gate_up_proj|down_proj)$")


def save_tiny_model(folder: Path, *, kind: Kind, seed: int = 0, **overrides: Any) -> Path:
    """Writes a random Qwen3 ("dense") or Qwen3-MoE ("moe") checkpoint and returns its folder.

    `overrides` are fields of the Hugging Face config (`vocab_size=250`, `dtype="bfloat16"`, ...). The same seed and
    config give the same weights; every weight is random, norms too, so that a tensor in the wrong place shows.
    """
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    config: Any
    if kind == "dense":
        config = Qwen3Config(**{**_SHAPE, **overrides}, architectures=["Qwen3ForCausalLM"])
    else:
        config = Qwen3MoeConfig(**{**_SHAPE, **_EXPERTS, **overrides}, architectures=["Qwen3MoeForCausalLM"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in model.state_dict().items():
        shapes |= checkpoint_shapes(name, tuple(tensor.shape))
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    generator = torch.Generator().manual_seed(seed)
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else getattr(torch, str(config.dtype))
    tensors = {name: _random(shapes[name], generator).to(dtype) for name in sorted(shapes)}
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def checkpoint_shapes(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The tensors on disk for one of the model in memory, where the experts of a layer are fused.

    >>> checkpoint_shapes("m.experts.gate_up_proj", (1, 8, 5))
    {'m.experts.0.gate_proj.weight': (4, 5), 'm.experts.0.up_proj.weight': (4, 5)}
    """
    match = _FUSED.match(name)
    if match is None:
        return {name: shape}
    experts, rows, columns = shape
    names = ("gate_proj", "up_proj") if match["projection"] == "gate_up_proj" else ("down_proj",)
    return {
        f"{match['prefix']}.{expert}.{part}.weight": (rows // len(names), columns)
        for expert in range(experts)
        for part in names
    }


def _random(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(shape, generator=generator)
    return 1 + 0.1 * values if len(shape) < 2 else 0.08 * values
