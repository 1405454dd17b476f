"""What the rules need to know of the world outside the YAML, looked up once so that they stay pure."""

from __future__ import annotations

import importlib.util
import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from refit_transport.config.model_shape import ModelShape
from refit_transport.config.schema import RefitConfig
from refit_transport.errors import UnknownTransportError

TransportLookup = Callable[[str | None], object]


@dataclass(frozen=True, slots=True)
class Job:
    """A configuration and what was found out about it.

    `model` is None where there is no readable model; the texts are "" where nothing is wrong.
    """

    config: RefitConfig
    model: ModelShape | None
    model_problem: str
    transport_problem: str
    fabric_problem: str


def job_of(config: RefitConfig, *, resolve_transport: TransportLookup) -> Job:
    """Reads the model's config.json, asks the registry, and looks for the packages that the fabric needs."""
    model, model_problem = _model(config)
    return Job(
        config=config,
        model=model,
        model_problem=model_problem,
        transport_problem=_transport_problem(config, resolve_transport),
        fabric_problem=_fabric_problem(config.settings.fabric),
    )


def _model(config: RefitConfig) -> tuple[ModelShape | None, str]:
    if config.refit_run.tiny_model is not None:
        return ModelShape.from_hf(config.refit_run.tiny_model.hf_config()), ""
    folder = Path(config.policy.model_name)
    if not folder.is_dir():
        return None, "is no folder"
    try:
        return ModelShape.from_folder(folder), ""
    except FileNotFoundError:
        return None, "has no config.json"
    except KeyError as error:
        return None, f"has a config.json without {error}"
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return None, f"has a config.json that can't be read ({error})"


def _transport_problem(config: RefitConfig, resolve_transport: TransportLookup) -> str:
    try:
        resolve_transport(config.policy.generation.refit_transport)
    except UnknownTransportError as error:
        return f"{error.reason}; known: {', '.join(error.known)}, or 'package.module:Class'"
    return ""


def _fabric_problem(fabric: str) -> str:
    if fabric in ("nccl", "nccl_m2n") and not _torch_has_cuda():
        return "needs a CUDA build of torch, and the installed one has none"
    if fabric == "nccl_m2n" and importlib.util.find_spec("nccl") is None:
        return "needs the package 'nccl-extensions'"
    return ""


def _torch_has_cuda() -> bool:
    """Reads torch's version file: importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    return bool(runpy.run_path(str(Path(spec.origin).with_name("version.py"))).get("cuda"))
