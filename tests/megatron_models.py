"""Tiny checkpoints from the real Hugging Face classes, and what those models say about token sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from refit_transport.config.tiny_models import TinyKind, tiny_config
from refit_transport.testing.models import save_tiny_model

# Smaller still than what vLLM takes.
_SIZES: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "intermediate_size": 96,
}
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 48}
_LATENT: dict[str, Any] = {
    **_EXPERTS,
    "head_dim": 8,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
_MAMBA: dict[str, Any] = {"mamba_head_dim": 8, "ssm_state_size": 6}
_NEXT: dict[str, Any] = {
    **_EXPERTS,
    "shared_expert_intermediate_size": 40,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
}
# What the package calls a kind, and what is smaller here.
_KINDS: dict[str, tuple[TinyKind, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {"hidden_size": 64}),
    "qwen3": ("dense", {}),
    "qwen3_moe": ("moe", _EXPERTS),
    "mixtral": ("mixtral", {}),
    "deepseek_v2": ("deepseek_v2", _LATENT),
    "deepseek_v3": ("deepseek_v3", _LATENT),
    "glm": ("glm", _EXPERTS),
    "gpt_oss": ("gpt_oss", {"intermediate_size": 48}),
    "qwen3_next": ("qwen3_next", _NEXT),
    "nemotron": ("nemotron_h", _MAMBA),
    "nemotron_moe": ("nemotron_h_moe", {**_MAMBA, **_EXPERTS, "moe_shared_expert_intermediate_size": 40}),
    "gemma": ("gemma", {}),
}


def small_config(kind: str) -> dict[str, Any]:
    """The config of a kind as `make_checkpoint` makes it."""
    name, smaller = _KINDS[kind]
    return tiny_config(name, {**_SIZES, **smaller})


def make_checkpoint(folder: Path, *, kind: str = "qwen3", **overrides: Any) -> Path:
    """Saves a model of one of the kinds with random weights; biases, norms and buffers are random too."""
    name, smaller = _KINDS[kind]
    options = {**_SIZES, **smaller, **overrides}
    if kind == "qwen3_next":
        kinds = ("linear_attention", "full_attention", "linear_attention")
        options["layer_types"] = [kinds[layer % 3] for layer in range(options["num_hidden_layers"])]
    return save_tiny_model(folder, kind=name, **options)


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
