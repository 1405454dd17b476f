"""All ways of refitting side by side on the ranks of a real job, which hold made-up weights of its layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from refit_transport.bench.advice import Advice, Measured, StepTime, advise
from refit_transport.bench.bounds import LowerBound, network_bound
from refit_transport.bench.cluster_rank import Prepared
from refit_transport.bench.isolation import Announce
from refit_transport.bench.results import Repetition, VariantResult
from refit_transport.bench.session_rank import Ran
from refit_transport.bench.variants import FLAT_PASSES, Variant
from refit_transport.config.settings import FabricName, RefitSettings
from refit_transport.errors import WorkerError
from refit_transport.layout.manifest import DTYPE_BYTES
from refit_transport.planning.planner import plan_transfer
from refit_transport.scheduling.schedule import Traffic
from refit_transport.scheduling.topology import Topology
from refit_transport.transports.base import Job
from refit_transport.transports.registry import BUILT_IN, known_transports

FABRICS: tuple[FabricName, ...] = ("gloo", "nccl", "nccl_m2n")
_SLACK_SECONDS = 30.0


class Ranks(Protocol):
    """All ranks of the job, as workers that answer calls; `cluster.crew.RayCrew` is one."""

    def address(self) -> tuple[str, int]:
        """Where rank 0 can open one more control channel."""

    def call(self, method: str, *arguments: Any, timeout_s: float, ranks: Sequence[int] | None = None) -> list[Any]:
        """Calls a method on all ranks (or these) at once; the results in their order."""


@dataclass(frozen=True, slots=True)
class RanksRequest:
    """What to compare: a job from presets, how often, and what a step takes besides its refit (None: not known)."""

    title: str
    job: Job
    repetitions: int = 5
    step: StepTime | None = None
    worker_timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class RanksResult:
    """What was found. `nbytes`: of the model as served; `elements`: compared on the targets after each refit."""

    title: str
    ranks: int
    nbytes: int
    elements: int
    repetitions: int
    topology: Topology
    measured: tuple[Measured, ...]
    missing: Mapping[str, str]
    advice: Advice

    @property
    def misses(self) -> list[str]:
        """A line for each variant that delivered something wrong, or moved other bytes than planned."""
        lines = []
        for each in self.measured:
            name, wrong = each.variant.name, each.result.wrong
            if wrong:
                lines.append(f"{name}: {len(wrong)} pieces delivered wrongly, first {wrong[0]}")
            if set(each.moved) != {each.planned_bytes}:
                lines.append(f"{name}: moved {sorted(set(each.moved))} bytes, planned {each.planned_bytes}")
        return lines

    def to_json(self) -> dict[str, Any]:
        """A plain value for programs, with medians."""
        found = asdict(self)
        for value, each in zip(found["measured"], self.measured, strict=True):
            result = each.result
            value["result"] |= {"seconds": result.seconds, "spread": result.spread, "of_bound": result.of_bound}
        return {**found, "misses": self.misses}


def candidates(fabric: FabricName) -> tuple[Variant, ...]:
    """The variants of a fabric, the plainest first."""
    suffix = "" if fabric == "gloo" else f", {fabric}"
    found = [
        Variant(f"nccl_reshard, all{suffix}", fabric=fabric),
        Variant(f"nccl_reshard, ffn{suffix}", coverage="ffn", fabric=fabric),
        Variant(f"nccl_reshard, flat{suffix}", disabled=FLAT_PASSES, fabric=fabric),
        Variant(f"gather_broadcast{suffix}", transport="gather_broadcast", fabric=fabric),
        Variant(
            f"gather_broadcast, single chain{suffix}", transport="gather_broadcast", chains="single", fabric=fabric
        ),
    ]
    if fabric == "gloo":
        found += [
            Variant("nccl_reshard, all, without shared memory", shared_memory="off", fabric=fabric),
            Variant("gather_broadcast, without shared memory", "gather_broadcast", shared_memory="off", fabric=fabric),
        ]
    built_in = {entry.name for entry in BUILT_IN}
    others = (name for name in known_transports() if name not in built_in)
    return (*found, *(Variant(f"{name}{suffix}", transport=name, fabric=fabric) for name in others))


def measure_ranks(request: RanksRequest, ranks: Ranks, *, announce: Announce) -> RanksResult:
    """Prepares every variant that can run here, refits by each in turn, compares every element, and advises.

    Raises:
        WorkerError: a worker failed, or no fabric can be used.
    """
    announce("making the weights")
    ranks.call("hold", timeout_s=request.worker_timeout_s)
    rounds, missing = _prepared(request, ranks, announce)
    if not rounds:
        raise WorkerError("bench", -1, "prepare", "; ".join(f"{name}: {why}" for name, why in missing.items()))
    for number in range(1, request.repetitions + 1):
        for place, each in enumerate(rounds):
            announce(f"repetition {number} of {request.repetitions}, {each.variant.name}")
            each.repeat(version=number * len(rounds) + place + 1)
    topology = rounds[0].topology
    measured = tuple(each.measured() for each in rounds)
    target = request.job.target
    return RanksResult(
        request.title,
        len(request.job.ranks),
        sum(spec.box.numel * DTYPE_BYTES[spec.dtype] for spec in target.tensors),
        sum(piece.box.numel for ranked in target.ranks for piece in ranked.pieces),
        request.repetitions,
        topology,
        measured,
        missing,
        advise(measured, request.step),
    )


def _prepared(request: RanksRequest, ranks: Ranks, announce: Announce) -> tuple[list[_Rounds], dict[str, str]]:
    """Every variant that can run, warmed up, and why others can't."""
    rounds: list[_Rounds] = []
    missing: dict[str, str] = {}
    for fabric in FABRICS:
        topology: Topology | None = None
        for variant in candidates(fabric):
            if topology is not None and (reason := _same_as_another(variant, topology)):
                missing[variant.name] = reason
                continue
            announce(f"preparing {variant.name}")
            each = _Rounds(request, variant, ranks)
            if obstacle := each.prepare(version=len(rounds) + 1):
                missing[f"fabric {fabric}"] = obstacle
                break
            topology = each.topology
            rounds.append(each)
    return rounds, missing


def _same_as_another(variant: Variant, topology: Topology) -> str:
    """Why a variant would only repeat another one here."""
    if variant.chains == "single" and all(len(nics) == 1 for nics in topology.nics_of_domains):
        return "the same as gather_broadcast: every domain has one NIC, so one chain"
    if variant.shared_memory == "off" and all(len(domain) == 1 for domain in topology.domains):
        return "no two ranks are in one domain, so none share memory"
    return ""


@dataclass(slots=True)
class _Rounds:
    """All refits of one variant."""

    request: RanksRequest
    variant: Variant
    ranks: Ranks
    topology: Topology = field(init=False)
    _settings: RefitSettings = field(init=False)
    _planned: Traffic = field(init=False)
    _prepare_seconds: float = 0.0
    _memory: list[int] = field(default_factory=list)
    _wrong: list[str] = field(default_factory=list)
    _repetitions: list[Repetition] = field(default_factory=list)
    _moved: list[int] = field(default_factory=list)

    def prepare(self, *, version: int) -> str:
        """Prepares the session, refits once to warm up, and takes what memory that has added; or says why not."""
        settings = self.variant.applied_to(self.request.job.settings)
        self._settings, name, patience = settings, self.variant.name, settings.timeout_s + _SLACK_SECONDS
        self._call("trim")
        before = self._call("memory")
        host, port = self.ranks.address()
        [meeting] = self._call("open_channel", name, host, port, ranks=(0,))
        prepared: list[Prepared] = self.ranks.call("prepare", name, meeting, settings, timeout_s=3 * patience)
        if obstacle := next((found.obstacle for found in prepared if found.obstacle), ""):
            return obstacle
        self._prepare_seconds = max(found.seconds for found in prepared)
        [self._planned] = self._call("planned", name, ranks=(0,))
        [self.topology] = self._call("topology", name, ranks=(0,))
        self._refit(version)
        after = self._call("memory")
        self._memory = [max(0, b - a) for a, b in zip(before, after, strict=True)]
        self._check(version)
        return ""

    def repeat(self, *, version: int) -> None:
        """Refits once, measured: the slowest rank's time from when all were there."""
        ran = self._refit(version)
        seconds, cpu = max(r.ended - r.began for r in ran), sum(r.cpu for r in ran)
        self._repetitions.append(Repetition.of(seconds, ran[0].ranks, cpu=cpu, busy=cpu))
        self._moved.append(sum(report.sent_bytes for report in ran[0].ranks))
        self._check(version)

    def measured(self) -> Measured:
        """Everything so far."""
        result = VariantResult(
            self.variant.name,
            self._bound(),
            self._prepare_seconds,
            tuple(self._repetitions),
            (),
            tuple(self._memory),
            tuple(self._wrong),
        )
        planned = self._planned
        return Measured(self.variant, self._settings, result, planned.network, planned.local, tuple(self._moved))

    def _bound(self) -> LowerBound:
        job = self.request.job
        if not job.settings.nic_rates:
            return LowerBound(0.0, "nothing")
        return network_bound(plan_transfer(job.source, job.target), self.topology)

    def _refit(self, version: int) -> list[Ran]:
        self._call("fill", version)
        return self.ranks.call("run", self.variant.name, timeout_s=2 * self._settings.timeout_s + _SLACK_SECONDS)

    def _check(self, version: int) -> None:
        for found in self._call("differences", version):
            self._wrong += found

    def _call(self, method: str, *arguments: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        return self.ranks.call(method, *arguments, timeout_s=self.request.worker_timeout_s, ranks=ranks)
