"""What a step of training is made of: sampled responses, and the padded tensors that a policy is trained on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, Self

import torch

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One response to one prompt, as the sampler saw it.

    `generation_logprobs` (nats, at the sampling temperature) and `versions` (of the weights that chose the token) have
    one entry per response token. `group` is the index of the prompt within its step; samples of one prompt share it.
    `finished` says whether a stop token (the last of `response`) or the length ended the response.

    Raises:
        ValueError: an empty prompt or response, or columns of different lengths.
    """

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    generation_logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    seed: int
    group: int
    finished: FinishReason

    def __post_init__(self) -> None:
        if not self.prompt or not self.response:
            raise ValueError(
                f"a sample needs a prompt and a response of at least one token (got {len(self.prompt)} and "
                f"{len(self.response)} tokens)"
            )
        if not len(self.response) == len(self.generation_logprobs) == len(self.versions):
            raise ValueError(
                f"a sample needs a log-probability and a version for each of its {len(self.response)} response tokens "
                f"(got {len(self.generation_logprobs)} and {len(self.versions)})"
            )

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.response

    @property
    def oldest_version(self) -> int:
        return min(self.versions)


@dataclass(frozen=True, slots=True)
class Rollout:
    """The samples of a step with their rewards, one per sample.

    Raises:
        ValueError: not one reward per sample, or no sample.
    """

    samples: tuple[Sample, ...]
    rewards: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.samples or len(self.samples) != len(self.rewards):
            raise ValueError(
                f"a rollout needs one reward per sample (got {len(self.samples)} samples, {len(self.rewards)} rewards)"
            )

    def mean_reward(self) -> float:
        return sum(self.rewards) / len(self.rewards)

    def mean_length(self) -> float:
        """Mean number of response tokens."""
        return sum(len(sample.response) for sample in self.samples) / len(self.samples)


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """Padded sequences with one column per *predicted* token: column t is about the prediction of token t + 1.

    `tokens` is `[batch, length + 1]` int64, everything else fp32: `sample_mask` `[batch]`, all others
    `[batch, length]`.
    `response_mask` is 1 where the predicted token belongs to the response. What isn't computed yet, or isn't needed,
    is None. Values outside of the response mask mean nothing and never count.
    """

    tokens: torch.Tensor
    response_mask: torch.Tensor
    sample_mask: torch.Tensor
    generation_logprobs: torch.Tensor
    prev_logprobs: torch.Tensor | None = None
    reference_logprobs: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    values: torch.Tensor | None = None

    def __post_init__(self) -> None:
        batch, width = self.tokens.shape
        for field in fields(self)[1:]:
            column = getattr(self, field.name)
            expected = (batch,) if field.name == "sample_mask" else (batch, width - 1)
            if column is not None and tuple(column.shape) != expected:
                raise ValueError(f"{field.name} must have shape {expected} (got {tuple(column.shape)})")

    @classmethod
    def from_samples(cls, samples: Sequence[Sample], *, pad: int = 0, length_multiple: int = 1) -> Self:
        """Right-padded tokens, masks and generation log-probabilities of `samples`, row by row.

        `length` is the longest sequence less one, rounded up to a multiple of `length_multiple`.

        >>> sample = Sample((1, 5), (7, 2), (-0.5, -0.25), (3, 3), seed=0, group=0, finished="stop")
        >>> batch = TrainBatch.from_samples([sample])
        >>> batch.tokens.tolist(), batch.response_mask.tolist(), batch.generation_logprobs.tolist()
        ([[1, 5, 7, 2]], [[0.0, 1.0, 1.0]], [[0.0, -0.5, -0.25]])
        """
        if not samples:
            raise ValueError("a batch needs at least one sample (got none)")
        longest = max(len(sample.tokens) for sample in samples) - 1
        length = -(-longest // length_multiple) * length_multiple
        tokens = torch.full((len(samples), length + 1), pad, dtype=torch.int64)
        mask = torch.zeros(len(samples), length)
        logprobs = torch.zeros(len(samples), length)
        for row, sample in enumerate(samples):
            end = len(sample.tokens)
            response = slice(len(sample.prompt) - 1, end - 1)
            tokens[row, :end] = torch.tensor(sample.tokens)
            mask[row, response] = 1.0
            logprobs[row, response] = torch.tensor(sample.generation_logprobs)
        return cls(tokens, mask, torch.ones(len(samples)), logprobs)

    @property
    def size(self) -> int:
        """Number of rows."""
        return self.tokens.shape[0]

    @property
    def length(self) -> int:
        """Number of predicted tokens of a row, padding included."""
        return self.tokens.shape[1] - 1

    @property
    def token_mask(self) -> torch.Tensor:
        """`[batch, length]`: 1 where a token counts, that is in the response of a sample that counts."""
        return self.response_mask * self.sample_mask[:, None]

    @property
    def token_count(self) -> float:
        """Number of tokens that count."""
        return float(self.token_mask.sum())

    @property
    def sample_count(self) -> float:
        """Number of samples that count: unmasked ones with a response."""
        return float((self.token_mask.sum(dim=1) > 0).sum())

    def rows(self, index: slice | Sequence[int]) -> Self:
        """The given rows in the given order; padding stays, so that all parts have one length."""
        chosen = index if isinstance(index, slice) else torch.as_tensor(index, dtype=torch.int64)
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: column[chosen] for name, column in columns.items() if column is not None})

    def with_padding_rows(self, multiple: int) -> Self:
        """This batch with rows that don't count appended, until its size is a multiple of `multiple`."""
        missing = -self.size % multiple
        if not missing:
            return self
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(
            self,
            **{
                name: torch.cat([column, column.new_zeros(missing, *column.shape[1:])])
                for name, column in columns.items()
                if column is not None
            },
        )


def split_evenly(batch: TrainBatch, parts: int) -> tuple[TrainBatch, ...]:
    """Consecutive, equally large parts of a batch (minibatches, or the rows of each data-parallel rank).

    Raises:
        ValueError: `parts` doesn't divide the rows.
    """
    if parts < 1 or batch.size % parts:
        raise ValueError(f"{batch.size} rows can't be split into {parts} equal parts; use with_padding_rows first")
    size = batch.size // parts
    return tuple(batch.rows(slice(start, start + size)) for start in range(0, batch.size, size))


def prompt_groups(samples: Iterable[Sample]) -> torch.Tensor:
    """`[samples]` int64: the group of each sample, as `group_advantages` wants it."""
    return torch.tensor([sample.group for sample in samples], dtype=torch.int64)
