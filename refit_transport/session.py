"""A refit session on one rank: prepared once, run for every new weight version."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, Self

from refit_transport.config.settings import AVAILABLE_FABRICS, RefitSettings
from refit_transport.errors import LayoutError, RefitTransportError, TransferError, VersionError
from refit_transport.fabrics.base import Fabric, Spent
from refit_transport.fabrics.deadline import Deadline, DeadlineCaller
from refit_transport.fabrics.gloo import GlooFabric, address_toward
from refit_transport.fabrics.rendezvous import ControlChannel
from refit_transport.layout.manifest import Manifest
from refit_transport.layout.wire import manifest_from_json, manifest_to_json
from refit_transport.refit_plan import RefitPlan
from refit_transport.report import RankReport, RefitReport
from refit_transport.scheduling.topology import Topology
from refit_transport.sources.base import Source
from refit_transport.targets.base import Target
from refit_transport.transports.base import Endpoint, Job

_GLOO_FIRST_S = 1.0


class RefitSession:
    """One rank's session. Every method is collective over all ranks of the refit.

    Order for each version: `begin`, `transfer(version)`, `finish`. After an error the session is broken: what arrived
    may be torn, and a new session must be prepared.
    """

    def __init__(
        self, channel: ControlChannel, endpoint: Endpoint, plan: RefitPlan, fabric: Fabric, *, version: int
    ) -> None:
        self._channel, self._endpoint, self._plan, self._fabric = channel, endpoint, plan, fabric
        self._settings = plan.job.settings
        self._summary = plan.summary() if channel.rank == 0 else None
        self._verifier = plan.verifier() if self._settings.verify != "off" else None
        # Counted in the report of the first refit.
        self._plan_seconds = 0.0
        self._seconds: dict[str, float] = {}
        self._spent = Spent()
        self._verified = 0
        self._forms: dict[str, str] = {}
        self._attempts = 0
        self._topics: tuple[str, ...] = ()
        self._last_topics: tuple[str, ...] = ()
        self._began = 0.0
        self._state = "idle"
        self.version = version

    @classmethod
    def prepare(
        cls,
        channel: ControlChannel,
        *,
        sources: int,
        settings: RefitSettings | None = None,
        source: Source | None = None,
        target: Target | None = None,
        version: int = -1,
    ) -> Self:
        """Exchanges manifests, plans, compares digests and connects the fabric; returns a complete session or raises.

        Args:
            channel: this rank's control channel; ranks 0 to `sources` - 1 are sources, the others targets.
            sources: the number of source ranks.
            settings: given by rank 0 only, which hands them to the others.
            source: this rank's source, on source ranks.
            target: this rank's target, on target ranks.
            version: the version that this rank has from earlier sessions; the next must be above every rank's.
        """
        began = time.perf_counter()
        channel.claim()
        with _telling_others(channel):
            channel.publish("version", version)
            job, endpoint = _exchange(channel, sources, settings, source, target)
            deadline = Deadline(job.settings.timeout_s)
            plan = RefitPlan(job)
            channel.agree("the plan/0", plan.digest(), deadline=deadline)
            last = max(channel.collect("version", range(channel.world_size), deadline=deadline))
            session = cls(channel, endpoint, plan, _fabric(channel, job.settings), version=last)
        session._plan_seconds = time.perf_counter() - began
        return session

    @property
    def plan(self) -> RefitPlan:
        return self._plan

    def begin(self) -> None:
        """Opens a refit: from here until `finish` the target's weights are not to be used."""
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

        It returns when every rank has everything and every target could make use of it.

        Raises:
            VersionError: `version` isn't above the last one, on any rank; nothing has moved, and a new refit may begin.
            TransferError, DeadlineError, AgreementError, VerificationError: the session is broken.
        """
        self._require("open", "transfer")
        self._attempts += 1
        deadline, agreement = Deadline(self._settings.timeout_s), f"the weight version/{self._attempts}"
        self._topics = (agreement, *(f"{topic}/{version}" for topic in ("checksums", "delivery", "report")))
        with self._guarded("transfer"), self._timed("agree"):
            self._channel.agree(agreement, str(version), deadline=deadline)
        if version <= self.version:
            self._state = "idle"
            raise VersionError(version, self.version)
        with self._guarded("transfer"):
            self._check_forms()
            for transport in self._plan.transports.values():
                self._spent.add(transport.run(self._endpoint, self._fabric, deadline=deadline))
            with self._timed("verify"):
                self._verify(version, deadline)
            if self._endpoint.target is not None:
                with self._spent.timing("load"):
                    self._endpoint.target.finish()
            with self._timed("agree"):
                self._channel.agree(f"delivery/{version}", "complete", deadline=deadline)
        self._state, self.version = "delivered", version

    def finish(self) -> RefitReport | None:
        """Closes the refit, which every rank has delivered. Rank 0 waits for all ranks and returns the report."""
        self._require("delivered", "finish")
        with self._guarded("finish"):
            # Whoever is here has seen every rank's delivery of this version, so nobody reads the last one's topics.
            # Rank 0 may be gone as soon as it has all reports: publishing comes last.
            self._channel.forget(self._last_topics)
            self._channel.publish(f"report/{self.version}", asdict(self._rank_report()))
            self._state, self._last_topics = "idle", self._topics
            if self._summary is None:
                return None
            deadline = Deadline(self._settings.timeout_s)
            parts = self._channel.collect(f"report/{self.version}", range(self._channel.world_size), deadline=deadline)
        total = time.perf_counter() - self._began
        return RefitReport(self.version, total, self._summary, tuple(RankReport(**part) for part in parts))

    def run(self, version: int) -> RefitReport | None:
        """`begin`, `transfer` and `finish` in one call, for ranks that no engine drives."""
        self.begin()
        self.transfer(version)
        return self.finish()

    def close(self) -> None:
        """Leaves the refit's group."""
        self._state = "closed"
        self._fabric.close()

    def _verify(self, version: int, deadline: Deadline) -> None:
        if self._verifier is None:
            return
        atoms = self._verifier.atoms(self._attempts, share=self._settings.verify)
        topic = f"checksums/{version}"
        source, target = self._endpoint.source_binding(), self._endpoint.target_binding()
        if source is not None:
            self._channel.publish(topic, self._verifier.source_checksums(source, atoms))
        sources = [ranked.rank for ranked in self._plan.job.source.ranks]
        parts = self._channel.collect(topic, sources, deadline=deadline)
        sums = {atom: value for part in parts for atom, value in part.items()}
        if source is not None:
            self._verifier.compare_replicas(source, atoms, sums)
        if target is not None:
            self._verified = self._verifier.compare(target, atoms, sums, version)

    def _check_forms(self) -> None:
        """Storage may move between refits; with another dtype, shape or stride it isn't what the manifest describes."""
        side = self._endpoint.source or self._endpoint.target
        assert side is not None
        for name, tensor in side.buffers().items():
            form = f"{tensor.dtype} {list(tensor.shape)} strides {list(tensor.stride())}"
            known = self._forms.setdefault(name, form)
            if form != known:
                raise LayoutError(name, self._channel.rank, f"{known}, as at the first refit", form)

    def _rank_report(self) -> RankReport:
        spent, target = self._spent, self._endpoint.target
        seconds = {**self._seconds, **{name: getattr(spent, name) for name in ("pack", "network", "local", "load")}}
        return RankReport(
            self._channel.rank,
            self._endpoint.manifest.role,
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
            with _telling_others(self._channel):
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
def _telling_others(channel: ControlChannel) -> Iterator[None]:
    """Publishes an error's cause; where another rank's came first, raises that one."""
    try:
        yield
    except Exception as error:
        try:
            first = channel.failure()
            if first is None:
                channel.report_failure(error)
        except TransferError:
            # The channel is gone as well: what was known before is the better cause.
            raise error from None
        if first is not None:
            raise first from error
        raise


def _exchange(
    channel: ControlChannel, sources: int, settings: RefitSettings | None, source: Source | None, target: Target | None
) -> tuple[Job, Endpoint]:
    """Publishes this rank's manifest and reads all others'."""
    rank, ranks = channel.rank, range(channel.world_size)
    _check_role(rank, channel.world_size, sources, source, target)
    if settings is not None:
        channel.publish("settings", settings.to_json())
    deadline = Deadline(settings.timeout_s if settings is not None else channel.timeout_s)
    agreed = RefitSettings.from_json(channel.collect("settings", (0,), deadline=deadline)[0])
    channel.publish("host", socket.gethostname())
    own = None
    if source is not None:
        own = source.manifest(rank)
        channel.publish("manifest", manifest_to_json(own))
    held = Manifest.of(_manifests(channel, ranks[:sources], deadline))
    if target is not None:
        own = target.manifest(rank, held.tensors)
        channel.publish("manifest", manifest_to_json(own))
    wanted = Manifest.of(_manifests(channel, ranks[sources:], deadline))
    assert own is not None  # for the type checker: every rank has a role
    topology = _topology(channel, agreed, deadline)
    return Job(held, wanted, topology, agreed), Endpoint(rank, own, source, target)


def _check_role(rank: int, world_size: int, sources: int, source: Source | None, target: Target | None) -> None:
    """Ranks below `sources` bring a source and the others a target; what is missing would be waited for in vain."""
    if not 0 < sources < world_size:
        reason = f"sources must be from 1 to {world_size - 1}, so that both sides have ranks (got {sources})"
        raise TransferError(rank, -1, "prepare", "", reason)
    role = "source" if rank < sources else "target"
    if (source is not None, target is not None) != (role == "source", role == "target"):
        given = [name for name, side in (("source", source), ("target", target)) if side is not None]
        reason = (
            f"needs a {role}, because ranks 0 to {sources - 1} of {world_size} are the sources (got {given or 'none'})"
        )
        raise TransferError(rank, -1, "prepare", "", reason)


def _manifests(channel: ControlChannel, ranks: range, deadline: Deadline) -> Iterator[Any]:
    return map(manifest_from_json, channel.collect("manifest", ranks, deadline=deadline))


def _topology(channel: ControlChannel, settings: RefitSettings, deadline: Deadline) -> Topology:
    if settings.domains is not None:
        return Topology.of(settings.domains)
    hosts = channel.collect("host", range(channel.world_size), deadline=deadline)
    return Topology.from_hosts(dict(enumerate(hosts)))


def _fabric(channel: ControlChannel, settings: RefitSettings) -> Fabric:
    if settings.fabric not in AVAILABLE_FABRICS:
        reason = f"fabric {settings.fabric!r} is not available yet: set refit_cfg's fabric to gloo or auto"
        raise TransferError(channel.rank, -1, "connect", "", reason)
    connect = partial(
        GlooFabric,
        channel.group_store("gloo"),
        rank=channel.rank,
        world_size=channel.world_size,
        address=address_toward(channel.host),
        timeout_s=settings.timeout_s,
    )
    try:
        # gloo's own timeout counts anew for each of its steps. Where the first one is missed, its error says more.
        return DeadlineCaller().call(connect, timeout_s=settings.timeout_s + _GLOO_FIRST_S)
    except TimeoutError as error:
        reason = (
            f"not every rank connected within {settings.timeout_s:g} s (timeout_s): one of them stopped or is cut off"
        )
        raise TransferError(channel.rank, -1, "connect", "", reason) from error
