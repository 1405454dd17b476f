"""The configuration as frozen models: NeMo RL's key names, with our settings under `refit_cfg` and `refit_run`.

These models hold the keys that this package reads and are strict about them. NeMo RL's other keys (`foreign.py`) stay
in `RefitConfig.document`, untouched. A value that depends on several keys is checked in `rules.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr

from refit_transport.config.base import Count, Number, Port, Section, TokenId, Whole
from refit_transport.config.settings import RefitSettings
from refit_transport.config.tiny_models import TINY_MODELS, TinyKind, tiny_config
from refit_transport.config.transport_settings import NcclReshardSettings, Ranks, RefitCfg, TransportSettings
from refit_transport.layout.parallelism import MegatronParallelism
from refit_transport.planning.routing import RouteRule

Precision = Literal["float32", "bfloat16"]


class Optimizer(Section):
    """`policy.megatron_cfg.optimizer`."""

    lr: Annotated[Number, Field(gt=0)] = 1e-3


class Megatron(Section):
    """`policy.megatron_cfg`: how the training side is cut."""

    enabled: bool
    tensor_model_parallel_size: Count = 1
    pipeline_model_parallel_size: Count = 1
    virtual_pipeline_model_parallel_size: Count | None = None
    expert_model_parallel_size: Count = 1
    # null: the same as tensor_model_parallel_size, as in Megatron.
    expert_tensor_parallel_size: Count | None = None
    # More than 1 is not available yet.
    context_parallel_size: Count = 1
    sequence_parallel: bool = False
    num_layers_in_first_pipeline_stage: Count | None = None
    num_layers_in_last_pipeline_stage: Count | None = None
    # The vocabulary is padded to a multiple of this times tensor_model_parallel_size.
    make_vocab_size_divisible_by: Count = 1
    optimizer: Optimizer = Optimizer()

    @property
    def parallelism(self) -> MegatronParallelism:
        """The sizes as plain values."""
        return MegatronParallelism(
            tensor=self.tensor_model_parallel_size,
            pipeline=self.pipeline_model_parallel_size,
            virtual_pipeline=self.virtual_pipeline_model_parallel_size or 1,
            expert=self.expert_model_parallel_size,
            expert_tensor=self.expert_tensor_parallel_size or 0,
            sequence_parallel=self.sequence_parallel,
            first_stage_layers=self.num_layers_in_first_pipeline_stage or 0,
            last_stage_layers=self.num_layers_in_last_pipeline_stage or 0,
        )

    @property
    def sequence_ranks(self) -> int:
        """Ranks that one sequence is cut over."""
        return self.tensor_model_parallel_size if self.sequence_parallel else 1

    @property
    def expert_tensor_ranks(self) -> int:
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def model_ranks(self) -> int:
        """Ranks of one copy of the dense weights."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size


class Resources(Section):
    """`policy.generation.colocated.resources`: what the generation side takes from the cluster."""

    gpus_per_node: Count | None = None
    num_nodes: Count | None = None

    @property
    def ranks(self) -> int:
        return (self.gpus_per_node or 0) * (self.num_nodes or 1)


class Colocated(Section):
    """`policy.generation.colocated`."""

    enabled: bool
    resources: Resources = Resources()


class Vllm(Section):
    """`policy.generation.vllm_cfg`: how the generation side is cut and run."""

    tensor_parallel_size: Count = 1
    pipeline_parallel_size: Count = 1
    # 1: experts are cut by tensor parallelism. tensor_parallel_size: they are spread whole over the ranks of a stage.
    expert_parallel_size: Count = 1
    # null: as policy.precision.
    precision: str | None = None
    max_model_len: Count | None = None
    gpu_memory_utilization: Annotated[Number, Field(gt=0, le=1)] = 0.5
    async_engine: bool = False
    enforce_eager: bool = False
    # What the engine loads before the first refit; `dummy` is random weights.
    load_format: Literal["auto", "dummy", "safetensors"] = "auto"

    @property
    def ranks(self) -> int:
        """Of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


class Generation(Section):
    """`policy.generation`."""

    colocated: Colocated
    backend: str = "vllm"
    vllm_cfg: Vllm = Vllm()
    # nccl_reshard, gather_broadcast, an installed transport or "module:Class"; null is gather_broadcast, as in NeMo RL.
    refit_transport: Annotated[str, Field(min_length=1)] | None = None
    refit_cfg: RefitCfg = RefitCfg()


class Policy(Section):
    """`policy`."""

    # A checkpoint folder (config.json beside safetensors), relative to the working directory.
    model_name: Annotated[str, Field(min_length=1)]
    precision: Precision
    megatron_cfg: Megatron
    generation: Generation


class Cluster(Section):
    """`cluster`. Where there is no GPU, a "GPU" is one CPU process."""

    gpus_per_node: Count
    num_nodes: Count = 1
    # Ports of the rendezvous; null: any that is free.
    master_port_range_low: Port | None = None
    master_port_range_high: Port | None = None

    @property
    def ranks(self) -> int:
        return self.gpus_per_node * self.num_nodes


class TinyModel(Section):
    """`refit_run.tiny_model`: a model of random weights for `run` to make; keys as in Hugging Face's config.json.

    What is null is as `tiny_models.TINY_MODELS` has it for the kind.
    """

    # dense and moe are Qwen3.
    kind: TinyKind
    seed: Annotated[int, Field(ge=0)] = 0
    vocab_size: Count | None = None
    hidden_size: Count | None = None
    num_hidden_layers: Count | None = None
    num_attention_heads: Count | None = None
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    intermediate_size: Count | None = None
    max_position_embeddings: Count | None = None
    tie_word_embeddings: bool | None = None
    # The deviation of matrices.
    initializer_range: Annotated[Number, Field(gt=0)] | None = None
    # Only of kinds with experts, however their config spells it.
    num_experts: Count | None = None
    num_experts_per_tok: Count | None = None
    moe_intermediate_size: Count | None = None
    # Other keys of the kind's config, such as sliding_window of gpt_oss.
    config: Mapping[str, Any] = {}

    def changes(self) -> dict[str, Any]:
        """The keys that are set, as the kind's config spells them."""
        found = self.model_dump(exclude={"kind", "seed", "config"}, exclude_none=True)
        experts = TINY_MODELS[self.kind].experts_key
        if "num_experts" in found and experts is not None:
            found[experts] = found.pop("num_experts")
        return {**found, **self.config}

    def hf_config(self) -> dict[str, Any]:
        """All the keys for the kind's config class."""
        return tiny_config(self.kind, self.changes())


class RefitRun(Section):
    """`refit_run`: what `refit-transport run` does between refits. Ours; NeMo RL doesn't know it."""

    refits: Count = 3
    # Optimizer steps before each refit.
    steps_per_refit: Count = 2
    # Of the training tokens.
    seed: Annotated[int, Field(ge=0)] = 0
    # Sequences of one step on each data-parallel rank.
    batch_size: Count = 2
    # Tokens of one sequence; null: 16 for each rank that a sequence is cut over.
    sequence_length: Annotated[Count, Field(ge=2)] | None = None
    # Token ids on which both sides' log-probabilities are compared after each refit, and by how much they may differ.
    prompts: Annotated[tuple[Annotated[tuple[TokenId, ...], Field(min_length=2)], ...], Field(min_length=1)] = (
        (1, 2, 3, 4, 5, 6, 7, 8),
        (8, 6, 4, 2),
    )
    logprob_tolerance: Annotated[Number, Field(gt=0)] = 1e-4
    # GRPO and PPO jobs: how far log-probabilities of trainer and samplers may be apart, on the mean of a step (nats);
    # null: 1e-5 where both compute in float32, else 1e-2. In asynchronous jobs, of a few sequences that both compute.
    logprob_error_limit: Annotated[Number, Field(gt=0)] | None = None
    # What going beyond that limit does: end the job at once, or warn at each step and fail at the end.
    on_logprob_error: Literal["stop", "warn"] = "stop"
    # Seconds that a worker may take to start, to train a step, or to compute log-probabilities.
    worker_timeout_s: Annotated[Number, Field(gt=0)] = 600.0
    # How often a dead engine of a GRPO or PPO job is started again; meanwhile training goes on with the others.
    engine_restarts: Whole = 2
    # Where the refit reports go as JSON, relative to the working directory; null: nowhere.
    report: Annotated[str, Field(min_length=1)] | None = None
    # Where events go as JSON lines, and counters as Prometheus' text; see docs/observability.md. null: nowhere.
    events: Annotated[str, Field(min_length=1)] | None = None
    metrics: Annotated[str, Field(min_length=1)] | None = None
    # Makes policy.model_name before the run, replacing another model that an earlier run made there.
    tiny_model: TinyModel | None = None


class RefitConfig(Section):
    """A whole job: what is trained, what serves it, and how the weights get from one to the other."""

    policy: Policy
    cluster: Cluster
    refit_run: RefitRun = RefitRun()

    _document: Mapping[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def document(self) -> Mapping[str, Any]:
        """The whole YAML as read, with NeMo RL's own keys."""
        return self._document

    @property
    def generation_ranks(self) -> int:
        return self.policy.generation.colocated.resources.ranks

    @property
    def training_ranks(self) -> int:
        """The policy's. A PPO job's critic has as many."""
        return self._remaining_ranks // 2 if self._has_critic else self._remaining_ranks

    @property
    def critic_ranks(self) -> int:
        return self.training_ranks if self._has_critic else 0

    @property
    def refit_ranks(self) -> int:
        """The policy's, then the engines'."""
        return self.training_ranks + self.generation_ranks

    @property
    def _remaining_ranks(self) -> int:
        return self.cluster.ranks - self.generation_ranks

    @property
    def _has_critic(self) -> bool:
        return self._document.get("ppo") is not None

    @property
    def data_parallel_size(self) -> int:
        """Of the training side."""
        return self.training_ranks // self.policy.megatron_cfg.model_ranks

    @property
    def engines(self) -> int:
        """vLLM engines, which is data parallelism of the generation side."""
        return self.generation_ranks // self.policy.generation.vllm_cfg.ranks

    @property
    def sequence_length(self) -> int:
        """Tokens of one training sequence."""
        return self.refit_run.sequence_length or 16 * self.policy.megatron_cfg.sequence_ranks

    @property
    def vllm_precision(self) -> str:
        precision = self.policy.generation.vllm_cfg.precision
        return self.policy.precision if precision in (None, "auto") else precision

    @property
    def transport(self) -> str:
        return self.policy.generation.refit_transport or "gather_broadcast"

    @cached_property
    def settings(self) -> TransportSettings:
        """Of the chosen transport. Another package's has those of `gather_broadcast` and `plugin_settings`."""
        settings: TransportSettings = getattr(self.policy.generation.refit_cfg, self.settings_name)
        return settings

    @property
    def settings_name(self) -> str:
        """The key under `refit_cfg` that holds `settings`."""
        return "nccl_reshard" if self.transport == "nccl_reshard" else "gather_broadcast"

    @property
    def plugin_settings(self) -> Mapping[str, Any]:
        """`refit_cfg.<transport>` as it stands in the document."""
        refit_cfg = self.document.get("policy", {}).get("generation", {}).get("refit_cfg") or {}
        return refit_cfg.get(self.transport) or {}

    def refit_settings(self) -> RefitSettings:
        """What the ranks of a refit agree on."""
        settings = self.settings
        reshard = settings if isinstance(settings, NcclReshardSettings) else NcclReshardSettings()
        return RefitSettings(
            transport=self.transport,
            fabric=settings.fabric,
            coverage=reshard.coverage,
            routes=tuple(RouteRule(route.pattern, route.transport) for route in reshard.routes),
            domains=self.domains(),
            nics=settings.topology.nics,
            nic_rates=tuple(map(float, settings.topology.nic_rates)),
            disabled_passes=reshard.disabled_passes,
            chains=self.policy.generation.refit_cfg.gather_broadcast.chains,
            shared_memory=settings.shared_memory,
            bucket_bytes=int(settings.bucket_bytes),
            staging_bytes=int(settings.staging_bytes),
            timeout_s=settings.timeout_s,
            verify=settings.verify,
            commit=settings.commit,
        )

    def domains(self) -> tuple[Ranks, ...] | None:
        """The refit ranks of each fast domain; None where only the placement on hosts tells (`auto`)."""
        domains = self.settings.topology.domains
        every = range(self.refit_ranks)
        if domains == "auto":
            return None
        if domains == "single":
            return (tuple(every),)
        if domains == "per_role":
            return tuple(every[: self.training_ranks]), tuple(every[self.training_ranks :])
        return domains
