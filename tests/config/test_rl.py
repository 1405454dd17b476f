"""GRPO and PPO jobs: NeMo RL's keys and defaults, what is refused, and what the losses are told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from refit_transport.config.rl import RlConfig, load_rl_config
from refit_transport.errors import ConfigError, Violation
from refit_transport.rl.advantages import GaeSettings, GroupSettings
from refit_transport.rl.settings import ImportanceSettings, KlSettings, PolicyLossSettings, ValueLossSettings
from refit_transport.rl.tasks import FirstDigitEcho

Load = Callable[[Mapping[str, Any]], RlConfig]
Check = Callable[[Mapping[str, Any]], tuple[Violation, ...]]


@pytest.fixture
def load(document: dict[str, Any], change: Callable[..., dict[str, Any]], tmp_path: Path) -> Load:
    """A GRPO job: 8 prompts x 4 samples, two data-parallel ranks; `changes` are dotted keys."""
    base = change(
        document,
        {
            "grpo.num_prompts_per_step": 8,
            "grpo.num_generations_per_prompt": 4,
            "policy.max_total_sequence_length": 32,
            "data.train.dataset_name": "first_digit_echo",
        },
    )

    def load(changes: Mapping[str, Any]) -> RlConfig:
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump(change(base, changes)))
        return load_rl_config(path, resolve_transport=lambda name: name)

    return load


@pytest.fixture
def refused(load: Load) -> Check:
    def check(changes: Mapping[str, Any]) -> tuple[Violation, ...]:
        try:
            load(changes)
        except ConfigError as error:
            return error.violations
        return ()

    return check


AS_PPO = {"grpo": None, "ppo.num_prompts_per_step": 32, "ppo.num_generations_per_prompt": 1}
ASYNC = {
    "grpo.async_grpo.enabled": True,
    "loss_fn.use_importance_sampling_correction": True,
    "policy.generation.vllm_cfg.async_engine": True,
}


ASYNC_PPO = {key.replace("grpo", "ppo"): value for key, value in ASYNC.items()}


class TestValues:
    def test_defaults_are_nemo_rls(self, load: Load) -> None:
        config = load({})
        assert config.policy_loss() == PolicyLossSettings(kl=KlSettings(0.01, "k3", 20.0, 10.0))
        assert config.group_advantages() == GroupSettings(use_leave_one_out_baseline=True, normalize_rewards=True)
        assert config.needs_reference
        assert config.sections.grpo is not None
        assert (config.sections.grpo.seed, config.sections.grpo.max_num_steps) == (42, 1_000_000)
        assert config.sections.checkpointing.save_period == 10
        assert config.sections.global_batch_size == 32
        assert config.sections.max_new_tokens == 31
        assert config.task() == FirstDigitEcho()

    def test_a_loss_with_everything(self, load: Load) -> None:
        config = load(
            {
                "loss_fn": {
                    "ratio_clip_min": 0.1,
                    "ratio_clip_max": 0.3,
                    "ratio_clip_c": 3.0,
                    "token_level_loss": False,
                    "sequence_level_importance_ratios": True,
                    "use_importance_sampling_correction": True,
                    "truncated_importance_sampling_type": "icepop",
                    "truncated_importance_sampling_ratio": 5,
                    "truncated_importance_sampling_ratio_min": 0.5,
                    "reference_policy_kl_penalty": 0,
                }
            }
        )
        assert config.policy_loss() == PolicyLossSettings(
            0.1, 0.3, 3.0, False, True, importance=ImportanceSettings("icepop", 5.0, 0.5)
        )
        assert not config.needs_reference

    def test_the_estimators_own_word_counts(self, load: Load) -> None:
        config = load({"grpo.normalize_rewards": True, "grpo.adv_estimator.normalize_rewards": False})
        assert not config.group_advantages().normalize_rewards

    def test_ppo(self, load: Load) -> None:
        config = load(
            {
                **AS_PPO,
                "ppo.adv_estimator": {"name": "gae", "gae_lambda": 0.9, "gae_gamma": 1},
                "loss_fn": {"use_kl_in_reward": True, "reference_policy_kl_type": "k1"},
                "value_loss_fn": {"scale": 0.4, "cliprange": 0.2},
                "value.megatron_cfg": {
                    "tensor_model_parallel_size": 1,
                    "expert_model_parallel_size": 2,
                    "expert_tensor_parallel_size": 1,
                },
            }
        )
        assert config.policy_loss() == PolicyLossSettings()
        assert config.gae() == GaeSettings(1.0, 0.9, True, KlSettings(0.01, "k1"))
        assert config.value_loss() == ValueLossSettings(0.4, 0.2)
        assert config.needs_reference
        # Four of the eight ranks generate; policy and critic share the others.
        assert (config.refit.training_ranks, config.refit.critic_ranks, config.refit.refit_ranks) == (2, 2, 6)
        with pytest.raises(ValueError, match="without grpo"):
            config.group_advantages()
        with pytest.raises(ValueError, match="without ppo"):
            load({}).gae()

    def test_asynchronous(self, load: Load) -> None:
        config = load({**ASYNC, "grpo.async_grpo.max_trajectory_age_steps": 3})
        assert (config.sections.asynchronous.enabled, config.sections.asynchronous.max_trajectory_age_steps) == (
            True,
            3,
        )

    def test_asynchronous_ppo(self, load: Load) -> None:
        assert load({**AS_PPO, **ASYNC_PPO}).sections.asynchronous.enabled

    def test_validation(self, load: Load) -> None:
        assert load({"grpo.val_period": 10}).validation_task() is None
        config = load({"data.validation": {"dataset_name": "first_digit_echo", "kwargs": {"digits": 5}}})
        assert config.validation_task() == FirstDigitEcho(digits=5)

    def test_a_task_of_the_user(self, load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "my_tasks.py").write_text(
            "class Silence:\n"
            "    def prompts(self, *, step, count, seed):\n        return ((1,),) * count\n"
            "    def reward(self, prompt, response):\n        return -float(len(response))\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        assert load({"data.train.dataset_name": "my_tasks:Silence"}).task().reward((1,), (2, 3)) == -2


@pytest.mark.parametrize(
    ("changes", "path", "reason", "remedy"),
    [
        ({"grpo": None}, "grpo, ppo", "one algorithm", "keep one"),
        ({"ppo": {}}, "grpo, ppo", "one algorithm", "keep one"),
        ({"grpo.num_prompt_per_step": 3}, "grpo.num_prompt_per_step", "is not a key of 'grpo'", "num_prompts_per_step"),
        ({"loss_fn.zebra": 3}, "loss_fn.zebra", "is not a key of 'loss_fn'", ""),
        ({"grpo.async_grpo.enable": True}, "grpo.async_grpo.enable", "is not a key of", "did you mean 'enabled'?"),
        ({"value.megatron_cfg.tensor_parallel": 1}, "value.megatron_cfg.tensor_parallel", "is not a key of", ""),
        ({"grpo.seed": -1}, "grpo.seed", "must be at least 0", ""),
        ({"grpo.num_prompts_per_step": True}, "grpo.num_prompts_per_step", "must be a number", ""),
        ({"loss_fn.reference_policy_kl_type": "k4"}, "loss_fn.reference_policy_kl_type", "must be k1 or k2 or k3", ""),
        ({"loss_fn.ratio_clip_c": 1}, "loss_fn.ratio_clip_c", "must be more than 1", ""),
        ({"data": None}, "data.train", "must be set", "dataset_name"),
        ({"policy.max_total_sequence_length": None}, "policy.max_total_sequence_length", "must be a whole number", ""),
        ({"grpo.max_rollout_turns": 3}, "grpo.max_rollout_turns", "must be 1: rollouts of several turns", ""),
        ({"grpo.reward_shaping.enabled": True}, "grpo.reward_shaping.enabled", "not available yet", ""),
        ({"loss_fn.use_cispo": True}, "loss_fn.use_cispo", "must be false: CISPO is not available yet", ""),
        ({"logger.wandb_enabled": True}, "logger.wandb_enabled", "must be false", ""),
        ({"checkpointing.metric_name": "val:accuracy"}, "checkpointing.metric_name", "must be train:reward", ""),
        ({"policy.generation.top_p": 0.9}, "policy.generation.top_p", "must be 1", ""),
        ({"policy.sequence_packing.enabled": True}, "policy.sequence_packing.enabled", "must be false", ""),
        ({"grpo.num_generations_per_prompt": 1}, "grpo.num_generations_per_prompt", "must be at least 2", "PPO"),
        ({"policy.train_global_batch_size": 24}, "policy.train_global_batch_size", "divide the 32 samples", "32"),
        ({"policy.train_micro_batch_size": 3}, "policy.train_global_batch_size", "a multiple of 6", "multiple of 6"),
        (
            {"policy.train_global_batch_size": 16, "loss_fn.force_on_policy_ratio": True},
            "loss_fn.force_on_policy_ratio",
            "a step makes 2 updates",
            "one update",
        ),
        (
            {"loss_fn.truncated_importance_sampling_ratio": 2},
            "loss_fn.truncated_importance_sampling_ratio",
            "must be null without",
            "_type",
        ),
        (
            {
                "loss_fn.truncated_importance_sampling_type": "tis",
                "loss_fn.truncated_importance_sampling_ratio": 2,
            },
            "loss_fn.truncated_importance_sampling_type",
            "must be null where use_importance_sampling_correction is false",
            "true",
        ),
        (
            {
                "loss_fn.use_importance_sampling_correction": True,
                "loss_fn.truncated_importance_sampling_type": "tis",
            },
            "loss_fn.truncated_importance_sampling_ratio",
            "must be set for tis",
            "2.0",
        ),
        (
            {"loss_fn.sequence_level_importance_ratios": True},
            "loss_fn.sequence_level_importance_ratios",
            "must be false where token_level_loss",
            "token_level_loss to false",
        ),
        ({"loss_fn.use_kl_in_reward": True}, "loss_fn.use_kl_in_reward", "one reward", "PPO"),
        (
            {"grpo.skip_reference_policy_logprobs_calculation": True},
            "grpo.skip_reference_policy_logprobs_calculation",
            "must be false where",
            "penalty to 0",
        ),
        (
            {**ASYNC, "loss_fn.use_importance_sampling_correction": False},
            "loss_fn.use_importance_sampling_correction",
            "must be true where",
            "set it to true",
        ),
        (
            {**ASYNC, "policy.generation.vllm_cfg.async_engine": False},
            "policy.generation.vllm_cfg.async_engine",
            "must be true where",
            "set it to true",
        ),
        (
            {"policy.generation.vllm_cfg.async_engine": True},
            "policy.generation.vllm_cfg.async_engine",
            "must be false where grpo.async_grpo.enabled is false",
            "set it to false",
        ),
        (
            {**AS_PPO, **ASYNC_PPO, "policy.generation.vllm_cfg.async_engine": False},
            "policy.generation.vllm_cfg.async_engine",
            "must be true where ppo.async_ppo.enabled is true",
            "set it to true",
        ),
        (
            {**AS_PPO, "cluster.gpus_per_node": 7, "policy.megatron_cfg": {"enabled": True}},
            "cluster.gpus_per_node",
            "leaves 3 of 7 ranks for training, which policy and critic share evenly",
            "as many as the policy's",
        ),
        (
            {"grpo.val_at_end": True},
            "grpo.val_at_end",
            "must be false where data.validation is null",
            "data.validation",
        ),
        (
            {**AS_PPO, "ppo.val_at_start": True},
            "ppo.val_at_start",
            "must be false where data.validation",
            "name a task",
        ),
        (
            {"data.validation.dataset_name": "nothing"},
            "data.validation.dataset_name",
            "unknown task 'nothing'",
            "name a task",
        ),
        ({"policy.generation.max_new_tokens": 33}, "policy.generation.max_new_tokens", "must be at most", "lower"),
        ({"policy.max_total_sequence_length": 65}, "policy.generation.vllm_cfg.max_model_len", "must be at least", "$"),
        ({"policy.generation.stop_token_ids": [2, 256]}, "policy.generation.stop_token_ids", "outside", "0 to 255"),
        ({"data.train.dataset_name": "nothing"}, "data.train.dataset_name", "unknown task 'nothing'", "name a task"),
        ({"data.train.kwargs": {"digits": 0}}, "data.train.dataset_name", "digits must be a whole number", ""),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(map(str, value)),
)
def test_one_problem(changes: Mapping[str, Any], path: str, reason: str, remedy: str, refused: Check) -> None:
    (found,) = refused(changes)
    assert found.path == path
    assert reason in found.reason
    assert remedy in found.remedy


def test_the_critic_is_cut_by_the_policys_rules(refused: Check) -> None:
    """Size for size what the same sizes of the policy break."""
    section = "megatron_cfg"
    for sizes in (
        {"tensor_model_parallel_size": 3},
        {"tensor_model_parallel_size": 2, "sequence_parallel": False},
        {"expert_model_parallel_size": 3, "expert_tensor_parallel_size": 1},
        {"pipeline_model_parallel_size": 3},
    ):
        whole = {"enabled": True, **sizes}
        of_policy = [
            each for each in refused({**AS_PPO, f"policy.{section}": whole}) if f"policy.{section}" in each.path
        ]
        of_critic = refused({**AS_PPO, f"value.{section}": whole})
        assert of_critic
        assert [(each.path.replace("value.", "policy."), each.reason) for each in of_critic] == [
            (each.path, each.reason) for each in of_policy
        ]


def test_all_problems_come_at_once(refused: Check) -> None:
    found = refused(
        {
            "cluster.gpus_per_node": 0,
            "policy.precision": "float16",
            "grpo.sede": 1,
            "loss_fn.ratio_clip_min": 2,
            "loss_fn.use_cispo": True,
            "data.train.dataset_name": "nothing",
            "grpo.num_generations_per_prompt": 1,
        }
    )
    assert {violation.path for violation in found} == {
        "cluster.gpus_per_node",
        "policy.precision",
        "grpo.sede",
        "loss_fn.ratio_clip_min",
        "loss_fn.use_cispo",
        "data.train.dataset_name",
        "grpo.num_generations_per_prompt",
    }


def test_an_unset_key_of_a_base_is_told(load: Load, refused: Check) -> None:
    (found,) = refused({"data.train.dataset_name": "???"})
    assert (found.path, found.reason) == ("data.train.dataset_name", "must be set")
    (found,) = refused({"policy.max_total_sequence_length": "${policy.nothing}"})
    assert found.path == "policy.max_total_sequence_length"
    assert "can't be worked out" in found.reason


def test_nemo_rls_switched_off_parts_are_taken(load: Load) -> None:
    config = load(
        {
            "grpo.reward_scaling": {"enabled": False, "source_min": 0.0},
            "grpo.val_period": 10,
            "logger.wandb": {"project": "p"},
            "logger.gpu_monitoring": {"collection_interval": 10},
            "policy.megatron_cfg.scheduler": {"lr_decay_style": "constant", "lr_warmup_iters": 0, "lr_decay_iters": 1},
            "policy.dynamic_batching": {"enabled": False, "train_mb_tokens": 10},
        }
    )
    assert config.sections.grpo is not None
