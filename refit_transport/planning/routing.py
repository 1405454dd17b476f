"""Which transport carries which tensor, and why."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from typing import Literal

from refit_transport.layout.manifest import Manifest

Coverage = Literal["ffn", "all"]
RESHARD = "nccl_reshard"
GATHER_BROADCAST = "gather_broadcast"

# Mixtral's w1, w3 and w2 are gate, up and down; some checkpoints stack experts with gate and up packed, and no suffix.
_FFN = re.compile(
    r"\.(mlp|feed_forward|block_sparse_moe|mixer)(\.(shared_)?experts?)?"
    r"\.((gate|up|down)_proj\.weight|w[123]\.weight|(gate_up|down)_proj(_bias)?)$"
)
_LAYER = re.compile(r"^(?P<layers>(.+\.)?layers)\.(?P<number>\d+)\.")


@dataclass(frozen=True, slots=True)
class RouteRule:
    """Tensors whose canonical name matches `pattern` go by `transport`.

    A pattern is a glob over the whole name, or with the prefix `re:` a regular expression that is searched for.

    >>> RouteRule("*.mlp.*", "nccl_reshard").matches("model.layers.0.mlp.up_proj.weight")
    True
    >>> RouteRule("re:layers[.][02][.]", "gather_broadcast").matches("model.layers.1.mlp.up_proj.weight")
    False
    """

    pattern: str
    transport: str

    def __post_init__(self) -> None:
        self._compiled()

    def matches(self, name: str) -> bool:
        return self._compiled().search(name) is not None

    def _compiled(self) -> re.Pattern[str]:
        regex = self.pattern.removeprefix("re:")
        return re.compile(regex if regex != self.pattern else rf"\A{translate(self.pattern)}")


@dataclass(frozen=True, slots=True)
class Route:
    """The transport of one tensor and the reason for the choice."""

    tensor: str
    transport: str
    reason: str


def is_ffn_projection(name: str) -> bool:
    """Whether a canonical name is of a gate, up or down projection, dense, shared or expert.

    >>> is_ffn_projection("model.layers.3.mlp.experts.down_proj.weight")
    True
    >>> is_ffn_projection("backbone.layers.3.mixer.experts.up_proj.weight")
    True
    >>> is_ffn_projection("model.layers.3.self_attn.q_proj.weight")
    False
    """
    return _FFN.search(name) is not None


def route_tensors(
    target: Manifest, *, transport: str = RESHARD, coverage: Coverage = "ffn", rules: Sequence[RouteRule] = ()
) -> tuple[Route, ...]:
    """Routes every tensor that some target rank needs.

    `nccl_reshard` is a preset of routes: the first matching rule decides, then the coverage. Any other transport
    carries everything. A tensor that a target rank can only take whole goes by `gather_broadcast` in any case.
    """
    opaque = {o.tensor: o.reason for manifest in reversed(target.ranks) for o in manifest.opaque}
    # Replicas share one sequence of pieces.
    distinct = {id(manifest.pieces): manifest for manifest in target.ranks}.values()
    needed = opaque.keys() | {name for manifest in distinct for name in manifest.held()}
    routes = []
    for name in (spec.name for spec in target.tensors if spec.name in needed):
        if name in opaque:
            routes.append(Route(name, GATHER_BROADCAST, f"the target takes it whole: {opaque[name]}"))
        elif transport != RESHARD:
            routes.append(Route(name, transport, f"refit_transport: {transport}"))
        else:
            routes.append(_preset_route(name, coverage, rules))
    return tuple(routes)


def _preset_route(name: str, coverage: Coverage, rules: Iterable[RouteRule]) -> Route:
    for rule in rules:
        if rule.matches(name):
            return Route(name, rule.transport, f"routes: {rule.pattern}")
    if coverage == "all" or is_ffn_projection(name):
        return Route(name, RESHARD, f"coverage: {coverage}")
    return Route(name, GATHER_BROADCAST, "coverage: ffn sends only FFN projections shard-to-shard")


def skipped_tensors(source: Iterable[str], taken: Collection[str]) -> Mapping[str, tuple[str, ...]]:
    """The source's tensors that no target takes, by the reason. The names of a drafter's layers follow on those of the
    model's, or begin with `mtp`.

    >>> for reason, names in skipped_tensors(("layers.0.w", "cache", "layers.1.w"), {"layers.0.w"}).items():
    ...     print(reason, names)
    the targets' loaders ignore it ('cache',)
    multi-token prediction: no target drafts ('layers.1.w',)
    """
    last: dict[str, int] = {}
    for layer in filter(None, map(_LAYER.match, taken)):
        last[layer["layers"]] = max(last.get(layer["layers"], 0), int(layer["number"]))
    drafts = any(name.startswith("mtp.") for name in taken)
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name in source:
        if name not in taken:
            match = _LAYER.match(name)
            behind = match is not None and int(match["number"]) > last.get(match["layers"], int(match["number"]))
            drafter = behind or (name.startswith("mtp.") and not drafts)
            found[_UNDRAFTED if drafter else _IGNORED].append(name)
    return {reason: tuple(names) for reason, names in found.items()}


_UNDRAFTED, _IGNORED = "multi-token prediction: no target drafts", "the targets' loaders ignore it"
