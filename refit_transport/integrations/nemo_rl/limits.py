"""What a NeMo RL job may not ask of our `nccl_reshard`: all of it in one error.

NeMo RL's own transport also refuses expert tensor parallelism, virtual and custom pipelines, embedding and loss as
pipeline layers, generation over several stages, DTensor policies, PPO and precisions that differ: we don't.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from refit_transport.config.keys import shown, value_at
from refit_transport.errors import ConfigError, Violation
from refit_transport.integrations.nemo_rl.settings import generation_of, problems_of


@dataclass(eq=False)
class UnsupportedJobError(ConfigError, ValueError):
    """A ValueError too, as NeMo RL's own check raises."""


Check = Callable[[Mapping[str, Any]], Iterator[Violation]]

_GENERATION = "generation"
_SWITCHES: Mapping[str, tuple[str, str]] = {
    f"{_GENERATION}.colocated.enabled": (
        "weights move between separate training and generation ranks",
        "set it to false and give colocated.resources, or set refit_transport to null",
    ),
    f"{_GENERATION}.vllm_kwargs.enable_eplb": (
        "which rank has which expert is planned once",
        "set it to false",
    ),
    f"{_GENERATION}.real_quant": ("quantized weights can't be delivered yet", "set it to false"),
    f"{_GENERATION}.quant_cfg": ("quantized weights can't be delivered yet", "set it to null"),
    f"{_GENERATION}.vllm_kwargs.quantization": ("quantized weights can't be delivered yet", "remove it"),
    "megatron_cfg.fp8_cfg.fp8_param": (
        "FP8 storage can't be sent yet; FP8 computation on BF16 storage can",
        "set it to false",
    ),
    "megatron_cfg.peft.enabled": ("adapters beside the weights can't be sent yet", "set it to false"),
    "dtensor_cfg.lora_cfg.enabled": ("adapters beside the weights can't be sent yet", "set it to false"),
    "draft.enabled": ("trained draft models of their own can't be sent yet", "set it to false"),
}


def require_supported(policy: Mapping[str, Any]) -> None:
    """Raises UnsupportedJobError, with one violation for each problem, unless refits can serve the policy's section."""
    found = [violation for check in _CHECKS for violation in check(policy)]
    found += problems_of(generation_of(policy))
    if found:
        raise UnsupportedJobError("refit_transport: nccl_reshard", tuple(found))


def _switches_are_off(policy: Mapping[str, Any]) -> Iterator[Violation]:
    for key, (reason, remedy) in _SWITCHES.items():
        if value := value_at(policy, key):
            yield Violation(f"policy.{key}", shown(value), f"must be off: {reason}", remedy)


def _vllm_generates(policy: Mapping[str, Any]) -> Iterator[Violation]:
    backend = generation_of(policy).get("backend")
    if backend != "vllm":
        reason = "must be vllm, the only generation backend that weights can be sent to"
        yield Violation(f"policy.{_GENERATION}.backend", shown(backend), reason, "set it to vllm")


def _somebody_trains(policy: Mapping[str, Any]) -> Iterator[Violation]:
    if not (value_at(policy, "megatron_cfg.enabled") or value_at(policy, "dtensor_cfg.enabled")):
        reason = "must be true, or policy.dtensor_cfg.enabled: weights come from a Megatron or a DTensor policy"
        yield Violation("policy.megatron_cfg.enabled", "false", reason, "enable one of them")


def _precisions_are_plain(policy: Mapping[str, Any]) -> Iterator[Violation]:
    for name in ("precision", "kv_cache_dtype"):
        value = value_at(policy, f"{_GENERATION}.vllm_cfg.{name}")
        if str(value).startswith("fp8"):
            reason = "must not be FP8: encodings with scales can't be delivered yet"
            yield Violation(f"policy.{_GENERATION}.vllm_cfg.{name}", shown(value), reason, "set it to auto")


def _experts_stay_in_an_engine(policy: Mapping[str, Any]) -> Iterator[Violation]:
    vllm = generation_of(policy).get("vllm_cfg") or {}
    tensor, expert = vllm.get("tensor_parallel_size") or 1, vllm.get("expert_parallel_size") or 1
    if expert not in (1, tensor):
        reason = f"must be 1 or tensor_parallel_size = {tensor}: experts over several engines can't be delivered yet"
        path = f"policy.{_GENERATION}.vllm_cfg.expert_parallel_size"
        yield Violation(path, shown(expert), reason, f"set it to {tensor}")


_CHECKS: tuple[Check, ...] = (
    _vllm_generates,
    _somebody_trains,
    _switches_are_off,
    _precisions_are_plain,
    _experts_stay_in_an_engine,
)
