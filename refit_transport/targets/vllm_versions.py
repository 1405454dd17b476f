"""What vLLM's versions have under different names, or not at all; the rest of the target doesn't know of versions.

`SKIP_LOAD_TENSORS`: what no loader fills. `is_deferred_attention_layer(module)`: whether it derives tensors after all
others are loaded. `disable_mtp_completeness_check()`: a drafter's loader may be given any part of the drafter.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import nn
from vllm.model_executor.model_loader.reload import meta

__all__ = ["SKIP_LOAD_TENSORS", "SKIP_TENSORS", "disable_mtp_completeness_check", "is_deferred_attention_layer"]

SKIP_TENSORS = frozenset(meta.SKIP_TENSORS)
# 0.25 has one set for both.
SKIP_LOAD_TENSORS = frozenset(getattr(meta, "SKIP_LOAD_TENSORS", SKIP_TENSORS))

try:
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
except ImportError:
    from vllm.model_executor.layers.attention import Attention, MLAAttention, MMEncoderAttention

    def is_deferred_attention_layer(layer: nn.Module) -> bool:
        """By 0.25's own list, in `process_weights_after_loading` of its model loader."""
        known = (Attention, MLAAttention, MMEncoderAttention)
        return isinstance(layer, known) and hasattr(layer, "process_weights_after_loading")


try:
    from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
except ImportError:

    def disable_mtp_completeness_check() -> Any:
        """0.25 has no such check."""
        return nullcontext()
