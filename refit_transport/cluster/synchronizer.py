"""Keeps generation engines at the policy's weights: prepares a refit once and runs it for every version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from refit_transport.cluster.generation import RefitAddress
from refit_transport.cluster.network import PortRange
from refit_transport.cluster.workers import WorkerGroup, collect
from refit_transport.config.settings import RefitSettings
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
    ) -> None:
        self._engine_ranks = [engine.count * ranks_per_actor for engine in engines]
        self._policy, self._engines = policy, tuple(engines)
        self._settings, self._ports, self._host = settings, ports, host
        self._prepared = False
        # A worker reports its own deadline with a better message than the driver's: give it time to. Joining has three
        # phases of their own: meeting, manifests, plan.
        self._patience_s = settings.timeout_s + 30.0
        self._join_patience_s = 3 * settings.timeout_s + 30.0

    def prepare(self) -> None:
        """Joins all ranks: manifests, plan and connections. Needed once; `sync` calls it when nobody did.

        Raises:
            WorkerError: naming group, rank and phase of the first failure.
        """
        host, port = self._policy.address(self._ports, host=self._host)
        world_size = self._policy.count + sum(self._engine_ranks)
        if not self._ports.low:
            port = 0  # whoever listens finds a free one itself, and nobody else can take it in between
        wanted = RefitAddress(host, port, 0, world_size, self._settings.timeout_s, Secret.new().text)
        opened = self._policy.start_one(0, "open_refit", address=wanted, incarnations={})
        [found] = collect([opened], timeout_s=self._patience_s)
        address = replace(wanted, port=int(found[0]))
        pending = [self._policy.start("join_refit", address, self._settings)]
        first_rank = self._policy.count
        for engine, ranks in zip(self._engines, self._engine_ranks, strict=True):
            pending.append(engine.start("join_refit", replace(address, first_rank=first_rank)))
            first_rank += ranks
        collect(pending, timeout_s=self._join_patience_s)
        self._prepared = True

    def sync(self, version: int) -> RefitReport:
        """Makes every engine serve the policy's present weights as `version`, which must be above the last one.

        Raises:
            WorkerError: naming group, rank and phase. The engines stay fenced, and the next `sync` prepares anew.
        """
        if not self._prepared:
            self.prepare()
        self._prepared = False
        collect([engine.start("start_refit") for engine in self._engines], timeout_s=self._patience_s)
        moving = [self._policy.start("send", version), *(engine.start("receive", version) for engine in self._engines)]
        collect(moving, timeout_s=self._patience_s)
        finishing = [engine.start("finish_refit", version) for engine in self._engines]
        report = self._policy.start("finish_refit")
        reports, *_ = collect([report, *finishing], timeout_s=self._patience_s)
        self._prepared = True
        found = reports[0]
        assert isinstance(found, RefitReport)
        return found

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
        findings, *_ = collect(comparing, timeout_s=self._patience_s)
        self._prepared = True
        found = findings[0]
        assert isinstance(found, Comparison)
        return found
