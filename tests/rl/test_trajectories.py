"""Samples, and the tensors made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refit_transport.rl.trajectories import Rollout, Sample, TrainBatch, prompt_groups, split_evenly

MakeBatch = Callable[..., TrainBatch]


def sample(prompt: int = 2, response: int = 3, *, group: int = 0, version: int = 1) -> Sample:
    return Sample(
        prompt=tuple(range(4, 4 + prompt)),
        response=tuple(range(10, 10 + response)),
        generation_logprobs=tuple(-0.5 * (index + 1) for index in range(response)),
        versions=(version,) * response,
        seed=0,
        group=group,
        finished="length",
    )


lengths = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=6)


@given(lengths, st.integers(1, 4))
def test_a_batch_says_what_its_samples_say(sizes: list[tuple[int, int]], multiple: int) -> None:
    samples = [sample(prompt, response) for prompt, response in sizes]
    batch = TrainBatch.from_samples(samples, pad=3, length_multiple=multiple)
    assert batch.length % multiple == 0
    assert batch.length - max(map(sum, sizes)) + 1 < multiple
    for row, each in enumerate(samples):
        at = batch.response_mask[row].bool()
        assert batch.tokens[row, 1:][at].tolist() == list(each.response)
        assert batch.tokens[row, : len(each.prompt)].tolist() == list(each.prompt)
        assert batch.generation_logprobs[row, at].tolist() == list(each.generation_logprobs)
        assert not batch.generation_logprobs[row, ~at].any()
        assert (batch.tokens[row, len(each.tokens) :] == 3).all()
    assert batch.token_count == sum(response for _, response in sizes)
    assert batch.sample_count == len(sizes)


def test_rows_keep_every_column(make_batch: MakeBatch) -> None:
    batch = make_batch(0)
    picked = batch.rows([4, 1])
    assert torch.equal(picked.tokens, batch.tokens[[4, 1]])
    assert torch.equal(picked.values, batch.values[[4, 1]])
    assert replace(batch, values=None).rows([0]).values is None
    parts = split_evenly(batch, 3)
    assert torch.equal(torch.cat([part.advantages for part in parts]), batch.advantages)


def test_uneven_parts_are_refused(make_batch: MakeBatch) -> None:
    with pytest.raises(ValueError, match="6 rows can't be split into 4"):
        split_evenly(make_batch(0), 4)


def test_groups() -> None:
    assert prompt_groups([sample(group=2), sample(group=0)]).tolist() == [2, 0]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"prompt": ()}, "a prompt and a response"),
        ({"response": ()}, "a prompt and a response"),
        ({"versions": (1,)}, "a version for each"),
    ],
)
def test_a_sample_that_contradicts_itself(change: dict[str, object], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        replace(sample(), **change)


def test_rollouts() -> None:
    rollout = Rollout((sample(response=2), sample(response=4)), (0.5, 1.0))
    assert (rollout.mean_reward(), rollout.mean_length()) == (0.75, 3.0)
    with pytest.raises(ValueError, match="one reward per sample"):
        Rollout((sample(),), ())


def test_a_column_of_another_shape_is_told(make_batch: MakeBatch) -> None:
    with pytest.raises(ValueError, match=r"values must have shape \(6, 9\)"):
        replace(make_batch(0), values=torch.zeros(6, 10))


def test_the_oldest_version_of_a_sample_that_saw_several() -> None:
    assert replace(sample(), versions=(4, 4, 6)).oldest_version == 4
