"""Actors of the double, with the attributes that NeMo RL's have and a real engine or model behind them.

Driver and workers are started with this package and the tests' folder on PYTHONPATH.
"""

import os

from refit_jobs import TIMEOUT_S

from refit_transport.cluster.generation import EngineConfig, engine_environment
from refit_transport.cluster.training import TrainingWorker
from refit_transport.layout.parallelism import MegatronParallelism


class _PolicyWorker:
    def shutdown(self):
        return True

    def refuse(self):
        """Makes this rank's next part in a refit fail."""
        worker = self._refit_transport_worker

        def send(version):
            del worker.send
            raise RuntimeError("a refusal")

        worker.send = send

    def seed(self, seed):
        """Other weights, the same on every layout."""
        self.trainer.set_weights(seed)

    def logprobs(self, sequences):
        return self.trainer.logprobs(sequences)


class MegatronPolicyWorker(_PolicyWorker):
    """`trainer` isn't NeMo RL's: it builds and changes the model."""

    def __init__(self, config, rank, world_size, *, is_model_owner):
        self.cfg, self.rank = config, rank
        self.trainer = TrainingWorker(
            rank=rank,
            world_size=world_size,
            init_method=config["double"]["init_method"],
            checkpoint=config["model_name"],
            parallelism=MegatronParallelism(**config["double"]["parallelism"]),
            timeout_s=TIMEOUT_S,
        )
        chunks = self.trainer._chunks
        self.model = list(chunks) if len(chunks) > 1 else chunks[0]


class DTensorPolicyWorker(_PolicyWorker):
    """A transformers module under FSDP2."""

    def __init__(self, config, rank, world_size, *, is_model_owner):
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from transformers import AutoModelForCausalLM

        self.cfg, self.rank = config, rank
        dist.init_process_group("gloo", init_method=config["double"]["init_method"], rank=rank, world_size=world_size)
        self.model = AutoModelForCausalLM.from_pretrained(config["model_name"], dtype=torch.float32)
        mesh = init_device_mesh("cpu", (world_size,))
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def seed(self, seed):
        import torch

        with torch.no_grad():
            # Reading the state dict shards again what a forward pass has left whole.
            for index, parameter in enumerate(self.model.state_dict().values()):
                parameter.to_local().mul_(1 + 0.05 * ((seed + index) % 5))

    def logprobs(self, sequences):
        import torch

        found = []
        with torch.no_grad():
            for sequence in sequences:
                logits = self.model(torch.tensor([list(sequence)])).logits.float().log_softmax(-1)
                found.append([float(logits[0, place, token]) for place, token in enumerate(sequence[1:])])
        return found


def _options(config):
    """As NeMo RL has it: vLLM isn't told of any transfer of weights."""
    vllm = config["vllm_cfg"]
    os.environ.update(engine_environment(EngineConfig(config["model_name"])))
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    return {
        "model": config["model_name"],
        "dtype": vllm["precision"],
        "load_format": vllm["load_format"],
        "tensor_parallel_size": vllm["tensor_parallel_size"],
        "max_model_len": 64,
        "enforce_eager": True,
        "gpu_memory_utilization": 0.5,
        "skip_tokenizer_init": True,
        "seed": 0,
    }


class VllmGenerationWorker:
    def __init__(self, config, rank, world_size, *, is_model_owner):
        self.cfg, self.llm = config, None
        if is_model_owner:
            options = _options(config)
            from vllm import LLM

            self.llm = LLM(**options)

    def generate(self, prompts, max_tokens):
        from vllm import SamplingParams

        wanted = SamplingParams(max_tokens=max_tokens, temperature=0.0, detokenize=False)
        outputs = self.llm.generate([{"prompt_token_ids": list(p)} for p in prompts], wanted, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def logprobs(self, sequences):
        from vllm import SamplingParams

        wanted = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        outputs = self.llm.generate([{"prompt_token_ids": list(s)} for s in sequences], wanted, use_tqdm=False)
        return [_scores(sequence, output) for sequence, output in zip(sequences, outputs, strict=True)]

    def shutdown(self):
        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()
        return True


class VllmAsyncGenerationWorker:
    def __init__(self, config, rank, world_size, *, is_model_owner):
        self.cfg, self.llm = config, None
        if is_model_owner:
            options = _options(config)
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**options))

    async def logprobs(self, sequences):
        from vllm import SamplingParams

        wanted = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        found = []
        for number, sequence in enumerate(sequences):
            prompt = {"prompt_token_ids": list(sequence)}
            async for output in self.llm.generate(prompt, wanted, request_id=f"{id(sequences)}-{number}"):
                last = output
            found.append(_scores(sequence, last))
        return found

    async def shutdown(self):
        if self.llm is not None:
            self.llm.shutdown()
        return True


def _scores(sequence, output):
    return [float(step[token].logprob) for token, step in zip(sequence[1:], output.prompt_logprobs[1:], strict=True)]
