"""Groups of samples between asynchronous generation and training, by the version of the weights that made them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from refit_transport.rl.trajectories import Rollout, Sample


@dataclass(frozen=True, slots=True)
class Dropped:
    """What became too old: of one weight version, how many groups (prompts) and samples."""

    version: int
    groups: int
    samples: int


@dataclass(frozen=True, slots=True)
class Taken:
    """What training gets, None while there isn't enough, and what was thrown away on the way."""

    rollout: Rollout | None
    dropped: tuple[Dropped, ...]


class ReplayBuffer:
    """Holds whole groups, because a group's advantages need all of its samples.

    A group is as old as its oldest token: age is the trainer's version less the lowest version of the group. `take`
    never returns one of an age above `max_age`, hands out the oldest first, and each group once.
    """

    def __init__(self, *, max_age: int, rollouts: Sequence[Rollout] = ()) -> None:
        """`rollouts` is what an earlier buffer's `contents` were.

        Raises:
            ValueError: a negative `max_age`.
        """
        if max_age < 0:
            raise ValueError(f"max_age must be at least 0 (got {max_age})")
        self._max_age = max_age
        self._groups: dict[int, list[Rollout]] = {}
        for rollout in rollouts:
            self.add(rollout)

    def __len__(self) -> int:
        """Number of groups."""
        return sum(map(len, self._groups.values()))

    @property
    def versions(self) -> tuple[int, ...]:
        """Of which weight versions there are groups, in order."""
        return tuple(sorted(self._groups))

    @property
    def contents(self) -> tuple[Rollout, ...]:
        """One rollout per group, in the order in which they would be taken; for a checkpoint."""
        return tuple(group for version in self.versions for group in self._groups[version])

    def add(self, rollout: Rollout) -> None:
        """Adds finished samples; those of one `group` number in this rollout are a group."""
        for group in _groups_of(rollout):
            self._groups.setdefault(_version_of(group), []).append(group)

    def take(self, groups: int, *, version: int) -> Taken:
        """Removes and returns `groups` groups for a step that trains the weights of `version`, if there are so many.

        Groups are numbered anew, from 0. What is too old for `version` is dropped, whether or not enough remains.

        Raises:
            ValueError: a sample was made by newer weights than the trainer's, or `groups` isn't positive.
        """
        if groups < 1:
            raise ValueError(f"a step needs at least one group (got {groups})")
        if self._groups and (newest := max(max(map(_newest, held)) for held in self._groups.values())) > version:
            raise ValueError(f"a sample has tokens of version {newest}, which is newer than the trainer's {version}")
        dropped = tuple(self._drop(old) for old in self.versions if version - old > self._max_age)
        if len(self) < groups:
            return Taken(None, dropped)
        chosen: list[Rollout] = []
        for held in self.versions:
            wanted = groups - len(chosen)
            chosen += self._groups[held][:wanted]
            self._groups[held] = self._groups[held][wanted:]
            if not self._groups[held]:
                del self._groups[held]
            if len(chosen) == groups:
                break
        return Taken(_joined(chosen), dropped)

    def _drop(self, version: int) -> Dropped:
        groups = self._groups.pop(version)
        return Dropped(version, len(groups), sum(len(group.samples) for group in groups))


def _version_of(group: Rollout) -> int:
    return min(sample.oldest_version for sample in group.samples)


def _newest(group: Rollout) -> int:
    return max(max(sample.versions) for sample in group.samples)


def _groups_of(rollout: Rollout) -> Iterator[Rollout]:
    members: dict[int, list[tuple[Sample, float]]] = {}
    for sample, reward in zip(rollout.samples, rollout.rewards, strict=True):
        members.setdefault(sample.group, []).append((sample, reward))
    for group in members.values():
        yield Rollout(tuple(sample for sample, _ in group), tuple(reward for _, reward in group))


def _joined(groups: Sequence[Rollout]) -> Rollout:
    samples = tuple(replace(sample, group=number) for number, group in enumerate(groups) for sample in group.samples)
    return Rollout(samples, tuple(reward for group in groups for reward in group.rewards))
