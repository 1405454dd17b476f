"""A whole GRPO or PPO job on Ray: a Megatron policy, perhaps a critic, vLLM engines, and the loop over them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from refit_transport.cluster.critic import CriticWorker
from refit_transport.cluster.fleet import Fleet
from refit_transport.cluster.job import (
    Announce,
    Place,
    PlacedGroups,
    Role,
    building_engine,
    model_and_cluster,
    placed_groups,
    policy_arguments,
    refit_roles,
    synchronizer_of,
    training_arguments,
)
from refit_transport.cluster.learning import GrpoLearner, Learner, PpoLearner, PpoSettings
from refit_transport.cluster.policy import PolicyWorker
from refit_transport.cluster.rl_loop import LogprobLimit, Loop, StepReport
from refit_transport.cluster.rollouts import AheadRollouts, Asking, FreshRollouts, Rollouts
from refit_transport.cluster.run_state import RunFolder
from refit_transport.cluster.served import ServedCheck
from refit_transport.cluster.synchronizer import RefitSynchronizer
from refit_transport.cluster.validation import Validator
from refit_transport.cluster.workers import Pending, WorkerGroup, collect
from refit_transport.config.rl import RlConfig
from refit_transport.config.rl_schema import VALIDATION_KEYS, CriticMegatron, RlOptimizer
from refit_transport.events import Observer, observing
from refit_transport.rl.tasks import Task

_CRITIC = "critic"
# A worker tells its own deadline better than the driver: give it time to. What a dead engine had is free at once.
_MARGIN_S, _RESTART_S = 30.0, 30.0
# Nats on the mean of a step, where both sides compute in fp32, and where one rounds to bf16.
_EXACT_LIMIT, _ROUNDED_LIMIT = 1e-5, 1e-2


@dataclass(frozen=True, slots=True)
class RlWorkers:
    """The running parts of a job."""

    policy: WorkerGroup
    critic: WorkerGroup | None
    fleet: Fleet
    synchronizer: RefitSynchronizer


def run_steps(config: RlConfig, *, ray_address: str | None, announce: Announce) -> Iterator[StepReport]:
    """Runs a job to its last step, from its last checkpoint if there is one, and yields each step when it is done.

    Args:
        config: the job.
        ray_address: a running Ray cluster's address; None starts one on this machine.
        announce: called with what comes next, in a few words.

    Raises:
        ConfigError: the model or a checkpoint can't be used; nothing has started, or all is released.
        WorkerError: a worker failed; everything is released first.
        ParityError: trainer and samplers compute different things.
    """
    steps, folder = config.sections.rollouts.max_num_steps, run_folder(config)
    done = None if folder is None else folder.latest()
    if done is not None and done[1].step >= steps:
        return
    with model_and_cluster(config.refit, address=ray_address, announce=announce) as scratch:
        announce("starting the workers")
        with running_workers(config, scratch=scratch) as workers:
            announce("planning the refit")
            workers.synchronizer.prepare()
            yield from loop_of(config, workers, folder, announce=announce).run(steps)


@contextmanager
def running_workers(config: RlConfig, *, scratch: Path | None = None) -> Iterator[RlWorkers]:
    """Starts all workers of a job and releases them at the end of the block. See `job.running_job`."""
    run = config.refit.refit_run
    with (
        observing(events=run.events, metrics=run.metrics) as observer,
        placed_groups(config.refit, roles(config), scratch=scratch) as placed,
    ):
        yield build_workers(config, placed, observer=observer)


def build_workers(config: RlConfig, placed: PlacedGroups, *, observer: Observer | None = None) -> RlWorkers:
    """Builds a job's workers on groups for its `roles`, in place of others that the groups may have had.

    Raises:
        WorkerError: a worker didn't start; names group, rank and phase.
    """
    refit = config.refit
    places, ports = placed.meeting_places()
    (policy, place), *others = zip(placed.groups, places, strict=True)
    learning = _learning(config, config.sections.policy.megatron_cfg.optimizer)
    learning["temperature"] = config.sections.policy.generation.temperature
    building = [policy.build(PolicyWorker, [own | learning for own in policy_arguments(refit, policy, place)])]
    critic = None
    if config.sections.ppo is not None:
        (critic, place), *others = others
        building.append(critic.build(CriticWorker, _critic_arguments(config, critic, place)))
    building += [_build_engine(config, engine, where) for engine, where in others]
    collect(building, timeout_s=refit.refit_run.worker_timeout_s)
    engines = {engine.name: engine for engine, _ in others}
    synchronizer = synchronizer_of(
        refit, policy, tuple(engines.values()), ports=ports, host=placed.host, observer=observer
    )
    fleet = Fleet(
        policy,
        engines,
        synchronizer=synchronizer,
        start={
            name: partial(_start_engine, config, placed, role)
            for name, role in zip(engines, roles(config)[-len(engines) :], strict=True)
        },
        restarts=refit.refit_run.engine_restarts,
        timeout_s=refit.refit_settings().timeout_s + _MARGIN_S,
    )
    return RlWorkers(policy, critic, fleet, synchronizer)


def _build_engine(config: RlConfig, engine: WorkerGroup, where: Place) -> Pending:
    """Starts constructing an engine's workers."""
    recompute = config.sections.asynchronous.recompute_kv_cache_after_weight_updates
    return building_engine(config.refit, engine, where, kv_cache="recompute" if recompute else "keep")


def _start_engine(config: RlConfig, placed: PlacedGroups, role: Role) -> tuple[WorkerGroup, Pending]:
    group, where = placed.start(role, timeout_s=_RESTART_S)
    return group, _build_engine(config, group, where)


def roles(config: RlConfig) -> list[Role]:
    """The policy, perhaps the critic, then each engine."""
    policy, *engines = refit_roles(config.refit)
    critic = [Role(_CRITIC, config.refit.critic_ranks)] if config.sections.ppo is not None else []
    return [policy, *critic, *engines]


def _learning(config: RlConfig, optimizer: RlOptimizer) -> dict[str, Any]:
    """What a training worker of an RL job has beyond one of `run`."""
    policy = config.sections.policy
    return {
        "learning_rate": optimizer.lr,
        "weight_decay": optimizer.weight_decay,
        "adam_betas": (optimizer.adam_beta1, optimizer.adam_beta2),
        "adam_eps": optimizer.adam_eps,
        "max_grad_norm": policy.max_grad_norm,
        "micro_batch_size": policy.train_micro_batch_size,
        "score_batch_size": policy.logprob_batch_size,
    }


def _critic_arguments(config: RlConfig, group: WorkerGroup, place: Place) -> list[dict[str, Any]]:
    value = config.sections.value
    megatron: CriticMegatron = value.megatron_cfg
    own = _learning(config, megatron.optimizer) | {
        "parallelism": megatron.parallelism,
        "max_grad_norm": value.max_grad_norm,
        "micro_batch_size": value.train_micro_batch_size or config.sections.policy.train_micro_batch_size,
    }
    return [each | own for each in training_arguments(config.refit, group, place)]


def run_folder(config: RlConfig) -> RunFolder | None:
    """Where the job's checkpoints are; None where it has none."""
    checkpointing = config.sections.checkpointing
    if not checkpointing.enabled:
        return None
    return RunFolder(
        Path(checkpointing.checkpoint_dir),
        fingerprint(config),
        keep=checkpointing.keep_top_k,
        best=checkpointing.metric_name is not None,
        higher_is_better=checkpointing.higher_is_better,
    )


def loop_of(config: RlConfig, workers: RlWorkers, folder: RunFolder | None, *, announce: Announce) -> Loop:
    """The loop over running workers; `folder` has the job's checkpoints."""
    sections, run = config.sections, config.refit.refit_run
    is_exact = config.refit.vllm_precision == config.refit.policy.precision == "float32"
    limit = run.logprob_error_limit or (_EXACT_LIMIT if is_exact else _ROUNDED_LIMIT)
    served = None
    if sections.asynchronous.enabled:
        served = ServedCheck(workers.policy, workers.fleet, timeout_s=run.worker_timeout_s)
    return Loop(
        learner=_learner(config, workers),
        rollouts=_rollouts(config, workers),
        sync=workers.synchronizer.sync,
        fleet=workers.fleet,
        folder=folder,
        save_period=sections.checkpointing.save_period,
        limit=LogprobLimit(limit, stops=run.on_logprob_error == "stop"),
        announce=announce,
        served=served,
        validator=_validator(config),
    )


def fingerprint(config: RlConfig) -> str:
    """Of all that decides a job's course, but not how far it goes, how it is cut, or where it writes."""
    refit, sections = config.refit, config.sections
    unimportant = {"train_micro_batch_size", "logprob_batch_size"}
    parts: list[Any] = [
        (refit.policy.model_name, refit.policy.precision, refit.vllm_precision),
        sections.rollouts.model_dump(mode="json", exclude={"max_num_steps", "max_num_epochs", *VALIDATION_KEYS}),
        *(part.model_dump(mode="json") for part in (sections.loss_fn, sections.value_loss_fn)),
        sections.data.model_dump(mode="json", exclude={"validation"}),
        sections.policy.model_dump(mode="json", exclude=unimportant),
    ]
    if sections.ppo is not None:
        critic = sections.value
        parts += [critic.max_grad_norm, critic.megatron_cfg.optimizer.model_dump(mode="json")]
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _learner(config: RlConfig, workers: RlWorkers) -> Learner:
    sections, timeout_s = config.sections, config.refit.refit_run.worker_timeout_s
    if workers.critic is None:
        return GrpoLearner(
            workers.policy,
            groups=config.group_advantages(),
            loss=config.policy_loss(),
            rows_per_update=sections.global_batch_size,
            timeout_s=timeout_s,
        )
    assert sections.ppo is not None
    settings = PpoSettings(
        gae=config.gae(),
        loss=config.policy_loss(),
        value_loss=config.value_loss(),
        epochs=sections.ppo.ppo_epochs,
        rows_per_update=sections.global_batch_size,
        first_policy_step=sections.ppo.policy_training_start_step + 1,
        seed=sections.ppo.seed,
    )
    return PpoLearner(workers.policy, workers.critic, settings=settings, timeout_s=timeout_s)


def _asking(config: RlConfig, task: Task, *, prompts: int, samples: int) -> Asking:
    sections, generation = config.sections, config.sections.policy.generation
    return Asking(
        task=task,
        prompts=prompts,
        samples=samples,
        seed=sections.rollouts.seed,
        max_prompt_tokens=sections.data.max_input_seq_length or sections.policy.max_total_sequence_length - 1,
        max_tokens=sections.max_new_tokens,
        temperature=generation.temperature,
        stop_ids=generation.stop_token_ids or (),
    )


def _validator(config: RlConfig) -> Validator | None:
    if (task := config.validation_task()) is None:
        return None
    own = config.sections.rollouts
    asking = _asking(config, task, prompts=own.max_val_samples, samples=own.val_num_generations_per_prompt)
    return Validator(asking, own.val_period, own.val_start_at, own.val_at_start, own.val_at_end)


def _rollouts(config: RlConfig, workers: RlWorkers) -> Rollouts:
    sections = config.sections
    own = sections.rollouts
    asking = _asking(
        config, config.task(), prompts=own.num_prompts_per_step, samples=own.num_generations_per_prompt
    )  # fmt: skip
    timeout_s, ahead = config.refit.refit_run.worker_timeout_s, sections.asynchronous
    if not ahead.enabled:
        return FreshRollouts(workers.fleet, asking, timeout_s=timeout_s)
    return AheadRollouts(
        workers.fleet,
        asking,
        max_age=ahead.max_trajectory_age_steps,
        in_flight=ahead.in_flight_weight_updates,
        timeout_s=timeout_s,
    )
