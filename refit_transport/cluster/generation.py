"""A vLLM generation rank as a plain class: one process each; Ray (or a test) wraps it.

All ranks of an engine run the same calls side by side (`external_launcher`), because vLLM's own executors can't place
CPU workers through Ray. Environment variables of vLLM and of torch's launcher protocol are set here, before vLLM is
imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from refit_transport.cluster.generation_stages import prepare_stage
from refit_transport.errors import SeamError, WorkerError

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
    """Where a refit's rank 0 listens, and this engine's place in it; the fields of the vLLM engine's init info."""

    host: str
    port: int
    first_rank: int
    world_size: int
    timeout_s: float


class GenerationWorker:
    """One rank of a vLLM engine. All ranks of the engine call each method together with equal arguments.

    Between `start_refit` and `finish_refit` the engine is fenced: it refuses to generate, and stays fenced when a refit
    fails, until a complete one.
    """

    def __init__(
        self, *, rank: int, world_size: int, host: str, port: int, config: EngineConfig, node: str = ""
    ) -> None:
        self.rank, self._node = rank, node
        self._fenced = ""
        self._version = -1
        os.environ.update(_environment(rank, world_size, host, port, config))
        self._llm = _engine(config)
        self._llm.collective_rpc(prepare_stage)

    def join_refit(self, address: RefitAddress) -> None:
        """Joins the refit as this engine's ranks; collective over the whole refit."""
        self._llm.collective_rpc(_end_open_update)
        self._llm.init_weight_transfer_engine({"init_info": {**asdict(address), "node": self._node}})

    def start_refit(self) -> None:
        """Fences the engine and opens a refit."""
        self._fenced = "a refit is open"
        self._llm.start_weight_update()

    def receive(self, version: int) -> None:
        """Receives a weight version; collective over the whole refit."""
        self._llm.update_weights({"update_info": {"version": version}})

    def finish_refit(self, version: int) -> None:
        """Serves the version that arrived: drops what was cached under the old one and lifts the fence."""
        self._llm.finish_weight_update(weight_version=str(version))
        if not self._llm.reset_prefix_cache():
            raise WorkerError("generation", self.rank, "finish_refit", "vLLM kept its prefix cache of the old weights")
        self._version, self._fenced = version, ""

    def compare(self) -> Comparison:
        """Compares what is served with what the sources hold now, between refits; collective over the whole refit."""
        found: list[Comparison] = self._llm.collective_rpc(_compare)
        return found[0]

    def version(self) -> int:
        """The version that is served; -1 before the first refit."""
        return self._version

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability of each token given the ones before it: `len(sequence) - 1` numbers per sequence.

        Raises:
            WorkerError: the engine is fenced.
        """
        from vllm import SamplingParams

        self._require_open("logprobs")
        wanted = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        outputs = self._llm.generate(
            [{"prompt_token_ids": list(sequence)} for sequence in sequences], wanted, use_tqdm=False
        )
        return [
            [float(step[token].logprob) for token, step in zip(sequence[1:], output.prompt_logprobs[1:], strict=True)]
            for sequence, output in zip(sequences, outputs, strict=True)
        ]

    def generate(self, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> list[list[int]]:
        """Greedy continuations, as token ids.

        Raises:
            WorkerError: the engine is fenced.
        """
        from vllm import SamplingParams

        self._require_open("generate")
        wanted = SamplingParams(max_tokens=max_tokens, temperature=0.0, detokenize=False)
        outputs = self._llm.generate([{"prompt_token_ids": list(p)} for p in prompts], wanted, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Copies of this rank's live parameters, by name: what is served, for comparisons."""
        [found] = self._llm.collective_rpc(_parameters)
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


def _environment(rank: int, world_size: int, host: str, port: int, config: EngineConfig) -> dict[str, str]:
    launcher = {
        "RANK": str(rank),
        # Ray shows a worker its own GPU only.
        "LOCAL_RANK": "0" if _has_cuda() else str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        # The engine runs in this process, so that the ranks' calls meet.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if not _has_cuda():
        launcher |= {
            "VLLM_CPU_KVCACHE_SPACE": str(config.kv_cache_gib),
            # Binding wants a NUMA node per rank.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "REFIT_TRANSPORT_VLLM_PLAIN_WEIGHTS": "1" if config.plain_weights else "0",
        }
    return launcher


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _engine(config: EngineConfig) -> LLM:
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    options: dict[str, Any] = {}
    if config.max_model_len is not None:
        options["max_model_len"] = config.max_model_len
    return LLM(
        model=config.model,
        dtype=config.dtype,
        load_format=config.load_format,
        tensor_parallel_size=config.tensor_parallel,
        pipeline_parallel_size=config.pipeline_parallel,
        enable_expert_parallel=config.expert_parallel,
        distributed_executor_backend="external_launcher",
        enforce_eager=config.enforce_eager,
        gpu_memory_utilization=config.gpu_memory_utilization,
        skip_tokenizer_init=True,
        weight_transfer_config=WeightTransferConfig(backend=ENGINE),
        seed=0,
        **options,
    )


def _end_open_update(worker: Any) -> None:
    """A refit that failed elsewhere leaves vLLM's update open, and vLLM would refuse to start the next one."""
    if not hasattr(worker, "_weight_update_active"):
        expected = "the flag of an open weight update"
        raise SeamError("vllm", metadata.version("vllm"), "Worker._weight_update_active", expected)
    worker._weight_update_active = False


def _compare(worker: Any) -> Comparison:
    engine: Any = getattr(worker, "weight_transfer_engine", None)
    if not hasattr(engine, "compare"):
        raise SeamError("vllm", metadata.version("vllm"), "Worker.weight_transfer_engine", "this package's engine")
    found: Comparison = engine.compare()
    return found


def _parameters(worker: Any) -> dict[str, torch.Tensor]:
    model = worker.model_runner.get_model()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
