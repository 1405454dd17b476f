"""Rules about what this version can run, and about everything but parallel sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from refit_transport.config.facts import Job
from refit_transport.config.keys import shown
from refit_transport.config.paths import CLUSTER, COLOCATED, GENERATION, MEGATRON, MODEL, REFIT_CFG, VLLM
from refit_transport.config.schema import RefitConfig
from refit_transport.errors import Violation


def not_colocated(job: Job) -> Iterator[Violation]:
    """A refit is between different processes."""
    if job.config.policy.generation.colocated.enabled:
        reason = "must be false: a refit transport moves weights between separate training and generation ranks"
        remedy = f"set it to false and give {COLOCATED}.resources, or let NeMo RL refit colocated workers itself"
        yield Violation(f"{COLOCATED}.enabled", "true", reason, remedy)


def vllm_generates(job: Job) -> Iterator[Violation]:
    """Only vLLM has a target yet."""
    if (backend := job.config.policy.generation.backend) != "vllm":
        reason = "must be vllm, the only generation backend that weights can be sent to"
        yield Violation(f"{GENERATION}.backend", shown(backend), reason, "set it to vllm")


def megatron_trains(job: Job) -> Iterator[Violation]:
    """Only Megatron has a source yet."""
    if not job.config.policy.megatron_cfg.enabled:
        reason = "must be true: Megatron is the only training backend so far, DTensor policies are not available yet"
        yield Violation(
            f"{MEGATRON}.enabled", "false", reason, "set it to true, and policy.dtensor_cfg.enabled to false"
        )


def engine_is_synchronous(job: Job) -> Iterator[Violation]:
    """The generation workers drive vLLM's blocking engine."""
    if job.config.policy.generation.vllm_cfg.async_engine:
        reason = "must be false: generation workers with vLLM's asynchronous engine are not available yet"
        yield Violation(f"{VLLM}.async_engine", "true", reason, "set it to false")


def transport_is_known(job: Job) -> Iterator[Violation]:
    """The registry has the transport."""
    if job.transport_problem:
        name = shown(job.config.policy.generation.refit_transport)
        yield Violation(f"{GENERATION}.refit_transport", name, "is an unknown transport", job.transport_problem)


def model_is_readable(job: Job) -> Iterator[Violation]:
    """There is a checkpoint folder, unless the run makes it."""
    if job.model_problem:
        remedy = (
            "give a folder with a Hugging Face checkpoint (download the model first), relative to the working directory"
        )
        yield Violation(MODEL, shown(job.config.policy.model_name), job.model_problem, remedy)


def tiny_model_is_consistent(job: Job) -> Iterator[Violation]:
    """The sizes make a model."""
    model = job.config.refit_run.tiny_model
    if model is None:
        return
    if model.num_attention_heads % model.num_key_value_heads:
        path, value = "refit_run.tiny_model.num_key_value_heads", str(model.num_key_value_heads)
        yield Violation(path, value, f"must divide num_attention_heads = {model.num_attention_heads}", "use a divisor")
    if model.kind == "moe" and model.num_experts_per_tok > model.num_experts:
        path, value = "refit_run.tiny_model.num_experts_per_tok", str(model.num_experts_per_tok)
        yield Violation(path, value, f"must be at most num_experts = {model.num_experts}", "lower it")


def fabric_runs_here(job: Job) -> Iterator[Violation]:
    """The fabric's packages are installed."""
    if job.fabric_problem:
        path = f"{_settings_path(job.config)}.fabric"
        yield Violation(path, shown(job.config.settings.fabric), job.fabric_problem, "use auto, or gloo on CPUs")


def commit_is_available(job: Job) -> Iterator[Violation]:
    """Only refits in place, so far."""
    refit_cfg = job.config.policy.generation.refit_cfg
    for name, settings in (("nccl_reshard", refit_cfg.nccl_reshard), ("gather_broadcast", refit_cfg.gather_broadcast)):
        if settings.commit == "staged":
            reason = "is not available yet: weights are received into the live parameters while generation is paused"
            yield Violation(f"{REFIT_CFG}.{name}.commit", "'staged'", reason, "set it to in_place")


def vllm_precision_is_plain(job: Job) -> Iterator[Violation]:
    """Encodings with scales have no pieces yet."""
    precision = job.config.policy.generation.vllm_cfg.precision
    if precision not in (None, "auto", "float32", "bfloat16"):
        reason = "must be float32, bfloat16 or auto: other encodings of the served weights are not available yet"
        yield Violation(f"{VLLM}.precision", shown(precision), reason, "set it to ${policy.precision}")


def buffers_nest(job: Job) -> Iterator[Violation]:
    """A message fits into the staging memory."""
    refit_cfg = job.config.policy.generation.refit_cfg
    for name, settings in (("nccl_reshard", refit_cfg.nccl_reshard), ("gather_broadcast", refit_cfg.gather_broadcast)):
        if settings.bucket_bytes > settings.staging_bytes:
            path, reason = (
                f"{REFIT_CFG}.{name}.bucket_bytes",
                f"must be at most staging_bytes = {settings.staging_bytes}",
            )
            yield Violation(path, str(int(settings.bucket_bytes)), reason, "lower it")


def domains_name_every_rank_once(job: Job) -> Iterator[Violation]:
    """Explicit domains are a partition of the refit's ranks."""
    domains = job.config.settings.topology.domains
    if isinstance(domains, str) or job.config.policy.generation.colocated.enabled or not job.config.generation_ranks:
        return
    path, value = f"{_settings_path(job.config)}.topology.domains", shown([list(domain) for domain in domains])
    first, count = job.config.training_ranks, job.config.cluster.ranks
    every = f"every refit rank once: 0 to {first - 1} train, {first} to {count - 1} generate"
    named = Counter(rank for domain in domains for rank in domain)
    troubles = {
        "repeats": sorted(rank for rank, times in named.items() if times > 1),
        "misses": sorted(set(range(count)) - named.keys()),
        "names ranks that don't exist:": sorted(named.keys() - set(range(count))),
    }
    for verb, ranks in troubles.items():
        if ranks:
            yield Violation(path, value, f"{verb} {', '.join(map(str, ranks))}", f"name {every}")
    if not all(domains):
        yield Violation(path, value, "has an empty domain", "remove it")


def ports_are_a_range(job: Job) -> Iterator[Violation]:
    """Both ends or none."""
    low, high = job.config.cluster.master_port_range_low, job.config.cluster.master_port_range_high
    if (low is None) != (high is None):
        missing = "low" if low is None else "high"
        reason = "must be set where the other end of the range is"
        yield Violation(f"{CLUSTER}.master_port_range_{missing}", "null", reason, "set both, or neither")
    elif low is not None and high is not None and low > high:
        path, reason = f"{CLUSTER}.master_port_range_low", f"must be at most master_port_range_high = {high}"
        yield Violation(path, str(low), reason, "swap them")


def prompts_fit_the_model(job: Job) -> Iterator[Violation]:
    """Prompts are tokens that the model has, and fit its context."""
    limit = job.config.policy.generation.vllm_cfg.max_model_len
    for index, prompt in enumerate(job.config.refit_run.prompts):
        path = f"refit_run.prompts[{index}]"
        if job.model is not None and max(prompt) >= job.model.vocab:
            reason = f"has a token id outside the model's vocabulary of {job.model.vocab}"
            yield Violation(path, shown(list(prompt)), reason, f"use ids from 0 to {job.model.vocab - 1}")
        if limit is not None and len(prompt) >= limit:
            reason = f"must be shorter than {VLLM}.max_model_len = {limit}, which has room for one new token"
            yield Violation(path, f"{len(prompt)} tokens", reason, "shorten it")


def sequence_divides(job: Job) -> Iterator[Violation]:
    """Sequence and context parallelism cut a sequence evenly."""
    parts, length = job.config.policy.megatron_cfg.sequence_ranks, job.config.sequence_length
    if job.config.policy.megatron_cfg.enabled and length % parts:
        reason = f"must be a multiple of {parts}, the ranks that a sequence is cut over"
        yield Violation("refit_run.sequence_length", str(length), reason, f"use a multiple of {parts}")


def _settings_path(config: RefitConfig) -> str:
    return f"{REFIT_CFG}.{'nccl_reshard' if config.transport == 'nccl_reshard' else 'gather_broadcast'}"
