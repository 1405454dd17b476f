"""From a YAML file to a `RefitConfig`, or to one `ConfigError` with everything that is wrong."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from refit_transport.config.document import Document, read_document, read_mapping
from refit_transport.config.facts import TransportLookup, job_of
from refit_transport.config.keys import KeyPath, split_foreign
from refit_transport.config.rules import Purpose, broken_rules
from refit_transport.config.schema import RefitConfig
from refit_transport.config.translate import PLACEHOLDERS, translated
from refit_transport.errors import ConfigError

_Model = TypeVar("_Model", bound=BaseModel)


def load_config(
    path: str | Path, *, resolve_transport: TransportLookup, overrides: Sequence[str] = (), purpose: Purpose = "run"
) -> RefitConfig:
    """Reads, merges and checks a configuration file.

    `overrides` are `key.path=value` texts, applied last. `resolve_transport` is `transports.registry.resolve`. To
    "plan", a model may have an architecture that workers can't train.

    Raises:
        ConfigError: with one violation for each problem.
    """
    return checked(read_document(Path(path), overrides), resolve_transport, purpose)


def config_from(
    values: Mapping[str, Any], *, resolve_transport: TransportLookup, source: str = "config"
) -> RefitConfig:
    """Checks a configuration that was read elsewhere, such as NeMo RL's; `source` stands in for the file name.

    Raises:
        ConfigError: with one violation for each problem.
    """
    return checked(read_mapping(values, source), resolve_transport)


def checked(document: Document, resolve_transport: TransportLookup, purpose: Purpose = "run") -> RefitConfig:
    """Checks a document that was read.

    Raises:
        ConfigError: with one violation for each problem.
    """
    ours, unknown = split_foreign(document.values)
    found = [problem for problem in document.problems if _holds(ours, problem.path)]
    doubtful = {violation.path for violation in found} | {path for finding in unknown for path in finding.suspects}
    found += [finding.violation for finding in unknown]
    try:
        config = RefitConfig.model_validate(ours)
    except ValidationError as error:
        refused = translated(error)
        found += [violation for violation in refused if not _told(violation.path, doubtful)]
        doubtful |= {violation.path for violation in refused}
        config = repaired(ours, error, RefitConfig)
    config._document = document.values
    job = job_of(config, document=document.values, resolve_transport=resolve_transport)
    found += broken_rules(job, purpose=purpose, doubtful=frozenset(doubtful))
    told = {violation.path for violation in found}
    found = [violation for violation in found if document.root_of(violation.path) not in told - {violation.path}]
    if found:
        raise ConfigError(document.source, tuple(map(document.with_origin, found)))
    return config


def _told(path: str, doubtful: set[str]) -> bool:
    return any(path == other or path.startswith((f"{other}.", f"{other}[")) for other in doubtful)


def _holds(ours: Mapping[str, Any], path: str) -> bool:
    """Whether a key is ours: a section of NeMo RL's is gone from `ours`."""
    value: Any = ours
    for key in path.split("[", maxsplit=1)[0].split("."):
        if not isinstance(value, Mapping) or key not in value:
            return False
        value = value[key]
    return True


def repaired(ours: dict[str, Any], error: ValidationError, model: type[_Model]) -> _Model:
    """The configuration with defaults and placeholders for what was refused, for the rules about the rest."""
    while True:
        refused = [details["loc"] for details in error.errors(include_url=False, include_context=False)]
        for where in refused:
            _replace(ours, where)
        try:
            return model.model_validate(ours)
        except ValidationError as remaining:
            if [details["loc"] for details in remaining.errors(include_url=False)] == refused:
                raise  # a required key without a placeholder; a test finds it
            error = remaining


def _replace(ours: dict[str, Any], where: KeyPath) -> None:
    """Drops a refused value; a refused item takes its whole list along."""
    names = [str(key) for key in itertools.takewhile(lambda key: isinstance(key, str), where)]
    section = ours
    for name in names[:-1]:
        if section.get(name) is None:
            section[name] = {}
        section = section[name]
    section.pop(names[-1], None)
    if (placeholder := PLACEHOLDERS.get(".".join(names))) is not None:
        section[names[-1]] = placeholder()
