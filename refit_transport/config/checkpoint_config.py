"""A checkpoint folder's `config.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from refit_transport.errors import ConfigError, Violation


def read_config(folder: Path) -> dict[str, Any]:
    """The checkpoint's `config.json`.

    Raises:
        ConfigError: the folder or the file doesn't exist, or the file is no JSON object.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise _unreadable(folder, "is missing" if folder.is_dir() else "is missing: there is no such folder") from error
    except (OSError, ValueError) as error:
        raise _unreadable(folder, f"can't be read: {error}") from error
    if not isinstance(config, dict):
        raise _unreadable(folder, "can't be read: it must hold a JSON object")
    return config


def _unreadable(folder: Path, reason: str) -> ConfigError:
    return ConfigError(str(folder), (Violation("config.json", str(folder / "config.json"), reason, ""),))
