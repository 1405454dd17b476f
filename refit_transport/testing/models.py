"""Tiny random models, saved as ordinary Hugging Face checkpoint folders.

The folder holds `config.json` and safetensors with the names that checkpoints have on disk. There is no tokenizer: run
vLLM with `skip_tokenizer_init=True` and token ids. Needs `transformers` and `safetensors`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from refit_transport.config.tiny_models import TINY_MODELS, TinyKind, tiny_config

_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def save_tiny_model(
    folder: Path, *, kind: TinyKind, seed: int = 0, max_shard_size: str = "1GB", **overrides: Any
) -> Path:
    """Writes a random checkpoint of one of the kinds of `config.tiny_models` and returns its folder.

    `overrides` are fields of the Hugging Face config (`vocab_size=250`, `dtype="bfloat16"`, ...). The same seed and
    config give the same weights; every weight is random, norms and biases too, so that a tensor in the wrong place
    shows. Matrices have the deviation `initializer_range`.
    """
    import transformers

    shape, config = TINY_MODELS[kind], {**_NO_TOKENS, **tiny_config(kind, overrides)}
    dtype = getattr(torch, str(config.setdefault("dtype", "float32")))
    config_class, model_class = getattr(transformers, f"{shape.name}Config"), getattr(transformers, shape.architecture)
    with torch.random.fork_rng(devices=[]):
        model = model_class(config_class(**config)).to(dtype)
    generator, deviation = torch.Generator().manual_seed(seed), float(config["initializer_range"])
    filled: set[int] = set()
    for name, tensor in sorted(model.state_dict().items()):
        # Tied weights are one tensor under two names.
        if tensor.data_ptr() not in filled:
            filled.add(tensor.data_ptr())
            tensor.copy_(_random(name, tuple(tensor.shape), deviation, generator))
    # It would draw on the terminal.
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def _random(name: str, shape: tuple[int, ...], deviation: float, generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(shape, generator=generator)
    if name.endswith("bias"):
        return 0.1 * values
    return 1 + 0.1 * values if len(shape) < 2 else deviation * values
