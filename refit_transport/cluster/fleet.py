"""A job's generation engines over its lifetime: who serves, who has died, who is being started in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from refit_transport.cluster.synchronizer import RefitSynchronizer
from refit_transport.cluster.workers import Pending, WorkerGroup, collect
from refit_transport.errors import WorkerError

# Starts an engine: its group of actors, and the construction of its workers in them, which takes longer.
StartEngine = Callable[[], tuple[WorkerGroup, Pending]]


@dataclass(frozen=True, slots=True)
class Change:
    """What `tend` found and did: the engines that left, by name, with what becomes of them; and those that came."""

    left: Mapping[str, str] = field(default_factory=dict)
    joined: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.left or self.joined)


class Fleet:
    """The engines of a job. One that has died is left out and started again, a few times; it joins when it is ready.

    An engine is its processes together: when one of them has died or doesn't answer, all are ended.
    """

    def __init__(
        self,
        policy: WorkerGroup,
        serving: Mapping[str, WorkerGroup],
        *,
        synchronizer: RefitSynchronizer,
        start: Mapping[str, StartEngine],
        restarts: int,
        timeout_s: float,
    ) -> None:
        """`restarts` is how often each engine may be started again; `timeout_s` how long one may be silent."""
        self._policy, self._synchronizer = policy, synchronizer
        self._serving, self._starting = dict(serving), dict[str, tuple[WorkerGroup, Pending]]()
        self._start, self._left = dict(start), dict.fromkeys(start, restarts)
        self._timeout_s = timeout_s

    @property
    def serving(self) -> tuple[WorkerGroup, ...]:
        """The engines that take part in refits, and so can be asked for samples after one."""
        return tuple(self._serving.values())

    def drop_dead(self) -> Mapping[str, str]:
        """Leaves out engines that have died, and starts them again; by name, what becomes of them.

        Raises:
            WorkerError: no engine is left.
        """
        left = {name: "" for name, group in self._serving.items() if not group.is_alive(timeout_s=self._timeout_s)}
        for name in left:
            self._serving.pop(name).release()
            left[name] = self._restart(name)
        if not self._serving:
            raise WorkerError("generation", -1, "reconcile", f"all generation engines have died: {', '.join(left)}")
        if left:
            self._synchronizer.reconcile(self._policy, self.serving)
        return left

    def tend(self) -> Change:
        """`drop_dead`, and lets in those that are ready: they serve after the next refit, and not before.

        Raises:
            WorkerError: no engine is left.
        """
        left = self.drop_dead()
        joined = tuple(name for name in list(self._starting) if self._is_ready(name))
        if joined:
            self._synchronizer.reconcile(self._policy, self.serving)
        return Change(left, joined)

    def release(self) -> None:
        """Ends all engines, also those that are starting."""
        for group in [*self._serving.values(), *(group for group, _ in self._starting.values())]:
            group.release()
        self._serving, self._starting = {}, {}

    def _restart(self, name: str) -> str:
        """Starts an engine that has died again, if it may be; says what was done."""
        if not self._left.get(name):
            return "left out"
        self._left[name] -= 1
        try:
            self._starting[name] = self._start[name]()
        except WorkerError as error:
            return f"left out: it can't be started again: {error}"
        return "starting again"

    def _is_ready(self, name: str) -> bool:
        """Lets an engine in that has started; one that failed to start is tried again or left out."""
        group, building = self._starting[name]
        if not building.is_over():
            return False
        del self._starting[name]
        try:
            collect([building], timeout_s=self._timeout_s)
        except WorkerError:
            group.release()
            self._restart(name)
            return False
        self._serving[name] = group
        return True
