"""A vLLM generation rank as a plain class: one process each; Ray (or a test) wraps it.

All ranks of an engine run the same calls side by side (`external_launcher`), because vLLM's own executors can't place
CPU workers through Ray. Environment variables of vLLM and of torch's launcher protocol are set here, before vLLM is
imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any

from refit_transport.cluster.generation_stages import prepare_stage
from refit_transport.cluster.sampling import SampleRequest, require_known, sample_of, vllm_parameters, vllm_prompt
from refit_transport.compatibility import require
from refit_transport.errors import SeamError, WorkerError
from refit_transport.rl.trajectories import Sample

if TYPE_CHECKING:
    import torch
    from vllm import LLM

    from refit_transport.verification import Comparison

ENGINE = "refit_transport"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How one vLLM engine is built. `plain_weights`: kernels on CPU compute with the parameters themselves."""

    model: str
    dtype: str = "float32"
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: bool = False
    max_model_len: int | None = None
    load_format: str = "auto"
    enforce_eager: bool = True
    gpu_memory_utilization: float = 0.5
    plain_weights: bool = True
    kv_cache_gib: int = 1


@dataclass(frozen=True, slots=True)
class RefitAddress:
    """Where a refit's rank 0 listens, and this group's place in it; the fields of the vLLM engine's init info.

    `secret` is the session's; `incarnation` tells a restarted group from the one before.
    """

    host: str
    port: int
    first_rank: int
    world_size: int
    timeout_s: float
    secret: str = field(repr=False)
    incarnation: int = 0


class GenerationWorker:
    """One rank of a vLLM engine. All ranks of the engine call each method together with equal arguments.

    Between `start_refit` and `finish_refit` the engine is fenced: it refuses to generate, and stays fenced when a refit
    fails, until a complete one. What `stage` began to receive doesn't fence it: the old weights are whole.
    """

    def __init__(
        self, *, rank: int, world_size: int, host: str, port: int, config: EngineConfig, node: str = ""
    ) -> None:
        self.rank, self._node = rank, node
        self._fenced = ""
        self._version = -1
        self._cached_tokens = 0
        os.environ.update(_launcher(rank, world_size, host, port) | engine_environment(config))
        self._llm = _engine(config)
        self._vocabulary = self._llm.model_config.get_vocab_size()
        self._llm.collective_rpc(prepare_stage)

    def join_refit(self, address: RefitAddress) -> None:
        """Joins the refit as this engine's ranks; collective over the whole refit."""
        self._llm.init_weight_transfer_engine({"init_info": {**asdict(address), "node": self._node}})

    def stage(self, version: int) -> None:
        """Begins to receive a version beside the weights that are served, and returns; for jobs that commit staged."""
        self._llm.collective_rpc(stage_weights, args=(version,))

    def start_refit(self) -> None:
        """Fences the engine and opens a refit."""
        self._fenced = "a refit is open"
        self._llm.start_weight_update()

    def receive(self, version: int) -> None:
        """Receives a weight version, or waits for what `stage` began; collective over the whole refit."""
        self._llm.update_weights({"update_info": {"version": version}})

    def finish_refit(self, version: int) -> None:
        """Serves the version that arrived: drops what was cached under the old one and lifts the fence."""
        self._llm.finish_weight_update(weight_version=str(version))
        if not self._llm.reset_prefix_cache():
            raise WorkerError("generation", self.rank, "finish_refit", "vLLM kept its prefix cache of the old weights")
        self._version, self._fenced = version, ""

    def compare(self) -> Comparison:
        """Compares what is served with what the sources hold now, between refits; collective over the whole refit."""
        found: list[Comparison] = self._llm.collective_rpc(compare_served)
        return found[0]

    def version(self) -> int:
        """The version that is served; -1 before the first refit."""
        return self._version

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability of each token given the ones before it: `len(sequence) - 1` numbers per sequence.

        Raises:
            WorkerError: the engine is fenced, or a prompt has a token that the model lacks.
        """
        from vllm import SamplingParams

        self._require_open("logprobs")
        require_known(sequences, self._vocabulary, "logprobs")
        wanted = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        outputs = self._llm.generate([vllm_prompt(sequence) for sequence in sequences], wanted, use_tqdm=False)
        return [
            [float(step[token].logprob) for token, step in zip(sequence[1:], output.prompt_logprobs[1:], strict=True)]
            for sequence, output in zip(sequences, outputs, strict=True)
        ]

    def generate(self, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> list[list[int]]:
        """Greedy continuations, as token ids.

        Raises:
            WorkerError: the engine is fenced, or a prompt has a token that the model lacks.
        """
        from vllm import SamplingParams

        self._require_open("generate")
        require_known(prompts, self._vocabulary, "generate")
        wanted = SamplingParams(max_tokens=max_tokens, temperature=0.0, detokenize=False)
        asked = [vllm_prompt(prompt) for prompt in prompts]
        outputs = self._llm.generate(asked, wanted, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        """Draws the responses as one batch; each depends on its own request and the weights only.

        Raises:
            WorkerError: the engine is fenced, or a prompt has a token that the model lacks.
        """
        self._require_open("sample")
        require_known((request.prompt for request in requests), self._vocabulary, "sample")
        outputs = self._llm.generate(
            [vllm_prompt(request.prompt) for request in requests],
            [vllm_parameters(request) for request in requests],
            use_tqdm=False,
        )
        self._cached_tokens = sum(output.num_cached_tokens or 0 for output in outputs)
        return [sample_of(request, output.outputs[0]) for request, output in zip(requests, outputs, strict=True)]

    def cached_prompt_tokens(self) -> int:
        """How many prompt tokens of the last `sample` came from the prefix cache."""
        return self._cached_tokens

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Copies of this rank's live parameters, by name: what is served, for comparisons."""
        [found] = self._llm.collective_rpc(live_parameters)
        return dict(found)

    def leave_refit(self) -> None:
        """Leaves the refit; the engine goes on with what it serves."""
        self._llm.shutdown_weight_transfer_engine()

    def shutdown(self) -> None:
        """Ends the engine and its process groups; the process may build another one afterwards."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self._fenced = "it was shut down"
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        cleanup_dist_env_and_memory()

    def _require_open(self, call: str) -> None:
        if self._fenced:
            reason = f"fenced: {self._fenced}; it serves again after a complete refit"
            raise WorkerError("generation", self.rank, call, reason)


def _launcher(rank: int, world_size: int, host: str, port: int) -> dict[str, str]:
    """Torch's launcher protocol, for the ranks of an engine that an outside launcher starts."""
    return {
        "RANK": str(rank),
        # Ray shows a worker its own GPU only.
        "LOCAL_RANK": "0" if _has_cuda() else str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }


def engine_environment(config: EngineConfig) -> dict[str, str]:
    """vLLM's own variables; to be set before vLLM is imported."""
    environment = {
        # The engine runs in the process of its rank, so that the ranks' calls meet.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if not _has_cuda():
        environment |= {
            "VLLM_CPU_KVCACHE_SPACE": str(config.kv_cache_gib),
            # Binding wants a NUMA node per rank.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "REFIT_TRANSPORT_VLLM_PLAIN_WEIGHTS": "1" if config.plain_weights else "0",
        }
    return environment


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _engine(config: EngineConfig) -> LLM:
    from vllm import LLM

    return LLM(**engine_options(config), distributed_executor_backend="external_launcher")


def engine_options(config: EngineConfig) -> dict[str, Any]:
    """vLLM's arguments for an engine that takes refits and samples as `sampling` says.

    Raises:
        MissingDependencyError, UnsupportedVersionError: there is no vLLM, or none that is supported.
    """
    require("vllm", needed_for="a generation worker")
    from vllm.config import WeightTransferConfig

    options: dict[str, Any] = {}
    if config.max_model_len is not None:
        options["max_model_len"] = config.max_model_len
    if not _has_cuda():
        # Where a step ends inside a prompt, vLLM 0.32 takes a seeded draw back as only GPUs' generators can.
        options["enable_chunked_prefill"] = False
    return options | {
        "model": config.model,
        "dtype": config.dtype,
        "load_format": config.load_format,
        "tensor_parallel_size": config.tensor_parallel,
        "pipeline_parallel_size": config.pipeline_parallel,
        "enable_expert_parallel": config.expert_parallel,
        "enforce_eager": config.enforce_eager,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "skip_tokenizer_init": True,
        "weight_transfer_config": WeightTransferConfig(backend=ENGINE),
        "logprobs_mode": "processed_logprobs",
        "seed": 0,
    }


def compare_served(worker: Any) -> Comparison:
    """A vLLM worker's part in a comparison of both sides."""
    found: Comparison = _own_engine(worker).compare()
    return found


def stage_weights(worker: Any, version: int) -> None:
    """Has a vLLM worker begin to receive a version."""
    _own_engine(worker).stage(version)


def _own_engine(worker: Any) -> Any:
    engine: Any = getattr(worker, "weight_transfer_engine", None)
    if not hasattr(engine, "stage"):
        raise SeamError("vllm", metadata.version("vllm"), "Worker.weight_transfer_engine", "this package's engine")
    return engine


def live_parameters(worker: Any) -> dict[str, torch.Tensor]:
    """Copies of a vLLM worker's parameters."""
    model = worker.model_runner.get_model()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
