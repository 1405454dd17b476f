"""What transformers computes from a checkpoint: the oracle for samplers' log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch


def token_logprobs(
    folder: Path, checkpoint: Mapping[str, np.ndarray], sequences: Sequence[Sequence[int]], *, temperature: float = 1.0
) -> list[np.ndarray]:
    """Of each sequence, the log-probabilities [length - 1, vocabulary] of every next token, in fp32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).eval()
    model.load_state_dict({name: torch.from_numpy(array.astype(np.float32)) for name, array in checkpoint.items()})
    with torch.no_grad():
        return [
            torch.log_softmax(model(torch.tensor([list(tokens)])).logits[0, :-1] / temperature, dim=-1).numpy()
            for tokens in sequences
        ]
