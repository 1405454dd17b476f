"""Checks that vLLM is, at the places where we extend it, what we know it to be."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

from refit_transport.errors import SeamError


def seam_error(seam: str, expected: str) -> SeamError:
    """An error that names the installed vLLM and the place."""
    version = str(getattr(import_module("vllm"), "__version__", "of unknown version"))
    return SeamError("vllm", version, seam, expected)


def attribute(module: str, path: str) -> Any:
    """The object at a dotted `path` inside a vLLM module.

    Raises:
        SeamError: the module or an attribute on the path doesn't exist.
    """
    try:
        found: Any = import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise seam_error(f"{module}:{path}", "it to exist") from error
    return found


def require_parameters(function: Callable[..., Any], seam: str, names: tuple[str, ...]) -> None:
    """Raises SeamError unless the function takes exactly these parameters."""
    found = tuple(inspect.signature(function).parameters)
    if found != names:
        raise seam_error(seam, f"parameters ({', '.join(names)}) instead of ({', '.join(found)})")
