"""Runs cases: all variants of a case in one set of processes, their repetitions interleaved."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Self

from refit_transport.bench.bounds import lower_bound
from refit_transport.bench.cases import Case
from refit_transport.bench.crew import Crew
from refit_transport.bench.isolation import Announce, isolated
from refit_transport.bench.lab import Counters, Lab
from refit_transport.bench.rank import LabRank, Sample
from refit_transport.bench.results import CaseResult, LabResult, Repetition, Uplink, VariantResult, judge
from refit_transport.bench.session_rank import Ran
from refit_transport.bench.variants import Variant, settings_of
from refit_transport.errors import LayoutError, RefitTransportError
from refit_transport.scheduling.schedule import Traffic

# Planning 30 000 tensors on every rank of a busy machine takes its time; nothing else comes near these.
_PREPARE_SECONDS = 600.0
_CALL_SECONDS = 180.0
# From the call to the common start: every rank must have read its pipe by then.
_START_SECONDS = 0.05
# A repetition in which the host of a virtual machine took more of a core than this from it is measured again.
_STOLEN_CORES = 0.03
_TRIES = 6
# Until the last acknowledgements have passed the counters.
_SETTLE_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class LabRequest:
    """Which cases to run, and how often after one warm-up."""

    cases: tuple[Case, ...]
    repetitions: int = 5


def run_lab(request: LabRequest, *, announce: Announce) -> LabResult:
    """Runs the cases in namespaces of their own; a case that fails doesn't keep the others from running.

    Raises:
        ConfigError: not root, or a tool is missing.
    """
    result: LabResult = isolated(measure_cases, request, announce=announce)
    return result


def measure_cases(request: LabRequest, announce: Announce) -> LabResult:
    """What `run_lab` does, once inside its namespaces."""
    before, found = os.getloadavg()[0], []
    for number, case in enumerate(request.cases, start=1):

        def tell(text: str, where: str = f"case {number} of {len(request.cases)}, {case.name}") -> None:
            announce(f"{where}: {text}")

        try:
            found.append(measure_case(case, repetitions=request.repetitions, announce=tell))
        except RefitTransportError as error:
            size = case.wiring.world_size
            found.append(CaseResult(case.name, case.title, case.model.nbytes, size, error=str(error)))
            tell(f"failed: {str(error).strip().splitlines()[-1]}")
    return LabResult(tuple(found), request.repetitions, (before, os.getloadavg()[0]))


def measure_case(case: Case, *, repetitions: int, announce: Announce) -> CaseResult:
    """Builds the network, prepares every variant, and refits by each in turn."""
    variants, missing = _expressible(case)
    announce("making the weights")
    samples = _samples(case, variants)
    namespaces = [case.wiring.namespace_of(rank) for rank in range(case.wiring.world_size)]
    with Lab(case.wiring) as lab, Crew(namespaces, lambda rank: LabRank(case, rank, samples)) as crew:
        crew.call("hold", timeout_s=_CALL_SECONDS)
        rounds = [_Rounds(case, variant, lab, crew) for variant in variants]
        for each in rounds:
            announce(f"preparing {each.variant.name}")
            each.prepare(version=len(rounds))
        versions = count(len(rounds) + 1)
        for number in range(1, repetitions + 1):
            for each in rounds:
                announce(f"repetition {number} of {repetitions}, {each.variant.name}")
                each.repeat(versions)
        results = {each.variant.name: each.result() for each in rounds}
    verdicts = judge(case.limits, results)
    size = case.wiring.world_size
    return CaseResult(case.name, case.title, case.model.nbytes, size, tuple(results.values()), verdicts, missing)


def _expressible(case: Case) -> tuple[list[Variant], dict[str, str]]:
    """The variants that the settings can express, and why others can't be."""
    variants, missing = [], {}
    for variant in case.variants:
        try:
            settings_of(variant, case.wiring)
            variants.append(variant)
        except LayoutError as error:
            missing[variant.name] = str(error)
    return variants, missing


def _samples(case: Case, variants: Sequence[Variant]) -> dict[str, Sample]:
    """What each variant refits; ranks inherit it by forking."""
    made: dict[int, Sample] = {}
    for variant in variants:
        model = id(case.model_of(variant))
        made[model] = made.get(model) or Sample.of(case, variant)
    return {variant.name: made[id(case.model_of(variant))] for variant in variants}


@dataclass(slots=True)
class _Rounds:
    """All refits of one variant."""

    case: Case
    variant: Variant
    lab: Lab
    crew: Crew
    _prepare_seconds: float = 0.0
    _planned: Traffic | None = None
    _memory: list[int] = field(default_factory=list)
    _wrong: list[str] = field(default_factory=list)
    _repetitions: list[Repetition] = field(default_factory=list)
    _counted: list[Counters] = field(default_factory=list)

    def prepare(self, *, version: int) -> None:
        """Prepares the sessions, refits once to warm up, and takes what memory all of that has added."""
        name = self.variant.name
        self.crew.call("trim", timeout_s=_CALL_SECONDS)
        before = self.crew.call("memory", timeout_s=_CALL_SECONDS)
        meeting = self.crew.call("listen", name, timeout_s=_CALL_SECONDS, ranks=(0,))[0]
        self._prepare_seconds = max(self.crew.call("prepare", name, meeting, timeout_s=_PREPARE_SECONDS))
        self._planned = self.crew.call("planned", name, timeout_s=_CALL_SECONDS, ranks=(0,))[0]
        self._refit(version)
        after = self.crew.call("memory", timeout_s=_CALL_SECONDS)
        self._memory = [max(0, b - a) for a, b in zip(before, after, strict=True)]
        self._check(version)

    def repeat(self, versions: Iterator[int]) -> None:
        """Refits once, measured. Of several tries, where processors were stolen, the one that lost least counts."""
        tries = [self._measured(next(versions))]
        while tries[-1].stolen > _STOLEN_CORES and len(tries) < _TRIES:
            tries.append(self._measured(next(versions)))
        self._repetitions.append(min(tries, key=lambda repetition: repetition.stolen))

    def _measured(self, version: int) -> Repetition:
        counted, before = self.lab.counters(), _Processors.now()
        ran = self._refit(version)
        after = _Processors.now()
        time.sleep(_SETTLE_SECONDS)
        self._counted.append(self.lab.counters().since(counted))
        self._check(version)
        return _repetition(ran, before, after)

    def result(self) -> VariantResult:
        """Everything measured so far."""
        return VariantResult(
            self.variant.name,
            lower_bound(self.case, self.variant),
            self._prepare_seconds,
            tuple(self._repetitions),
            tuple(self._uplinks()),
            tuple(self._memory),
            tuple(self._wrong),
        )

    def _refit(self, version: int) -> list[Ran]:
        self.crew.call("fill", self.variant.name, version, timeout_s=_CALL_SECONDS)
        start = time.monotonic() + _START_SECONDS
        return self.crew.call("run", self.variant.name, start, timeout_s=_CALL_SECONDS)

    def _check(self, version: int) -> None:
        for found in self.crew.call("differences", self.variant.name, version, timeout_s=_CALL_SECONDS):
            self._wrong += found

    def _uplinks(self) -> list[Uplink]:
        assert self._planned is not None
        found = []
        for nic, ranks in enumerate(self.case.wiring.nic_ranks):
            out = sum(self._planned.network_sent.get(rank, 0) for rank in ranks)
            into = sum(self._planned.network_received.get(rank, 0) for rank in ranks)
            sent = round(statistics.median(counters.sent[nic] for counters in self._counted))
            received = round(statistics.median(counters.received[nic] for counters in self._counted))
            found += [Uplink(nic, "out", out, sent, into), Uplink(nic, "in", into, received, out)]
        return found


@dataclass(frozen=True, slots=True)
class _Processors:
    """CPU seconds of the whole machine so far: not idle, and taken away by the host of a virtual machine."""

    busy: float
    stolen: float

    @classmethod
    def now(cls) -> Self:
        ticks = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        idle, stolen = ticks[3] + ticks[4], ticks[7]
        second = os.sysconf("SC_CLK_TCK")
        return cls((sum(ticks) - idle - stolen) / second, stolen / second)


def _repetition(ran: Sequence[Ran], before: _Processors, after: _Processors) -> Repetition:
    return Repetition.of(
        max(r.ended for r in ran) - min(r.began for r in ran),
        ran[0].ranks,
        cpu=sum(r.cpu for r in ran),
        busy=after.busy - before.busy,
        stolen=after.stolen - before.stolen,
    )
