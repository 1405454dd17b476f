"""The buffer between asynchronous generation and training, against a plain list of groups."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refit_transport.rl.replay_buffer import Dropped, ReplayBuffer
from refit_transport.rl.trajectories import Rollout, Sample


def rollout(*versions: tuple[int, ...], group: int = 0, name: int = 0) -> Rollout:
    """One group with a sample for each tuple of token versions; `name` is its seed and its reward."""
    samples = tuple(
        Sample((1,), (2,) * len(each), (-0.1,) * len(each), each, seed=name, group=group, finished="stop")
        for each in versions
    )
    return Rollout(samples, (float(name),) * len(samples))


def test_oldest_first_and_each_once() -> None:
    buffer = ReplayBuffer(max_age=2)
    for name, version in enumerate((5, 4, 5)):
        buffer.add(rollout((version,), (version,), name=name))
    taken = buffer.take(2, version=5)
    assert [sample.seed for sample in taken.rollout.samples] == [1, 1, 0, 0]
    assert [sample.group for sample in taken.rollout.samples] == [0, 0, 1, 1]
    assert taken.rollout.rewards == (1.0, 1.0, 0.0, 0.0)
    assert len(buffer) == 1
    assert buffer.take(1, version=5).rollout.samples[0].seed == 2
    assert buffer.take(1, version=5).rollout is None


def test_what_is_too_old_is_dropped_and_told() -> None:
    buffer = ReplayBuffer(max_age=1)
    buffer.add(rollout((3,), (3,)))
    buffer.add(rollout((4,)))
    taken = buffer.take(2, version=5)
    assert taken.rollout is None
    assert taken.dropped == (Dropped(version=3, groups=1, samples=2),)
    assert buffer.versions == (4,)


def test_one_old_token_makes_a_group_old() -> None:
    buffer = ReplayBuffer(max_age=1)
    buffer.add(rollout((5, 5), (3, 5)))
    assert buffer.take(1, version=5).dropped == (Dropped(version=3, groups=1, samples=2),)


def test_groups_of_one_rollout_are_told_apart() -> None:
    first, second = rollout((1,), (1,), group=0, name=1), rollout((1,), group=1, name=2)
    buffer = ReplayBuffer(max_age=0)
    buffer.add(Rollout(first.samples + second.samples, first.rewards + second.rewards))
    assert len(buffer) == 2
    assert len(buffer.take(1, version=1).rollout.samples) == 2


def test_contents_start_another_buffer() -> None:
    buffer = ReplayBuffer(max_age=3)
    for name, version in enumerate((2, 1, 2)):
        buffer.add(rollout((version,), name=name))
    again = ReplayBuffer(max_age=3, rollouts=buffer.contents)
    assert again.take(3, version=2) == buffer.take(3, version=2)


def test_samples_of_the_future_are_refused() -> None:
    buffer = ReplayBuffer(max_age=1)
    buffer.add(rollout((1, 7)))
    with pytest.raises(ValueError, match="version 7, which is newer than the trainer's 6"):
        buffer.take(1, version=6)


def test_arguments_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="max_age must be at least 0"):
        ReplayBuffer(max_age=-1)
    with pytest.raises(ValueError, match="at least one group"):
        ReplayBuffer(max_age=1).take(0, version=0)


actions = st.lists(
    st.one_of(st.lists(st.integers(0, 3), min_size=1, max_size=3), st.integers(1, 4)), min_size=1, max_size=40
)


@given(actions, st.integers(0, 3))
def test_against_a_list(drawn: list[list[int] | int], max_age: int) -> None:
    """Lists add a group with tokens so many versions behind the present one; numbers take, and publish a version."""
    buffer, plain, version = ReplayBuffer(max_age=max_age), [], 3
    for name, action in enumerate(drawn):
        if isinstance(action, list):
            group = rollout(*((version - age,) for age in action), name=name)
            buffer.add(group)
            plain.append((version - max(action), name, group))
            continue
        taken = buffer.take(action, version=version)
        old = [group for oldest, _, group in plain if version - oldest > max_age]
        plain = sorted((entry for entry in plain if version - entry[0] <= max_age), key=lambda entry: entry[:2])
        assert sum(each.groups for each in taken.dropped) == len(old)
        assert sum(each.samples for each in taken.dropped) == sum(len(group.samples) for group in old)
        if len(plain) < action:
            assert taken.rollout is None
        else:
            chosen, plain = plain[:action], plain[action:]
            expected = [
                replace(sample, group=number) for number, (_, _, group) in enumerate(chosen) for sample in group.samples
            ]
            assert list(taken.rollout.samples) == expected
            assert all(version - sample.oldest_version <= max_age for sample in taken.rollout.samples)
        version += 1
    assert len(buffer) == len(plain)
