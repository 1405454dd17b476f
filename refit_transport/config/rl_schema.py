"""The sections of a GRPO or PPO job, with NeMo RL's key names and defaults.

Where NeMo RL can do something that isn't available here, its key accepts only the value that means "without". Of
sections that NeMo RL's configuration shares with `schema.py` (`policy`), these models read what training and sampling
need besides, and leave the rest to `schema.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field

from refit_transport.config.base import Count, Number, Section, TokenId, Whole
from refit_transport.config.keys import shown
from refit_transport.config.schema import Megatron, Optimizer
from refit_transport.rl.settings import KlType, TruncationType

Positive = Annotated[Number, Field(gt=0)]
NonNegative = Annotated[Number, Field(ge=0)]
Fraction = Annotated[Number, Field(ge=0, le=1)]
# Settings of what is switched off; read by NeMo RL alone.
Unread = Mapping[str, Any] | None


def only(value: object, what: str) -> AfterValidator:
    """Refuses every other value, because `what` is not available yet."""

    def check(got: object) -> object:
        if got != value:
            raise ValueError(f"must be {shown(value)}: {what} not available yet")
        return got

    return AfterValidator(check)


class View(Section):
    """Some keys of a section whose others are checked elsewhere."""

    model_config = ConfigDict(extra="ignore")


class Switch(View):
    """A section whose `enabled` must be false."""

    enabled: Annotated[bool, only(False, "this is")] = False


class Asynchronous(Section):
    """`grpo.async_grpo`, `ppo.async_ppo`: generation runs ahead of training."""

    enabled: bool = False
    # Optimizer steps that a sample's oldest token may lie behind the weights that are trained on it.
    max_trajectory_age_steps: Count = 1
    # Pauses generation for a refit and resumes it mid-sequence, instead of waiting until all sequences are done.
    in_flight_weight_updates: bool = False
    # What an interrupted sequence has cached: computed anew with the new weights, or kept as the old ones made it.
    recompute_kv_cache_after_weight_updates: bool = False
    max_generation_failures: Annotated[int, only(0, "dropping failed generations is")] = 0
    warmup_generation_lead_steps: Annotated[int | None, only(None, "a lead of its own for the warm-up is")] = None
    drop_incomplete_targets_on_restore: Annotated[bool, only(False, "dropping restored samples is")] = False


class Rollouts(Section):
    """What `grpo` and `ppo` share: how much is sampled, and how long."""

    num_prompts_per_step: Count = 32
    num_generations_per_prompt: Count = 16
    # Tasks make their prompts, so an epoch has no end.
    max_num_epochs: Count = 1
    max_num_steps: Count = 1_000_000
    # Of prompts and samples.
    seed: Whole = 42
    # Reference log-probabilities aren't computed; only without a KL penalty.
    skip_reference_policy_logprobs_calculation: bool = False
    max_rollout_turns: Annotated[int, only(1, "rollouts of several turns are")] = 1
    overlong_filtering: Annotated[bool, only(False, "filtering overlong samples is")] = False
    use_dynamic_sampling: Annotated[bool, only(False, "dynamic sampling is")] = False
    batch_multiplier: Annotated[Number, only(1, "dynamic sampling is")] = 1
    dynamic_sampling_max_gen_batches: Count = 10
    reward_shaping: Switch = Switch()
    reward_scaling: Switch = Switch()
    seq_logprob_error_threshold: Annotated[Number | None, only(None, "masking by log-probability error is")] = None
    stop_at_validation_metric: Annotated[str | None, only(None, "stopping early is")] = None
    stop_at_validation_threshold: Annotated[Number | None, only(None, "stopping early is")] = None
    # Validation, of data.validation: after every so many steps (0: never) from a step on, before the first, after the
    # last.
    val_period: Whole = 10
    val_start_at: int = -1
    val_at_start: bool = False
    val_at_end: bool = False
    # Prompts of a validation, and responses to each.
    max_val_samples: Count = 256
    val_num_generations_per_prompt: Count = 1
    # Engines batch by themselves.
    val_batch_size: Count = 256

    @property
    def samples_per_step(self) -> int:
        return self.num_prompts_per_step * self.num_generations_per_prompt


# Keys of `Rollouts` that decide nothing about what is learned.
VALIDATION_KEYS = frozenset(key for key in Rollouts.model_fields if key.startswith("val_")) | {"max_val_samples"}


class GroupEstimator(Section):
    """`grpo.adv_estimator`; null takes over the value from `grpo`."""

    name: Literal["grpo"] = "grpo"
    normalize_rewards: bool | None = None
    use_leave_one_out_baseline: bool | None = None
    # Of other estimators.
    minus_baseline: bool = True


class Grpo(Rollouts):
    """`grpo`."""

    normalize_rewards: bool = True
    use_leave_one_out_baseline: bool = True
    adv_estimator: GroupEstimator = GroupEstimator()
    async_grpo: Asynchronous = Asynchronous()
    advantage_clip_low: Annotated[Number | None, only(None, "clipping advantages is")] = None
    advantage_clip_high: Annotated[Number | None, only(None, "clipping advantages is")] = None
    invalid_tool_call_advantage: Annotated[Number | None, only(None, "calling tools is")] = None
    malformed_thinking_advantage: Annotated[Number | None, only(None, "judging think tags is")] = None


class GaeEstimator(Section):
    """`ppo.adv_estimator`."""

    name: Literal["gae"] = "gae"
    gae_lambda: Fraction = 0.95
    gae_gamma: Fraction = 1.0
    # Whitens the advantages of a step over all its tokens.
    normalize_advantages: bool = True
    gae_lambda_value: Annotated[Number | None, only(None, "a lambda of its own for the critic is")] = None
    gae_lambda_policy: Annotated[Number | None, only(None, "a lambda of its own for the policy is")] = None
    length_adaptive_alpha: Annotated[Number, only(0, "a lambda that depends on the length is")] = 0.0


class Ppo(Rollouts):
    """`ppo`."""

    # Passes over each rollout.
    ppo_epochs: Count = 4
    # Steps that train the critic alone, before the first that trains the policy.
    policy_training_start_step: Whole = 0
    adv_estimator: GaeEstimator = GaeEstimator()
    async_ppo: Asynchronous = Asynchronous()


class LossFn(Section):
    """`loss_fn`: see `rl.settings.PolicyLossSettings`."""

    reference_policy_kl_penalty: NonNegative = 0.01
    reference_policy_kl_type: KlType = "k3"
    kl_input_clamp_value: Positive | None = 20.0
    kl_output_clamp_value: Positive | None = 10.0
    # Subtracts the KL from every token's reward instead of adding it to the loss. PPO only.
    use_kl_in_reward: bool = False
    ratio_clip_min: Annotated[Number, Field(ge=0, lt=1)] = 0.2
    ratio_clip_max: NonNegative = 0.2
    ratio_clip_c: Annotated[Number, Field(gt=1)] | None = None
    token_level_loss: bool = True
    sequence_level_importance_ratios: bool = False
    force_on_policy_ratio: bool = False
    use_importance_sampling_correction: bool = False
    truncated_importance_sampling_type: TruncationType | None = None
    truncated_importance_sampling_ratio: Positive | None = None
    truncated_importance_sampling_ratio_min: NonNegative | None = None
    use_on_policy_kl_approximation: Annotated[bool, only(False, "weighting the KL by the sampler's ratio is")] = False
    disable_ppo_ratio: Annotated[bool, only(False, "a loss without ratios is")] = False
    use_cispo: Annotated[bool, only(False, "CISPO is")] = False
    positive_example_nll_weight: Annotated[Number, only(0, "a likelihood term is")] = 0.0


class ValueLossFn(Section):
    """`value_loss_fn`: see `rl.settings.ValueLossSettings`."""

    scale: Positive = 1.0
    cliprange: Positive | None = None


class TaskData(Section):
    """`data.train`: which task is learned; `data.validation`: which one is judged."""

    # A built-in task (first_digit_echo) or "module:Class"; see `rl.tasks`.
    dataset_name: Annotated[str, Field(min_length=1)]
    # What the task is made with.
    kwargs: Mapping[str, Any] = Field(default_factory=dict)


class Data(Section):
    """`data`."""

    train: TaskData
    # Tokens of a prompt at most; null: as many as leave room for one new token.
    max_input_seq_length: Count | None = None
    shuffle: bool = True
    num_workers: Whole = 1
    # The same for validation; null: there is none.
    validation: TaskData | None = None
    default: Annotated[Unread, only(None, "defaults for data sets are")] = None
    use_multiple_dataloader: Annotated[bool, only(False, "several data loaders are")] = False


class Logger(Section):
    """`logger`."""

    # JSONL always, and TensorBoard where it is enabled; relative to the working directory.
    log_dir: Annotated[str, Field(min_length=1)] = "logs"
    tensorboard_enabled: bool = False
    wandb_enabled: Annotated[bool, only(False, "Weights & Biases is")] = False
    mlflow_enabled: Annotated[bool, only(False, "MLflow is")] = False
    swanlab_enabled: Annotated[bool, only(False, "SwanLab is")] = False
    monitor_gpus: Annotated[bool, only(False, "monitoring GPUs is")] = False
    num_val_samples_to_print: Annotated[int, only(0, "printing samples is")] = 0
    tensorboard: Unread = None
    wandb: Unread = None
    mlflow: Unread = None
    swanlab: Unread = None
    gpu_monitoring: Unread = None


class Checkpointing(Section):
    """`checkpointing`."""

    enabled: bool = True
    checkpoint_dir: Annotated[str, Field(min_length=1)] = "results/rl"
    # Which checkpoints are the best; null: the latest.
    metric_name: Literal["train:reward"] | None = None
    higher_is_better: bool = True
    # null: all.
    keep_top_k: Count | None = 3
    # Steps from one checkpoint to the next.
    save_period: Count = 10
    checkpoint_must_save_by: Annotated[str | None, only(None, "saving before a deadline is")] = None
    model_save_format: Annotated[str, only("safetensors", "another format is")] = "safetensors"
    save_consolidated: Annotated[bool, only(False, "consolidated checkpoints are")] = False
    save_optimizer: Annotated[bool, only(True, "a checkpoint that can't be resumed is")] = True


class RlOptimizer(View):
    """`policy.megatron_cfg.optimizer` and that of `value`."""

    lr: Positive = Optimizer.model_fields["lr"].default
    optimizer: Annotated[str, only("adam", "another optimizer is")] = "adam"
    weight_decay: NonNegative = 0.01
    adam_beta1: Annotated[Number, Field(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[Number, Field(ge=0, lt=1)] = 0.999
    adam_eps: Positive = 1e-8


class LearningRate(View):
    """`policy.megatron_cfg.scheduler`."""

    lr_decay_style: Annotated[str, only("constant", "a changing learning rate is")] = "constant"
    lr_warmup_iters: Annotated[int, only(0, "a changing learning rate is")] = 0


class RlMegatron(View):
    """`policy.megatron_cfg`, beside the parallel sizes."""

    optimizer: RlOptimizer = RlOptimizer()
    scheduler: LearningRate = LearningRate()


class RlGeneration(View):
    """`policy.generation`: how responses are sampled."""

    # Tokens of a response at most; null: whatever policy.max_total_sequence_length leaves.
    max_new_tokens: Count | None = None
    temperature: Positive = 1.0
    top_p: Annotated[Number, only(1, "sampling from a part of the distribution is")] = 1.0
    top_k: Annotated[int | None, only(None, "sampling from a part of the distribution is")] = None
    stop_token_ids: tuple[TokenId, ...] | None = None
    stop_strings: Annotated[Any, only(None, "stopping at text is")] = None


class RlPolicy(View):
    """`policy`, beside what `schema.Policy` has."""

    # Sequences of one optimizer step; null: all of a step's.
    train_global_batch_size: Count | None = None
    # Sequences of one micro-batch on each data-parallel rank.
    train_micro_batch_size: Count = 4
    # The same where log-probabilities are computed; null: as train_micro_batch_size.
    logprob_batch_size: Count | None = None
    # Tokens of prompt and response together at most.
    max_total_sequence_length: Count
    max_grad_norm: Positive = 1.0
    megatron_cfg: RlMegatron = RlMegatron()
    generation: RlGeneration = RlGeneration()
    sequence_packing: Switch = Switch()
    dynamic_batching: Switch = Switch()


class CriticMegatron(Megatron):
    """`value.megatron_cfg`: how the critic is cut."""

    model_config = ConfigDict(extra="ignore")

    enabled: bool = True
    optimizer: RlOptimizer = RlOptimizer()  # type: ignore[assignment]
    scheduler: LearningRate = LearningRate()


class Value(View):
    """`value`: PPO's critic, a model of the policy's shape with a value head, on as many ranks as the policy."""

    # null: as the policy's.
    train_micro_batch_size: Count | None = None
    max_grad_norm: Positive = 1.0
    megatron_cfg: CriticMegatron = CriticMegatron()


class RlSections(Section):
    """All that a GRPO or PPO job says beside `RefitConfig`. Exactly one of `grpo` and `ppo` is there."""

    grpo: Grpo | None = None
    ppo: Ppo | None = None
    loss_fn: LossFn = LossFn()
    value_loss_fn: ValueLossFn = ValueLossFn()
    data: Data
    logger: Logger = Logger()
    checkpointing: Checkpointing = Checkpointing()
    policy: RlPolicy
    value: Value = Value()

    @property
    def rollouts(self) -> Rollouts:
        return self.grpo or self.ppo or Rollouts()

    @property
    def asynchronous(self) -> Asynchronous:
        if self.grpo is not None:
            return self.grpo.async_grpo
        return self.ppo.async_ppo if self.ppo is not None else Asynchronous()

    @property
    def global_batch_size(self) -> int:
        """Sequences of one optimizer step."""
        return self.policy.train_global_batch_size or self.rollouts.samples_per_step

    @property
    def max_new_tokens(self) -> int:
        """Tokens of a response at most."""
        return self.policy.generation.max_new_tokens or self.policy.max_total_sequence_length - 1

    def has_one_algorithm(self) -> bool:
        return (self.grpo is None) != (self.ppo is None)
