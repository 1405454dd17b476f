"""Advantages against numbers worked out by hand, explicit sums, and their algebra."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import rl_oracle
import torch
from hypothesis import given
from hypothesis import strategies as st

from refit_transport.rl.advantages import (
    STD_EPSILON,
    GaeSettings,
    GroupSettings,
    generalized_advantages,
    group_advantages,
    terminal_rewards,
    whiten,
    with_gae,
    with_group_advantages,
)
from refit_transport.rl.kl import kl_estimate
from refit_transport.rl.settings import KlSettings
from refit_transport.rl.trajectories import TrainBatch

MakeBatch = Callable[..., TrainBatch]
PLAIN = GroupSettings(use_leave_one_out_baseline=False, normalize_rewards=False)

# Eighths, as the rewards of the built-in task: two that differ do so by more than rounding.
rewards_and_groups = st.lists(st.tuples(st.integers(0, 8).map(lambda n: n / 8), st.integers(0, 3)), min_size=1)
booleans = st.booleans()


class TestGroups:
    def test_by_hand(self) -> None:
        rewards, groups = [1.0, 2.0, 6.0, 4.0], torch.tensor([0, 0, 0, 1])
        assert group_advantages(rewards, groups, PLAIN).tolist() == [-2, -1, 3, 0]
        deviation = math.sqrt((4 + 1 + 9) / 2) + 1e-4
        normalized = group_advantages(rewards, groups, replace(PLAIN, normalize_rewards=True))
        assert normalized.tolist() == pytest.approx([-2 / deviation, -1 / deviation, 3 / deviation, 0])
        others = group_advantages(rewards, groups, GroupSettings(normalize_rewards=False))
        assert others.tolist() == pytest.approx([-3, -1.5, 4.5, 0])

    @given(rewards_and_groups, booleans, booleans)
    def test_against_loops(self, drawn: list[tuple[float, int]], leave_one_out: bool, normalize: bool) -> None:
        rewards, groups = [reward for reward, _ in drawn], [group for _, group in drawn]
        found = group_advantages(rewards, torch.tensor(groups), GroupSettings(leave_one_out, normalize))
        expected = rl_oracle.group_advantages(
            rewards, groups, leave_one_out=leave_one_out, normalize=normalize, epsilon=STD_EPSILON
        )
        assert found.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)

    @given(rewards_and_groups)
    def test_leaving_one_out_stretches_by_n_over_n_less_1(self, drawn: list[tuple[float, int]]) -> None:
        rewards, groups = [reward for reward, _ in drawn], torch.tensor([group for _, group in drawn])
        plain = group_advantages(rewards, groups, PLAIN)
        others = group_advantages(rewards, groups, GroupSettings(normalize_rewards=False))
        count = torch.bincount(groups)[groups].float()
        torch.testing.assert_close(others * (count - 1), plain * count)

    @pytest.mark.parametrize("value", [0.1, 1e6, 0.0])
    @pytest.mark.parametrize("leave_one_out", [True, False])
    def test_equal_rewards_teach_nothing(self, value: float, leave_one_out: bool) -> None:
        groups = torch.zeros(7, dtype=torch.int64)
        found = group_advantages([value] * 7, groups, GroupSettings(leave_one_out))
        assert found.abs().max() <= 1e-9 * max(value, 1)

    def test_large_close_rewards_keep_their_digits(self) -> None:
        groups = torch.zeros(4, dtype=torch.int64)
        small = group_advantages([0.0, 0.25, 0.5, 1.0], groups, GroupSettings())
        large = group_advantages([1e6, 1e6 + 0.25, 1e6 + 0.5, 1e6 + 1], groups, GroupSettings())
        torch.testing.assert_close(large, small)

    def test_every_response_token_gets_it(self, make_batch: MakeBatch) -> None:
        batch = make_batch(0)
        rewards, groups = [1.0, 0, 1, 1, 0, 0], torch.tensor([0, 0, 1, 1, 2, 2])
        found = with_group_advantages(batch, rewards, groups, PLAIN).advantages
        each = group_advantages(rewards, groups, PLAIN)
        for row in range(batch.size):
            assert found[row].tolist() == (each[row] * batch.response_mask[row]).tolist()


class TestGae:
    def test_by_hand(self) -> None:
        rewards, values = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.25]])
        found = generalized_advantages(rewards, values, torch.ones(1, 2), gamma=0.5, lam=0.5)
        # d1 = 1 - .25; d0 = .5 * .25 - .5; A0 = d0 + .25 d1
        assert found.advantages.tolist() == [[-0.375 + 0.25 * 0.75, 0.75]]
        assert found.returns.tolist() == [[0.3125, 1.0]]

    @pytest.mark.parametrize("seed", range(6))
    @pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.99, 0.0)])
    def test_against_the_double_sum(self, seed: int, gamma: float, lam: float, make_batch: MakeBatch) -> None:
        batch = make_batch(seed)
        rewards = torch.randn(batch.size, batch.length, generator=torch.Generator().manual_seed(seed))
        # With holes, as between the turns of a dialogue.
        mask = batch.response_mask * (
            torch.rand(batch.values.shape, generator=torch.Generator().manual_seed(seed)) < 0.8
        )
        found = generalized_advantages(rewards, batch.values, mask, gamma=gamma, lam=lam)
        for row in range(batch.size):
            at = mask[row].bool()
            advantages, returns = rl_oracle.gae(
                rewards[row, at].tolist(), batch.values[row, at].tolist(), gamma=gamma, lam=lam
            )
            assert found.advantages[row, at].tolist() == pytest.approx(advantages, rel=1e-5, abs=1e-6)
            assert found.returns[row, at].tolist() == pytest.approx(returns, rel=1e-5, abs=1e-6)
            assert not found.advantages[row, ~at].any()
            assert not found.returns[row, ~at].any()

    def test_lambda_1_returns_are_what_is_still_to_come(self, make_batch: MakeBatch) -> None:
        batch = make_batch(4)
        rewards = terminal_rewards(torch.arange(6.0), batch.token_mask)
        found = generalized_advantages(rewards, batch.values, batch.token_mask, gamma=1.0, lam=1.0)
        expected = torch.arange(6.0)[:, None] * batch.token_mask
        torch.testing.assert_close(found.returns, expected)

    def test_terminal_reward_is_at_the_last_token(self) -> None:
        mask = torch.tensor([[0.0, 1, 1, 0], [0, 0, 0, 0], [1, 0, 1, 1]])
        assert terminal_rewards(torch.tensor([3.0, 4, 5]), mask).tolist() == [[0, 0, 3, 0], [0] * 4, [0, 0, 0, 5]]

    @pytest.mark.parametrize("kl", [None, KlSettings(penalty=0.5, kl_type="k1")])
    def test_of_a_batch(self, kl: KlSettings | None, make_batch: MakeBatch) -> None:
        batch = make_batch(8)
        rewards = [1.0, 0, 0.5, 0.25, 1, 7]
        found = with_gae(batch, rewards, GaeSettings(normalize_advantages=False, kl=kl))
        for row in range(batch.size - 1):
            at = batch.response_mask[row].bool()
            each = [0.0] * int(at.sum())
            if kl is not None:
                penalty = kl_estimate(batch.prev_logprobs[row, at], batch.reference_logprobs[row, at], kl)
                each = (-0.5 * penalty).tolist()
            each[-1] += rewards[row]
            advantages, _ = rl_oracle.gae(each, batch.values[row, at].tolist(), gamma=1.0, lam=0.95)
            assert found.advantages[row, at].tolist() == pytest.approx(advantages, rel=1e-5, abs=1e-6)
        assert not found.advantages[-1].any()

    def test_masked_rewards_and_values_change_nothing(self, make_batch: MakeBatch) -> None:
        batch = make_batch(8)
        outside = batch.token_mask == 0
        dirty = replace(
            batch,
            **{
                name: getattr(batch, name).masked_fill(outside, torch.nan)
                for name in ("values", "prev_logprobs", "reference_logprobs")
            },
        )
        settings = GaeSettings(kl=KlSettings())
        clean, found = (with_gae(each, [0.5] * 6, settings) for each in (batch, dirty))
        assert torch.equal(clean.advantages, found.advantages)
        assert torch.equal(clean.returns, found.returns)

    def test_missing_columns_are_told(self, make_batch: MakeBatch) -> None:
        batch = make_batch(0)
        with pytest.raises(ValueError, match="critic's values"):
            with_gae(replace(batch, values=None), [0.0] * 6, GaeSettings())
        with pytest.raises(ValueError, match="reference_logprobs"):
            with_gae(replace(batch, reference_logprobs=None), [0.0] * 6, GaeSettings(kl=KlSettings()))
        with pytest.raises(ValueError, match="gae_lambda must lie between"):
            GaeSettings(gae_lambda=1.5)


class TestWhitening:
    def test_mean_and_variance(self, make_batch: MakeBatch) -> None:
        batch = make_batch(6)
        white = whiten(batch.advantages, batch.token_mask)
        counted = white[batch.token_mask.bool()]
        assert counted.mean().item() == pytest.approx(0, abs=1e-6)
        assert counted.var().item() == pytest.approx(1, rel=1e-5)
        assert not white[batch.token_mask == 0].any()

    def test_by_hand(self) -> None:
        white = whiten(torch.tensor([[1.0, 3.0, 99.0]]), torch.tensor([[1.0, 1.0, 0.0]]))
        assert white.tolist() == [[pytest.approx(-math.sqrt(0.5)), pytest.approx(math.sqrt(0.5)), 0.0]]

    @pytest.mark.parametrize("count", [0, 1, 3])
    def test_equal_values(self, count: int) -> None:
        mask = (torch.arange(3) < count).float()[None]
        assert whiten(torch.full((1, 3), 5.0), mask).tolist() == [[0.0, 0.0, 0.0]]
