"""Rules about several keys of a GRPO or PPO job at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from refit_transport.config import rules_parallel
from refit_transport.config.facts import Job
from refit_transport.config.keys import shown
from refit_transport.config.paths import COLOCATED, GENERATION, MEGATRON, VLLM
from refit_transport.config.rl_schema import RlSections
from refit_transport.config.rules import touches
from refit_transport.errors import Violation
from refit_transport.rl.tasks import task_from

_CRITIC = "value.megatron_cfg"
_CRITIC_CHECKS = (
    rules_parallel.training_ranks_divide,
    rules_parallel.sequence_parallel_fits,
    rules_parallel.training_cuts_tensors_evenly,
    rules_parallel.training_cuts_experts_evenly,
    rules_parallel.training_cuts_layers_evenly,
)


@dataclass(frozen=True, slots=True)
class RlJob:
    """Both halves of a configuration; `refit` is None where that half is broken."""

    sections: RlSections
    refit: Job | None


def one_algorithm(job: RlJob) -> Iterator[Violation]:
    """GRPO or PPO."""
    if not job.sections.has_one_algorithm():
        got = "both" if job.sections.grpo is not None else "neither"
        reason = "must be there without the other one: a job has one algorithm"
        yield Violation("grpo, ppo", got, reason, "keep one of the sections grpo and ppo")


def advantages_have_a_group(job: RlJob) -> Iterator[Violation]:
    """One sample alone is as good as its group."""
    grpo = job.sections.grpo
    if grpo is not None and grpo.num_generations_per_prompt < 2:
        reason = "must be at least 2: GRPO compares the samples of one prompt with each other"
        path = "grpo.num_generations_per_prompt"
        yield Violation(path, str(grpo.num_generations_per_prompt), reason, "raise it, or use PPO")


def batches_divide(job: RlJob) -> Iterator[Violation]:
    """A step's samples are whole optimizer steps, and these are whole micro-batches on every rank."""
    sections, size = job.sections, job.sections.global_batch_size
    samples = sections.rollouts.samples_per_step
    path = "policy.train_global_batch_size"
    if samples % size:
        reason = f"must divide the {samples} samples of a step (num_prompts_per_step * num_generations_per_prompt)"
        yield Violation(path, str(size), reason, f"set it to {samples}, or to a divisor of it")
    if job.refit is None or (ranks := job.refit.config.data_parallel_size) < 1:
        return
    unit = ranks * sections.policy.train_micro_batch_size
    if size % unit:
        each = f"train_micro_batch_size = {sections.policy.train_micro_batch_size} on {ranks} data-parallel ranks"
        remedy = f"use a multiple of {unit}, or lower policy.train_micro_batch_size"
        yield Violation(path, str(size), f"must be a multiple of {unit}, {each}", remedy)


def on_policy_has_one_update(job: RlJob) -> Iterator[Violation]:
    """After the first update the ratio isn't 1 any more."""
    sections = job.sections
    updates = sections.rollouts.samples_per_step // min(sections.global_batch_size, sections.rollouts.samples_per_step)
    updates *= sections.ppo.ppo_epochs if sections.ppo is not None else 1
    if sections.loss_fn.force_on_policy_ratio and updates > 1:
        reason = f"must be false: a step makes {updates} updates, and only the first is on policy"
        yield Violation("loss_fn.force_on_policy_ratio", "true", reason, "make one update per step, or set it to false")


def importance_is_complete(job: RlJob) -> Iterator[Violation]:
    """Bounds without a correction, or a correction without its bounds, would be ignored."""
    loss = job.sections.loss_fn
    kind, maximum = loss.truncated_importance_sampling_type, loss.truncated_importance_sampling_ratio
    minimum = loss.truncated_importance_sampling_ratio_min
    base = "loss_fn.truncated_importance_sampling"
    if kind is None:
        for key, value in (("ratio", maximum), ("ratio_min", minimum)):
            if value is not None:
                yield Violation(f"{base}_{key}", str(value), f"must be null without {base}_type", f"set {base}_type")
        return
    if not loss.use_importance_sampling_correction:
        reason = "must be null where use_importance_sampling_correction is false"
        yield Violation(f"{base}_type", shown(kind), reason, "set loss_fn.use_importance_sampling_correction to true")
    if maximum is None:
        yield Violation(f"{base}_ratio", "null", f"must be set for {kind}", "for example 2.0")
    if kind != "tis" and minimum is None:
        yield Violation(f"{base}_ratio_min", "null", f"must be set for {kind}", "for example 0.5")
    if maximum is not None and minimum is not None and minimum > maximum:
        yield Violation(f"{base}_ratio_min", str(minimum), f"must be at most {base}_ratio = {maximum}", "lower it")


def sequence_ratios_are_consistent(job: RlJob) -> Iterator[Violation]:
    """GSPO takes everything per sequence."""
    loss = job.sections.loss_fn
    if not loss.sequence_level_importance_ratios:
        return
    path = "loss_fn.sequence_level_importance_ratios"
    if loss.token_level_loss:
        yield Violation(path, "true", "must be false where token_level_loss is true", "set token_level_loss to false")
    if loss.truncated_importance_sampling_type == "seq-mask-tis":
        reason = "must be false with seq-mask-tis, which corrects each token"
        yield Violation(path, "true", reason, "use the type tis or icepop")


def kl_has_a_place(job: RlJob) -> Iterator[Violation]:
    """GRPO's reward is one number per sample; a penalty needs the reference."""
    sections = job.sections
    if sections.grpo is not None and sections.loss_fn.use_kl_in_reward:
        reason = "must be false: GRPO has one reward for a whole response"
        yield Violation("loss_fn.use_kl_in_reward", "true", reason, "set it to false, or use PPO")
    if sections.rollouts.skip_reference_policy_logprobs_calculation and sections.loss_fn.reference_policy_kl_penalty:
        section = "grpo" if sections.grpo is not None else "ppo"
        path = f"{section}.skip_reference_policy_logprobs_calculation"
        reason = "must be false where loss_fn.reference_policy_kl_penalty isn't 0"
        yield Violation(path, "true", reason, "set the penalty to 0, or this to false")


def asynchrony_is_complete(job: RlJob) -> Iterator[Violation]:
    """Samples of older weights need a correction, and an engine that can be paused."""
    sections = job.sections
    enabled = "ppo.async_ppo.enabled" if sections.ppo is not None else "grpo.async_grpo.enabled"
    if sections.asynchronous.enabled and not sections.loss_fn.use_importance_sampling_correction:
        reason = f"must be true where {enabled} is: samples are of older weights"
        yield Violation("loss_fn.use_importance_sampling_correction", "false", reason, "set it to true")
    if job.refit is None:
        return
    engine = job.refit.config.policy.generation.vllm_cfg.async_engine
    if engine != sections.asynchronous.enabled:
        wanted = shown(sections.asynchronous.enabled)
        reason = f"must be {wanted} where {enabled} is {wanted}"
        yield Violation(f"{VLLM}.async_engine", shown(engine), reason, f"set it to {wanted}")


def lengths_nest(job: RlJob) -> Iterator[Violation]:
    """A prompt and a response fit the sequence, and the sequence fits the engine."""
    policy = job.sections.policy
    longest = policy.max_total_sequence_length
    new, prompt = policy.generation.max_new_tokens, job.sections.data.max_input_seq_length
    for path, value in ((f"{GENERATION}.max_new_tokens", new), ("data.max_input_seq_length", prompt)):
        if value is not None and value > longest:
            yield Violation(
                path, str(value), f"must be at most policy.max_total_sequence_length = {longest}", "lower it"
            )
    limit = None if job.refit is None else job.refit.config.policy.generation.vllm_cfg.max_model_len
    if limit is not None and limit < longest:
        reason = f"must be at least policy.max_total_sequence_length = {longest}"
        yield Violation(f"{VLLM}.max_model_len", str(limit), reason, "set it to ${policy.max_total_sequence_length}")


def stop_tokens_are_the_models(job: RlJob) -> Iterator[Violation]:
    """An id outside of the vocabulary never comes."""
    stops = job.sections.policy.generation.stop_token_ids or ()
    if job.refit is None or job.refit.model is None or not stops or max(stops) < (vocab := job.refit.model.vocab):
        return
    reason = f"has a token id outside the model's vocabulary of {vocab}"
    yield Violation(f"{GENERATION}.stop_token_ids", shown(list(stops)), reason, f"use ids from 0 to {vocab - 1}")


def task_is_known(job: RlJob) -> Iterator[Violation]:
    """The tasks can be made."""
    for name, data in (("train", job.sections.data.train), ("validation", job.sections.data.validation)):
        if data is None:
            continue
        try:
            task_from(data.dataset_name, data.kwargs)
        except ValueError as error:
            path = f"data.{name}.dataset_name"
            yield Violation(path, shown(data.dataset_name), str(error), "name a task of refit_transport.rl.tasks")


def validation_has_data(job: RlJob) -> Iterator[Violation]:
    """What asks for validation would be ignored without a task."""
    if job.sections.data.validation is not None:
        return
    section = "ppo" if job.sections.ppo is not None else "grpo"
    for key in ("val_at_start", "val_at_end"):
        if getattr(job.sections.rollouts, key):
            reason = "must be false where data.validation is null"
            yield Violation(f"{section}.{key}", "true", reason, "name a task in data.validation.dataset_name")


def critic_is_cut_evenly(job: RlJob) -> Iterator[Violation]:
    """What holds for the policy's parallel sizes holds for the critic's."""
    if job.sections.ppo is None or job.refit is None:
        return
    config, critic = job.refit.config, job.sections.value.megatron_cfg
    if not critic.enabled:
        reason = "must be true: Megatron is the only training backend so far"
        yield Violation(f"{_CRITIC}.enabled", "false", reason, "set it to true")
    policy = config.policy.model_copy(update={"megatron_cfg": critic})
    swapped = replace(job.refit, config=config.model_copy(update={"policy": policy}))
    for check in _CRITIC_CHECKS:
        for found in check(swapped):
            yield replace(found, path=found.path.replace(MEGATRON, _CRITIC, 1))


def critic_has_ranks(job: RlJob) -> Iterator[Violation]:
    """Policy and critic share what generation leaves of the cluster."""
    if job.refit is None or job.sections.ppo is None:
        return
    config = job.refit.config
    left = config.cluster.ranks - config.generation_ranks
    if left > 0 and left % 2:
        total = config.cluster.gpus_per_node
        reason = f"leaves {left} of {config.cluster.ranks} ranks for training, which policy and critic share evenly"
        yield Violation(
            "cluster.gpus_per_node", str(total), reason, "count the critic's ranks: as many as the policy's"
        )


@dataclass(frozen=True, slots=True)
class RlRule:
    """A check and the keys that it reads, a section standing for all its keys."""

    check: Callable[[RlJob], Iterable[Violation]]
    reads: tuple[str, ...]


_SIZES = (
    "grpo.num_prompts_per_step",
    "grpo.num_generations_per_prompt",
    "ppo.num_prompts_per_step",
    "ppo.num_generations_per_prompt",
    "policy.train_global_batch_size",
)
_ASYNC = ("grpo.async_grpo", "ppo.async_ppo", "loss_fn.use_importance_sampling_correction")

RL_RULES = (
    RlRule(one_algorithm, reads=()),
    RlRule(advantages_have_a_group, reads=("grpo.num_generations_per_prompt",)),
    RlRule(batches_divide, reads=(*_SIZES, "policy.train_micro_batch_size")),
    RlRule(on_policy_has_one_update, reads=(*_SIZES, "ppo.ppo_epochs", "loss_fn.force_on_policy_ratio")),
    RlRule(importance_is_complete, reads=("loss_fn",)),
    RlRule(sequence_ratios_are_consistent, reads=("loss_fn",)),
    RlRule(
        kl_has_a_place,
        reads=(
            "loss_fn",
            "grpo.skip_reference_policy_logprobs_calculation",
            "ppo.skip_reference_policy_logprobs_calculation",
        ),
    ),
    RlRule(asynchrony_is_complete, reads=_ASYNC),
    RlRule(
        lengths_nest,
        reads=("policy.max_total_sequence_length", f"{GENERATION}.max_new_tokens", "data.max_input_seq_length"),
    ),
    RlRule(stop_tokens_are_the_models, reads=(f"{GENERATION}.stop_token_ids",)),
    RlRule(task_is_known, reads=("data.train", "data.validation")),
    RlRule(validation_has_data, reads=("grpo", "ppo", "data.validation")),
    RlRule(critic_has_ranks, reads=("cluster", f"{COLOCATED}.resources")),
    RlRule(critic_is_cut_evenly, reads=("value.megatron_cfg",)),
)


def broken_rl_rules(job: RlJob, *, doubtful: frozenset[str]) -> Iterator[Violation]:
    """Every violation of every rule whose keys are all readable; `doubtful` are the keys that aren't."""
    for rule in RL_RULES:
        if not any(touches(read, key) for read in rule.reads for key in doubtful):
            yield from rule.check(job)
