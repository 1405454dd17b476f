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


def make_checkpoint(
    folder: Path, *, kind: str = "qwen3", seed: int = 0, max_shard_size: str = "1GB", **overrides: Any
) -> Path:
    """Saves a model of kind qwen2, qwen3 or qwen3_moe with random weights."""
    import transformers

    config_class, model_class, extra = {
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {}),
        "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM, _EXPERTS),
    }[kind]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**_COMMON, **extra, **overrides}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.to(torch.float32).save_pretrained(folder, max_shard_size=max_shard_size)
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
