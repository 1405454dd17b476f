"""What a checkpoint folder that isn't whole says: each file by name, before anything is read from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from refit_transport.cluster.checkpoint import CheckpointReader
from refit_transport.errors import ConfigError

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two tensors in two files with an index."""
    names = {"a.weight": "one.safetensors", "b.weight": "two.safetensors"}
    for name, file in names.items():
        save_file({name: torch.ones(16, 16)}, tmp_path / file)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": names}))
    return tmp_path


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE: dict[str, Callable[[Path], None]] = {
    "cut short": cut,
    "empty": lambda path: path.write_bytes(b""),
    "something else": lambda path: path.write_bytes(b"x" * 4096),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_every_damaged_file_is_named(folder: Path, kind: str) -> None:
    CheckpointReader(folder).check()
    for file in ("one.safetensors", "two.safetensors"):
        DAMAGE[kind](folder / file)
    with pytest.raises(ConfigError) as caught:
        CheckpointReader(folder).check()
    assert [violation.path for violation in caught.value.violations] == ["one.safetensors", "two.safetensors"]
    for violation in caught.value.violations:
        assert violation.reason.startswith("is missing" if kind == "missing" else "is damaged or incomplete")
        assert violation.remedy


def test_a_damaged_file_without_an_index_is_named(folder: Path) -> None:
    (folder / INDEX).unlink()
    cut(folder / "two.safetensors")
    with pytest.raises(ConfigError) as caught:
        CheckpointReader(folder)
    assert [violation.path for violation in caught.value.violations] == ["two.safetensors"]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_an_unusable_index_is_named(folder: Path, text: str) -> None:
    (folder / INDEX).write_text(text)
    with pytest.raises(ConfigError) as caught:
        CheckpointReader(folder)
    assert [violation.path for violation in caught.value.violations] == [INDEX]
