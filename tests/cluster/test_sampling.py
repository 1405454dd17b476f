"""Requests, seeds and their distribution over engines; overlap of two activities."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refit_transport.cluster.overlap import Activity, Interval, overlap
from refit_transport.cluster.sampling import SampleRequest, sampling_seed, split_over_engines


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"prompt": ()}, "a prompt of at least one token"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"seed": -1}, "seed must be in 0"),
        ({"seed": 1 << 63}, "seed must be in 0"),
        ({"temperature": -1.0}, "temperature must be 0"),
        ({"temperature": 1e-3}, "temperature must be 0 .* at least 0.01"),
        ({"temperature": math.nan}, "temperature must be 0"),
        ({"temperature": math.inf}, "temperature must be 0"),
    ],
)
def test_a_request_that_vllm_would_change_or_refuse_is_refused_at_once(change, text):
    SampleRequest((1,), 0, 0, 1, temperature=0.0)
    with pytest.raises(ValueError, match=text):
        SampleRequest(**{"prompt": (1,), "seed": 0, "group": 0, "max_tokens": 1} | change)


@given(st.integers(), st.integers(0, 1 << 40), st.integers(0, 1 << 20), st.integers(0, 1 << 10))
def test_seeds_are_valid_and_no_coordinate_is_exchanged_for_another(run, step, prompt, sample):
    seed = sampling_seed(run, step=step, prompt=prompt, sample=sample)
    assert SampleRequest((1,), seed, 0, 1).seed == seed
    others = {(run, step, prompt, sample + 1), (run, step, sample, prompt), (run + 1, step, prompt, sample)}
    for other in others - {(run, step, prompt, sample)}:
        assert sampling_seed(other[0], step=other[1], prompt=other[2], sample=other[3]) != seed


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 40)), max_size=40), st.integers(1, 6))
def test_engines_get_neighbours_and_nearly_equal_shares(sizes, engines):
    requests = [SampleRequest((1,) * prompt, 0, 0, new) for prompt, new in sizes]
    shares = split_over_engines(requests, engines)
    assert [index for share in shares for index in share] == list(range(len(requests)))
    assert len(shares) == engines
    cost = [sum(requests[index].cost for index in share) for share in shares]
    largest = max((request.cost for request in requests), default=0)
    assert all(abs(own - sum(cost) / engines) <= largest for own in cost)


def test_no_engine_is_refused():
    with pytest.raises(ValueError, match="at least one engine"):
        split_over_engines([], 0)


@given(
    *[st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=8) for _ in range(2)],
    st.tuples(st.integers(0, 40), st.integers(1, 30)),
)
def test_overlap_counts_every_second_once(generation, training, window):
    """The oracle looks at each second of a timeline."""
    ran = np.zeros((2, 100), bool)
    for row, intervals in zip(ran, (generation, training), strict=True):
        for start, length in intervals:
            row[start : start + length] = True
    start, end = window[0], window[0] + window[1]
    seen = ran[:, start:end]
    found = overlap(
        *([Interval(s, s + length) for s, length in intervals] for intervals in (generation, training)),
        within=Interval(start, end),
    )
    assert (found.wall_s, found.generation_s, found.training_s) == (end - start, seen[0].sum(), seen[1].sum())
    assert found.both_s == (seen[0] & seen[1]).sum()
    assert found.share == found.both_s / (end - start)


def test_activity_is_told_once_and_goes_on(monkeypatch):
    clock = iter((1.0, 3.0, 5.0, 6.0, 6.0, 4.0))
    monkeypatch.setattr(time, "time", lambda: next(clock))
    activity = Activity()
    activity.end()
    activity.begin()
    activity.begin()
    activity.end()
    activity.begin()
    assert activity.take() == [Interval(1.0, 3.0), Interval(5.0, 6.0)]
    # The clock was set back.
    activity.end()
    assert activity.take() == [Interval(6.0, 6.0)]
    assert activity.take() == []
    with pytest.raises(ValueError, match="end before it starts"):
        Interval(2.0, 1.0)
