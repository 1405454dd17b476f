"""What the losses can be told. Names and defaults are NeMo RL's (`loss_fn`, `value_loss_fn`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

KlType = Literal["k1", "k2", "k3"]
TruncationType = Literal["tis", "icepop", "seq-mask-tis"]


@dataclass(frozen=True, slots=True)
class KlSettings:
    """The penalty for leaving the reference policy: `penalty` times a per-token estimate of the divergence.

    `kl_type` is Schulman's estimator. The log-ratio is clamped to +-`input_clamp`, the estimate to +-`output_clamp`
    (None: not at all).
    """

    penalty: float = 0.01
    kl_type: KlType = "k3"
    input_clamp: float | None = 20.0
    output_clamp: float | None = 10.0

    def __post_init__(self) -> None:
        _require(self.penalty >= 0, "the KL penalty must be at least 0", self.penalty)
        for clamp in (self.input_clamp, self.output_clamp):
            _require(clamp is None or clamp > 0, "a clamp of the KL must be positive", clamp)


@dataclass(frozen=True, slots=True)
class ImportanceSettings:
    """How much a token counts whose sampler was another policy than the trainer's before this step.

    The weight is pi_prev / pi_generation of the token (of the whole sequence, when ratios are per sequence). `tis`
    clamps it to [`minimum`, `maximum`]; `icepop` drops what lies outside; `seq-mask-tis` drops sequences whose
    geometric mean lies outside and leaves the weights of the others as they are. None: untruncated.
    """

    truncation: TruncationType | None = None
    maximum: float | None = None
    minimum: float | None = None

    def __post_init__(self) -> None:
        if self.truncation is None:
            _require(self.maximum is None and self.minimum is None, "bounds need a truncation", self.maximum)
            return
        _require(self.maximum is not None and self.maximum > 0, "truncation needs a positive maximum", self.maximum)
        if self.truncation != "tis":
            _require(self.minimum is not None, f"{self.truncation} needs a minimum", self.minimum)
        if self.minimum is not None and self.maximum is not None:
            _require(0 <= self.minimum <= self.maximum, "the minimum must lie between 0 and the maximum", self.minimum)

    @property
    def bounds(self) -> tuple[float, float]:
        """Lowest and highest weight that stays as it is."""
        return self.minimum or 0.0, math.inf if self.maximum is None else self.maximum


@dataclass(frozen=True, slots=True)
class PolicyLossSettings:
    """The clipped policy gradient loss of GRPO and PPO.

    The ratio pi / pi_prev is clipped to [1 - `ratio_clip_min`, 1 + `ratio_clip_max`]; for negative advantages the loss
    is capped at `ratio_clip_c` times their size (dual clipping; None: not). `token_level_loss` means over all tokens,
    otherwise over the samples' own means. `sequence_level_importance_ratios` gives all tokens of a sequence the
    geometric mean of their ratios (GSPO). `force_on_policy_ratio` takes the policy itself for pi_prev: exact for one
    update per rollout, and `prev_logprobs` needn't be computed. `importance` None: no correction. `kl` None: no penalty
    in the loss (it may be in the reward), so no reference log-probabilities are needed.
    """

    ratio_clip_min: float = 0.2
    ratio_clip_max: float = 0.2
    ratio_clip_c: float | None = None
    token_level_loss: bool = True
    sequence_level_importance_ratios: bool = False
    force_on_policy_ratio: bool = False
    importance: ImportanceSettings | None = None
    kl: KlSettings | None = None

    def __post_init__(self) -> None:
        _require(0 <= self.ratio_clip_min < 1, "ratio_clip_min must lie in [0, 1)", self.ratio_clip_min)
        _require(self.ratio_clip_max >= 0, "ratio_clip_max must be at least 0", self.ratio_clip_max)
        _require(self.ratio_clip_c is None or self.ratio_clip_c > 1, "ratio_clip_c must exceed 1", self.ratio_clip_c)
        if self.sequence_level_importance_ratios:
            _require(not self.token_level_loss, "ratios per sequence need the loss per sequence", "token_level_loss")
            _require(
                self.importance is None or self.importance.truncation != "seq-mask-tis",
                "seq-mask-tis corrects each token, so ratios can't be per sequence",
                "seq-mask-tis",
            )


@dataclass(frozen=True, slots=True)
class ValueLossSettings:
    """`scale` / 2 times the mean squared error of the values to the returns over all tokens.

    With `cliprange`, a value counts as if it lay within +-`cliprange` of its value before the update, where that is
    worse.
    """

    scale: float = 1.0
    cliprange: float | None = None

    def __post_init__(self) -> None:
        _require(self.scale > 0, "scale must be positive", self.scale)
        _require(self.cliprange is None or self.cliprange > 0, "cliprange must be positive", self.cliprange)


@dataclass(frozen=True, slots=True)
class LossCounts:
    """What a step's means divide by: the tokens and samples that count in the WHOLE batch of an update.

    Every micro-batch on every rank uses the same counts, so that losses, gradients and metrics just add up.
    """

    tokens: float
    samples: float

    def __post_init__(self) -> None:
        _require(self.tokens > 0 and self.samples > 0, "an update needs at least one token that counts", self.tokens)


def _require(holds: object, rule: str, got: object) -> None:
    if not holds:
        raise ValueError(f"{rule} (got {got})")
