"""Rules about parallel sizes: what each must divide, on the training side and on the generation side."""

from __future__ import annotations

from collections.abc import Iterator

from refit_transport.config.facts import Job
from refit_transport.config.paths import COLOCATED, MEGATRON, RESOURCES, VLLM
from refit_transport.config.schema import Megatron, RefitConfig
from refit_transport.errors import Violation


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
    remedy = "change the parallel sizes, cluster.gpus_per_node or colocated.resources"
    if ranks % megatron.model_ranks:
        sizes = (
            f"tensor {megatron.tensor_model_parallel_size} x pipeline {megatron.pipeline_model_parallel_size} "
            f"x context {megatron.context_parallel_size}"
        )
        yield Violation(MEGATRON, sizes, f"must divide the {ranks} training ranks", remedy)
    if ranks % megatron.expert_ranks:
        sizes = (
            f"expert tensor {megatron.expert_tensor_ranks} x expert {megatron.expert_model_parallel_size} "
            f"x pipeline {megatron.pipeline_model_parallel_size}"
        )
        path = f"{MEGATRON}.expert_model_parallel_size"
        yield Violation(path, sizes, f"must divide the {ranks} training ranks", remedy)


def generation_ranks_divide(job: Job) -> Iterator[Violation]:
    """Whole engines fill the generation ranks, and whole groups of engines share the experts."""
    vllm, ranks = job.config.policy.generation.vllm_cfg, job.config.generation_ranks
    if not _vllm_generates(job.config) or not _ranks_are_known(job.config):
        return
    tensor, pipeline, expert = vllm.tensor_parallel_size, vllm.pipeline_parallel_size, vllm.expert_parallel_size
    if ranks % vllm.model_ranks:
        sizes = f"tensor {tensor} x pipeline {pipeline}"
        remedy = f"change the parallel sizes or {COLOCATED}.resources"
        yield Violation(VLLM, sizes, f"must divide the {ranks} generation ranks", remedy)
    path = f"{VLLM}.expert_parallel_size"
    if expert > 1 and expert % tensor:
        reason = (
            f"must be 1 or a multiple of tensor_parallel_size = {tensor}, because vLLM spreads experts over TP x DP"
        )
        yield Violation(path, str(expert), reason, f"set it to {tensor}")
    elif expert > 1 and ranks % (expert * pipeline):
        reason = f"times pipeline_parallel_size = {pipeline} must divide the {ranks} generation ranks"
        yield Violation(path, str(expert), reason, f"set it to {tensor}")


def sequence_parallel_fits(job: Job) -> Iterator[Violation]:
    """Megatron's own conditions on sequence parallelism."""
    megatron, tensor = job.config.policy.megatron_cfg, job.config.policy.megatron_cfg.tensor_model_parallel_size
    if not megatron.enabled:
        return
    path = f"{MEGATRON}.sequence_parallel"
    if megatron.sequence_parallel and tensor == 1:
        yield Violation(path, "true", "needs tensor_model_parallel_size of 2 or more", "set it to false")
    if not megatron.sequence_parallel and tensor > 1 and job.model is not None and job.model.experts:
        reason = "must be true: Megatron doesn't train a mixture of experts with tensor parallelism without it"
        yield Violation(path, "false", reason, "set it to true")


def training_cuts_tensors_evenly(job: Job) -> Iterator[Violation]:
    """Tensor parallelism divides heads and FFN width."""
    if job.config.policy.megatron_cfg.enabled:
        size = job.config.policy.megatron_cfg.tensor_model_parallel_size
        yield from _tensor_cuts(job, f"{MEGATRON}.tensor_model_parallel_size", size)


def training_cuts_experts_evenly(job: Job) -> Iterator[Violation]:
    """Expert parallelism divides the experts, expert tensor parallelism their width."""
    megatron, model = job.config.policy.megatron_cfg, job.model
    if not megatron.enabled or model is None:
        return
    experts, tensor = megatron.expert_model_parallel_size, megatron.expert_tensor_ranks
    path = f"{MEGATRON}.expert_model_parallel_size"
    if not model.experts and experts > 1:
        yield Violation(path, str(experts), "must be 1, because the model has no experts", "set it to 1")
    elif model.experts % experts:
        yield _uneven(path, experts, f"the model's {model.experts} experts")
    if model.experts and model.expert_width % tensor:
        yield _uneven(f"{MEGATRON}.expert_tensor_parallel_size", tensor, f"the experts' width {model.expert_width}")


def training_cuts_layers_evenly(job: Job) -> Iterator[Violation]:
    """Every pipeline stage has layers, as many as the next but for the first and the last where they are set."""
    megatron, model = job.config.policy.megatron_cfg, job.model
    if not megatron.enabled or model is None:
        return
    stages, chunks = megatron.pipeline_model_parallel_size, megatron.virtual_pipeline_model_parallel_size or 1
    if stages == 1:
        yield from _pipeline_keys_without_pipeline(megatron)
        return
    layers, sizes = model.layers, f"the model's {model.layers} layers"
    for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
        own = getattr(megatron, name)
        if own is None:
            continue
        layers, stages, sizes = layers - own, stages - 1, f"the {layers - own} layers of the other stages"
        if own % chunks:
            yield _uneven(f"{MEGATRON}.virtual_pipeline_model_parallel_size", chunks, f"{name} = {own}")
    path = f"{MEGATRON}.pipeline_model_parallel_size"
    value = str(megatron.pipeline_model_parallel_size)
    if (stages and layers <= 0) or (not stages and layers != 0):
        reason = "leaves stages without layers or layers without a stage: first and last stage take what isn't there"
        yield Violation(path, value, reason, "change num_layers_in_first_pipeline_stage or ..._last_...")
    elif stages and layers % stages:
        yield Violation(path, value, f"leaves {stages} stages that must divide {sizes}", _DIVISOR)
    elif stages and layers // stages % chunks:
        path = f"{MEGATRON}.virtual_pipeline_model_parallel_size"
        yield _uneven(path, chunks, f"the {layers // stages} layers of a stage")


def generation_cuts_tensors_evenly(job: Job) -> Iterator[Violation]:
    """vLLM's tensor parallelism divides heads and widths; experts are whole where they are spread."""
    vllm, model = job.config.policy.generation.vllm_cfg, job.model
    if not _vllm_generates(job.config) or model is None:
        return
    path = f"{VLLM}.tensor_parallel_size"
    yield from _tensor_cuts(job, path, vllm.tensor_parallel_size)
    if model.experts and vllm.expert_parallel_size == 1 and model.expert_width % vllm.tensor_parallel_size:
        yield _uneven(path, vllm.tensor_parallel_size, f"the experts' width {model.expert_width}")
    if not model.experts and vllm.expert_parallel_size > 1:
        reason = "must be 1, because the model has no experts"
        yield Violation(f"{VLLM}.expert_parallel_size", str(vllm.expert_parallel_size), reason, "set it to 1")


def generation_cuts_layers(job: Job) -> Iterator[Violation]:
    """vLLM's pipeline stages may be uneven, but none is empty."""
    stages = job.config.policy.generation.vllm_cfg.pipeline_parallel_size
    if _vllm_generates(job.config) and job.model is not None and stages > job.model.layers:
        reason = f"must be at most the model's {job.model.layers} layers"
        yield Violation(f"{VLLM}.pipeline_parallel_size", str(stages), reason, "lower it")


_DIVISOR = "use a divisor"


def _tensor_cuts(job: Job, path: str, size: int) -> Iterator[Violation]:
    model = job.model
    if model is None:
        return
    if model.heads % size:
        yield _uneven(path, size, f"the model's {model.heads} attention heads")
    if model.kv_heads % size and size % model.kv_heads:
        yield _uneven(path, size, f"(or be a multiple of) the model's {model.kv_heads} key-value heads")
    if model.ffn_width % size:
        yield _uneven(path, size, f"the model's FFN width {model.ffn_width}")


def _pipeline_keys_without_pipeline(megatron: Megatron) -> Iterator[Violation]:
    names = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
    for name in (*names, "virtual_pipeline_model_parallel_size"):
        if (getattr(megatron, name) or 0) > (0 if name in names else 1):
            value = str(getattr(megatron, name))
            yield Violation(f"{MEGATRON}.{name}", value, "needs pipeline_model_parallel_size of 2 or more", "remove it")


def _uneven(path: str, size: int, what: str) -> Violation:
    return Violation(path, str(size), f"must divide {what}", _DIVISOR)


def _ranks_are_known(config: RefitConfig) -> bool:
    """Whether generation has a share of the cluster that leaves some for training."""
    return not config.policy.generation.colocated.enabled and 0 < config.generation_ranks < config.cluster.ranks


def _vllm_generates(config: RefitConfig) -> bool:
    return config.policy.generation.backend == "vllm"
