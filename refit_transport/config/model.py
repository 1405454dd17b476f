"""The model that a configuration trains, before any of its weights is read."""

from __future__ import annotations

from pathlib import Path

from refit_transport.config.checkpoint_config import read_config
from refit_transport.config.keys import shown
from refit_transport.config.paths import MODEL
from refit_transport.config.schema import RefitConfig
from refit_transport.errors import ConfigError, Violation
from refit_transport.layout.presets.model import LogicalModel


def logical_model(config: RefitConfig) -> LogicalModel:
    """The tensors of the model that is trained: of `refit_run.tiny_model` where it is to be made, else of the folder.

    Raises:
        ConfigError: there is no readable `config.json`, a size is missing, or the architecture isn't supported; one
            violation of `policy.model_name` tells all of it.
    """
    tiny = config.refit_run.tiny_model
    if tiny is not None:
        return LogicalModel.from_config(tiny.hf_config())
    folder = Path(config.policy.model_name)
    if not folder.is_dir():
        raise _unusable(config, "is no folder")
    try:
        return LogicalModel.from_config(read_config(folder))
    except ConfigError as error:
        reason = "; ".join(f"{problem.path} {problem.reason} (got {problem.value})" for problem in error.violations)
        raise _unusable(config, f"has an unusable config.json: {reason}") from error


def _unusable(config: RefitConfig, reason: str) -> ConfigError:
    remedy = (
        "give a folder with a Hugging Face checkpoint (download the model first), relative to the working directory"
    )
    return ConfigError(MODEL, (Violation(MODEL, shown(config.policy.model_name), reason, remedy),))
