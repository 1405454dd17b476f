"""NeMo RL as it is on disk, read without importing it: the double, and a checkout where `NEMO_RL_SOURCE` names one."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from refit_transport.integrations.nemo_rl.seams import Seam

DOUBLE = Path(__file__).resolve().parent / "double"
CHECKOUT = os.environ.get("NEMO_RL_SOURCE", "")
WITHOUT = "NEMO_RL_SOURCE doesn't name a checkout of NeMo RL"
SOURCES = ["double", pytest.param("real", marks=pytest.mark.skipif(not CHECKOUT, reason=WITHOUT))]


def root_of(source: str) -> Path:
    return DOUBLE if source == "double" else Path(CHECKOUT)


def parsed(root: Path, module: str) -> ast.Module | None:
    """The module's syntax tree; None where there is no such module."""
    base = root.joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return ast.parse(path.read_text(encoding="utf-8"))
    return None


def declared(root: Path, seam: Seam) -> ast.AST | None:
    """What a module defines under a seam's path, looked up where it imports it from; None where it has none."""
    tree: ast.AST | None = parsed(root, seam.module)
    for name in seam.path.split("."):
        if tree is None:
            return None
        tree = _member(root, tree, name)
    return tree


def _member(root: Path, tree: ast.AST, name: str) -> ast.AST | None:
    for node in ast.walk(tree) if isinstance(tree, ast.Module) else tree.body:  # type: ignore[attr-defined]
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
            origin = parsed(root, node.module or "")
            return None if origin is None else _member(root, origin, name)
    return None


def parameters(function: ast.AST) -> tuple[str, ...]:
    assert isinstance(function, ast.FunctionDef)
    arguments = function.args
    return tuple(each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))


def assigned(root: Path, module: str) -> set[str]:
    """The attributes that a module's classes set on themselves."""
    tree = parsed(root, module)
    assert tree is not None, module
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
