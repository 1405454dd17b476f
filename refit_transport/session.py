"""A refit session on one rank: prepared once, run for every new weight version."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Literal, Self, get_args

import torch

from refit_transport.config.settings import RefitSettings
from refit_transport.connect import connect_fabric
from refit_transport.errors import LayoutError, RefitTransportError, TransferError, VersionError
from refit_transport.fabrics.base import Fabric, Phase, Spent
from refit_transport.fabrics.deadline import Deadline
from refit_transport.fabrics.rendezvous import ControlChannel, telling_others
from refit_transport.introduction import introduce
from refit_transport.memory import check_apart
from refit_transport.refit_plan import RefitPlan
from refit_transport.report import RankReport, RefitReport
from refit_transport.scheduling.topology import Topology
from refit_transport.session_checks import SessionChecks
from refit_transport.sources.base import Source
from refit_transport.staging import StagedTarget
from refit_transport.targets.base import Target
from refit_transport.transports.base import Endpoint
from refit_transport.verification import Comparison


class RefitSession:
    """One rank's session. Every method is collective over all ranks of the refit.

    Order for each version: `begin`, `transfer(version)`, `finish`. A version is delivered to every target or to none:
    no rank returns from the last of these calls before all targets have it complete. After an error the session is
    broken, and a new one must be prepared. What the targets then hold:

    - in place: after an error of `transfer`, nothing that may be used, before the next complete refit;
    - staged: what they held before, whole, unless the error is one of `finish`.
    """

    def __init__(
        self, channel: ControlChannel, endpoint: Endpoint, plan: RefitPlan, fabric: Fabric, *, version: int
    ) -> None:
        self._channel, self._endpoint, self._plan, self._fabric = channel, endpoint, plan, fabric
        self._settings = plan.job.settings
        self._summary = plan.summary() if channel.rank == 0 else None
        # Counted in the report of the first refit.
        self._plan_seconds = 0.0
        self._seconds: dict[str, float] = {}
        self._spent = Spent()
        self._verified = 0
        self._forms: dict[tuple[str, str], tuple[torch.dtype, torch.Size, tuple[int, ...]]] = {}
        self._attempts = self._comparisons = 0
        self._checks = SessionChecks(channel, endpoint, plan)
        # Of all ranks about the last refit, on rank 0.
        self._reports: list[dict[str, Any]] = []
        # What this rank published for the present attempt, last, and for the one before.
        self._topics: deque[tuple[str, ...]] = deque(maxlen=2)
        self._began = 0.0
        self._state = "idle"
        self.version = self._delivered = version

    @classmethod
    def prepare(
        cls,
        channel: ControlChannel,
        *,
        settings: RefitSettings | None = None,
        source: Source | None = None,
        target: Target | None = None,
        version: int = -1,
        topology: Topology | None = None,
        idle_ranks: Literal["refused", "allowed"] = "refused",
        node: str = "",
    ) -> Self:
        """Exchanges manifests, plans, compares digests and connects the fabric; returns a complete session or raises.

        Args:
            channel: this rank's control channel.
            settings: given by rank 0 only, which hands them to the others.
            source: this rank's source, on source ranks.
            target: this rank's target, on target ranks; a rank may have both, in memory of their own.
            version: the version that this rank has from earlier sessions; the next must be above every rank's.
            topology: the machine graph, the same on every rank; made from the settings when None.
            idle_ranks: whether a rank may have neither side. It then connects and votes like the others, and plans and
                moves nothing (rank 0 plans, for the report). Where every rank has its part, one without is a mistake.
            node: this rank's node in the cluster, where somebody knows it; ranks of one node share a fast domain.
        """
        began = time.perf_counter()
        channel.claim()
        with _closing_on_error(channel), telling_others(channel):
            channel.publish("version", version)
            if source is None and target is None and idle_ranks == "refused":
                raise TransferError(channel.rank, -1, "prepare", "", "a rank needs a source or a target")
            job, endpoint = introduce(channel, settings, source, target, topology, node)
            deadline = Deadline(job.settings.timeout_s)
            plan = RefitPlan(job)
            digest = plan.digest() if channel.rank == 0 or endpoint.role != "none" else None
            channel.agree("the plan/0", digest, deadline=deadline)
            last = max(channel.collect("version", range(channel.world_size), deadline=deadline))
            fabric = connect_fabric(
                channel,
                job.topology,
                job.settings,
                slot_bytes=plan.slot_bytes,
                deadline=deadline,
                buffers=endpoint.devices(),
            )
            session = cls(channel, endpoint, plan, fabric, version=last)
        session._plan_seconds = time.perf_counter() - began
        return session

    @property
    def plan(self) -> RefitPlan:
        return self._plan

    def begin(self) -> None:
        """Opens a refit: in place, the target's weights are not to be used from here until after `finish`."""
        self._require("idle", "begin")
        self._began = time.perf_counter()
        self._seconds = {"plan": self._plan_seconds}
        self._plan_seconds = 0.0
        self._spent, self._verified = Spent(), 0
        with self._guarded("begin"):
            if self._endpoint.target is not None:
                self._endpoint.target.begin()
        self._state = "open"

    def transfer(self, version: int) -> None:
        """Delivers the sources' present weights as `version`, and verifies them if the settings ask for it.

        Nothing moves before all ranks have come and mean the same version. It returns when every rank has everything,
        and in place, every target could make use of it. Staged, a target's old weights can be used meanwhile.

        Raises:
            VersionError: `version` isn't above the last one; nothing has moved, and a new refit may begin.
            AgreementError: the ranks mean different versions; nothing has moved.
            TransferError, DeadlineError, VerificationError: the session is broken.
        """
        self._require("open", "transfer")
        self._attempts += 1
        deadline = Deadline(self._settings.timeout_s)
        self._topics.append(tuple(f"{topic}/{self._attempts}" for topic in ("checksums", "boxes", "replicas")))
        with self._guarded("transfer"):
            with self._timed("agree"):
                self._channel.agree(f"the weight version/{self._attempts}", str(version), deadline=deadline)
            # Whoever has come here has seen the end of the attempt before, and so read all of it.
            if len(self._topics) == self._topics.maxlen:
                self._channel.forget(self._topics[0])
            if version > self.version:
                # Whoever was late has taken its time from the wait before, not from what follows.
                deadline = Deadline(self._settings.timeout_s)
                self._deliver(version, deadline)
                self._vote("what arrived", version, deadline)
        if version <= self.version:
            self._state = "idle"
            raise VersionError(version, self.version)
        self._state, self._delivered = "delivered", version

    def finish(self) -> RefitReport | None:
        """Closes the refit, which every rank has delivered. Rank 0 returns the report.

        Staged, every target takes over what has arrived, and isn't to be used meanwhile; the call returns when all
        have. Whoever doesn't return from it can't know what the others serve.

        Raises:
            TransferError, DeadlineError, VerificationError: only where it is staged; the session is broken.
        """
        self._require("delivered", "finish")
        if self._settings.commit == "staged":
            deadline = Deadline(self._settings.timeout_s)
            with self._guarded("commit"):
                self._take_over(self._delivered)
                self._vote("what is served", self._delivered, deadline)
        self._state, self.version = "idle", self._delivered
        if self._summary is None:
            return None
        total = time.perf_counter() - self._began
        parts = (self._rank_report(), *(RankReport(**part) for part in self._reports[1:]))
        return RefitReport(self.version, total, self._summary, parts, self._channel.refused)

    def _vote(self, what: str, version: int, deadline: Deadline) -> None:
        """Returns when every rank has come this far with this version."""
        with self._timed("agree"):
            report = asdict(self._rank_report())
            topic = f"{what}/{self._attempts}"
            self._reports = self._channel.agree(topic, str(version), deadline=deadline, report=report)

    def _take_over(self, version: int) -> None:
        target = self._endpoint.target
        if not isinstance(target, StagedTarget):
            return
        with self._spent.timing("load"):
            target.apply()
        if self._checks.are_on:
            with self._timed("verify"):
                target.check(version)
                self._verified += self._checks.derived(version, self._attempts)

    def _deliver(self, version: int, deadline: Deadline) -> None:
        target = self._endpoint.target
        self._check_forms("target", {} if target is None else target.buffers())
        with self._timed("verify"):
            self._checks.replicas(version, deadline)
        with self._checks.reading_sources(self._attempts) as held:
            for transport in self._plan.transports.values():
                self._spent.add(transport.run(self._endpoint, self._fabric, deadline=deadline))
        with self._timed("verify"):
            self._verified = self._checks.arrived(version, self._attempts, held, deadline)
        if target is not None:
            with self._spent.timing("load"):
                target.finish()
        if self._settings.commit == "in_place":
            with self._timed("verify"):
                self._verified += self._checks.derived(version, self._attempts)

    def run(self, version: int) -> RefitReport | None:
        """`begin`, `transfer` and `finish` in one call, for ranks that no engine drives."""
        self.begin()
        self.transfer(version)
        return self.finish()

    def compare(self) -> Comparison:
        """Compares all that both sides hold now, without moving anything; every rank returns the same findings.

        Collective, between refits: before the first, or after one's `finish`. What differs doesn't break the session.
        """
        self._require("idle", "compare")
        self._comparisons += 1
        topic, deadline = f"asked-{self._comparisons}", Deadline(self._settings.timeout_s)
        with self._guarded("compare"):
            served = self._endpoint.served_binding()
            self._check_forms("served", {} if served is None else served.buffers)
            own = self._checks.everything(served, topic, self.version, deadline)
            self._channel.publish(f"found/{topic}", own.to_json())
            everyone = range(self._channel.world_size)
            found = self._channel.collect(f"found/{topic}", everyone, deadline=deadline)
            # Whoever has published this has read all of the comparison before.
            before = f"asked-{self._comparisons - 1}"
            self._channel.forget([f"{kind}/{before}" for kind in ("checksums", "boxes", "found")])
        return Comparison.joined([Comparison.from_json(part) for part in found])

    def verify(self) -> Comparison:
        """`compare`, and an error where the sides differ.

        Raises:
            AgreementError: replicas of the sources differ.
            VerificationError: a target serves something else; names the first tensor, box and ranks.
        """
        return self.compare().require_equal()

    def close(self) -> None:
        """Leaves the refit's group; a second call does nothing."""
        self._state = "closed"
        self._fabric.close()
        self._channel.close()

    def _check_forms(self, role: Literal["target", "served"], target: Mapping[str, torch.Tensor]) -> None:
        """Storage may move between refits; with another dtype, shape or stride it isn't what the manifest describes."""
        source = self._endpoint.source
        buffers: dict[str, Mapping[str, torch.Tensor]] = {
            "source": {} if source is None else source.buffers(),
            role: target,
        }
        for side, tensors in buffers.items():
            for name, tensor in tensors.items():
                form = (tensor.dtype, tensor.shape, tensor.stride())
                known = self._forms.setdefault((side, name), form)
                if form != known:
                    before, now = (
                        f"{dtype} {list(shape)} strides {list(stride)}" for dtype, shape, stride in (known, form)
                    )
                    raise LayoutError(name, self._channel.rank, f"{before}, as at the first refit", now)
        check_apart(buffers["source"], target, rank=self._channel.rank)

    def _rank_report(self) -> RankReport:
        spent, target = self._spent, self._endpoint.target
        phases: tuple[Phase, ...] = get_args(Phase)
        seconds = {**self._seconds, **{str(phase): float(getattr(spent, phase)) for phase in phases}}
        return RankReport(
            self._channel.rank,
            self._endpoint.role,
            socket.gethostname(),
            seconds,
            spent.sent_bytes,
            spent.received_bytes,
            self._verified,
            {} if target is None else dict(target.private_layers()),
        )

    def _require(self, state: str, call: str) -> None:
        if self._state != state:
            reason = f"{call} needs a session that is {state}; this one is {self._state}"
            raise TransferError(self._channel.rank, -1, call, "", reason)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - began

    @contextmanager
    def _guarded(self, phase: str) -> Iterator[None]:
        """Breaks the session on any error and tells the other ranks the cause."""
        try:
            with telling_others(self._channel):
                yield
        except RefitTransportError:
            self._state = "broken"
            self._fabric.close()
            raise
        except Exception as error:
            self._state = "broken"
            self._fabric.close()
            raise TransferError(self._channel.rank, -1, phase, "", f"{type(error).__name__}: {error}") from error


@contextmanager
def _closing_on_error(channel: ControlChannel) -> Iterator[None]:
    try:
        yield
    except BaseException:
        channel.close()
        raise
