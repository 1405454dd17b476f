"""What a run of the lab found, and whether the figures hold."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from refit_transport.bench.bounds import LowerBound
from refit_transport.bench.figures import BOUND, ExtraMemory, Figure, Limit, Overhead, Ratio, UplinkBytes
from refit_transport.report import RankReport

MIB = 1 << 20
# Headers take 0.7 % of a full packet. A NIC also carries acknowledgements of what goes the other way, and control
# messages.
UPLINK_TOLERANCE = 0.05
ACKNOWLEDGEMENT_SHARE = 0.01
CONTROL_BYTES = 256 * 1024
# Phases in which bytes are packed, sent, received or unpacked are all others; these are overhead.
_NOT_MOVING = frozenset({"plan", "agree", "verify"})


@dataclass(frozen=True, slots=True)
class Uplink:
    """One direction of one NIC in one refit: planned payload, and measured bytes with everything (the median).

    `backward`: planned payload of the other direction, which this one acknowledges.
    """

    nic: int
    direction: str
    planned: int
    measured: int
    backward: int

    @property
    def holds(self) -> bool:
        """Within 5 % of the plan, besides what no plan counts."""
        extra = self.backward * ACKNOWLEDGEMENT_SHARE + CONTROL_BYTES
        least = self.planned * (1 - UPLINK_TOLERANCE)
        return least <= self.measured <= self.planned * (1 + UPLINK_TOLERANCE) + extra


@dataclass(frozen=True, slots=True)
class Repetition:
    """One refit: seconds from the first rank's begin to the last one's end; where they went; other work meanwhile.

    seconds_by_phase: the busiest rank's. cpu: cores that the ranks kept busy. other_cpu: cores that others did.
    stolen: cores that the host of a virtual machine took away from it.
    """

    seconds: float
    seconds_by_phase: Mapping[str, float]
    overhead: float
    cpu: float
    other_cpu: float
    stolen: float = 0.0

    @classmethod
    def of(cls, seconds: float, ranks: Sequence[RankReport], *, cpu: float, busy: float, stolen: float = 0.0) -> Self:
        """From all ranks' reports, the CPU seconds of the ranks, and those of the whole machine: busy, and stolen."""
        moving = [{phase: t for phase, t in rank.seconds.items() if phase not in _NOT_MOVING} for rank in ranks]
        busiest = max(moving, key=lambda phases: sum(phases.values()))
        overhead = 1 - sum(busiest.values()) / seconds
        return cls(seconds, busiest, overhead, cpu / seconds, max(0.0, busy - cpu) / seconds, stolen / seconds)


@dataclass(frozen=True, slots=True)
class VariantResult:
    """All repetitions of one variant. `extra_memory`: bytes by rank; `wrong`: pieces that weren't delivered exactly."""

    name: str
    bound: LowerBound
    prepare_seconds: float
    repetitions: tuple[Repetition, ...]
    uplinks: tuple[Uplink, ...]
    extra_memory: tuple[int, ...]
    wrong: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """The median."""
        return statistics.median(r.seconds for r in self.repetitions)

    @property
    def spread(self) -> float:
        """The slowest repetition's time beyond the fastest one's, as a share of the median."""
        times = [r.seconds for r in self.repetitions]
        return (max(times) - min(times)) / self.seconds

    @property
    def of_bound(self) -> float | None:
        """The share of the bound that is reached; None where there is no bound."""
        return self.bound.seconds / self.seconds if self.bound.seconds else None


@dataclass(frozen=True, slots=True)
class Verdict:
    """A figure beside its limit. `value` is None where it couldn't be measured, and then the limit is missed."""

    figure: str
    limit: str
    value: float | None
    holds: bool
    why: str = ""


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One case. `missing`: variants that didn't run, and why; `error`: why the case ended early."""

    name: str
    title: str
    nbytes: int
    ranks: int
    variants: tuple[VariantResult, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    error: str = ""

    @property
    def misses(self) -> list[str]:
        """A line for everything that isn't as it must be."""
        lines = [f"{self.name}: {self.error.strip().splitlines()[-1]}"] if self.error else []
        for verdict in self.verdicts:
            if not verdict.holds:
                value = "not measured" if verdict.value is None else f"{verdict.value:.4g}"
                lines.append(f"{self.name}: {verdict.figure}: {value}, must be {verdict.limit}")
        return lines


@dataclass(frozen=True, slots=True)
class LabResult:
    """All cases of one run. `load`: the machine's load average (1 minute) before and after."""

    cases: tuple[CaseResult, ...]
    repetitions: int
    load: tuple[float, float]

    @property
    def misses(self) -> list[str]:
        """A line for everything that isn't as it must be, in any case."""
        return [line for case in self.cases for line in case.misses]

    def to_json(self) -> dict[str, Any]:
        """A plain value for programs, with medians."""
        found = asdict(self)
        for shown, case in zip(found["cases"], self.cases, strict=True):
            for value, variant in zip(shown["variants"], case.variants, strict=True):
                value |= {"seconds": variant.seconds, "spread": variant.spread, "of_bound": variant.of_bound}
        return {**found, "misses": self.misses}


def judge(limits: tuple[Limit, ...], variants: Mapping[str, VariantResult]) -> tuple[Verdict, ...]:
    """The case's figures, then what holds for every variant: each element delivered, uplinks as planned."""
    verdicts = []
    for limit in limits:
        value = _value(limit.figure, variants)
        reported = limit.most is None and limit.least is None
        holds = reported or (value is not None and limit.holds(value))
        verdicts.append(Verdict(str(limit.figure), limit.text, value, holds, limit.why))
    for variant in variants.values():
        wrong, off = len(variant.wrong), [uplink for uplink in variant.uplinks if not uplink.holds]
        worst = "; ".join(f"NIC {u.nic} {u.direction}: planned {u.planned}, measured {u.measured}" for u in off)
        verdicts.append(Verdict(f"{variant.name}: pieces delivered wrongly", "<= 0", wrong, not wrong))
        name = f"{variant.name}: uplinks off the plan by over {UPLINK_TOLERANCE:.0%}"
        verdicts.append(Verdict(name, "<= 0", len(off), not off, worst))
    return tuple(verdicts)


def _value(figure: Figure, variants: Mapping[str, VariantResult]) -> float | None:
    match figure:
        case Ratio():
            over, under = (_fastest(names, variants) for names in (figure.over, figure.under))
            return over / under if over and under else None
        case Overhead():
            found = variants.get(figure.variant)
            return None if found is None else statistics.median(r.overhead for r in found.repetitions)
        case ExtraMemory():
            found = variants.get(figure.variant)
            return None if found is None else max(found.extra_memory) / MIB
        case UplinkBytes():
            found = variants.get(figure.variant)
            return None if found is None else sum(uplink.measured for uplink in found.uplinks)


def _fastest(names: tuple[str, ...], variants: Mapping[str, VariantResult]) -> float | None:
    """The least median of these variants; None where one of them didn't run."""
    if names == (BOUND,):
        return next((variant.bound.seconds for variant in variants.values()), None)
    if not all(name in variants for name in names):
        return None
    return min(variants[name].seconds for name in names)
