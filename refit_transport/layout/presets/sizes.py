"""Parallel layouts as people write them: `tp8 pp8 ep32`, `tp32 dp8`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import lcm

from refit_transport.errors import ConfigError, Violation
from refit_transport.layout.parallelism import MegatronParallelism
from refit_transport.layout.presets.vllm import EngineParallelism

_SIZE = re.compile(r"^(?P<key>[a-z]+)[=:]?(?P<value>\d+)$")
_TRAINING = ("tp", "pp", "vpp", "ep", "etp", "cp", "dp", "first", "last", "fsdp")
_SERVING = ("tp", "pp", "dp", "ep")


@dataclass(frozen=True, slots=True)
class FullySharded:
    """FSDP2: every rank holds a share of dim 0 of each tensor."""


@dataclass(frozen=True, slots=True)
class TrainingSizes:
    """A training layout and the number of its ranks."""

    parallelism: MegatronParallelism | FullySharded
    ranks: int


def training_sizes(text: str, *, ranks: int | None = None) -> TrainingSizes:
    """Parses a Megatron layout: tp, pp, vpp, ep, etp, cp, dp; `first` and `last` count the layers of those stages.

    `etp` is 1 unless given, as in RL recipes (Megatron's own default is tp). Without dp the layout fills `ranks`, or
    takes as few as it needs. `fsdp` alone is FSDP2 on that many ranks.

    Raises:
        ConfigError: an unknown, doubled or misspelt size, or sizes that aren't `ranks` ranks.

    >>> training_sizes("pp16 ep16").ranks, training_sizes("TP8 PP8 EP32 CP2 DP2").ranks
    (256, 256)
    """
    sizes = _parse(text, "source", _TRAINING)
    if "fsdp" in sizes:
        return _fully_sharded(text, sizes, ranks)
    tensor, pipeline, context = sizes.get("tp", 1), sizes.get("pp", 1), sizes.get("cp", 1)
    expert, expert_tensor = sizes.get("ep", 1), sizes.get("etp", 1)
    stage = tensor * context * sizes["dp"] if "dp" in sizes else lcm(tensor * context, expert * expert_tensor)
    needed = stage * pipeline
    if ranks is not None and (ranks % needed if "dp" not in sizes else ranks != needed):
        many = "exactly" if "dp" in sizes else "a multiple of"
        raise _error("source", text, f"needs {many} {needed} training ranks (got {ranks})")
    parallelism = MegatronParallelism(
        tensor,
        pipeline,
        sizes.get("vpp", 1),
        expert,
        expert_tensor,
        first_stage_layers=sizes.get("first", 0),
        last_stage_layers=sizes.get("last", 0),
    )
    return TrainingSizes(parallelism, needed if ranks is None else ranks)


def serving_sizes(text: str, *, ranks: int | None = None) -> EngineParallelism:
    """Parses a vLLM layout: tp, pp, dp, ep. Without dp the layout fills `ranks`, or takes as few as it needs.

    Raises:
        ConfigError: an unknown, doubled or misspelt size, or sizes that aren't `ranks` ranks.

    >>> serving_sizes("tp32 dp8").ranks, serving_sizes("tp8 ep8", ranks=16).data, serving_sizes("tp4 pp2 dp3").ranks
    (256, 2, 24)
    """
    sizes = _parse(text, "target", _SERVING)
    tensor, expert, pipeline = sizes.get("tp", 1), sizes.get("ep", 1), sizes.get("pp", 1)
    smallest = lcm(tensor, expert) * pipeline
    total = tensor * pipeline * sizes["dp"] if "dp" in sizes else (ranks or smallest)
    if ranks is not None and (total != ranks or ranks % smallest):
        needed = f"exactly {total}" if "dp" in sizes else f"a multiple of {smallest}"
        raise _error("target", text, f"needs {needed} generation ranks (got {ranks})")
    return EngineParallelism(tensor, total // (tensor * pipeline), expert, pipeline)


def _fully_sharded(text: str, sizes: dict[str, int], ranks: int | None) -> TrainingSizes:
    if len(sizes) > 1:
        raise _error("source", text, "has fsdp beside other sizes")
    if ranks not in (None, sizes["fsdp"]):
        raise _error("source", text, f"needs exactly {sizes['fsdp']} training ranks (got {ranks})")
    return TrainingSizes(FullySharded(), sizes["fsdp"])


def _parse(text: str, side: str, known: Iterable[str]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for word in re.split(r"[\s,]+", text.strip().lower()):
        match = _SIZE.match(word)
        if match is None or match["key"] not in known:
            example = "pp16 ep16" if side == "source" else "tp32 dp8"
            raise _error(side, word, f"is no parallel size; known: {', '.join(known)}, as in {example!r}")
        if match["key"] in sizes:
            raise _error(side, word, "gives a size twice")
        sizes[match["key"]] = int(match["value"])
        if not sizes[match["key"]]:
            raise _error(side, word, "must be at least 1")
    return sizes


def _error(side: str, got: str, reason: str) -> ConfigError:
    return ConfigError("layout", (Violation(side, repr(got), reason, ""),))
