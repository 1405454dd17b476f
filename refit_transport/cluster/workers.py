"""Groups of Ray actors: placed together, called together, each call with a deadline, all released at the end."""

from __future__ import annotations

import gc
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from refit_transport.cluster.network import HeldPort, PortRange
from refit_transport.errors import RefitTransportError, WorkerError

_MOST_NAMED = 8
_LONGEST_FACT = 200
_LATECOMERS_S = 3.0


class _Host:
    """The actor: holds one worker object, built after the actor's place in the cluster is known."""

    def __init__(self) -> None:
        self._worker: Any = None
        self._port = HeldPort()

    def address(self, ports: PortRange, address: str | None) -> tuple[str, int]:
        """This node's IP address and a port on it, held until the next one is asked for."""
        return address or ray.util.get_node_ip_address(), self._port.renew(ports)

    def process_id(self) -> int:
        """This actor's process id."""
        return os.getpid()

    def node(self) -> str:
        """The id of this actor's node; where containers share a host name, it still tells them apart."""
        return str(ray.get_runtime_context().get_node_id())

    def build(self, worker_class: type, arguments: Mapping[str, Any]) -> None:
        """Constructs the worker, which Python's collector then leaves alone."""
        gc.unfreeze()
        self._worker = worker_class(**arguments)
        gc.collect()
        gc.freeze()

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls one of the worker's methods."""
        return getattr(self._worker, method)(*args, **kwargs)


class Pending:
    """Calls in flight on some workers of a group."""

    def __init__(self, group: WorkerGroup, phase: str, references: Mapping[int, Any]) -> None:
        self.group, self.phase = group, phase
        self.references = dict(references)

    def is_over(self) -> bool:
        """Whether every call has returned or failed, as of now."""
        references = list(self.references.values())
        ready, _ = ray.wait(references, num_returns=len(references), timeout=0)
        return len(ready) == len(references)


class WorkerGroup:
    """Actors of one role, one per rank, in a placement group of their own."""

    def __init__(
        self,
        name: str,
        count: int,
        *,
        resources: Mapping[str, float],
        environment: Mapping[str, str],
        timeout_s: float,
    ) -> None:
        """Reserves the resources for all ranks at once and starts the actors.

        Raises:
            WorkerError: the cluster doesn't have the resources free within `timeout_s`.
        """
        self.name, self.count, self.timeout_s = name, count, timeout_s
        # Several jobs may share a cluster, and a group may come while the one before it is still going.
        unique = f"refit-{name}-{secrets.token_hex(4)}"
        self._placement: PlacementGroup | None = placement_group(
            [dict(resources)] * count, strategy="PACK", name=unique
        )
        self._actors: list[Any] = []
        try:
            self._start(resources, environment)
        except BaseException:
            self.release()
            raise

    def _start(self, resources: Mapping[str, float], environment: Mapping[str, str]) -> None:
        assert self._placement is not None
        if not self._placement.wait(self.timeout_s):
            free = {key: value for key, value in ray.available_resources().items() if key in resources}
            reason = (
                f"{self.count} bundles of {dict(resources)} are not free within {self.timeout_s:g} s (free: {free}); "
                "lower cluster.gpus_per_node or cluster.num_nodes, or raise refit_run.worker_timeout_s"
            )
            raise WorkerError(self.name, -1, "placement", reason)
        actor = ray.remote(_Host)
        for rank in range(self.count):
            strategy = PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=rank)
            self._actors.append(
                actor.options(
                    num_cpus=resources.get("CPU", 0),
                    num_gpus=resources.get("GPU", 0),
                    max_restarts=0,
                    scheduling_strategy=strategy,
                    runtime_env={"env_vars": dict(environment)},
                ).remote()
            )

    def address(self, ports: PortRange, *, rank: int = 0, host: str | None = None) -> tuple[str, int]:
        """The address of a rank's node, or `host`, and a port that is held there until the next call."""
        reference = self._actors[rank].address.remote(ports, host)
        [found] = collect([Pending(self, "address", {rank: reference})], timeout_s=self.timeout_s)
        return (str(found[rank][0]), int(found[rank][1]))

    def build(self, worker_class: type, arguments: Sequence[Mapping[str, Any]]) -> Pending:
        """Starts constructing every rank's worker from its own arguments."""
        references = {
            rank: actor.build.remote(worker_class, dict(own))
            for rank, (actor, own) in enumerate(zip(self._actors, arguments, strict=True))
        }
        return Pending(self, "start", references)

    def start(self, method: str, *args: Any, **kwargs: Any) -> Pending:
        """Calls a method on every rank with equal arguments, without waiting."""
        references = {rank: actor.call.remote(method, *args, **kwargs) for rank, actor in enumerate(self._actors)}
        return Pending(self, method, references)

    def start_one(self, rank: int, method: str, **kwargs: Any) -> Pending:
        """Calls a method on one rank, without waiting."""
        return Pending(self, method, {rank: self._actors[rank].call.remote(method, **kwargs)})

    def start_on(self, ranks: Sequence[int], method: str, *args: Any) -> Pending:
        """Calls a method on some ranks with equal arguments, without waiting."""
        return Pending(self, method, {rank: self._actors[rank].call.remote(method, *args) for rank in ranks})

    def call(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> list[Any]:
        """Calls a method on every rank and waits; the results by rank."""
        [found] = collect([self.start(method, *args, **kwargs)], timeout_s=timeout_s or self.timeout_s)
        return [found[rank] for rank in range(self.count)]

    def is_alive(self, *, timeout_s: float) -> bool:
        """Whether every rank's process answers within `timeout_s`, after what it is at."""
        try:
            collect([self._pings()], timeout_s=timeout_s)
        except WorkerError:
            return False
        return True

    def _pings(self) -> Pending:
        return Pending(self, "process_id", {rank: actor.process_id.remote() for rank, actor in enumerate(self._actors)})

    def nodes(self) -> list[str]:
        """The id of each rank's node."""
        references = {rank: actor.node.remote() for rank, actor in enumerate(self._actors)}
        [found] = collect([Pending(self, "nodes", references)], timeout_s=self.timeout_s)
        return [found[rank] for rank in range(self.count)]

    def process_ids(self) -> list[int]:
        """The process id of each rank's actor."""
        [found] = collect([self._pings()], timeout_s=self.timeout_s)
        return [int(found[rank]) for rank in range(self.count)]

    def release(self) -> None:
        """Ends the actors and frees their resources; a second call does nothing."""
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        self._actors = []
        if self._placement is not None:
            remove_placement_group(self._placement)
            self._placement = None


def collect(pending: Sequence[Pending], *, timeout_s: float) -> list[dict[int, Any]]:
    """Waits for calls on several groups at once; the results by rank, in the order of `pending`.

    Raises:
        WorkerError: the first failure of any of them, or a worker that didn't answer within `timeout_s`.
    """
    places = {
        reference: (index, rank) for index, calls in enumerate(pending) for rank, reference in calls.references.items()
    }
    results: list[dict[int, Any]] = [{} for _ in pending]
    waiting, end = list(places), time.monotonic() + timeout_s
    while waiting:
        ready, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, end - time.monotonic()))
        if not ready:
            raise _silence(pending, [places[reference] for reference in waiting], timeout_s)
        index, rank = places[ready[0]]
        try:
            results[index][rank] = ray.get(ready[0])
        except RayError as error:
            cause, silent = _cause(error, ready[0], waiting)
            raise _worker_error(pending, places[cause[0]], cause[1], [places[s] for s in silent]) from cause[1]
    return results


def _cause(error: RayError, reference: Any, waiting: Sequence[Any]) -> tuple[tuple[Any, RayError], Sequence[Any]]:
    """The failure to tell, with its reference, and the references that give no answer.

    The peers of a worker that died or stopped often fail first, with errors that follow from it. So the others get a
    moment; who died is the cause, and who is silent is worth a word.
    """
    end = time.monotonic() + _LATECOMERS_S
    while waiting and not isinstance(error, RayActorError) and time.monotonic() < end:
        ready, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, end - time.monotonic()))
        for other in ready:
            try:
                ray.get(other)
            except RayActorError as death:
                return (other, death), ()
            except RayError:
                continue
    return (reference, error), () if isinstance(error, RayActorError) else waiting


def _silence(pending: Sequence[Pending], silent: Sequence[tuple[int, int]], timeout_s: float) -> WorkerError:
    """Names every worker that doesn't answer: those that wait for the one that hangs are among them."""
    (index, rank), *others = silent
    also = f" (nor from {_names(pending, others)})" if others else ""
    remedy = "raise refit_run.worker_timeout_s or the transport's timeout_s if they are only slow"
    reason = f"no answer within {timeout_s:g} s{also}; {remedy}"
    return WorkerError(pending[index].group.name, rank, pending[index].phase, reason)


def _names(pending: Sequence[Pending], places: Sequence[tuple[int, int]]) -> str:
    named = [f"{pending[index].group.name} rank {rank}" for index, rank in places[:_MOST_NAMED]]
    if len(places) > _MOST_NAMED:
        named.append(f"{len(places) - _MOST_NAMED} more")
    return ", ".join(named)


def _death(text: str) -> str:
    """The fact in Ray's paragraph about a dead actor.

    >>> _death("The actor died.\\n  Worker PID: 7 Worker exit detail: End of file. Some common causes include: (1)")
    'End of file.'
    """
    last = text.strip().splitlines()[-1].strip() if text.strip() else "no reason known"
    detail = last.partition("Worker exit detail: ")[2] or last
    fact = detail.partition(" Some common causes")[0]
    return fact if len(fact) <= _LONGEST_FACT else f"{fact[: _LONGEST_FACT - 3]}..."


def _worker_error(
    pending: Sequence[Pending], place: tuple[int, int], error: RayError, silent: Sequence[tuple[int, int]]
) -> WorkerError:
    index, rank = place
    if isinstance(error, RayActorError):
        reason = f"the process died: killed, out of memory, or crashed ({_death(str(error))})"
    else:
        cause = error.cause if isinstance(error, RayTaskError) and error.cause is not None else error
        own = isinstance(cause, RefitTransportError)
        reason = str(cause) if own else f"{type(cause).__name__}: {cause}"
    if silent:
        reason += f"; no answer from {_names(pending, silent)}"
    return WorkerError(pending[index].group.name, rank, pending[index].phase, reason)
