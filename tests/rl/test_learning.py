"""The algorithms learn: a tiny policy on the built-in task, from chance to nearly always right."""

from __future__ import annotations

from statistics import mean

import pytest
from rl_learning import ONE_STEP_OFF, grpo, ppo

# What the best policy gets that doesn't read its prompt.
BLIND = 0.105


def test_grpo_starts_to_read_its_prompt() -> None:
    rewards = grpo(steps=28, seed=0)
    assert mean(rewards[:3]) <= 0.12
    assert mean(rewards[-3:]) >= 1.5 * BLIND


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
class TestWholeRuns:
    def test_grpo(self, seed: int) -> None:
        rewards = grpo(steps=60, seed=seed)
        assert mean(rewards[:5]) <= 0.12
        assert mean(rewards[-5:]) >= 0.90

    def test_ppo(self, seed: int) -> None:
        rewards = ppo(steps=60, seed=seed)
        assert mean(rewards[:5]) <= 0.12
        assert mean(rewards[-5:]) >= 0.85

    def test_grpo_one_step_off(self, seed: int) -> None:
        rewards = grpo(steps=60, seed=seed, lag=1, settings=ONE_STEP_OFF)
        assert mean(rewards[-5:]) >= 0.85
