"""What the rules need to know beside the keys that are ours, looked up once so that they stay pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from refit_transport.config.model import logical_model
from refit_transport.config.schema import RefitConfig
from refit_transport.errors import ConfigError, UnknownTransportError, Violation
from refit_transport.layout.presets.model import LogicalModel

TransportLookup = Callable[[str | None], object]


@dataclass(frozen=True, slots=True)
class Job:
    """A configuration and what was found out about it.

    `document` is the whole YAML, with NeMo RL's own keys. `model` is None where `model_problems` say why.
    `transport_problem` is "" where the transport is known.
    """

    config: RefitConfig
    document: Mapping[str, Any]
    model: LogicalModel | None
    model_problems: tuple[Violation, ...]
    transport_problem: str


def job_of(config: RefitConfig, *, document: Mapping[str, Any], resolve_transport: TransportLookup) -> Job:
    """Reads the model's config.json and asks the registry."""
    model, problems = _model(config)
    return Job(config, document, model, problems, _transport_problem(config, resolve_transport))


def _model(config: RefitConfig) -> tuple[LogicalModel | None, tuple[Violation, ...]]:
    try:
        return logical_model(config), ()
    except ConfigError as error:
        return None, error.violations


def _transport_problem(config: RefitConfig, resolve_transport: TransportLookup) -> str:
    try:
        resolve_transport(config.policy.generation.refit_transport)
    except UnknownTransportError as error:
        return f"{error.reason}; known: {', '.join(error.known)}, or 'package.module:Class'"
    return ""
