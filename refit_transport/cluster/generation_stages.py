"""What vLLM's external launcher lacks with pipeline stages: log-probabilities of prompts on every rank.

Each rank has a scheduler of its own, and vLLM keeps them alike by sending the last stage's logits to all stages. For
the prompt's tokens it doesn't: an earlier stage would take its own hidden states for the last ones, and fail.
"""

from __future__ import annotations

from importlib import metadata
from types import MethodType
from typing import Any

from refit_transport.errors import SeamError

_METHOD = "_get_prompt_logprobs_dict"


def share_prompt_logprobs(worker: Any) -> None:
    """Gives every stage what the last one computes for prompts. Runs in each vLLM worker; idempotent.

    Raises:
        SeamError: vLLM isn't as we know it.
    """
    runner = worker.model_runner
    for name in (_METHOD, "num_prompt_logprobs"):
        if not hasattr(runner, name):
            raise SeamError("vllm", metadata.version("vllm"), f"ModelRunner.{name}", "how it scores prompts")
    setattr(runner, _METHOD, MethodType(_of_last_stage, runner))


def _of_last_stage(runner: Any, hidden_states: Any, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
    """Stands in for vLLM's method, on all ranks of a stage group together."""
    from vllm.distributed.parallel_state import get_pp_group

    waiting: dict[str, int] = runner.num_prompt_logprobs
    if not waiting:
        return {}
    stages, found = get_pp_group(), None
    if stages.is_last_rank:
        found = getattr(type(runner), _METHOD)(runner, hidden_states, num_scheduled_tokens)
    found = stages.broadcast_object(found, src=stages.world_size - 1)
    for request in found:
        waiting.pop(request, None)
    return dict(found)
