"""What a checkpoint folder that isn't whole says: each file by name, before anything is read from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from refit_transport.cluster.checkpoint import CheckpointReader
from refit_transport.errors import ConfigError, LayoutError
from refit_transport.layout.box import Box
from refit_transport.layout.manifest import TensorSpec

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


def test_columns_in_turn_are_read_field_by_field(tmp_path: Path) -> None:
    """gpt-oss has a column of gate, one of up, and so on; the logical tensor has them in a dim of their own."""
    stored = torch.arange(2 * 3 * 8, dtype=torch.float32).view(2, 3, 8)
    save_file({"m.experts.gate_up_proj": stored}, tmp_path / "model.safetensors")
    reader, spec = CheckpointReader(tmp_path), TensorSpec("m.experts.gate_up_proj", (2, 3, 4, 2), "float32")
    up = torch.zeros(1, 3, 2, 1)
    reader.copy_into(up, spec, Box.of((1, 2), (0, 3), (1, 3), (1, 2)))
    assert torch.equal(up[..., 0], stored[1:, :, [3, 5]])


def test_mxfp4_blocks_are_named(tmp_path: Path) -> None:
    save_file({"m.experts.gate_up_proj_blocks": torch.zeros(1)}, tmp_path / "model.safetensors")
    spec = TensorSpec("m.experts.gate_up_proj", (2, 3, 4, 2), "bfloat16")
    with pytest.raises(LayoutError, match=r"gate_up_proj: .*MXFP4 blocks, which aren't supported: convert it to BF16"):
        CheckpointReader(tmp_path).copy_into(torch.zeros(spec.shape), spec, spec.box)
