"""The model that `run` makes: whole or not there, left alone when it is the right one, nobody else's files touched."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from refit_transport.cluster.checkpoint import CheckpointReader
from refit_transport.cluster.tiny_model import tiny_model
from refit_transport.config.schema import TinyModel
from refit_transport.errors import ConfigError
from refit_transport.testing import models

WANTED = TinyModel(kind="dense", num_hidden_layers=1)


def make_tiny_model(folder: Path, wanted: TinyModel) -> None:
    with tiny_model(folder, wanted):
        pass


def stamps(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_the_same_model_is_left_alone_and_another_replaces_it(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "model"
    make_tiny_model(folder, WANTED)
    CheckpointReader(folder).check()
    before = stamps(folder)
    # Another run may be reading it at this moment.
    make_tiny_model(folder, WANTED)
    assert stamps(folder) == before
    make_tiny_model(folder, WANTED.model_copy(update={"seed": 1}))
    assert stamps(folder) != before
    assert list(folder.parent.iterdir()) == [folder]


def test_without_room_nothing_is_left_and_the_next_run_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(folder: Path, **_: Any) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = tmp_path / "model"
    with monkeypatch.context() as patch:
        patch.setattr(models, "save_tiny_model", no_room)
        with pytest.raises(ConfigError, match=r"policy\.model_name: can't be written: .*No space left"):
            make_tiny_model(folder, WANTED)
    assert list(tmp_path.iterdir()) == []
    make_tiny_model(folder, WANTED)
    CheckpointReader(folder).check()


def test_files_of_somebody_else_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for folder in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(ConfigError, match=r"policy\.model_name: holds files"):
            make_tiny_model(folder, WANTED)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_model_in_use_is_shared_with_who_wants_the_same_and_kept_from_others(tmp_path: Path) -> None:
    folder, other = tmp_path / "model", WANTED.model_copy(update={"seed": 1})
    with tiny_model(folder, WANTED):
        before = stamps(folder)
        make_tiny_model(folder, WANTED)
        with pytest.raises(ConfigError, match=r"policy\.model_name: is in use by another run"):
            make_tiny_model(folder, other)
        assert stamps(folder) == before
    make_tiny_model(folder, other)
    assert stamps(folder) != before
