"""The ranks of a job on Ray, placed as `run` places them, each holding any worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from refit_transport.cluster.job import placed_groups, refit_roles
from refit_transport.cluster.network import PortRange
from refit_transport.cluster.workers import Pending, WorkerGroup, collect
from refit_transport.config.schema import RefitConfig


class RayCrew:
    """Groups whose ranks count as refit ranks: the policy's first, then the engines', one after the other."""

    def __init__(self, groups: Sequence[WorkerGroup], *, ports: PortRange, host: str | None) -> None:
        self._groups, self._ports, self._host = tuple(groups), ports, host
        self._places = [(group, rank) for group in groups for rank in range(group.count)]

    def address(self) -> tuple[str, int]:
        """Rank 0's address and a port that is free there and was not given before."""
        host, port = self._groups[0].address(self._ports, host=self._host)
        self._ports = self._ports.promising(port)
        return host, port

    def call(self, method: str, *arguments: Any, timeout_s: float, ranks: Sequence[int] | None = None) -> list[Any]:
        """Calls a method on all ranks (or these) at once; the results in the order of the ranks.

        Raises:
            WorkerError: the first rank that failed or gave no answer in time, by its group's name.
        """
        asked = [self._places[rank] for rank in (range(len(self._places)) if ranks is None else ranks)]
        chosen = {group: [rank for other, rank in asked if other is group] for group, _ in asked}
        pending = [group.start_on(own, method, *arguments) for group, own in chosen.items()]
        found = dict(zip(chosen, collect(pending, timeout_s=timeout_s), strict=True))
        return [found[group][rank] for group, rank in asked]


@contextmanager
def running_crew(
    config: RefitConfig,
    worker_class: type,
    arguments: Callable[[int], Mapping[str, Any]],
    *,
    scratch: Path | None = None,
) -> Iterator[RayCrew]:
    """Starts a worker on every rank of a configuration, and releases all at the end of the block.

    Args:
        config: where the ranks go, and how many there are.
        worker_class: built on each rank from `arguments(rank)` and `node`, the id of its node.
        arguments: those of one refit rank.
        scratch: see `job.running_job`.

    Raises:
        WorkerError: a worker didn't start; names group, rank and phase.
    """
    with placed_groups(config, refit_roles(config), scratch=scratch) as placed:
        building: list[Pending] = []
        first = 0
        for group in placed.groups:
            own = [{**arguments(first + rank), "node": node} for rank, node in enumerate(group.nodes())]
            building.append(group.build(worker_class, own))
            first += group.count
        collect(building, timeout_s=config.refit_run.worker_timeout_s)
        yield RayCrew(placed.groups, ports=placed.ports, host=placed.host)
