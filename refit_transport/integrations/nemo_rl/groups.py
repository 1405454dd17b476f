"""NeMo RL's actors as groups of refit workers, so that `RefitSynchronizer` drives them like our own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import ray
from ray import cloudpickle

import refit_transport
from refit_transport.cluster.workers import Pending, WorkerGroup, collect
from refit_transport.errors import WorkerError
from refit_transport.integrations.nemo_rl import probe, remote

_LEAVING_S = 30.0


class _Call:
    """Stands for a method of an actor's handle."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.remote = function


class _Adopted:
    """Stands for the handle of an actor of our own: the same methods, run by `remote`'s functions."""

    def __init__(self, handle: Any, relay: Any | None) -> None:
        run = handle.__ray_call__.remote
        self.build = _Call(partial(run, remote.build))
        self.address = _Call(partial(run, remote.address))
        self.process_id = _Call(partial(run, remote.process_id))
        self.node = _Call(partial(run, remote.node))
        if relay is None:
            self.call = _Call(lambda method, *args, **named: run(remote.call, method, args, named))
        else:
            self.call = _Call(lambda method, *args, **named: relay.call.remote(handle, method, args, named))


class AdoptedGroup(WorkerGroup):
    """Actors that NeMo RL started and will end. `relay`: for actors with an event loop, see `remote.Relay`."""

    def __init__(self, name: str, handles: Sequence[Any], *, timeout_s: float, relay: Any | None = None) -> None:
        """Raises WorkerError where an actor can't import this package."""
        self.name, self.count, self.timeout_s = name, len(handles), timeout_s
        self._placement = None
        self._started: list[Any] = []
        _require_package(self, handles)
        self._actors = [_Adopted(handle, relay) for handle in handles]

    def start(self, method: str, *args: Any, **kwargs: Any) -> Pending:
        """See `WorkerGroup`."""
        return self._noted(super().start(method, *args, **kwargs))

    def start_one(self, rank: int, method: str, **kwargs: Any) -> Pending:
        """See `WorkerGroup`."""
        return self._noted(super().start_one(rank, method, **kwargs))

    def settle(self, timeout_s: float) -> None:
        """Waits until every call that was started has ended, well or not."""
        if self._started:
            ray.wait(self._started, num_returns=len(self._started), timeout=timeout_s)
            self._started.clear()

    def release(self) -> None:
        """Has the actors leave the refit; they themselves stay. Who doesn't answer is left alone."""
        if self._actors:
            leaving = list(self.start("leave_refit").references.values())
            ray.wait(leaving, num_returns=len(leaving), timeout=_LEAVING_S)
        self._actors, self._started = [], []

    def _noted(self, pending: Pending) -> Pending:
        running = ray.wait(self._started, num_returns=len(self._started), timeout=0)[1] if self._started else []
        self._started = [*running, *pending.references.values()]
        return pending


def _require_package(group: AdoptedGroup, handles: Sequence[Any]) -> None:
    cloudpickle.register_pickle_by_value(probe)
    try:
        wanted = refit_transport.__version__
        asked = {rank: handle.__ray_call__.remote(probe.missing, wanted) for rank, handle in enumerate(handles)}
    finally:
        cloudpickle.unregister_pickle_by_value(probe)
    [answers] = collect([Pending(group, "delivery", asked)], timeout_s=group.timeout_s)
    for rank, problem in sorted(answers.items()):
        if problem:
            remedy = (
                "start the driver with `python -m refit_transport.integrations.nemo_rl`, or call its install() before "
                "ray.init; or install the same version there"
            )
            raise WorkerError(group.name, rank, "delivery", f"{problem}; {remedy}")


def workers_in(group: WorkerGroup, worker_class: type, arguments: Mapping[str, Any]) -> Pending:
    """Starts giving every actor its worker, which learns its rank and node."""
    own = [{**arguments, "rank": rank, "node": node} for rank, node in enumerate(group.nodes())]
    return group.build(worker_class, own)
