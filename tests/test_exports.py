"""The names at the package's top: lazy, complete, and the same for people, type checkers and programs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import refit_transport

INIT = Path(refit_transport.__file__)


def imported_when(code: str) -> set[str]:
    """The top-level packages in a fresh process after `code`."""
    script = f"{code}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    return set(found.stdout.split())


HEAVY = {"torch", "ray", "vllm", "megatron", "transformers", "yaml", "pydantic", "omegaconf", "rich", "numpy", "scipy"}


def test_importing_the_package_brings_in_nothing_heavy():
    assert not imported_when("import refit_transport; refit_transport.__version__; dir(refit_transport)") & HEAVY


def test_planning_needs_no_torch():
    names = "Layout, Mesh, Shard, Topology, bound, build_schedule, manifest_from_layouts, plan_transfer, simulate"
    assert imported_when(f"from refit_transport import {names}") & HEAVY == {"numpy"}


def test_reshard_needs_no_engine():
    engines = {"ray", "vllm", "megatron", "transformers", "yaml", "pydantic", "omegaconf"}
    # torch itself may bring in yaml, so what torch brings doesn't count.
    found = imported_when("from refit_transport import reshard") - imported_when("import torch.distributed.tensor")
    assert not found & engines


def test_the_module_that_is_named_like_a_function_does_not_hide_it():
    code = "import refit_transport.resharding as r; import refit_transport; assert refit_transport.reshard is r.reshard"
    imported_when(code)


def test_every_name_is_what_its_module_calls_so():
    assert sorted(refit_transport.__all__) == list(refit_transport.__all__)
    for name in refit_transport.__all__:
        assert getattr(refit_transport, name).__name__ == name
    assert set(refit_transport.__all__) <= set(dir(refit_transport))
    assert not hasattr(refit_transport, "resharder")


def test_type_checkers_see_the_same_names_in_the_same_modules():
    block = next(node for node in ast.parse(INIT.read_text()).body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert sorted(seen) == list(refit_transport.__all__)
    for name, module in seen.items():
        assert refit_transport._MODULES[name] == module.removeprefix("refit_transport.")
