"""Packages that only some extras install."""

from __future__ import annotations

import importlib
from typing import Any

from refit_transport.errors import MissingDependencyError


def optional_module(name: str, *, needed_for: str, extra: str) -> Any:
    """Imports a module when it is needed.

    Raises:
        MissingDependencyError: its package isn't installed; names the extra that brings it.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise MissingDependencyError(name.partition(".")[0], needed_for, extra) from error
