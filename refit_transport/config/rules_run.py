"""Rules about everything but parallel sizes and what is not available yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from refit_transport.config.facts import Job
from refit_transport.config.keys import nearest, shown
from refit_transport.config.paths import CLUSTER, GENERATION, REFIT_CFG, VLLM
from refit_transport.config.tiny_models import PATTERN, TINY_MODELS
from refit_transport.errors import Violation


def transport_is_known(job: Job) -> Iterator[Violation]:
    """The registry has the transport."""
    if job.transport_problem:
        name = shown(job.config.policy.generation.refit_transport)
        yield Violation(f"{GENERATION}.refit_transport", name, "is an unknown transport", job.transport_problem)


def model_is_readable(job: Job) -> Iterator[Violation]:
    """There is a checkpoint folder, unless the run makes it."""
    yield from job.model_problems


def tiny_model_is_consistent(job: Job) -> Iterator[Violation]:
    """The kind has the keys that are set, and the sizes make a model."""
    model = job.config.refit_run.tiny_model
    if model is None:
        return
    path, known = "refit_run.tiny_model", TINY_MODELS[model.kind].config
    for key, value in model.changes().items():
        if key not in known:
            where = f"{path}.config.{key}" if key in model.config else f"{path}.{key}"
            near = nearest(key, tuple(known)) if key in model.config else None
            remedy = f"did you mean {near!r}?" if near else "remove it"
            yield Violation(where, shown(value), f"is no key of the kind {model.kind}", remedy)
    config = model.hf_config()
    if (model.num_hidden_layers or config["num_hidden_layers"]) != config["num_hidden_layers"]:
        reason = f"must be the {config['num_hidden_layers']} layers of {PATTERN} {config[PATTERN]!r}"
        yield Violation(f"{path}.num_hidden_layers", str(model.num_hidden_layers), reason, "remove it")
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    if heads % groups:
        reason = f"must divide num_attention_heads = {heads}"
        yield Violation(f"{path}.num_key_value_heads", str(groups), reason, "use a divisor")
    experts = TINY_MODELS[model.kind].experts_key
    if experts is not None and config["num_experts_per_tok"] > config[experts]:
        value, reason = str(config["num_experts_per_tok"]), f"must be at most num_experts = {config[experts]}"
        yield Violation(f"{path}.num_experts_per_tok", value, reason, "lower it")


def buffers_nest(job: Job) -> Iterator[Violation]:
    """The staging memory holds two payloads at least; gather_broadcast uses half of it for whole tensors."""
    refit_cfg = job.config.policy.generation.refit_cfg
    for name, settings in (("nccl_reshard", refit_cfg.nccl_reshard), ("gather_broadcast", refit_cfg.gather_broadcast)):
        if 4 * settings.bucket_bytes > settings.staging_bytes:
            path = f"{REFIT_CFG}.{name}.bucket_bytes"
            reason = f"must be at most a quarter of staging_bytes = {settings.staging_bytes}"
            yield Violation(path, str(int(settings.bucket_bytes)), reason, "lower it")


def domains_name_every_rank_once(job: Job) -> Iterator[Violation]:
    """Explicit domains are a partition of the refit's ranks."""
    domains = job.config.settings.topology.domains
    if isinstance(domains, str) or job.config.policy.generation.colocated.enabled or not job.config.generation_ranks:
        return
    path, value = (
        f"{REFIT_CFG}.{job.config.settings_name}.topology.domains",
        shown([list(domain) for domain in domains]),
    )
    first, count = job.config.training_ranks, job.config.refit_ranks
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


def nic_rates_are_of_the_domains(job: Job) -> Iterator[Violation]:
    """A list of rates has one for each domain, and the domains are known beforehand."""
    rates, domains = job.config.settings.topology.nic_rates, job.config.domains()
    if len(rates) <= 1 or (domains is not None and len(domains) == len(rates)):
        return
    reason = (
        "must be one rate: which domains there are shows only at the run"
        if domains is None
        else f"must be one rate, or one for each of {len(domains)} domains"
    )
    remedy = "list topology.domains, or give one rate" if domains is None else "give as many rates as domains"
    path = f"{REFIT_CFG}.{job.config.settings_name}.topology.nic_rates"
    yield Violation(path, shown([int(rate) for rate in rates]), reason, remedy)


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
    """Sequence parallelism cuts a sequence evenly."""
    parts, length = job.config.policy.megatron_cfg.sequence_ranks, job.config.sequence_length
    if job.config.policy.megatron_cfg.enabled and length % parts:
        reason = f"must be a multiple of {parts}, the ranks that a sequence is cut over"
        yield Violation("refit_run.sequence_length", str(length), reason, f"use a multiple of {parts}")
