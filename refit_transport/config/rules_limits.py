"""Rules about what `run` can't do yet: each key that asks for it is refused, because to ignore it would be wrong.

The other rules go on as if the refused size were 1, so that what else is wrong is told at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from refit_transport.config.facts import Job
from refit_transport.config.keys import shown, value_at
from refit_transport.config.paths import COLOCATED, GENERATION, MEGATRON, MODEL, VLLM
from refit_transport.errors import Violation

# NeMo RL's switches that add, remove or re-encode weights, and what they ask for.
OTHER_WEIGHTS: Mapping[str, str] = {
    "policy.dtensor_cfg.enabled": "DTensor policies",
    "policy.draft.enabled": "draft models",
    "policy.hf_config_overrides": "changes to the checkpoint's own config.json",
    "policy.is_vlm": "vision-language models",
    "policy.quant_cfg": "quantized weights",
    "policy.reward_model_cfg.enabled": "reward models",
    f"{MEGATRON}.fp8_cfg.enabled": "FP8 weights",
    f"{MEGATRON}.model_overrides": "changes to the checkpoint's own config.json",
    f"{MEGATRON}.mtp_num_layers": "layers for multi-token prediction",
    f"{MEGATRON}.peft.enabled": "adapters beside the checkpoint's weights",
    f"{GENERATION}.quant_cfg": "quantized weights",
    f"{GENERATION}.real_quant": "quantized weights",
    f"{GENERATION}.vllm_kwargs.hf_overrides": "changes to the checkpoint's own config.json",
    f"{GENERATION}.vllm_kwargs.quantization": "quantized weights",
    f"{GENERATION}.vllm_kwargs.speculative_config": "draft models",
}

TRAINED = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "MixtralForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Glm4MoeForCausalLM",
    "GptOssForCausalLM",
    "Qwen3NextForCausalLM",
    "NemotronHForCausalLM",
    "GemmaForCausalLM",
)
# Why the others that plans know aren't.
_MISSING: Mapping[str, str] = {
    "Gemma3ForCausalLM": "Megatron-core has no norms behind attention and MLP",
    "Gemma3ForConditionalGeneration": "Megatron-core has no norms behind attention and MLP",
    "Qwen3_5MoeForConditionalGeneration": "multimodal models are not built",
}


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


def architecture_is_trained(job: Job) -> Iterator[Violation]:
    """Training workers build a Megatron model of the checkpoint's architecture."""
    if job.model is not None and job.model.architecture not in TRAINED:
        why = _MISSING[job.model.architecture]
        reason = f"has the architecture {job.model.architecture}, whose training is not available yet: {why}"
        remedy = f"use a model of {', '.join(TRAINED)}"
        yield Violation(MODEL, shown(job.config.policy.model_name), reason, remedy)


def asynchronous_engine_has_one_stage(job: Job) -> Iterator[Violation]:
    """vLLM's asynchronous engine starts its ranks itself, and not yet in stages."""
    vllm = job.config.policy.generation.vllm_cfg
    if vllm.async_engine and (stages := vllm.pipeline_parallel_size) > 1:
        reason = "must be 1 where async_engine is true: asynchronous engines of several stages are not available yet"
        yield Violation(f"{VLLM}.pipeline_parallel_size", str(stages), reason, "set it to 1, or async_engine to false")


def context_is_whole(job: Job) -> Iterator[Violation]:
    """Every training rank sees whole sequences, but for sequence parallelism."""
    if (size := job.config.policy.megatron_cfg.context_parallel_size) > 1:
        reason = "must be 1: training with context parallelism is not available yet"
        yield Violation(f"{MEGATRON}.context_parallel_size", str(size), reason, "set it to 1")


def experts_stay_in_an_engine(job: Job) -> Iterator[Violation]:
    """Experts are spread over all ranks of an engine, or over none."""
    vllm = job.config.policy.generation.vllm_cfg
    tensor, expert = vllm.tensor_parallel_size, vllm.expert_parallel_size
    if expert not in (1, tensor):
        reason = (
            f"must be 1 or tensor_parallel_size = {tensor}: experts of several engines together are not available yet"
        )
        yield Violation(f"{VLLM}.expert_parallel_size", str(expert), reason, f"set it to {tensor}")


def weights_are_the_checkpoints(job: Job) -> Iterator[Violation]:
    """Both sides have exactly the checkpoint's weights."""
    for path, what in OTHER_WEIGHTS.items():
        if value := value_at(job.document, path):
            yield Violation(path, shown(value), f"must be off: {what} are not available yet", "set it to false or null")


def vllm_precision_is_plain(job: Job) -> Iterator[Violation]:
    """Encodings with scales have no pieces yet."""
    precision = job.config.policy.generation.vllm_cfg.precision
    if precision not in (None, "auto", "float32", "bfloat16"):
        reason = "must be float32, bfloat16 or auto: other encodings of the served weights are not available yet"
        yield Violation(f"{VLLM}.precision", shown(precision), reason, "set it to ${policy.precision}")
