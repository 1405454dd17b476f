"""`refit-transport explain`: for each parameter its route, ranks, boxes and ways, from presets alone."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import groupby
from typing import Any

from refit_transport.config.schema import RefitConfig
from refit_transport.errors import ConfigError, Violation
from refit_transport.explain import ARRIVALS, Group, Part, Way, common_name, explain, family, ranges
from refit_transport.planning.routing import RouteRule
from refit_transport.preview import assumptions_of, preset_job
from refit_transport.refit_plan import RefitPlan
from refit_transport.report import sized
from refit_transport.scheduling.topology import Topology

# Up to so many families are shown box by box; the rest in three lines each.
_DETAILED_FAMILIES = 3
_MOST_BOXES = 4
_MOST_WAYS = 8
_NEAREST = 4

_ARRIVES = {
    "copy": "copied on the rank itself",
    "local": "from a holder in the same domain",
    "enter": "over the network from a holder",
    "forward": "over the network, forwarded by another target",
    "inside": "passed on inside the domain that it entered",
}


@dataclass(frozen=True, slots=True)
class Explained:
    """The groups that a pattern chose, and what they rest on."""

    groups: tuple[Group, ...]
    topology: Topology
    fabric: str
    assumptions: tuple[str, ...]

    @property
    def shard_to_shard(self) -> float:
        """The share of the chosen bytes that goes from shard to shard, 0 to 1."""
        moved = [(group, group.nbytes * len(group.names)) for group in self.groups if group.transport]
        return sum(group.shard_to_shard * size for group, size in moved) / max(1, sum(size for _, size in moved))

    def to_json(self) -> dict[str, Any]:
        """A plain value for programs: every parameter's name is in one group."""
        return {
            "shard_to_shard": self.shard_to_shard,
            "fabric": self.fabric,
            "domains": [list(ranks) for ranks in self.topology.domains],
            "groups": [_group_json(group) for group in self.groups],
            "assumptions": list(self.assumptions),
        }


def explain_config(config: RefitConfig, pattern: str | None, *, announce: Callable[[str], None]) -> Explained:
    """Plans a configuration from presets and explains the parameters that a pattern matches, all when None.

    Raises:
        ConfigError: the pattern matches nothing; else as `preview.preview`.
    """
    announce("describing both sides")
    job = preset_job(config)
    names = [spec.name for spec in job.source.tensors]
    chosen = names if pattern is None else matching(pattern, names)
    announce(f"planning {len(job.target.tensors)} tensors for {len(job.ranks)} ranks")
    plan = RefitPlan(job)
    announce(f"explaining {len(chosen)} of them")
    return Explained(explain(plan, chosen), job.topology, config.settings.fabric, assumptions_of(config))


def matching(pattern: str, names: Sequence[str]) -> list[str]:
    """The names that match; a pattern is as in `routes`: a glob, or `re:` and a regular expression.

    Raises:
        ConfigError: none does; says which names come near. Or it is no regular expression.
    """
    try:
        rule = RouteRule(pattern, "")
    except re.error as error:
        problem = Violation("--param", repr(pattern), f"is no regular expression: {error}", "")
        raise ConfigError("explain", (problem,)) from None
    found = [name for name in names if rule.matches(name)]
    if found:
        return found
    bare = pattern.removeprefix("re:").strip("*")
    families = dict(zip(map(family, reversed(names)), reversed(names), strict=True))
    # Only the end of a name is compared with a pattern that begins anywhere.
    cut = -len(bare) if pattern.startswith("*") else None
    near = sorted(families.values(), key=lambda name: -SequenceMatcher(None, bare, name[cut:], autojunk=False).ratio())
    remedy = f"the nearest of {len(names)} names: {', '.join(near[:_NEAREST])}"
    raise ConfigError("explain", (Violation("--param", repr(pattern), "matches no parameter", remedy),))


def render_explained(found: Explained) -> Iterator[str]:
    """Lines for people."""
    families: dict[str, list[Group]] = defaultdict(list)
    for group in found.groups:
        families[f"{family(group.names[0])} {group.shape} {group.transport} {group.reason}"].append(group)
    yield f"{found.shard_to_shard:.2%} of these parameters' bytes go shard to shard; fabric: {found.fabric}"
    for groups in families.values():
        yield ""
        yield from _overview(groups)
        if len(families) <= _DETAILED_FAMILIES:
            yield from _details(groups, found.topology)
    yield ""
    yield from (f"assumed: {assumption}" for assumption in found.assumptions)


def _overview(groups: Sequence[Group]) -> Iterator[str]:
    """What the tensors of one family have in common, whatever their stage."""
    names, first = [name for group in groups for name in group.names], groups[0]
    count = f"{len(names)} tensors of " if len(names) > 1 else ""
    yield f"{common_name(names)}  {list(first.shape)} {first.dtype}, {count}{sized(first.nbytes)}"
    if not first.transport:
        yield f"  not moved: {first.reason}"
        return
    how = "NCCL M2N" if first.way == "native" else "messages of the schedule"
    yield f"  {first.transport}, {how}, {first.shard_to_shard:.0%} shard to shard; because {first.reason}"
    sources, targets = _all_ranks(groups, "sources"), _all_ranks(groups, "targets")
    boxes = sorted({sum(len(part.boxes) for part in group.parts) for group in groups})
    text = f"{boxes[0]} to {boxes[-1]} boxes" if len(boxes) > 1 else "1 box" if boxes == [1] else f"{boxes[0]} boxes"
    yield f"  from ranks {sources} to ranks {targets}, {text}{' each' if len(names) > 1 else ''}"
    shares = _arrivals(groups)
    if shares:
        yield f"  arrives {', '.join(f'{share:.1%} {_ARRIVES[arrival]}' for arrival, share in shares)}"


def _all_ranks(groups: Sequence[Group], side: str) -> str:
    held = [getattr(group, side) for group in groups]
    each = sorted({len(ranks) for ranks in held})
    note = f" ({each[0]} for each tensor)" if len(each) == 1 and len(set(held)) > 1 else ""
    return ranges(rank for ranks in held for rank in ranks) + note


def _arrivals(groups: Sequence[Group]) -> list[tuple[str, float]]:
    """Of all bytes that ranks receive because they want them, the share of each kind of arrival."""
    totals: dict[str, float] = defaultdict(float)
    for group in groups:
        for part in group.parts:
            for way in part.ways:
                if not way.relay:
                    totals[way.arrival] += way.share * part.nbytes * len(group.names)
    everything = sum(totals.values())
    return [(arrival, totals[arrival] / everything) for arrival in ARRIVALS if totals[arrival]]


def _details(groups: Sequence[Group], topology: Topology) -> Iterator[str]:
    """Boxes and ways of the first tensors that go alike."""
    first, *others = groups
    if not first.transport:
        return
    if others:
        rest = common_name([name for group in others for name in group.names])
        yield f"  {first.family}, in detail ({rest}: alike on other ranks, or otherwise; choose one with --param):"
    shown = 0
    for part in first.parts:
        if shown >= _MOST_BOXES:
            break
        shown += len(part.boxes)
        yield from _part_lines(part, topology)
    hidden = sum(len(part.boxes) for part in first.parts) - shown
    if hidden > 0:
        yield f"    and {hidden} more boxes; --json lists them all"


def _part_lines(part: Part, topology: Topology) -> Iterator[str]:
    texts = [str(box) for box in part.boxes[:_MOST_BOXES]]
    if len(part.boxes) > _MOST_BOXES:
        texts.append(f"and {len(part.boxes) - _MOST_BOXES} more")
    held = f"held by {_ranks(part.holders)}, wanted by {_ranks(part.wanters)}"
    yield f"    {'box' if len(part.boxes) == 1 else 'boxes'} {', '.join(texts)}: {sized(part.nbytes)}, {held}"
    lines = list(_way_lines(part.ways, topology)) or ["the collective chooses the ways"]
    yield from (f"      {line}" for line in lines[:_MOST_WAYS])
    if len(lines) > _MOST_WAYS:
        yield f"      and {len(lines) - _MOST_WAYS} more ways; --json lists them all"


def _way_lines(ways: Iterable[Way], topology: Topology) -> Iterator[str]:
    """A line for the ranks of one domain that get equal shares from one sender."""

    def alike(way: Way) -> tuple[int, int, int, float, bool]:
        share = round(way.share, 3)
        return ARRIVALS.index(way.arrival), way.sender, topology.domain(way.receiver), share, way.relay

    for (arrival, sender, domain, share, relay), group in groupby(sorted(ways, key=alike), key=alike):
        receivers = _ranks([way.receiver for way in group])
        inside = f"the domain of {_ranks(topology.domains[domain])}"
        text = {
            "copy": f"{receivers} has it itself and copies it",
            "local": f"{receivers} from rank {sender} of the same domain, which holds it",
            "enter": f"enters {inside} at {receivers}, from rank {sender}, which holds it",
            "forward": f"enters {inside} at {receivers}, forwarded by rank {sender}",
            "inside": f"{receivers} from rank {sender} of the same domain, where it came in",
        }[ARRIVALS[arrival]]
        parts = "" if math.isclose(share, 1, abs_tol=5e-4) else f" ({share:.1%} of it)"
        yield text + parts + (" (only to pass it on)" if relay else "")


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {ranges(numbers)}"


def _group_json(group: Group) -> dict[str, Any]:
    return {
        "parameters": list(group.names),
        "shape": list(group.shape),
        "dtype": group.dtype,
        "bytes": group.nbytes,
        "transport": group.transport or None,
        "way": group.way or None,
        "reason": group.reason,
        "shard_to_shard": group.shard_to_shard,
        "source_ranks": list(group.sources),
        "target_ranks": list(group.targets),
        "parts": [
            {
                "boxes": [[[span.start, span.stop] for span in box.spans] for box in part.boxes],
                "bytes": part.nbytes,
                "holders": list(part.holders),
                "wanters": list(part.wanters),
                "ways": [
                    {"arrival": w.arrival, "sender": w.sender, "receiver": w.receiver, "share": w.share}
                    | ({"relay": True} if w.relay else {})
                    for w in part.ways
                ],
            }
            for part in group.parts
        ],
    }
