"""Actors that stay warm between tests, as long as each test leaves them as it found them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from refit_jobs import ENVIRONMENT, TIMEOUT_S

from refit_transport.cluster.workers import Pending, WorkerGroup


class WarmGroup(WorkerGroup):
    """A group that knows whether its processes are free for another worker."""

    def __init__(self, name: str, count: int) -> None:
        super().__init__(name, count, resources={"CPU": 0.5}, environment=ENVIRONMENT, timeout_s=TIMEOUT_S)
        self._in_use = False
        self._ending: Pending | None = None

    def build(self, worker_class: type, arguments: Sequence[Mapping[str, Any]]) -> Pending:
        self._in_use, self._ending = True, None
        return super().build(worker_class, arguments)

    def start(self, method: str, *args: Any, **kwargs: Any) -> Pending:
        pending = super().start(method, *args, **kwargs)
        if method == "shutdown":
            self._ending = pending
        return pending

    def is_free(self) -> bool:
        """Whether no worker was built, or the last one was shut down on every rank."""
        if not self._in_use:
            return True
        if self._ending is None:
            return False
        try:
            ray.get(list(self._ending.references.values()), timeout=TIMEOUT_S)
        except RayError:
            return False
        return True


class WarmGroups:
    """Groups by name. One whose last user failed before its workers were shut down is replaced by new processes."""

    def __init__(self, ranks: Mapping[str, int]) -> None:
        self._ranks = dict(ranks)
        self._made: dict[str, WarmGroup] = {}

    def __getitem__(self, name: str) -> WarmGroup:
        if (made := self._made.get(name)) is not None and not made.is_free():
            made.release()
            del self._made[name]
        if name not in self._made:
            self._made[name] = WarmGroup(name, self._ranks[name])
        return self._made[name]

    def release(self) -> None:
        for group in self._made.values():
            group.release()
