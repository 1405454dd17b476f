"""A whole GRPO or PPO job on Ray: a Megatron policy, perhaps a critic, vLLM engines, and the loop over them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from refit_transport.cluster.async_generation import AsyncGenerationWorker
from refit_transport.cluster.critic import CriticWorker
from refit_transport.cluster.fleet import Fleet
from refit_transport.cluster.generation import GenerationWorker
from refit_transport.cluster.job import (
    Announce,
    Place,
    PlacedGroups,
    Role,
    engine_arguments,
    engine_config,
    model_and_cluster,
    placed_groups,
    policy_arguments,
    refit_roles,
    training_arguments,
)
from refit_transport.cluster.learning import GrpoLearner, Learner, PpoLearner, PpoSettings
from refit_transport.cluster.policy import PolicyWorker
from refit_transport.cluster.rl_loop import LogprobLimit, Loop, StepReport
from refit_transport.cluster.rollouts import AheadRollouts, Asking, FreshRollouts, Rollouts
from refit_transport.cluster.run_state import RunFolder
from refit_transport.cluster.synchronizer import RefitSynchronizer
from refit_transport.cluster.workers import Pending, WorkerGroup, collect
from refit_transport.config.rl import RlConfig
from refit_transport.config.rl_schema import CriticMegatron, RlOptimizer
from refit_transport.events import observing

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
    steps, folder = config.sections.rollouts.max_num_steps, _run_folder(config)
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
    """Starts all workers of a job and releases them at the end of the block. See `job.running_job`.

    The critic's ranks come on top of the cluster's own: as many as the policy has.
    """
    refit = config.refit
    run = refit.refit_run
    with (
        observing(events=run.events, metrics=run.metrics) as observer,
        placed_groups(refit, roles(config), scratch=scratch) as placed,
    ):
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
        synchronizer = RefitSynchronizer(
            policy,
            tuple(engines.values()),
            settings=refit.refit_settings(),
            ports=ports,
            host=placed.host,
            ranks_per_actor=_ranks_per_actor(config),
            observer=observer,
        )
        fleet = Fleet(
            policy,
            engines,
            synchronizer=synchronizer,
            start={role.name: partial(_start_engine, config, placed, role) for role in roles(config)[-len(engines) :]},
            restarts=refit.refit_run.engine_restarts,
            timeout_s=refit.refit_settings().timeout_s + _MARGIN_S,
        )
        yield RlWorkers(policy, critic, fleet, synchronizer)


def _build_engine(config: RlConfig, engine: WorkerGroup, where: Place) -> Pending:
    """Starts constructing an engine's workers."""
    refit, ahead = config.refit, config.sections.asynchronous
    if not ahead.enabled:
        return engine.build(GenerationWorker, engine_arguments(refit, engine, where))
    own = {
        "config": engine_config(refit),
        "kv_cache": "recompute" if ahead.recompute_kv_cache_after_weight_updates else "keep",
        "timeout_s": refit.refit_run.worker_timeout_s,
    }
    return engine.build(AsyncGenerationWorker, [{**own, "node": node} for node in engine.nodes()])


def _start_engine(config: RlConfig, placed: PlacedGroups, role: Role) -> tuple[WorkerGroup, Pending]:
    group, where = placed.start(role, timeout_s=_RESTART_S)
    return group, _build_engine(config, group, where)


def roles(config: RlConfig) -> list[Role]:
    """The policy, perhaps the critic, then each engine: an actor per rank, or per engine where it runs ahead."""
    policy, *engines = refit_roles(config.refit)
    each = _ranks_per_actor(config)
    engines = [Role(role.name, role.actors // each, each) for role in engines]
    critic = [Role(_CRITIC, policy.actors)] if config.sections.ppo is not None else []
    return [policy, *critic, *engines]


def _ranks_per_actor(config: RlConfig) -> int:
    if not config.sections.asynchronous.enabled:
        return 1
    return config.refit.policy.generation.vllm_cfg.ranks


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


def _run_folder(config: RlConfig) -> RunFolder | None:
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
    limit = None
    if not sections.asynchronous.enabled:
        is_exact = config.refit.vllm_precision == config.refit.policy.precision == "float32"
        by_precision = _EXACT_LIMIT if is_exact else _ROUNDED_LIMIT
        limit = LogprobLimit(run.logprob_error_limit or by_precision, stops=run.on_logprob_error == "stop")
    return Loop(
        learner=_learner(config, workers),
        rollouts=_rollouts(config, workers),
        sync=workers.synchronizer.sync,
        fleet=workers.fleet,
        folder=folder,
        save_period=sections.checkpointing.save_period,
        limit=limit,
        announce=announce,
    )


def fingerprint(config: RlConfig) -> str:
    """Of all that decides a job's course, but not how far it goes, how it is cut, or where it writes."""
    refit, sections = config.refit, config.sections
    unimportant = {"train_micro_batch_size", "logprob_batch_size"}
    parts: list[Any] = [
        (refit.policy.model_name, refit.policy.precision, refit.vllm_precision),
        sections.rollouts.model_dump(mode="json", exclude={"max_num_steps", "max_num_epochs"}),
        *(part.model_dump(mode="json") for part in (sections.loss_fn, sections.value_loss_fn, sections.data)),
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


def _rollouts(config: RlConfig, workers: RlWorkers) -> Rollouts:
    sections, generation = config.sections, config.sections.policy.generation
    asking = Asking(
        task=config.task(),
        prompts=sections.rollouts.num_prompts_per_step,
        samples=sections.rollouts.num_generations_per_prompt,
        seed=sections.rollouts.seed,
        max_prompt_tokens=sections.data.max_input_seq_length or sections.policy.max_total_sequence_length - 1,
        max_tokens=sections.max_new_tokens,
        temperature=generation.temperature,
        stop_ids=generation.stop_token_ids or (),
    )
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
