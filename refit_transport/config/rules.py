"""Rules about several keys at once, or about a key and the world (the model folder, the installed packages).

A rule is a pure function that yields violations. It runs when all the keys that it reads are readable; `RULES` says
which those are. A problem of one key alone belongs into the schema.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from refit_transport.config import rules_parallel, rules_run
from refit_transport.config.facts import Job
from refit_transport.config.paths import CLUSTER, COLOCATED, GENERATION, MEGATRON, MODEL, REFIT_CFG, VLLM
from refit_transport.errors import Violation

Check = Callable[[Job], Iterable[Violation]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A check and the keys that it reads, a section standing for all its keys."""

    check: Check
    reads: tuple[str, ...]


_RANKS = (CLUSTER, COLOCATED)
_SHAPE = (MODEL, "refit_run.tiny_model")

RULES: tuple[Rule, ...] = (
    Rule(rules_run.not_colocated, reads=(COLOCATED,)),
    Rule(rules_run.vllm_generates, reads=(f"{GENERATION}.backend",)),
    Rule(rules_run.megatron_trains, reads=(f"{MEGATRON}.enabled",)),
    Rule(rules_run.engine_is_synchronous, reads=(f"{VLLM}.async_engine",)),
    Rule(rules_run.transport_is_known, reads=(f"{GENERATION}.refit_transport",)),
    Rule(rules_run.model_is_readable, reads=_SHAPE),
    Rule(rules_run.tiny_model_is_consistent, reads=("refit_run.tiny_model",)),
    Rule(rules_run.fabric_runs_here, reads=(f"{GENERATION}.refit_transport", REFIT_CFG)),
    Rule(rules_run.commit_is_available, reads=(REFIT_CFG,)),
    Rule(rules_run.vllm_precision_is_plain, reads=(f"{VLLM}.precision",)),
    Rule(rules_run.buffers_nest, reads=(REFIT_CFG,)),
    Rule(rules_run.domains_name_every_rank_once, reads=(*_RANKS, REFIT_CFG, f"{GENERATION}.refit_transport")),
    Rule(rules_run.ports_are_a_range, reads=(CLUSTER,)),
    Rule(rules_run.prompts_fit_the_model, reads=("refit_run.prompts", f"{VLLM}.max_model_len", *_SHAPE)),
    Rule(rules_run.sequence_divides, reads=(MEGATRON, "refit_run.sequence_length")),
    Rule(rules_parallel.generation_has_resources, reads=_RANKS),
    Rule(rules_parallel.training_ranks_divide, reads=(*_RANKS, MEGATRON)),
    Rule(rules_parallel.generation_ranks_divide, reads=(*_RANKS, VLLM)),
    Rule(rules_parallel.sequence_parallel_fits, reads=(MEGATRON, *_SHAPE)),
    Rule(rules_parallel.training_cuts_tensors_evenly, reads=(MEGATRON, *_SHAPE)),
    Rule(rules_parallel.training_cuts_experts_evenly, reads=(MEGATRON, *_SHAPE)),
    Rule(rules_parallel.training_cuts_layers_evenly, reads=(MEGATRON, *_SHAPE)),
    Rule(rules_parallel.generation_cuts_tensors_evenly, reads=(VLLM, *_SHAPE)),
    Rule(rules_parallel.generation_cuts_layers, reads=(VLLM, *_SHAPE)),
)


def broken_rules(job: Job, *, doubtful: frozenset[str] = frozenset()) -> Iterator[Violation]:
    """Every violation of every rule whose keys are all readable; `doubtful` are the keys that aren't."""
    for rule in RULES:
        if not any(_touches(read, key) for read in rule.reads for key in doubtful):
            yield from rule.check(job)


def _touches(read: str, key: str) -> bool:
    """Whether one of two keys is the other or lies below it."""
    shorter, longer = sorted((read, key), key=len)
    return longer == shorter or longer.startswith((f"{shorter}.", f"{shorter}["))
