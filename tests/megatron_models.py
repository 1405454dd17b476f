"""Tiny checkpoints from the real Hugging Face classes, and what those models say about token sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    # Larger than usual, so that log-probabilities differ clearly between tokens.
    "initializer_range": 0.1,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}


_LATENT: dict[str, Any] = {
    **_EXPERTS,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
}
_GLM: dict[str, Any] = {
    **_EXPERTS,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "attention_bias": True,
    "use_qk_norm": True,
    "partial_rotary_factor": 0.5,
    "n_group": 1,
    "topk_group": 1,
}
_MAMBA: dict[str, Any] = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 4,
    "ssm_state_size": 6,
    "conv_kernel": 4,
    "chunk_size": 8,
    "use_mamba_kernels": False,
    "n_routed_experts": 8,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 40,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
}
_OSS: dict[str, Any] = {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 48,
    "sliding_window": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_NEXT: dict[str, Any] = {
    **_EXPERTS,
    "shared_expert_intermediate_size": 40,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 4,
}
# What the class is called, and what its config has beyond the common parts.
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "qwen3_moe": ("Qwen3Moe", _EXPERTS),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}),
    "deepseek_v2": ("DeepseekV2", {**_LATENT, "q_lora_rank": None, "topk_method": "greedy", "n_group": 1}),
    "deepseek_v3": ("DeepseekV3", _LATENT),
    "glm": ("Glm4Moe", _GLM),
    "gpt_oss": ("GptOss", _OSS),
    "qwen3_next": ("Qwen3Next", _NEXT),
    "nemotron": ("NemotronH", {**_MAMBA, "hybrid_override_pattern": "M-M*"}),
    "nemotron_moe": ("NemotronH", {**_MAMBA, "hybrid_override_pattern": "ME*M-"}),
}


def small_config(kind: str) -> dict[str, Any]:
    return {**_COMMON, **_KINDS[kind][1]}


def make_checkpoint(
    folder: Path,
    *,
    kind: str = "qwen3",
    seed: int = 0,
    max_shard_size: str = "1GB",
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Path:
    """Saves a model of one of the kinds with random weights; biases, norms and buffers are random too."""
    import transformers

    name, _ = _KINDS[kind]
    config_class, model_class = getattr(transformers, f"{name}Config"), getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(seed)
    options = {**small_config(kind), **overrides}
    if "hybrid_override_pattern" in options:
        options["num_hidden_layers"] = len(options["hybrid_override_pattern"])
    if kind == "qwen3_next":
        kinds = ("linear_attention", "full_attention", "linear_attention")
        options["layer_types"] = [kinds[layer % 3] for layer in range(options["num_hidden_layers"])]
    model = model_class(config_class(**options))
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name or name.endswith(("bias", ".D", "A_log")):
                tensor.add_(torch.randn_like(tensor) * 0.1)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def checkpoint_tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def load_model(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def model_logprobs(model: Any, sequences: list[list[int]]) -> list[list[float]]:
    """The same quantity as `TrainingWorker.logprobs`, one unpadded sequence at a time."""
    found = []
    with torch.no_grad():
        for sequence in sequences:
            ids = torch.tensor([sequence])
            table = model(ids).logits[0, :-1].float().log_softmax(-1)
            found.append(table.gather(1, ids[0, 1:, None])[:, 0].tolist())
    return found


def train_model(model: Any, batches: list[list[list[int]]], *, learning_rate: float) -> list[float]:
    """Plain AdamW on the mean next-token cross entropy over all tokens of each batch; returns the losses."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        total = sum(len(sequence) - 1 for sequence in batch)
        value = 0.0
        for sequence in batch:
            ids = torch.tensor([sequence])
            logits = model(ids).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum") / total
            loss.backward()
            value += float(loss.detach())
        optimizer.step()
        losses.append(value)
    model.eval()
    return losses


def sequences(*, vocab: int, lengths: tuple[int, ...], seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (length,), generator=generator).tolist() for length in lengths]
