"""The policy loss against numbers worked out by hand, against loops, and against its own parts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import rl_oracle
import torch

from refit_transport.rl.policy_loss import PolicyMetrics, loss_counts, policy_loss
from refit_transport.rl.settings import ImportanceSettings, KlSettings, LossCounts, PolicyLossSettings
from refit_transport.rl.trajectories import TrainBatch, split_evenly

MakeBatch = Callable[..., TrainBatch]
Moved = Callable[[TrainBatch, int], torch.Tensor]

KL = KlSettings(penalty=0.3, kl_type="k3")
TIS = ImportanceSettings("tis", 1.2)
SETTINGS = {
    "token": PolicyLossSettings(),
    "sequence": PolicyLossSettings(token_level_loss=False),
    "asymmetric": PolicyLossSettings(ratio_clip_min=0.1, ratio_clip_max=0.3),
    "dual": PolicyLossSettings(ratio_clip_c=1.25),
    "on-policy": PolicyLossSettings(force_on_policy_ratio=True, kl=KL),
    "k1": PolicyLossSettings(kl=replace(KL, kl_type="k1")),
    "k2": PolicyLossSettings(kl=replace(KL, kl_type="k2"), token_level_loss=False),
    "k3": PolicyLossSettings(kl=KL),
    "k3 clamped": PolicyLossSettings(kl=replace(KL, input_clamp=0.5, output_clamp=0.1)),
    "importance": PolicyLossSettings(importance=ImportanceSettings()),
    "tis": PolicyLossSettings(importance=TIS),
    "tis with minimum": PolicyLossSettings(importance=replace(TIS, minimum=0.8), token_level_loss=False),
    "icepop": PolicyLossSettings(importance=ImportanceSettings("icepop", 1.3, 0.7)),
    "seq-mask-tis": PolicyLossSettings(importance=ImportanceSettings("seq-mask-tis", 1.1, 0.9)),
    "per sequence": PolicyLossSettings(
        sequence_level_importance_ratios=True, token_level_loss=False, importance=TIS, kl=KL, ratio_clip_c=3.0
    ),
}


def by_hand(settings: PolicyLossSettings, *, ratios: list[float], advantages: list[float]) -> float:
    """The loss of one sequence whose previous and generation log-probabilities are all 0."""
    count = len(ratios)
    batch = TrainBatch(
        tokens=torch.zeros(1, count + 1, dtype=torch.int64),
        response_mask=torch.ones(1, count),
        sample_mask=torch.ones(1),
        generation_logprobs=torch.zeros(1, count),
        prev_logprobs=torch.zeros(1, count),
        advantages=torch.tensor([advantages]),
    )
    return policy_loss(torch.tensor([ratios]).log(), batch, settings, loss_counts(batch)).loss.item()


class TestByHand:
    @pytest.mark.parametrize(
        ("ratio", "advantage", "loss"),
        [(1.0, 2.0, -2.0), (1.5, 2.0, -2.4), (0.5, 2.0, -1.0), (0.5, -2.0, 1.6), (1.5, -2.0, 3.0), (9.0, 0.0, 0.0)],
    )
    def test_clipping(self, ratio: float, advantage: float, loss: float) -> None:
        assert by_hand(SETTINGS["token"], ratios=[ratio], advantages=[advantage]) == pytest.approx(loss, rel=1e-6)

    @pytest.mark.parametrize(
        ("ratio", "advantage", "loss"), [(5.0, -2.0, 6.0), (2.0, -2.0, 4.0), (5.0, 2.0, -2.4), (0.5, -2.0, 1.6)]
    )
    def test_dual_clipping(self, ratio: float, advantage: float, loss: float) -> None:
        settings = PolicyLossSettings(ratio_clip_c=3.0)
        assert by_hand(settings, ratios=[ratio], advantages=[advantage]) == pytest.approx(loss, rel=1e-6)

    def test_asymmetric_bounds(self) -> None:
        settings = PolicyLossSettings(ratio_clip_min=0.1, ratio_clip_max=0.5)
        assert by_hand(settings, ratios=[2.0, 0.5], advantages=[1.0, -1.0]) == pytest.approx((-1.5 + 0.9) / 2)

    def test_ratio_of_a_sequence_is_the_geometric_mean(self) -> None:
        settings = PolicyLossSettings(sequence_level_importance_ratios=True, token_level_loss=False)
        loss = by_hand(settings, ratios=[1.21, 1.0], advantages=[1.0, 3.0])
        assert loss == pytest.approx(-1.1 * 2, rel=1e-6)

    def test_token_and_sequence_means_differ_by_length(self) -> None:
        batch = TrainBatch(
            tokens=torch.zeros(2, 4, dtype=torch.int64),
            response_mask=torch.tensor([[1.0, 0, 0], [1, 1, 1]]),
            sample_mask=torch.ones(2),
            generation_logprobs=torch.zeros(2, 3),
            prev_logprobs=torch.zeros(2, 3),
            advantages=torch.tensor([[4.0, 0, 0], [1, 1, 1]]),
        )
        counts = loss_counts(batch)
        assert counts == LossCounts(tokens=4, samples=2)
        now = torch.zeros(2, 3)
        assert policy_loss(now, batch, SETTINGS["token"], counts).loss.item() == pytest.approx(-7 / 4)
        assert policy_loss(now, batch, SETTINGS["sequence"], counts).loss.item() == pytest.approx(-5 / 2)

    @pytest.mark.parametrize(("maximum", "loss"), [(2.0, -(0.5 + 2.0 + 2.0) / 3), (8.0, -(0.5 + 2.0 + 4.0) / 3)])
    def test_truncated_importance(self, maximum: float, loss: float) -> None:
        generation = -torch.tensor([[0.5, 2.0, 4.0]]).log()
        batch = TrainBatch(
            tokens=torch.zeros(1, 4, dtype=torch.int64),
            response_mask=torch.ones(1, 3),
            sample_mask=torch.ones(1),
            generation_logprobs=generation,
            prev_logprobs=torch.zeros(1, 3),
            advantages=torch.ones(1, 3),
        )
        settings = PolicyLossSettings(importance=ImportanceSettings("tis", maximum))
        result = policy_loss(torch.zeros(1, 3), batch, settings, loss_counts(batch))
        assert result.loss.item() == pytest.approx(loss)
        metrics = PolicyMetrics.from_sums(result.sums)
        assert metrics.truncated_fraction == pytest.approx(1 / 3 if maximum == 2 else 0)
        assert metrics.importance_weight == pytest.approx(-loss)
        assert metrics.logprob_error == pytest.approx((math.log(2) + math.log(2) + math.log(4)) / 3)


# Those whose gradient is that of the value; the rest of it is in TestGradients and test_kl.
PLAIN_GRADIENTS = [name for name, each in SETTINGS.items() if not each.force_on_policy_ratio and each.kl is None]


class TestAgainstLoops:
    @pytest.mark.parametrize("name", SETTINGS)
    @pytest.mark.parametrize("seed", range(4))
    def test_loss(self, name: str, seed: int, make_batch: MakeBatch, moved: Moved) -> None:
        batch, settings = make_batch(seed), SETTINGS[name]
        logprobs = moved(batch, seed)
        result = policy_loss(logprobs, batch, settings, loss_counts(batch))
        assert result.loss.item() == pytest.approx(rl_oracle.policy_loss(logprobs, batch, settings), rel=1e-5, abs=1e-6)
        assert PolicyMetrics.from_sums(result.sums).loss == pytest.approx(result.loss.item(), rel=1e-5, abs=1e-6)

    @pytest.mark.parametrize("name", PLAIN_GRADIENTS)
    @pytest.mark.parametrize("seed", range(4))
    def test_gradient(self, name: str, seed: int, make_batch: MakeBatch, moved: Moved) -> None:
        """By finite differences of the loops."""
        batch, settings = make_batch(seed, rows=3, length=6), SETTINGS[name]
        logprobs = moved(batch, seed)
        policy_loss(logprobs, batch, settings, loss_counts(batch)).loss.backward()
        step = 1e-6
        for row, column in itertools.product(range(batch.size), range(batch.length)):
            ends = []
            for sign in (1, -1):
                near = logprobs.detach().double().clone()
                near[row, column] += sign * step
                ends.append(rl_oracle.policy_loss(near, batch, settings))
            slope = (ends[0] - ends[1]) / (2 * step)
            assert logprobs.grad[row, column].item() == pytest.approx(slope, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("parts", [1, 2, 3, 6])
def test_parts_add_up(name: str, parts: int, make_batch: MakeBatch, moved: Moved) -> None:
    batch, settings = make_batch(11), SETTINGS[name]
    counts, logprobs = loss_counts(batch), moved(batch, 11)
    whole = policy_loss(logprobs, batch, settings, counts)
    (gradient,) = torch.autograd.grad(whole.loss, logprobs)
    shares = [
        policy_loss(rows, part, settings, counts)
        for rows, part in zip(logprobs.chunk(parts), split_evenly(batch, parts), strict=True)
    ]
    (added,) = torch.autograd.grad(sum(share.loss for share in shares), logprobs)
    torch.testing.assert_close(added, gradient)
    torch.testing.assert_close(sum(share.sums for share in shares), whole.sums)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("junk", [1e4, math.inf, math.nan])
def test_what_is_masked_never_counts(name: str, junk: float, make_batch: MakeBatch, moved: Moved) -> None:
    batch, settings = make_batch(5), SETTINGS[name]
    logprobs, counts = moved(batch, 5), loss_counts(batch)
    clean = policy_loss(logprobs, batch, settings, counts)
    outside = batch.token_mask == 0
    dirty = replace(
        batch,
        **{
            column: getattr(batch, column).masked_fill(outside, junk)
            for column in ("generation_logprobs", "prev_logprobs", "reference_logprobs", "advantages")
        },
    )
    spoilt = logprobs.detach().masked_fill(outside, junk).requires_grad_()
    result = policy_loss(spoilt, dirty, settings, counts)
    assert result.loss.item() == clean.loss.item()
    torch.testing.assert_close(result.sums, clean.sums, rtol=0, atol=0)
    clean.loss.backward()
    result.loss.backward()
    torch.testing.assert_close(spoilt.grad, logprobs.grad, rtol=0, atol=0)
    assert not spoilt.grad[outside].any()


def test_padding_rows_change_nothing(make_batch: MakeBatch, moved: Moved) -> None:
    batch = make_batch(3)
    logprobs = moved(batch, 3).detach()
    padded = batch.with_padding_rows(4)
    assert padded.size == 8
    assert loss_counts(padded) == loss_counts(batch)
    more = torch.cat([logprobs, torch.zeros(2, batch.length)])
    for settings in SETTINGS.values():
        loss = policy_loss(logprobs, batch, settings, loss_counts(batch)).loss
        assert policy_loss(more, padded, settings, loss_counts(padded)).loss.item() == pytest.approx(loss.item())


class TestGradients:
    def test_on_policy_is_the_plain_policy_gradient(self, make_batch: MakeBatch, moved: Moved) -> None:
        batch = make_batch(2)
        logprobs = moved(batch, 2)
        counts = loss_counts(batch)
        policy_loss(logprobs, batch, PolicyLossSettings(force_on_policy_ratio=True), counts).loss.backward()
        torch.testing.assert_close(logprobs.grad, -batch.advantages * batch.token_mask / counts.tokens)

    def test_no_gradient_through_what_was_measured(self, make_batch: MakeBatch, moved: Moved) -> None:
        batch = make_batch(2)
        measured = replace(
            batch,
            prev_logprobs=batch.prev_logprobs.clone().requires_grad_(),
            generation_logprobs=batch.generation_logprobs.clone().requires_grad_(),
        )
        sums = policy_loss(moved(batch, 2), measured, SETTINGS["tis"], loss_counts(batch)).sums
        assert not sums.requires_grad


def test_entropy_estimate_is_the_entropy() -> None:
    """Over every token of a distribution, each as often as its generating distribution says, it is exact."""
    policy = torch.tensor([0.5, 0.25, 0.25])
    generation = torch.tensor([0.25, 0.25, 0.5])
    sampled = torch.tensor([0, 1, 2, 2])
    batch = TrainBatch(
        tokens=torch.zeros(1, 5, dtype=torch.int64),
        response_mask=torch.ones(1, 4),
        sample_mask=torch.ones(1),
        generation_logprobs=generation.log()[sampled][None],
        prev_logprobs=policy.log()[sampled][None],
        advantages=torch.zeros(1, 4),
    )
    sums = policy_loss(policy.log()[sampled][None], batch, SETTINGS["token"], loss_counts(batch)).sums
    assert PolicyMetrics.from_sums(sums).approx_entropy == pytest.approx(1.5 * math.log(2))


@pytest.mark.parametrize(
    ("column", "settings"),
    [("advantages", "token"), ("prev_logprobs", "token"), ("reference_logprobs", "k3")],
)
def test_a_missing_column_is_told(column: str, settings: str, make_batch: MakeBatch, moved: Moved) -> None:
    batch = make_batch(1)
    with pytest.raises(ValueError, match=f"needs {column} in the batch"):
        policy_loss(moved(batch, 1), replace(batch, **{column: None}), SETTINGS[settings], loss_counts(batch))


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: PolicyLossSettings(ratio_clip_min=1.0), "ratio_clip_min must lie in"),
        (lambda: PolicyLossSettings(ratio_clip_max=-0.1), "ratio_clip_max must be at least 0"),
        (lambda: PolicyLossSettings(ratio_clip_c=1.0), "ratio_clip_c must exceed 1"),
        (lambda: PolicyLossSettings(sequence_level_importance_ratios=True), "need the loss per sequence"),
        (lambda: ImportanceSettings("tis"), "needs a positive maximum"),
        (lambda: ImportanceSettings("icepop", 2.0), "needs a minimum"),
        (lambda: ImportanceSettings("tis", 1.0, 2.0), "between 0 and the maximum"),
        (lambda: ImportanceSettings(maximum=2.0), "bounds need a truncation"),
        (lambda: KlSettings(penalty=-1.0), "at least 0"),
        (lambda: LossCounts(tokens=0, samples=1), "at least one token"),
    ],
)
def test_settings_that_make_no_sense(make: Callable[[], object], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        make()
