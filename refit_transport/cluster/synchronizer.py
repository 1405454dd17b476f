"""Keeps generation engines at the policy's weights: prepares a refit once and runs it for every version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from refit_transport.cluster.generation import RefitAddress
from refit_transport.cluster.network import PortRange
from refit_transport.cluster.workers import Pending, WorkerGroup, collect
from refit_transport.config.settings import RefitSettings
from refit_transport.events import Observer
from refit_transport.fabrics.secret import Secret
from refit_transport.report import RefitReport
from refit_transport.verification import Comparison


class RefitSynchronizer:
    """Drives both sides from the outside. Bytes never pass through it.

    `policy` is a group of `PolicyWorker`, each of `engines` one of `GenerationWorker`, or of a single
    `AsyncGenerationWorker` for the whole engine of `ranks_per_actor` ranks; all built. Refit ranks: the policy's first,
    then the engines', one after the other.
    """

    def __init__(
        self,
        policy: WorkerGroup,
        engines: Sequence[WorkerGroup],
        *,
        settings: RefitSettings,
        ports: PortRange,
        host: str | None = None,
        ranks_per_actor: int = 1,
        observer: Observer | None = None,
    ) -> None:
        self._observer = observer or Observer()
        self._ranks_per_actor = ranks_per_actor
        self._settings, self._ports, self._host = settings, ports, host
        self._prepared = False
        # A worker reports its own deadline with a better message than the driver's: give it time to. Joining has three
        # phases of their own: meeting, manifests, plan.
        self._patience_s = settings.timeout_s + 30.0
        self._join_patience_s = 3 * settings.timeout_s + 30.0
        self._incarnations: dict[str, int] = {}
        self._members: dict[str, WorkerGroup] = {}
        self._policy, self._engines = policy, tuple(engines)
        self.reconcile(policy, engines)

    def reconcile(self, policy: WorkerGroup, engines: Sequence[WorkerGroup]) -> None:
        """Sets who takes part from the next refit on; who is new receives everything in it.

        Nothing is planned or connected anew unless somebody came or went. A group under the name of an earlier one is
        its next incarnation: what is left of the earlier one isn't let in any more.
        """
        members = {group.name: group for group in (policy, *engines)}
        came = [name for name, group in members.items() if self._members.get(name) is not group]
        went = [name for name, group in self._members.items() if members.get(name) is not group]
        for name in came:
            self._incarnations[name] = self._incarnations.get(name, -1) + 1
        if came or went:
            self._prepared = False
            self._observer.members(joined=came, left=went)
        self._policy, self._engines, self._members = policy, tuple(engines), members

    def prepare(self) -> None:
        """Joins all ranks: manifests, plan and connections. Needed once; `sync` calls it when nobody did.

        Raises:
            WorkerError: naming group, rank and phase of the first failure.
        """
        ranks = self._policy.count + sum(engine.count for engine in self._engines) * self._ranks_per_actor
        with self._observer.preparing(ranks=ranks):
            self._prepare()
        self._prepared = True

    def _prepare(self) -> None:
        host, port = self._policy.address(self._ports, host=self._host)
        if not self._ports.low:
            port = 0  # whoever listens finds a free one itself, and nobody else can take it in between
        first_ranks: dict[str, int] = {}
        incarnations: dict[int, int] = {}
        for group in (self._policy, *self._engines):
            first_ranks[group.name] = len(incarnations)
            count = group.count if group is self._policy else group.count * self._ranks_per_actor
            ranks = range(len(incarnations), len(incarnations) + count)
            incarnations |= dict.fromkeys(ranks, self._incarnations[group.name])
        address = RefitAddress(host, port, 0, len(incarnations), self._settings.timeout_s, Secret.new().text)
        opened = self._policy.start_one(0, "open_refit", address=address, incarnations=incarnations)
        [found] = collect([opened], timeout_s=self._patience_s)
        address = replace(address, port=int(found[0]))

        def own(group: WorkerGroup) -> RefitAddress:
            return replace(address, first_rank=first_ranks[group.name], incarnation=self._incarnations[group.name])

        joining = [self._policy.start("join_refit", own(self._policy), self._settings)]
        joining += [engine.start("join_refit", own(engine)) for engine in self._engines]
        collect(joining, timeout_s=self._join_patience_s)

    def sync(self, version: int) -> RefitReport:
        """Makes every engine serve the policy's present weights as `version`, which must be above the last one.

        Staged, engines that generate in the background go on while they receive, and stand still only to take over.

        Raises:
            WorkerError: naming group, rank and phase; the next `sync` prepares anew. The engines stay fenced, unless it
                is staged and not everything had arrived: then they still serve what they did.
        """
        commit, engines = self._settings.commit, len(self._engines)
        with self._observer.refit(version, engines=engines, commit=commit) as watched:
            report = watched.report = self._sync(version)
        return report

    def _sync(self, version: int) -> RefitReport:
        if not self._prepared:
            self.prepare()
        self._prepared = False
        if self._settings.commit == "staged":
            self._answers([self._policy.start("send", version), *self._starting("stage", version)])
            self._answers(self._starting("start_refit"))
            self._answers(self._starting("receive", version))
        else:
            self._answers(self._starting("start_refit"))
            self._answers([self._policy.start("send", version), *self._starting("receive", version)])
        [by_rank, *_] = self._answers([self._policy.start("finish_refit"), *self._starting("finish_refit", version)])
        self._prepared = True
        report = by_rank[0]
        assert isinstance(report, RefitReport)
        return report

    def _starting(self, method: str, *arguments: Any) -> list[Pending]:
        return [engine.start(method, *arguments) for engine in self._engines]

    def _answers(self, pending: Sequence[Pending]) -> list[dict[int, Any]]:
        return collect(pending, timeout_s=self._patience_s)

    def compare(self) -> Comparison:
        """Compares what the engines serve with what the policy holds now, between two refits; moves nothing.

        What differs is in the result: `compare().require_equal()` raises it. The engines may not generate meanwhile.

        Raises:
            WorkerError: naming group, rank and phase; the next call prepares anew.
        """
        if not self._prepared:
            self.prepare()
        self._prepared = False
        comparing = [group.start("compare") for group in (self._policy, *self._engines)]
        findings, *_ = self._answers(comparing)
        self._prepared = True
        found = findings[0]
        assert isinstance(found, Comparison)
        return found
