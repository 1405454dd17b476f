"""A Ray actor that serves: vLLM's own asynchronous engine, as its examples make one."""

from __future__ import annotations

from typing import Any

from vllm import AsyncEngineArgs, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor import Executor


class ServingActor(AsyncLLM):
    def __init__(self, model: str, tensor: int) -> None:
        options: dict[str, Any] = {"max_model_len": 64, "enforce_eager": True, "dtype": "float32"}
        config = AsyncEngineArgs(
            model=model,
            tensor_parallel_size=tensor,
            distributed_executor_backend="mp",
            weight_transfer_config=WeightTransferConfig(backend="refit_transport"),
            skip_tokenizer_init=True,
            **options,
        ).create_engine_config()
        super().__init__(vllm_config=config, executor_class=Executor.get_class(config), log_stats=False)

    async def pause(self) -> None:
        await self.pause_generation(mode="keep", clear_cache=False)

    async def go_on(self) -> None:
        assert await self.reset_prefix_cache(reset_running_requests=True)
        await self.resume_generation()

    async def complete(self, prompt: list[int], length: int) -> tuple[list[int], list[float]]:
        """Greedy tokens and their log-probabilities."""
        wanted = SamplingParams(max_tokens=length, temperature=0.0, logprobs=0, ignore_eos=True, detokenize=False)
        found = None
        async for output in self.generate({"prompt_token_ids": prompt}, wanted, "asked"):
            found = output.outputs[0]
        assert found is not None
        tokens = list(found.token_ids)
        return tokens, [float(step[token].logprob) for token, step in zip(tokens, found.logprobs, strict=True)]
