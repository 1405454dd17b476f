"""The model that `run` makes for itself, in a folder that several runs may use at a time."""

from __future__ import annotations

import fcntl
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from refit_transport.config.schema import TinyModel
from refit_transport.errors import ConfigError, Violation

_MARKER = "made-by-refit-transport"


@contextmanager
def tiny_model(folder: Path, wanted: TinyModel) -> Iterator[None]:
    """Writes the model unless it is there, and keeps other runs from replacing it during the block.

    The folder appears with everything in it or not at all. A lock on the marker file says who uses the model.

    Raises:
        ConfigError: the folder holds something that wasn't made here, can't be written, or is used by another run
            that wants another model.
    """
    try:
        _make(folder, wanted)
    except (OSError, SafetensorError) as error:
        raise _refused(folder, f"can't be written: {error}") from error
    with (folder / _MARKER).open(encoding="utf-8") as marker:
        fcntl.flock(marker, fcntl.LOCK_SH)
        if not _is_there(folder, wanted):
            raise _refused(folder, "was replaced by another run that wants another model")
        yield


def _make(folder: Path, wanted: TinyModel) -> None:
    if _is_there(folder, wanted):
        return
    if not (folder / _MARKER).exists():
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise _refused(
                folder, "holds files that weren't made by refit_run.tiny_model, and they are not overwritten"
            )
        _write(folder, wanted)
        return
    with (folder / _MARKER).open(encoding="utf-8") as marker:
        try:
            fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _refused(folder, "is in use by another run that wants another model") from error
        _write(folder, wanted)


def _is_there(folder: Path, wanted: TinyModel) -> bool:
    marker = folder / _MARKER
    return marker.is_file() and marker.read_text(encoding="utf-8") == _marks(wanted)


def _marks(wanted: TinyModel) -> str:
    return json.dumps({"kind": wanted.kind, "seed": wanted.seed, "config": wanted.hf_config()})


def _write(folder: Path, wanted: TinyModel) -> None:
    from refit_transport.testing.models import save_tiny_model

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as made:
        model = Path(made) / "model"
        save_tiny_model(model, kind=wanted.kind, seed=wanted.seed, **wanted.changes())
        (model / _MARKER).write_text(_marks(wanted), encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        model.rename(folder)


def _refused(folder: Path, reason: str) -> ConfigError:
    remedy = "name another folder, or remove refit_run.tiny_model to use the model that is there"
    return ConfigError("refit_run", (Violation("policy.model_name", str(folder), reason, remedy),))
