"""What vLLM 0.32 lacks for engines of several pipeline stages under its external launcher."""

from __future__ import annotations

from importlib import metadata
from types import MethodType
from typing import Any

from refit_transport.errors import SeamError

_PROMPTS = "_get_prompt_logprobs_dict"


def prepare_stage(worker: Any) -> None:
    """Makes a vLLM worker's model runner ready for stages. Idempotent; does nothing for one stage.

    Raises:
        SeamError: vLLM isn't as we know it.
    """
    from vllm.distributed.parallel_state import get_pp_group

    runner, stages = worker.model_runner, get_pp_group()
    if stages.world_size == 1:
        return
    for name in (_PROMPTS, "num_prompt_logprobs", "input_batch", "intermediate_tensors", "max_num_tokens"):
        if not hasattr(runner, name):
            raise SeamError("vllm", metadata.version("vllm"), f"ModelRunner.{name}", "what stages need")
    if not stages.is_first_rank and runner.intermediate_tensors is None:
        _allocate_inputs(runner)
    setattr(runner, _PROMPTS, MethodType(_prompts_of_last_stage, runner))


def _allocate_inputs(runner: Any) -> None:
    """The buffers for what the stage before sends: vLLM allocates them while warming up, which an eager CPU skips."""
    runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
        batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
    )


def _prompts_of_last_stage(runner: Any, hidden_states: Any, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
    """Log-probabilities of prompts, on every rank of the stages together.

    Each rank has a scheduler of its own, and vLLM keeps them alike by sending the last stage's logits to all. For the
    prompt's tokens it doesn't: an earlier stage would take its own hidden states for the last ones.
    """
    from vllm.distributed.parallel_state import get_pp_group

    waiting: dict[str, int] = runner.num_prompt_logprobs
    if not waiting:
        return {}
    stages, places, by_place = get_pp_group(), runner.input_batch.req_id_to_index, None
    if stages.is_last_rank:
        found = getattr(type(runner), _PROMPTS)(runner, hidden_states, num_scheduled_tokens)
        by_place = {places[request]: logprobs for request, logprobs in found.items()}
    # Each rank has its own names for the requests; their places in the batch are the same.
    by_place = stages.broadcast_object(by_place, src=stages.world_size - 1)
    shared = {request: by_place[place] for request, place in places.items() if place in by_place}
    for request in shared:
        waiting.pop(request, None)
    return shared
