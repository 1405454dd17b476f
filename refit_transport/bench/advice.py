"""What measured refits say about the settings to use. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from refit_transport.bench.results import VariantResult
from refit_transport.bench.variants import Variant
from refit_transport.config.settings import RefitSettings
from refit_transport.report import sized

# Two variants differ when one is slower in every repetition, and by more than this in the median.
_NOISE = 0.02
_FEW = 5
_MOSTLY = 0.5

# Of variants that tie, the one that rests on less.
_RESTS_ON = {
    "gather_broadcast": "whole tensors go through the engine's own loader, so nothing rests on the engine's layout",
    "ffn": "all but FFN projections go through the engine's own loader",
    "all": "no rank holds a whole tensor, and the engine's loader has nothing to do",
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One variant, its settings and times; planned payload bytes of one refit, and what each one really moved."""

    variant: Variant
    settings: RefitSettings
    result: VariantResult
    network_bytes: int
    local_bytes: int
    moved: tuple[int, ...]

    @property
    def planned_bytes(self) -> int:
        return self.network_bytes + self.local_bytes


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one training step and what else lies between two refits, and who says so."""

    seconds: float
    origin: str


@dataclass(frozen=True, slots=True)
class Advice:
    """What to set, in the YAML's own keys under `policy.generation`, and why.

    ties: variants whose times differ from the fastest's by no more than noise, the chosen one among them. share: of a
    step with its refit; None where the step's time isn't known.
    """

    variant: str
    snippet: dict[str, Any]
    ties: tuple[str, ...]
    share: float | None
    reasons: tuple[str, ...]


def advise(measured: Sequence[Measured], step: StepTime | None) -> Advice:
    """The safest of the fastest variants that delivered every element."""
    right = [each for each in measured if not each.result.wrong]
    if not right:
        return Advice("", {}, (), None, ("no variant delivered every element: set nothing before that is understood",))
    ordered = sorted(right, key=lambda each: each.result.seconds)
    # Whatever comes after one that is surely slower isn't as fast as the first, however much it wavers.
    ties = list(takewhile(lambda each: not is_slower(each.result, ordered[0].result), ordered))
    chosen = min(ties, key=lambda each: _risk(each.variant))
    share = None if step is None else chosen.result.seconds / (chosen.result.seconds + step.seconds)
    reasons = (
        *_why(chosen, ties, right),
        _share_text(chosen, share, step),
        *_fall_back(chosen, right),
        *_unmeasured(chosen),
    )
    names = tuple(each.variant.name for each in ties)
    return Advice(chosen.variant.name, snippet(chosen.settings), names, share, reasons)


def is_slower(one: VariantResult, other: VariantResult) -> bool:
    """Whether one is slower beyond noise: in each pair of neighbouring repetitions, and by 2 % in the median."""
    pairs = zip(one.repetitions, other.repetitions, strict=True)
    return all(a.seconds > b.seconds for a, b in pairs) and one.seconds > other.seconds * (1 + _NOISE)


def snippet(settings: RefitSettings) -> dict[str, Any]:
    """The keys under `policy.generation` that make these settings."""
    section: dict[str, Any] = {"fabric": settings.fabric}
    if settings.transport == "nccl_reshard":
        section["coverage"] = settings.coverage
        if settings.disabled_passes:
            section["disabled_passes"] = list(settings.disabled_passes)
    elif settings.chains != "nic":
        section["chains"] = settings.chains
    if settings.shared_memory != "auto":
        section["shared_memory"] = settings.shared_memory
    name = settings.transport if settings.transport in ("nccl_reshard", "gather_broadcast") else "gather_broadcast"
    return {"refit_transport": settings.transport, "refit_cfg": {name: section}}


def _kind(variant: Variant) -> str:
    return variant.coverage if variant.transport == "nccl_reshard" else variant.transport


def _risk(variant: Variant) -> tuple[int, int, int]:
    """Smaller is safer: what it rests on, how far it is from the defaults, how much the fabric needs."""
    kind = list(_RESTS_ON).index(_kind(variant)) if _kind(variant) in _RESTS_ON else len(_RESTS_ON)
    unusual = bool(variant.disabled) + (variant.chains != "nic") + (variant.shared_memory != "auto")
    return kind, unusual, ("gloo", "nccl", "nccl_m2n", "auto").index(variant.fabric)


def _why(chosen: Measured, ties: Sequence[Measured], right: Sequence[Measured]) -> list[str]:
    name, seconds = chosen.variant.name, chosen.result.seconds
    others = [each.variant.name for each in ties if each is not chosen]
    few = "" if len(chosen.result.repetitions) >= _FEW else f"; {len(chosen.result.repetitions)} repetitions are few"
    if others:
        kind = _RESTS_ON.get(_kind(chosen.variant), "it is another package's")
        lines = [f"{name} ties with {'; '.join(others)}: they differ by no more than noise{few}"]
        lines.append(f"of these, {name} is the safer choice: {kind}")
    else:
        lines = [f"{name} is the fastest beyond noise{few}"]
    slower = [each for each in right if each not in ties]
    if slower:
        lines.append("slower: " + "; ".join(f"{e.variant.name} {e.result.seconds / seconds:.2f} times" for e in slower))
    return lines


def _share_text(chosen: Measured, share: float | None, step: StepTime | None) -> str:
    refit = f"a refit takes {chosen.result.seconds * 1e3:.1f} ms and moves {sized(chosen.planned_bytes)}"
    if share is None or step is None:
        return f"{refit}; give --step-seconds or --report to see its share of a step"
    return f"{refit}: {share:.2%} of a step, which takes {step.seconds:g} s without it ({step.origin})"


def _fall_back(chosen: Measured, right: Sequence[Measured]) -> list[str]:
    """When to use something else, and what it costs."""
    lines = []
    whole = [each for each in right if each.variant.transport == "gather_broadcast"]
    if chosen.variant.transport != "gather_broadcast" and whole:
        best = min(whole, key=lambda each: each.result.seconds)
        times = best.result.seconds / chosen.result.seconds
        memory = max(best.result.extra_memory) / max(1, max(chosen.result.extra_memory))
        lines.append(
            "fall back to gather_broadcast when a run reports private layers or tensors that arrive whole for most of "
            f"the model, or when verification fails: {times:.2f} times the time here, {memory:.1f} times the memory"
        )
    elif chosen.variant.transport == "gather_broadcast":
        lines.append(
            "go over to nccl_reshard when memory for whole tensors is short, or when an engine's model spreads over "
            "several domains"
        )
    if chosen.variant.fabric != "gloo":
        plain = [each for each in right if each.variant.fabric == "gloo"]
        cost = [f", {min(e.result.seconds for e in plain) / chosen.result.seconds:.2f} times the time"] if plain else []
        lines.append("".join(("fall back to fabric gloo when NCCL can't connect", *cost)))
    return lines


def _unmeasured(chosen: Measured) -> list[str]:
    lines = []
    overhead = statistics.median(r.overhead for r in chosen.result.repetitions)
    if overhead > _MOSTLY:
        lines.append(f"{overhead:.0%} of its time is agreement, which hardly grows with the model")
    if _kind(chosen.variant) != "all":
        lines.append("not measured: the engine's own loader, through which whole tensors go; `run` reports it as load")
    return lines
