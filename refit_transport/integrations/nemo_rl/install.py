"""Puts this package behind NeMo RL's `nccl_reshard`, in the driver's process."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from refit_transport.compatibility import TABLE, require
from refit_transport.integrations.nemo_rl import seams
from refit_transport.integrations.nemo_rl.delivery import use_hook
from refit_transport.integrations.nemo_rl.limits import require_supported
from refit_transport.integrations.nemo_rl.settings import KEEPS_KV_CACHE, TRANSPORT, generation_of, read_settings

if TYPE_CHECKING:
    from refit_transport.integrations.nemo_rl.synchronizer import RefitTransportSynchronizer

_MARK = "serves_refit_transport"


def install() -> None:
    """Checks versions and every seam, then replaces those that `seams.SEAMS` says are replaced. Idempotent.

    Call it before `ray.init` (NeMo RL's `init_ray`), so that workers get this package too, and before the driver
    imports NeMo RL's functions by name.

    Raises:
        MissingDependencyError, UnsupportedVersionError: the driver has no Ray, or a version that isn't supported.
        SeamError: NeMo RL isn't installed, or isn't as we know it at a seam.
        Nothing has been changed then.
    """
    check()
    if getattr(seams.find(seams.FACTORY), _MARK, False):
        return
    factory = _marked(_factory(seams.find(seams.FACTORY)))
    for seam in (seams.FACTORY, *seams.FACTORY_COPIES):
        seams.replace_at(seam, factory)
    seams.replace_at(seams.LIMITS, _marked(_limits(seams.find(seams.LIMITS))))
    seams.replace_at(seams.PPO_SETUP, _marked(_ppo_setup(seams.find(seams.PPO_SETUP), factory)))
    seams.replace_at(seams.GENERATION_CONFIG, _marked(_generation_config(seams.find(seams.GENERATION_CONFIG))))
    use_hook()


def check() -> None:
    """Proves that what a driver stands on is as we know it; changes nothing.

    vLLM and Megatron-core count where workers run, in environments of their own: these check theirs as they join.

    Raises:
        MissingDependencyError, UnsupportedVersionError, SeamError: as `install`.
    """
    for package in ("torch", "ray"):
        require(package, needed_for="the NeMo RL adapter")
    # NeMo RL is often run from its checkout, where there is no metadata of it.
    TABLE["nemo-rl"].check(seams.installed_version())
    seams.check_seams()


def _marked(function: Callable[..., Any]) -> Callable[..., Any]:
    setattr(function, _MARK, True)
    return function


def _factory(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def create_weight_synchronizer(
        policy: Any,
        generation: Any,
        generation_backend: str,
        colocated: bool,  # noqa: FBT001 - NeMo RL's signature
        train_cluster: Any = None,
        inference_cluster: Any = None,
        refit_buffer_size_gb: float | None = None,
    ) -> Any:
        if generation_backend == "vllm" and not colocated and generation.cfg.get("refit_transport") == TRANSPORT:
            return _synchronizer(policy, generation)
        return original(
            policy=policy,
            generation=generation,
            generation_backend=generation_backend,
            colocated=colocated,
            train_cluster=train_cluster,
            inference_cluster=inference_cluster,
            refit_buffer_size_gb=refit_buffer_size_gb,
        )

    return create_weight_synchronizer


def _synchronizer(policy: Any, generation: Any) -> RefitTransportSynchronizer:
    # Only now: Ray must not be imported before NeMo RL has set its variables.
    from refit_transport.integrations.nemo_rl.synchronizer import RefitTransportSynchronizer

    seams.find(seams.SYNCHRONIZER).register(RefitTransportSynchronizer)
    return RefitTransportSynchronizer(policy, generation)


def _limits(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def check_nccl_reshard_refit_support(master_config: Any) -> None:
        require_supported(master_config.policy)
        _note_kv_cache(master_config, "grpo", "async_grpo")

    return check_nccl_reshard_refit_support


def _ppo_setup(original: Callable[..., Any], factory: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def setup(master_config: Any, *arguments: Any, **named: Any) -> Any:
        generation = generation_of(master_config.policy)
        if generation.get("refit_transport") != TRANSPORT:
            return original(master_config, *arguments, **named)
        require_supported(master_config.policy)
        _note_kv_cache(master_config, "ppo", "async_ppo")
        generation["refit_transport"] = None
        try:
            made = original(master_config, *arguments, **named)
        finally:
            generation["refit_transport"] = TRANSPORT
        policy, policy_generation, _, (train_cluster, inference_cluster), *_ = made
        policy_generation.cfg["refit_transport"] = TRANSPORT
        policy_generation.weight_synchronizer = factory(
            policy=policy,
            generation=policy_generation,
            generation_backend="vllm",
            colocated=False,
            train_cluster=train_cluster,
            inference_cluster=inference_cluster,
        )
        policy_generation.weight_synchronizer.init_communicator()
        return made

    return setup


def _generation_config(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def configure_generation_config(config: Any, *arguments: Any, **named: Any) -> Any:
        config = original(config, *arguments, **named)
        if config["backend"] == "vllm" and config.get("refit_transport") == TRANSPORT:
            # What is wrong with them shall not show only when all workers are up.
            read_settings(config)
            config["vllm_cfg"]["load_format"] = "auto"
        return config

    return configure_generation_config


def _note_kv_cache(master_config: Any, algorithm: str, section: str) -> None:
    """Tells the synchronizer, which sees the generation's settings only, what requests in flight shall do."""
    settings = getattr(getattr(master_config, algorithm, None), section, None)
    keeps = bool(getattr(settings, "in_flight_weight_updates", False)) and not bool(
        getattr(settings, "recompute_kv_cache_after_weight_updates", False)
    )
    generation_of(master_config.policy)[KEEPS_KV_CACHE] = keeps
