"""A refit session on one rank: prepared once, run for every new weight version."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Literal, Self, get_args

import torch

from refit_transport.config.settings import RefitSettings
from refit_transport.connect import connect_fabric
from refit_transport.errors import LayoutError, RefitTransportError, TransferError, VersionError
from refit_transport.fabrics.base import Fabric, Phase, Spent
from refit_transport.fabrics.deadline import Deadline
from refit_transport.fabrics.rendezvous import ControlChannel
from refit_transport.layout.manifest import Manifest, RankManifest
from refit_transport.layout.wire import ManifestReader, part_digests, shared_parts
from refit_transport.memory import check_apart
from refit_transport.places import Place, place_here, topology_of
from refit_transport.refit_plan import RefitPlan
from refit_transport.report import RankReport, RefitReport
from refit_transport.scheduling.topology import Topology
from refit_transport.sources.base import Source
from refit_transport.targets.base import Target
from refit_transport.transports.base import Endpoint, Job


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
        self._forms: dict[tuple[str, str], tuple[torch.dtype, torch.Size, tuple[int, ...]]] = {}
        self._attempts = 0
        self._topics: tuple[str, ...] = ()
        # What this rank published for the present attempt, the last one, and the one before.
        self._last_topics: tuple[str, ...] = ()
        self._forgotten: tuple[str, ...] = ()
        self._began = 0.0
        self._state = "idle"
        self.version = version

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
        with telling_others(channel):
            channel.publish("version", version)
            if source is None and target is None and idle_ranks == "refused":
                raise TransferError(channel.rank, -1, "prepare", "", "a rank needs a source or a target")
            job, endpoint = _exchange(channel, settings, source, target, topology, node)
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

        Ranks don't wait for each other before they send: that all mean the same version comes out in the vote, before
        any target may serve it.

        Raises:
            VersionError: `version` isn't above the last one, on any rank; nothing has moved, and a new refit may begin.
            TransferError, DeadlineError, AgreementError, VerificationError: the session is broken.
        """
        self._require("open", "transfer")
        self._attempts += 1
        deadline, agreement = Deadline(self._settings.timeout_s), f"the weight version/{self._attempts}"
        report, announced = f"report/{version}", f"announced/{self._attempts}"
        self._forgotten, self._last_topics = self._last_topics, self._topics
        self._topics = (
            agreement,
            announced,
            report,
            *(f"{topic}/{self._attempts}" for topic in ("checksums", "replicas")),
        )
        with self._guarded("transfer"):
            self._channel.publish(announced, version)
            # While bytes move there is time for it. Whoever is here has seen every rank's vote on the last version, so
            # nobody reads what belongs to the one before.
            self._channel.forget(self._forgotten)
            if version > self.version:
                self._deliver(version, deadline)
                with self._timed("agree"):
                    reports = {report: asdict(self._rank_report())}
                    self._channel.agree(agreement, str(version), deadline=deadline, reports=reports)
            else:
                self._channel.require_equal(announced, "the weight version", deadline=deadline)
        if version <= self.version:
            self._state = "idle"
            raise VersionError(version, self.version)
        self._state, self.version = "delivered", version

    def _deliver(self, version: int, deadline: Deadline) -> None:
        self._check_forms()
        for transport in self._plan.transports.values():
            self._spent.add(transport.run(self._endpoint, self._fabric, deadline=deadline))
        with self._timed("verify"):
            self._verify(version, deadline)
        if self._endpoint.target is not None:
            with self._spent.timing("load"):
                self._endpoint.target.finish()

    def finish(self) -> RefitReport | None:
        """Closes the refit, which every rank has delivered. Rank 0 returns the report."""
        self._require("delivered", "finish")
        with self._guarded("finish"):
            others: list[Any] = []
            if self._summary is not None:
                ranks, deadline = range(1, self._channel.world_size), Deadline(self._settings.timeout_s)
                others = self._channel.collect(f"report/{self.version}", ranks, deadline=deadline)
            self._state = "idle"
        if self._summary is None:
            return None
        total = time.perf_counter() - self._began
        parts = (self._rank_report(), *(RankReport(**part) for part in others))
        return RefitReport(self.version, total, self._summary, parts)

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
        topic = f"checksums/{self._attempts}"
        source, target = self._endpoint.source_binding(), self._endpoint.target_binding()
        if source is not None:
            self._channel.publish(topic, self._verifier.source_checksums(source, atoms))
        sources = [ranked.rank for ranked in self._plan.job.source.ranks]
        parts = self._channel.collect(topic, sources, deadline=deadline)
        sums = {atom: value for part in parts for atom, value in part.items()}
        if source is not None:
            self._verifier.compare_replicas(source, atoms, sums)
            self._channel.publish(f"replicas/{self._attempts}", "agree")
        if target is not None:
            # Where replicas differ, that is the cause of what a target finds.
            self._channel.collect(f"replicas/{self._attempts}", sources, deadline=deadline)
            self._verified = self._verifier.compare(target, atoms, sums, version)

    def _check_forms(self) -> None:
        """Storage may move between refits; with another dtype, shape or stride it isn't what the manifest describes."""
        buffers: dict[str, Mapping[str, torch.Tensor]] = {}
        for role, side in (("source", self._endpoint.source), ("target", self._endpoint.target)):
            buffers[role] = {} if side is None else side.buffers()
            for name, tensor in buffers[role].items():
                form = (tensor.dtype, tensor.shape, tensor.stride())
                known = self._forms.setdefault((role, name), form)
                if form != known:
                    before, now = (
                        f"{dtype} {list(shape)} strides {list(stride)}" for dtype, shape, stride in (known, form)
                    )
                    raise LayoutError(name, self._channel.rank, f"{before}, as at the first refit", now)
        check_apart(buffers["source"], buffers["target"], rank=self._channel.rank)

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
def telling_others(channel: ControlChannel) -> Iterator[None]:
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
    channel: ControlChannel,
    settings: RefitSettings | None,
    source: Source | None,
    target: Target | None,
    topology: Topology | None,
    node: str,
) -> tuple[Job, Endpoint]:
    """Publishes this rank's manifests and reads all others'; an idle rank reads none, so its job is an empty one."""
    rank, everyone = channel.rank, range(channel.world_size)
    if settings is not None:
        channel.publish("settings", settings.to_json())
    deadline = Deadline(settings.timeout_s if settings is not None else channel.timeout_s)
    agreed = RefitSettings.from_json(channel.collect("settings", (0,), deadline=deadline)[0])
    channel.publish("rank", {"source": source is not None, "target": target is not None})
    ranks = channel.collect("rank", everyone, deadline=deadline)
    sources = [number for number in everyone if ranks[number]["source"]]
    targets = [number for number in everyone if ranks[number]["target"]]
    if not sources or not targets:
        raise TransferError(rank, -1, "prepare", "", "a refit needs at least one source and one target rank")
    own_source = own_target = None
    held, wanted = Manifest("source", (), ()), Manifest("target", (), ())
    is_idle = source is None and target is None and rank != 0
    if source is not None:
        own_source = source.manifest(rank)
        _publish_manifest(channel, own_source)
    if not is_idle:
        held = Manifest.of(_manifests(channel, "manifest/source", sources, deadline))
    if target is not None:
        own_target = target.manifest(rank, held.tensors)
        _publish_manifest(channel, own_target)
    if not is_idle:
        wanted = Manifest.of(_manifests(channel, "manifest/target", targets, deadline))
    # Only now, because a target has its buffers after its manifest.
    devices = {tensor.device for side in (source, target) if side is not None for tensor in side.buffers().values()}
    channel.publish("place", asdict(place_here(devices, node=node)))
    places = [Place(**value) for value in channel.collect("place", everyone, deadline=deadline)]
    found = topology_of(dict(enumerate(places)), agreed) if topology is None else topology
    # Ranks without a side don't relay for others.
    job = Job(held, wanted, found.renumbered({number: number for number in {*sources, *targets}}), agreed)
    return job, Endpoint(rank, source, own_source, target, own_target)


def _publish_manifest(channel: ControlChannel, manifest: RankManifest) -> None:
    """Parts that other ranks have too are in the store once, before the manifest that names them."""
    value, parts = shared_parts(manifest)
    channel.share(parts)
    channel.publish(f"manifest/{manifest.role}", value)


def _manifests(channel: ControlChannel, topic: str, ranks: Sequence[int], deadline: Deadline) -> Iterator[RankManifest]:
    """What is equal is read and decoded once, and is one object."""
    values = channel.collect(topic, ranks, deadline=deadline)
    reader = ManifestReader(channel.shared(digest for value in values for digest in part_digests(value)))
    return map(reader.manifest, values)
