"""Unknown keys and what was meant instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

from refit_transport.config.base import Section
from refit_transport.config.foreign import FOREIGN_KEYS
from refit_transport.config.schema import RefitConfig
from refit_transport.errors import Violation

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """A violation, and the other keys whose values it makes doubtful (a misspelt key leaves the right one unset)."""

    violation: Violation
    suspects: tuple[str, ...] = ()


def dotted(path: KeyPath) -> str:
    """
    >>> dotted(("refit_run", "prompts", 0))
    'refit_run.prompts[0]'
    """
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).lstrip(".")


def nearest(word: str, known: Iterator[str] | frozenset[str] | tuple[str, ...]) -> str | None:
    """The known word that `word` is probably a misspelling of."""
    matches = difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.7)
    return matches[0] if matches else None


def section_of(annotation: object) -> type[Section] | None:
    """The section that a field holds directly, optional or not."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


@cache
def sections() -> Mapping[str, type[Section]]:
    """Every block of the YAML that is ours to check, by dotted path; "" is the whole."""

    def walk(path: str, model: type[Section]) -> Iterator[tuple[str, type[Section]]]:
        yield path, model
        for name, field in model.model_fields.items():
            if (inner := section_of(field.annotation)) is not None and not _is_list(field.annotation):
                yield from walk(f"{path}.{name}".removeprefix("."), inner)

    return dict(walk("", RefitConfig))


def _is_list(annotation: object) -> bool:
    return getattr(annotation, "__origin__", None) is tuple


def split_foreign(document: Mapping[str, Any]) -> tuple[dict[str, Any], list[Finding]]:
    """Separates our keys from NeMo RL's: what the models shall read, and a finding for each key that nobody knows."""
    unknown: list[Finding] = []
    also_known = frozenset({str(_plugin_name(document))} - {"None"})

    def walk(path: str, value: Any) -> Any:
        model = sections().get(path)
        if model is None or not isinstance(value, Mapping):
            return value
        foreign = FOREIGN_KEYS.get(path, frozenset())
        if path == "policy.generation.refit_cfg":
            foreign |= also_known - model.model_fields.keys()
        ours = {}
        for key, inner in value.items():
            where = f"{path}.{key}".removeprefix(".")
            if key in model.model_fields:
                ours[key] = walk(where, inner)
            elif key not in foreign:
                unknown.append(_unknown(path, str(key), inner, foreign | model.model_fields.keys()))
        return ours

    return walk("", document), unknown


def _plugin_name(document: Mapping[str, Any]) -> object:
    return value_at(document, "policy.generation.refit_transport")


def value_at(document: Mapping[str, Any], path: str) -> Any:
    """The value under a dotted path; None where there is none.

    >>> value_at({"policy": {"draft": {"enabled": True}}}, "policy.draft.enabled")
    True
    """
    value: Any = document
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _unknown(section: str, key: str, value: object, known: frozenset[str]) -> Finding:
    where = dotted((section, key))
    near = nearest(key, known)
    homes = [path for path, keys in _all_keys().items() if key in keys]
    hints = [f"did you mean {near!r}?"] if near is not None else []
    if homes:
        hints.append(f"{key!r} belongs under {' or '.join(repr(path or 'the top level') for path in homes)}")
    if not hints:
        elsewhere = ((path, nearest(key, keys)) for path, keys in _all_keys().items())
        hints = [f"did you mean '{dotted((path, found))}'?" for path, found in elsewhere if found is not None][:1]
    if not hints:
        hints = [f"known here: {', '.join(sorted(known))}" if len(known) <= 12 else "remove it"]
    reason = f"is not a key of {repr(section) if section else 'the top level'}"
    suspects = [dotted((section, near))] if near is not None else []
    suspects += [dotted((path, key)) for path in homes]
    return Finding(Violation(where, shown(value), reason, "; ".join(hints)), tuple(suspects))


@cache
def _all_keys() -> Mapping[str, frozenset[str]]:
    return {path: FOREIGN_KEYS.get(path, frozenset()) | model.model_fields.keys() for path, model in sections().items()}


def shown(value: object) -> str:
    """A value for a message, cut where it is long."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
