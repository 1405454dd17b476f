"""Rules about ranks and parallel sizes: `layout.parallelism` knows what doesn't fit, and these know the keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from refit_transport.config.facts import Job
from refit_transport.config.paths import COLOCATED, MEGATRON, RESOURCES, VLLM
from refit_transport.config.schema import RefitConfig
from refit_transport.errors import Violation
from refit_transport.layout.parallelism import (
    Misfit,
    Size,
    dense_rank_misfits,
    expert_rank_misfits,
    sequence_misfits,
    stage_misfits,
)
from refit_transport.layout.presets.building import (
    dense_width_misfits,
    expert_misfits,
    expert_training_misfits,
    expert_width_misfits,
    module_misfits,
)


def generation_has_resources(job: Job) -> Iterator[Violation]:
    """The generation side's share of the cluster, by NeMo RL's rules: part of a single node, else whole nodes."""
    colocated, cluster = job.config.policy.generation.colocated, job.config.cluster
    if colocated.enabled:
        return
    gpus, nodes = colocated.resources.gpus_per_node, colocated.resources.num_nodes
    path = f"{RESOURCES}.gpus_per_node"
    if gpus is None:
        reason = "must be set, because generation has ranks of its own"
        yield Violation(path, "null", reason, "set it to the generation ranks of one node")
    elif cluster.num_nodes == 1 and gpus >= cluster.gpus_per_node:
        reason = (
            f"must be less than cluster.gpus_per_node = {cluster.gpus_per_node}, which counts the training ranks too"
        )
        yield Violation(path, str(gpus), reason, f"raise cluster.gpus_per_node above {gpus}")
    elif cluster.num_nodes > 1 and gpus != cluster.gpus_per_node:
        reason = (
            f"must be cluster.gpus_per_node = {cluster.gpus_per_node}: with several nodes, generation takes whole ones"
        )
        yield Violation(path, str(gpus), reason, f"set it to {cluster.gpus_per_node}")
    path = f"{RESOURCES}.num_nodes"
    if cluster.num_nodes == 1 and nodes not in (None, 1):
        yield Violation(path, str(nodes), "must be null or 1 where cluster.num_nodes is 1", "remove it")
    elif cluster.num_nodes > 1 and nodes is None:
        reason = f"must be set where cluster.num_nodes is {cluster.num_nodes}"
        yield Violation(path, "null", reason, "set it to the number of generation nodes")
    elif nodes is not None and cluster.num_nodes > 1 and nodes >= cluster.num_nodes:
        reason = f"must be less than cluster.num_nodes = {cluster.num_nodes}: training needs a node too"
        yield Violation(path, str(nodes), reason, "lower it, or raise cluster.num_nodes")


def training_ranks_divide(job: Job) -> Iterator[Violation]:
    """Whole copies of the dense weights, and of the experts, fill the training ranks."""
    megatron, ranks = job.config.policy.megatron_cfg, job.config.training_ranks
    if not megatron.enabled or not _ranks_are_known(job.config):
        return
    tensor, pipeline = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    expert, expert_tensor = megatron.expert_model_parallel_size, megatron.expert_tensor_ranks
    remedy = "change the parallel sizes, cluster.gpus_per_node or colocated.resources"
    yield from _trained(dense_rank_misfits(ranks, tensor=tensor, pipeline=pipeline), remedy)
    misfits = expert_rank_misfits(ranks, pipeline=pipeline, expert=expert, expert_tensor=expert_tensor)
    yield from _trained(misfits, remedy)


def generation_ranks_divide(job: Job) -> Iterator[Violation]:
    """Whole engines fill the generation ranks."""
    vllm, ranks = job.config.policy.generation.vllm_cfg, job.config.generation_ranks
    if not (_vllm_generates(job.config) and _ranks_are_known(job.config)):
        return
    tensor, stages, remedy = vllm.tensor_parallel_size, vllm.pipeline_parallel_size, f"or {COLOCATED}.resources"
    reason = f"must divide the {ranks} generation ranks"
    if ranks % tensor:
        yield Violation(f"{VLLM}.tensor_parallel_size", str(tensor), reason, f"change it {remedy}")
    elif ranks % (tensor * stages):
        reason = f"times tensor_parallel_size = {tensor} {reason}"
        yield Violation(f"{VLLM}.pipeline_parallel_size", str(stages), reason, f"change it {remedy}")


def sequence_parallel_fits(job: Job) -> Iterator[Violation]:
    """Megatron's own conditions on sequence parallelism."""
    megatron, model = job.config.policy.megatron_cfg, job.model
    if not megatron.enabled:
        return
    tensor, parallel = megatron.tensor_model_parallel_size, megatron.sequence_parallel
    yield from _trained(sequence_misfits(tensor=tensor, sequence_parallel=parallel), "set it to false")
    if model is not None:
        misfits = expert_training_misfits(model, tensor=tensor, sequence_parallel=parallel)
        yield from _trained(misfits, "set it to true")


def training_cuts_tensors_evenly(job: Job) -> Iterator[Violation]:
    """Tensor parallelism divides heads and FFN width."""
    megatron, model = job.config.policy.megatron_cfg, job.model
    if megatron.enabled and model is not None:
        misfits = dense_width_misfits(model, "source", tensor=megatron.tensor_model_parallel_size, spec="local")
        yield from _trained(misfits, _DIVISOR)


def training_cuts_experts_evenly(job: Job) -> Iterator[Violation]:
    """Expert parallelism divides the experts, expert tensor parallelism their width."""
    megatron, model = job.config.policy.megatron_cfg, job.model
    if not megatron.enabled or model is None:
        return
    expert = megatron.expert_model_parallel_size
    remedy = _DIVISOR if model.experts else "set it to 1"
    yield from _trained(expert_misfits(model, expert=expert, uneven="refused"), remedy)
    yield from _trained(expert_width_misfits(model, "source", expert_tensor=megatron.expert_tensor_ranks), _DIVISOR)


def training_cuts_layers_evenly(job: Job) -> Iterator[Violation]:
    """Every pipeline stage has layers, as many as the next but for the first and the last where they are set."""
    megatron, model = job.config.policy.megatron_cfg, job.model
    if not megatron.enabled or model is None:
        return
    misfits = stage_misfits(
        model,
        pipeline=megatron.pipeline_model_parallel_size,
        virtual_pipeline=megatron.virtual_pipeline_model_parallel_size or 1,
        first_stage_layers=megatron.num_layers_in_first_pipeline_stage or 0,
        last_stage_layers=megatron.num_layers_in_last_pipeline_stage or 0,
    )
    has_stages = megatron.pipeline_model_parallel_size > 1
    remedy = f"{_DIVISOR}, or change num_layers_in_first_pipeline_stage or ..._last_..." if has_stages else "remove it"
    yield from _trained(misfits, remedy)


def training_modules_take_it(job: Job) -> Iterator[Violation]:
    """Megatron's own conditions on single models."""
    megatron, model = job.config.policy.megatron_cfg, job.model
    if megatron.enabled and model is not None:
        chunks = megatron.virtual_pipeline_model_parallel_size or 1
        misfits = module_misfits(model, virtual_pipeline=chunks, expert_tensor=megatron.expert_tensor_ranks)
        yield from _trained(misfits, "set it to 1")


def generation_cuts_layers(job: Job) -> Iterator[Violation]:
    """Every stage of an engine has layers."""
    size, model = job.config.policy.generation.vllm_cfg.pipeline_parallel_size, job.model
    if _vllm_generates(job.config) and model is not None and size > model.layers:
        reason = f"must be at most {model.layers}, the model's layers"
        yield Violation(f"{VLLM}.pipeline_parallel_size", str(size), reason, "lower it")


def generation_cuts_tensors_evenly(job: Job) -> Iterator[Violation]:
    """vLLM's tensor parallelism divides heads and widths; experts are whole where they are spread."""
    vllm, model = job.config.policy.generation.vllm_cfg, job.model
    if _vllm_generates(job.config) and model is not None:
        tensor, expert = vllm.tensor_parallel_size, vllm.expert_parallel_size
        found = [*dense_width_misfits(model, "target", tensor=tensor)]
        found += expert_misfits(model, expert=expert, uneven="taken")
        if expert == 1:
            found += expert_width_misfits(model, "target", expert_tensor=tensor)
        for misfit in found:
            remedy = "set it to 1" if misfit.size == "expert" else _DIVISOR
            yield Violation(f"{VLLM}.{_ENGINE_KEYS[misfit.size]}", misfit.got, misfit.reason, remedy)


_DIVISOR = "use a divisor"
_TRAINING_KEYS: Mapping[Size, str] = {
    "tensor": "tensor_model_parallel_size",
    "sequence_parallel": "sequence_parallel",
    "pipeline": "pipeline_model_parallel_size",
    "virtual_pipeline": "virtual_pipeline_model_parallel_size",
    "first_stage_layers": "num_layers_in_first_pipeline_stage",
    "last_stage_layers": "num_layers_in_last_pipeline_stage",
    "expert": "expert_model_parallel_size",
    "expert_tensor": "expert_tensor_parallel_size",
}
_ENGINE_KEYS: Mapping[Size, str] = {
    "tensor": "tensor_parallel_size",
    "expert": "expert_parallel_size",
    "expert_tensor": "tensor_parallel_size",
}


def _trained(misfits: Iterable[Misfit], remedy: str) -> Iterator[Violation]:
    """The training side's misfits at their keys; that of several keys at their section."""
    for misfit in misfits:
        key = _TRAINING_KEYS.get(misfit.size)
        path, value = (MEGATRON, f"{misfit.name} {misfit.got}") if key is None else (f"{MEGATRON}.{key}", misfit.got)
        yield Violation(path, value, misfit.reason, remedy)


def _ranks_are_known(config: RefitConfig) -> bool:
    """Whether generation has a share of the cluster that leaves some for training."""
    return not config.policy.generation.colocated.enabled and 0 < config.generation_ranks < config.cluster.ranks


def _vllm_generates(config: RefitConfig) -> bool:
    return config.policy.generation.backend == "vllm"
