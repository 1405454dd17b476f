"""How this package gets into NeMo RL's workers, each of which runs in a virtual environment of its own.

These environments are made from NeMo RL's lock file and lack us. A job's `py_modules` are copied to every node and put
on every worker's PYTHONPATH, whichever interpreter it runs, and what a worker starts inherits them: vLLM's processes
too. NeMo RL builds the job's runtime environment itself, so we add ours through Ray's `RAY_RUNTIME_ENV_HOOK`. What
runs in workers imports nothing but what their environments have anyway (torch, numpy, rich).

Environment variables, set by `use_hook` and read by Ray and `add_package`:

- `RAY_RUNTIME_ENV_HOOK`: Ray's; names `add_package`.
- `REFIT_TRANSPORT_NEXT_RUNTIME_ENV_HOOK`: the hook that was there before, which runs first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

_HOOK = "RAY_RUNTIME_ENV_HOOK"
_NEXT = "REFIT_TRANSPORT_NEXT_RUNTIME_ENV_HOOK"
_OURS = f"{__name__}.add_package"
_PACKAGE = str(Path(str(import_module("refit_transport").__file__)).parent)


def use_hook() -> None:
    """Has `ray.init` in this process ask `add_package`, after whoever was asked before. Idempotent."""
    before = os.environ.get(_HOOK, "")
    if before == _OURS:
        return
    if before:
        os.environ[_NEXT] = before
    os.environ[_HOOK] = _OURS


def add_package(runtime_env: Mapping[str, Any] | None) -> dict[str, Any]:
    """The job's runtime environment with this package in it."""
    environment = dict(runtime_env or {})
    if before := os.environ.get(_NEXT, ""):
        module, _, name = before.rpartition(".")
        environment = dict(getattr(import_module(module), name)(environment))
    modules = list(environment.get("py_modules") or ())
    if _PACKAGE not in modules:
        modules.append(_PACKAGE)
    return {**environment, "py_modules": modules}
