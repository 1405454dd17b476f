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
    except (OSError, ValueError) as error:
        raise ConfigError(str(folder), (Violation("config.json", str(path), f"can't be read: {error}", ""),)) from error
    if not isinstance(config, dict):
        raise ConfigError(str(folder), (Violation("config.json", str(path), "must hold a JSON object", ""),))
    return config
