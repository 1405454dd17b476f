"""What a sampler is asked, what vLLM is told for it, and what its answer means; which engine answers what.

Log-probabilities are *processed* ones: those of the distribution that was sampled, softmax(logits / temperature). A
trainer compares with them when it divides its own logits by the same temperature.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

from refit_transport.errors import WorkerError
from refit_transport.rl.trajectories import Sample

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import CompletionOutput

# vLLM samples at this temperature when a lower one is asked for.
_COLDEST = 0.01


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One response to one prompt.

    `seed` alone (with prompt and weights) decides what is drawn; see `rl.seeds.sample_seed`. `group` is the prompt's
    index in its step. `temperature` 0 is greedy, with the log-probabilities of temperature 1. Generation stops after a
    token of `stop_ids`, which belongs to the response, after `max_tokens`, or when the engine's `max_model_len` is
    reached.

    Raises:
        ValueError: no prompt, or a number out of its range.
    """

    prompt: tuple[int, ...]
    seed: int
    group: int
    max_tokens: int
    temperature: float = 1.0
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("a request needs a prompt of at least one token (got none)")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1 (got {self.max_tokens})")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed must be in 0 .. 2**63 - 1 (got {self.seed}); rl.seeds makes such seeds")
        if self.temperature != 0 and not _COLDEST <= self.temperature < math.inf:
            raise ValueError(
                f"temperature must be 0 (greedy) or at least {_COLDEST}, which vLLM samples at when it is lower "
                f"(got {self.temperature})"
            )

    @property
    def cost(self) -> int:
        """The most tokens that it can occupy."""
        return len(self.prompt) + self.max_tokens


def require_known(prompts: Iterable[Sequence[int]], vocabulary: int, call: str) -> None:
    """Proves that a model of this many tokens has those of the prompts. Without a tokenizer vLLM doesn't look.

    Raises:
        WorkerError: it lacks one, with which vLLM's engine would end.
    """
    for prompt in prompts:
        unknown = [token for token in prompt if not 0 <= token < vocabulary]
        if unknown:
            reason = (
                f"a prompt has token {unknown[0]}, and the model has tokens 0 to {vocabulary - 1}: prompts must be "
                "made for the vocabulary of policy.model_name"
            )
            raise WorkerError("generation", -1, call, reason)


def vllm_prompt(tokens: Sequence[int]) -> dict[str, Any]:
    """A prompt as vLLM takes it where nothing is left to prepare."""
    return {"type": "token", "prompt_token_ids": list(tokens)}


def vllm_parameters(request: SampleRequest, **more: Any) -> SamplingParams:
    """vLLM's parameters: only the request's own stop tokens stop, whatever the checkpoint's configuration says."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=request.temperature,
        seed=request.seed,
        max_tokens=request.max_tokens,
        stop_token_ids=list(request.stop_ids),
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        skip_clone=True,
        **more,
    )


def sample_of(request: SampleRequest, completion: CompletionOutput) -> Sample:
    """vLLM's finished answer, with the version of the weights that chose each token.

    Raises:
        WorkerError: it was not finished by a stop token or the length, or lacks log-probabilities or versions.
    """
    reason, found = completion.finish_reason, completion.logprobs
    if reason not in ("stop", "length") or found is None or completion.weight_versions is None:
        raise WorkerError("generation", -1, "sample", f"vLLM's answer is unusable (finish reason {reason!r})")
    finished: Literal["stop", "length"] = "stop" if reason == "stop" else "length"
    response = tuple(completion.token_ids)
    return Sample(
        prompt=request.prompt,
        response=response,
        generation_logprobs=tuple(float(step[token].logprob) for token, step in zip(response, found, strict=True)),
        versions=tuple(
            _version(span.version) for span in completion.weight_versions for _ in range(span.start, span.end)
        ),
        seed=request.seed,
        group=request.group,
        finished=finished,
    )


def _version(label: str) -> int:
    """Weights as loaded have the version -1, as everywhere."""
    return -1 if label == "default" else int(label)


def split_over_engines(requests: Sequence[SampleRequest], engines: int) -> list[list[int]]:
    """The indices of the requests that each engine takes, in order.

    Each engine gets neighbours of nearly equal cost in all: at most one request more or less than its share. So all but
    `engines - 1` prompts stay whole and share their prefix.

    >>> requests = [SampleRequest((1, 2), seed, seed // 4, max_tokens=8) for seed in range(12)]
    >>> split_over_engines(requests, 3)
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]

    Raises:
        ValueError: no engine.
    """
    if engines < 1:
        raise ValueError(f"requests need at least one engine (got {engines})")
    shares: list[list[int]] = [[] for _ in range(engines)]
    ends = list(accumulate(request.cost for request in requests))
    for index, (request, end) in enumerate(zip(requests, ends, strict=True)):
        # Twice the middle of the request's cost, so that all is whole numbers.
        middle = 2 * end - request.cost
        shares[middle * engines // (2 * ends[-1])].append(index)
    return shares
