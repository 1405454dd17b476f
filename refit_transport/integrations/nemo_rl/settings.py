"""`policy.generation.refit_cfg.nccl_reshard` in a NeMo RL configuration, as this package's settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

from pydantic import BaseModel, ValidationError

from refit_transport.config import rules_run
from refit_transport.config.facts import Job
from refit_transport.config.keys import split_foreign
from refit_transport.config.schema import RefitConfig
from refit_transport.config.settings import RefitSettings
from refit_transport.config.translate import translated
from refit_transport.errors import ConfigError, Violation

TRANSPORT = "nccl_reshard"
KEEPS_KV_CACHE = "_refit_transport_keeps_kv_cache"
"""Key of the generation's settings: requests in flight go on with what the weights before have cached."""

_SOURCE = "NeMo RL's configuration"
_PATH = f"policy.generation.refit_cfg.{TRANSPORT}"


def generation_of(policy: Mapping[str, Any]) -> MutableMapping[str, Any]:
    """The generation's settings; empty where there are none."""
    found: MutableMapping[str, Any] = policy.get("generation") or {}
    return found


def read_settings(
    generation: Mapping[str, Any], *, training_ranks: int | None = None, generation_ranks: int = 1
) -> RefitSettings:
    """The refit's settings; defaults for what isn't set.

    Without `training_ranks` what depends on the number of ranks isn't checked.

    Raises:
        ConfigError: with one violation for each problem.
    """
    document = _document(_section(generation), training_ranks or 1, generation_ranks)
    ours, unknown = split_foreign(document)
    found = [finding.violation for finding in unknown]
    try:
        config = RefitConfig.model_validate(ours)
    except ValidationError as error:
        found += [each for each in translated(error) if each.path not in {violation.path for violation in found}]
        raise ConfigError(_SOURCE, tuple(found)) from error
    job = Job(config, document, None, (), "")
    found += rules_run.buffers_nest(job)
    if training_ranks is not None:
        found += rules_run.domains_name_every_rank_once(job)
        found += rules_run.nic_rates_are_of_the_domains(job)
    if found:
        raise ConfigError(_SOURCE, tuple(found))
    return config.refit_settings()


def _section(generation: Mapping[str, Any]) -> Any:
    """NeMo RL may have made a model of `refit_cfg`, with our section among what it doesn't know."""
    refit_cfg = generation.get("refit_cfg") or {}
    if isinstance(refit_cfg, BaseModel):
        refit_cfg = refit_cfg.model_extra or {}
    return refit_cfg.get(TRANSPORT)


def _document(section: Any, training_ranks: int, generation_ranks: int) -> dict[str, Any]:
    """A configuration that has just enough around the section to stand alone."""
    return {
        "policy": {
            "model_name": "NeMo RL's",
            "precision": "bfloat16",
            "megatron_cfg": {"enabled": True},
            "generation": {
                "colocated": {"enabled": False, "resources": {"num_nodes": 1, "gpus_per_node": generation_ranks}},
                "refit_transport": TRANSPORT,
                "refit_cfg": {TRANSPORT: section},
            },
        },
        "cluster": {"num_nodes": 1, "gpus_per_node": training_ranks + generation_ranks},
    }


def problems_of(generation: Mapping[str, Any]) -> Iterable[Violation]:
    """What is wrong with the settings, for a list with other problems."""
    try:
        read_settings(generation)
    except ConfigError as error:
        return error.violations
    return ()
