"""Small real jobs on warm Ray actors: what the end-to-end tests start, and the oracle that they compare with."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron_export import export
from support_names import architecture, serving_layout, training_layout

from refit_transport.cluster.async_generation import AsyncGenerationWorker, KvCache
from refit_transport.cluster.generation import EngineConfig, GenerationWorker
from refit_transport.cluster.network import LOOPBACK, PortRange
from refit_transport.cluster.policy import PolicyWorker
from refit_transport.cluster.synchronizer import RefitSynchronizer
from refit_transport.cluster.workers import Pending, WorkerGroup, collect
from refit_transport.config.checkpoint_config import read_config
from refit_transport.config.settings import RefitSettings
from refit_transport.errors import LayoutError
from refit_transport.fabrics.program import Binding
from refit_transport.layout.parallelism import MegatronParallelism
from refit_transport.layout.presets.megatron import source_manifest
from refit_transport.layout.presets.model import LogicalModel
from refit_transport.layout.presets.vllm import EngineParallelism, target_manifest
from refit_transport.refit_plan import RefitPlan
from refit_transport.report import PlanSummary
from refit_transport.scheduling.topology import Topology
from refit_transport.transports.base import Job
from refit_transport.views import piece_view

TIMEOUT_S = 300.0
PROMPTS = ((1, 2, 3, 4, 5, 6, 7, 8), (8, 6, 4, 2, 0, 9), tuple(range(20, 40)))
TESTS = Path(__file__).resolve().parent
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONPATH": os.pathsep.join(map(str, (TESTS, TESTS.parent))),
}


class TestPolicy(PolicyWorker):
    """A policy worker that remembers versions of its weights and exports them by hand."""

    __test__ = False

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._remembered: dict[str, dict[str, torch.Tensor]] = {}
        self._refuses = False

    def remember(self, name: str) -> None:
        self._remembered[name] = {key: tensor.clone() for key, tensor in self.source().buffers().items()}

    def recall(self, name: str) -> None:
        with torch.no_grad():
            for key, tensor in self.source().buffers().items():
                tensor.copy_(self._remembered[name][key])

    def recall_layer(self, name: str, layer: int) -> None:
        """Gives one layer the weights of another version."""
        manifest, buffers = self.source().manifest(self.rank), self.source().buffers()
        with torch.no_grad():
            for piece in manifest.pieces:
                if piece.tensor.startswith(f"model.layers.{layer}."):
                    piece_view(piece, buffers).copy_(piece_view(piece, self._remembered[name]))

    def refuse_next_send(self, rank: int) -> None:
        """Makes this rank's next `send` fail, if it is the given one."""
        self._refuses = rank == self.rank

    def send(self, version: int) -> None:
        if self._refuses:
            self._refuses = False
            raise LayoutError("model.norm.weight", self.rank, "weights", "a refusal")
        super().send(version)

    def swap_pieces(self, tensor: str, other: str, expert: int, other_expert: int) -> None:
        """Exchanges an expert's part of one stacked tensor with an expert's part of the same or another one."""
        views = [self._views_of(tensor, expert), self._views_of(other, other_expert)]
        with torch.no_grad():
            for here, there in zip(*views, strict=True):
                kept = here.clone()
                here.copy_(there)
                there.copy_(kept)

    def scale_pieces(self, tensor: str, factor: float) -> None:
        with torch.no_grad():
            for view in self._views_of(tensor, None):
                view.mul_(factor)

    def _views_of(self, tensor: str, expert: int | None) -> list[torch.Tensor]:
        binding = Binding.of(self.source().manifest(self.rank), self.source().buffers())
        return [
            binding.view(index)
            for index, piece in enumerate(binding.manifest.pieces)
            if piece.tensor == tensor and (expert is None or piece.box.spans[0].start == expert)
        ]

    def export(self) -> dict[str, np.ndarray]:
        return export(self._chunks, vocab=self._model.vocab)


class TestGeneration(GenerationWorker):
    """A generation worker that can be corrupted."""

    __test__ = False

    def flip(self, rank: int, parameter: str) -> None:
        """Changes the lowest bit of the first element of one rank's live parameter."""
        if rank == self.rank:
            self._llm.collective_rpc(_flip, args=(parameter,))

    def skip_next_cache_reset(self) -> None:
        """Lets the next refit leave the prefix cache as it is."""
        reset = self._llm.reset_prefix_cache

        def skip() -> bool:
            self._llm.reset_prefix_cache = reset
            return True

        self._llm.reset_prefix_cache = skip


class TestAsyncGeneration(AsyncGenerationWorker):
    """An engine of its own processes whose insides can be seen."""

    __test__ = False

    def use_kv_cache(self, what: KvCache) -> None:
        self._kv_cache = what

    def started(self) -> int:
        """How many responses have a token."""
        states = self._llm.output_processor.request_states.values()
        return len(self.finished()) + sum(state.detokenizer.num_output_tokens() > 0 for state in states)

    def unfinished(self) -> int:
        """What vLLM itself still knows."""
        return self._llm.get_num_unfinished_requests()


def _flip(worker: Any, parameter: str) -> None:
    found = dict(worker.model_runner.get_model().named_parameters())[parameter]
    found.data.view(-1)[:1].view(torch.uint8)[0] ^= 1


@dataclass(frozen=True)
class Case:
    """A model, how it is trained, and how it is served."""

    kind: str
    train: MegatronParallelism
    tensor: int = 1
    engines: int = 1
    expert_parallel: bool = False
    plain_weights: bool = True
    dtype: str = "float32"
    max_model_len: int = 128
    model: Mapping[str, Any] = ()  # type: ignore[assignment]

    @property
    def row(self) -> dict[str, str]:
        """What the support matrix calls this case."""
        unusual = {key: value for key, value in dict(self.model).items() if key != "num_hidden_layers"}
        return {
            "architecture": architecture({"dense": "qwen3", "moe": "qwen3_moe"}[self.kind], unusual),
            "source": training_layout(self.train, ranks=2),
            "target": serving_layout(self.cut),
        }

    @property
    def cut(self) -> EngineParallelism:
        return EngineParallelism(self.tensor, self.engines, self.tensor if self.expert_parallel else 1)


class RunningCase:
    """One case on warm actor groups. An actor of an asynchronous engine holds `ranks_per_actor` of its ranks."""

    ranks_per_actor = 1

    def __init__(self, case: Case, folder: Path, policy: WorkerGroup, hosts: Sequence[WorkerGroup]) -> None:
        self.case, self.folder, self.policy = case, folder, policy
        self.engines = list(hosts[: case.engines])

    def start(self) -> None:
        ports = PortRange()
        host, port = self.policy.address(ports, host=LOOPBACK)
        common = {
            "world_size": self.policy.count,
            "init_method": f"tcp://{host}:{port}",
            "checkpoint": str(self.folder),
            "parallelism": self.case.train,
            "precision": self.case.dtype,
            "timeout_s": TIMEOUT_S,
        }
        pending = [self.policy.build(TestPolicy, [{"rank": r, **common} for r in range(self.policy.count)])]
        pending += [self.building(engine, self.folder) for engine in self.engines]
        collect(pending, timeout_s=TIMEOUT_S)

    def config(self, folder: Path, tensor: int) -> EngineConfig:
        return EngineConfig(
            model=str(folder),
            dtype=self.case.dtype,
            tensor_parallel=tensor,
            expert_parallel=self.case.expert_parallel,
            max_model_len=self.case.max_model_len,
            plain_weights=self.case.plain_weights,
        )

    def building(self, engine: WorkerGroup, folder: Path) -> Pending:
        """Starts building an engine over all ranks of a group."""
        if "async" in engine.name:
            own = {"config": self.config(folder, self.ranks_per_actor), "timeout_s": TIMEOUT_S}
            return engine.build(TestAsyncGeneration, [own])
        host, port = engine.address(PortRange(), host=LOOPBACK)
        own = {"world_size": engine.count, "host": host, "port": port, "config": self.config(folder, engine.count)}
        return engine.build(TestGeneration, [{"rank": r, **own} for r in range(engine.count)])

    def settings(self, **changes: Any) -> RefitSettings:
        sources = self.policy.count
        total = sources + self.ranks_per_actor * sum(engine.count for engine in self.engines)
        small = {"bucket_bytes": 1 << 14, "staging_bytes": 1 << 17, "timeout_s": TIMEOUT_S, "verify": "full"}
        domains = (tuple(range(sources)), tuple(range(sources, total)))
        return RefitSettings(**{**small, "domains": domains, **changes})

    def synchronizer(self, **changes: Any) -> RefitSynchronizer:
        return RefitSynchronizer(
            self.policy,
            self.engines,
            settings=self.settings(**changes),
            ports=PortRange(),
            host=LOOPBACK,
            ranks_per_actor=self.ranks_per_actor,
        )

    def planned(self, **changes: Any) -> PlanSummary:
        """What presets of both sides say beforehand."""
        case, settings = self.case, self.settings(**changes)
        logical = LogicalModel.from_config(read_config(self.folder))
        source = source_manifest(logical, case.train, world_size=self.policy.count, dtype=case.dtype)
        target = target_manifest(logical, case.cut, first_rank=self.policy.count, dtype=case.dtype)
        return RefitPlan(Job(source, target, Topology.of(settings.domains or ()), settings)).summary()

    def exported(self) -> dict[str, np.ndarray]:
        """The checkpoint that the policy's present weights make, by the hand-written exporter."""
        return {name: array for part in self.policy.call("export") for name, array in part.items()}

    def served(self) -> list[dict[str, np.ndarray]]:
        """Every engine rank's live parameters, engine after engine."""
        return [
            {name: tensor.float().numpy() for name, tensor in weights.items()}
            for engine in self.engines
            for weights in flat(engine.call("weights"))
        ]

    def logprobs(self) -> tuple[list[list[float]], list[list[list[float]]]]:
        trained = self.policy.call("logprobs", PROMPTS)[0]
        return trained, [found for engine in self.engines for found in engine.call("logprobs", PROMPTS)]

    def stop(self) -> None:
        collect(
            [self.policy.start("shutdown"), *(engine.start("shutdown") for engine in self.engines)],
            timeout_s=TIMEOUT_S,
        )


def flat(found: Sequence[Any]) -> list[Any]:
    """What each rank holds, where an actor speaks for one rank or for several."""
    return [own for part in found for own in (part if isinstance(part, list) else [part])]


def expected_parameters(case: Case, checkpoint: Mapping[str, np.ndarray], rank: int) -> dict[str, np.ndarray]:
    """What a vLLM rank of this case must hold, cut by hand from the checkpoint: the oracle.

    qkv rows are q | k | v of the rank's heads (ranks share a KV head when there are fewer heads than ranks), gate and
    up are stacked, the vocabulary is padded to a multiple of 64 with zeros, experts are cut by width or by number.
    """
    size = case.tensor
    found: dict[str, np.ndarray] = {}

    def rows(array: np.ndarray, parts: int = size, part: int = rank) -> np.ndarray:
        return np.split(array, parts, axis=0)[part]

    def vocabulary(array: np.ndarray) -> np.ndarray:
        padded = -(-len(array) // 64) * 64
        return rows(np.concatenate((array, np.zeros((padded - len(array), array.shape[1]), array.dtype))))

    layers = 1 + max(int(name.split(".")[2]) for name in checkpoint if ".layers." in name)
    found["model.embed_tokens.weight"] = vocabulary(checkpoint["model.embed_tokens.weight"])
    found["model.norm.weight"] = checkpoint["model.norm.weight"]
    if "lm_head.weight" in checkpoint:
        found["lm_head.weight"] = vocabulary(checkpoint["lm_head.weight"])
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        get = lambda name, prefix=prefix: checkpoint[prefix + name]  # noqa: E731
        head = len(get("self_attn.q_norm.weight"))
        kv_heads = len(get("self_attn.k_proj.weight")) // head
        kv_parts, kv_part = (size, rank) if kv_heads >= size else (kv_heads, rank * kv_heads // size)
        found[prefix + "self_attn.qkv_proj.weight"] = np.concatenate(
            (
                rows(get("self_attn.q_proj.weight")),
                rows(get("self_attn.k_proj.weight"), kv_parts, kv_part),
                rows(get("self_attn.v_proj.weight"), kv_parts, kv_part),
            )
        )
        found[prefix + "self_attn.o_proj.weight"] = np.split(get("self_attn.o_proj.weight"), size, axis=1)[rank]
        for name in ("self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm"):
            found[f"{prefix}{name}.weight"] = get(f"{name}.weight")
        if prefix + "mlp.gate.weight" in checkpoint:
            found[prefix + "mlp.gate.weight"] = get("mlp.gate.weight")
            found |= _experts(case, checkpoint, prefix + "mlp.experts.", rank)
        else:
            gate, up = rows(get("mlp.gate_proj.weight")), rows(get("mlp.up_proj.weight"))
            found[prefix + "mlp.gate_up_proj.weight"] = np.concatenate((gate, up))
            found[prefix + "mlp.down_proj.weight"] = np.split(get("mlp.down_proj.weight"), size, axis=1)[rank]
    return found


def _experts(case: Case, checkpoint: Mapping[str, np.ndarray], prefix: str, rank: int) -> dict[str, np.ndarray]:
    numbers = sorted({int(name.removeprefix(prefix).split(".")[0]) for name in checkpoint if name.startswith(prefix)})
    if case.expert_parallel:
        numbers, parts, part = np.split(np.array(numbers), case.tensor)[rank].tolist(), 1, 0
    else:
        parts, part = case.tensor, rank
    w13, w2 = [], []
    for number in numbers:
        gate, up, down = (checkpoint[f"{prefix}{number}.{kind}_proj.weight"] for kind in ("gate", "up", "down"))
        w13.append(np.concatenate((np.split(gate, parts)[part], np.split(up, parts)[part])))
        w2.append(np.split(down, parts, axis=1)[part])
    return {
        f"{prefix}routed_experts.w13_weight": np.stack(w13),
        f"{prefix}routed_experts.w2_weight": np.stack(w2),
    }


def wrong_parameters(job: RunningCase, checkpoint) -> list[str]:
    """Live parameters of any engine rank that aren't the oracle's, bit for bit."""
    wrong = []
    for number, weights in enumerate(job.served()):
        expected = expected_parameters(job.case, checkpoint, number % job.case.tensor)
        wrong += [f"rank {number}: {name} is not expected" for name in weights.keys() - expected.keys()]
        wrong += [
            f"rank {number}: {name}"
            for name, array in expected.items()
            if name not in weights or not np.array_equal(weights[name], array)
        ]
    return wrong


def largest_difference(job: RunningCase) -> float:
    trained, served = job.logprobs()
    assert all(found == served[0] for found in served)
    return max(
        abs(a - b) for row, other in zip(trained, served[0], strict=True) for a, b in zip(row, other, strict=True)
    )
