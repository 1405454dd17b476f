"""How transformers' modules name and stack what a checkpoint has: entries of a state dict <-> canonical tensors. Pure.

transformers 5 keeps a layer's experts in two or three stacked parameters, gate and up in one, and calls some modules
otherwise than the checkpoint does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# Checkpoint names on the left.
_RENAMED = (
    (re.compile(r"^backbone\."), "model."),
    (re.compile(r"\.block_sparse_moe\."), ".mlp."),
    (re.compile(r"^language_model\.model\."), "model.language_model."),
    (re.compile(r"^vision_tower\.vision_model\."), "model.vision_tower."),
    (re.compile(r"^multi_modal_projector\."), "model.multi_modal_projector."),
)
_EXPERTS = re.compile(r"^(?P<prefix>.*\.experts)\.(?P<projection>\w+)\.weight$")
# Mixtral's are gate, up and down too.
_PROJECTIONS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def by_entry(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The canonical tensors in each entry of a module that has all of these; gates are stacked before ups, in dim 1.

    >>> experts = [f"model.layers.0.block_sparse_moe.experts.{name}.weight" for name in ("w3", "w2", "w1")]
    >>> found = by_entry(experts)
    >>> list(found)
    ['model.layers.0.mlp.experts.gate_up_proj', 'model.layers.0.mlp.experts.down_proj']
    >>> [name.split(".")[-2] for name in found["model.layers.0.mlp.experts.gate_up_proj"]]
    ['w1', 'w3']
    """
    known = frozenset(names := tuple(names))
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(_entry(name, known), []).append(name)
    return {entry: tuple(sorted(held, key=_projection)) for entry, held in found.items()}


def renamed(name: str) -> str:
    """What a module calls a checkpoint's tensor that it keeps by itself."""
    for pattern, replacement in _RENAMED:
        name = pattern.sub(replacement, name)
    return name


def _entry(name: str, names: frozenset[str]) -> str:
    match = _EXPERTS.match(name)
    if match is None:
        return renamed(name)
    gated = any(f"{match['prefix']}.{gate}.weight" in names for gate in ("gate_proj", "w1"))
    stacked = "gate_up_proj" if gated and _projection(name) != "down_proj" else _projection(name)
    return f"{renamed(match['prefix'] + '.')}{stacked}"


def _projection(name: str) -> str:
    """A projection's usual name; those of a gated pair are in alphabetical order."""
    match = _EXPERTS.match(name)
    return "" if match is None else _PROJECTIONS.get(match["projection"], match["projection"])
