"""Rules about several keys at once, or about a key and the world (the model folder, the registry, what is there yet).

A rule is a pure function that yields violations. It runs when all the keys that it reads are readable; `RULES` says
which those are. A problem of one key alone belongs into the schema.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from refit_transport.config import rules_limits, rules_parallel, rules_run
from refit_transport.config.facts import Job
from refit_transport.config.paths import CLUSTER, COLOCATED, GENERATION, MEGATRON, MODEL, REFIT_CFG, VLLM
from refit_transport.errors import Violation

Check = Callable[[Job], Iterable[Violation]]
Purpose = Literal["run", "plan"]
"""What a configuration is checked for. Planning needs no more of a model than its outline."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A check and the keys that it reads, a section standing for all its keys; and what it is needed for."""

    check: Check
    reads: tuple[str, ...]
    purposes: tuple[Purpose, ...] = ("run", "plan")


def _keys(section: str, names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names.split())


_RANKS = (f"{CLUSTER}.gpus_per_node", f"{CLUSTER}.num_nodes", COLOCATED)
_SHAPE = (MODEL, "refit_run.tiny_model")
_TRANSPORT = f"{GENERATION}.refit_transport"
_TRAINS, _GENERATES = f"{MEGATRON}.enabled", f"{GENERATION}.backend"
_TENSOR, _PIPELINE = _keys(MEGATRON, "tensor_model_parallel_size pipeline_model_parallel_size")
_EXPERT = (_TENSOR, *_keys(MEGATRON, "expert_model_parallel_size expert_tensor_parallel_size"))
_CONTEXT, _SEQUENCE = _keys(MEGATRON, "context_parallel_size sequence_parallel")
_STAGES = _keys(
    MEGATRON,
    "virtual_pipeline_model_parallel_size num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage",
)
_VLLM_TENSOR, _VLLM_PIPELINE, _VLLM_EXPERT = _keys(
    VLLM, "tensor_parallel_size pipeline_parallel_size expert_parallel_size"
)


def _of_both(names: str) -> tuple[str, ...]:
    return (*_keys(f"{REFIT_CFG}.nccl_reshard", names), *_keys(f"{REFIT_CFG}.gather_broadcast", names))


RULES: tuple[Rule, ...] = (
    Rule(rules_limits.not_colocated, reads=(f"{COLOCATED}.enabled",)),
    Rule(rules_limits.vllm_generates, reads=(_GENERATES,)),
    Rule(rules_limits.megatron_trains, reads=(_TRAINS,)),
    Rule(rules_limits.architecture_is_trained, reads=_SHAPE, purposes=("run",)),
    Rule(
        rules_limits.asynchronous_engine_has_one_stage,
        reads=(f"{VLLM}.async_engine", f"{VLLM}.pipeline_parallel_size"),
    ),
    Rule(rules_limits.vllm_precision_is_plain, reads=(f"{VLLM}.precision",)),
    Rule(rules_limits.context_is_whole, reads=(_CONTEXT,)),
    Rule(rules_limits.experts_stay_in_an_engine, reads=(_VLLM_TENSOR, _VLLM_EXPERT)),
    Rule(rules_limits.weights_are_the_checkpoints, reads=tuple(rules_limits.OTHER_WEIGHTS)),
    Rule(rules_run.transport_is_known, reads=(_TRANSPORT,)),
    Rule(rules_run.model_is_readable, reads=_SHAPE),
    Rule(rules_run.tiny_model_is_consistent, reads=("refit_run.tiny_model",)),
    Rule(rules_run.buffers_nest, reads=_of_both("staging_bytes bucket_bytes")),
    Rule(rules_run.domains_name_every_rank_once, reads=(*_RANKS, _TRANSPORT, *_of_both("topology"))),
    Rule(rules_run.nic_rates_are_of_the_domains, reads=(*_RANKS, _TRANSPORT, *_of_both("topology"))),
    Rule(rules_run.ports_are_a_range, reads=_keys(CLUSTER, "master_port_range_low master_port_range_high")),
    Rule(rules_run.prompts_fit_the_model, reads=("refit_run.prompts", f"{VLLM}.max_model_len", *_SHAPE)),
    Rule(rules_run.sequence_divides, reads=(_TRAINS, _TENSOR, _SEQUENCE, "refit_run.sequence_length")),
    Rule(rules_parallel.generation_has_resources, reads=_RANKS),
    Rule(rules_parallel.training_ranks_divide, reads=(*_RANKS, _TRAINS, *_EXPERT, _PIPELINE)),
    Rule(rules_parallel.generation_ranks_divide, reads=(*_RANKS, _GENERATES, _VLLM_TENSOR, _VLLM_PIPELINE)),
    Rule(rules_parallel.sequence_parallel_fits, reads=(_TRAINS, _TENSOR, _SEQUENCE, *_SHAPE)),
    Rule(rules_parallel.training_cuts_tensors_evenly, reads=(_TRAINS, _TENSOR, *_SHAPE)),
    Rule(rules_parallel.training_cuts_experts_evenly, reads=(_TRAINS, *_EXPERT, *_SHAPE)),
    Rule(rules_parallel.training_cuts_layers_evenly, reads=(_TRAINS, _PIPELINE, *_STAGES, *_SHAPE)),
    Rule(rules_parallel.training_modules_take_it, reads=(_TRAINS, *_EXPERT, *_STAGES, *_SHAPE)),
    Rule(rules_parallel.generation_cuts_layers, reads=(_GENERATES, _VLLM_PIPELINE, *_SHAPE)),
    Rule(rules_parallel.generation_cuts_tensors_evenly, reads=(_GENERATES, _VLLM_TENSOR, _VLLM_EXPERT, *_SHAPE)),
)


def broken_rules(job: Job, *, purpose: Purpose = "run", doubtful: frozenset[str] = frozenset()) -> Iterator[Violation]:
    """Every violation of every rule whose keys are all readable; `doubtful` are the keys that aren't."""
    for rule in RULES:
        if purpose in rule.purposes and not any(touches(read, key) for read in rule.reads for key in doubtful):
            yield from rule.check(job)


def touches(read: str, key: str) -> bool:
    """Whether one of two keys is the other or lies below it."""
    shorter, longer = sorted((read, key), key=len)
    return longer == shorter or longer.startswith((f"{shorter}.", f"{shorter}["))
