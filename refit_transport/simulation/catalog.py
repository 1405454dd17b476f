"""The models and systems that ship with the package, by name; a Hugging Face `config.json` works as well."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from refit_transport.errors import ConfigError, Violation
from refit_transport.layout.presets.model import LogicalModel


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """A named model. `stand_in` says what a model stands for whose shapes aren't public; "" for real ones."""

    name: str
    model: LogicalModel
    stand_in: str = ""


@dataclass(frozen=True, slots=True)
class System:
    """One kind of machine. Rates in bytes per second, each direction, per GPU; `domain` counts GPUs with fast links."""

    name: str
    gpus_per_node: int
    domain: int
    nic_rate: float
    local_rate: float
    note: str = ""


def model_names() -> tuple[str, ...]:
    """The models that ship."""
    return tuple(_read("models.json"))


def system_names() -> tuple[str, ...]:
    """The systems that ship."""
    return tuple(_read("systems.json"))


def catalog_entry(name: str) -> Mapping[str, Any]:
    """What the package data say of a model: `config`, `parameters` (published), `parameters_from`, and where it is on
    the Hub (`checkpoint`) or what it stands for (`stand_in`)."""
    entry: Mapping[str, Any] = _read("models.json")[name]
    return entry


def find_model(name: str) -> CatalogModel:
    """A model by its name here (letter case doesn't matter), or from a `config.json` or a folder that has one.

    Raises:
        ConfigError: no such model or file, with what is near and what there is; or the file isn't usable.

    >>> find_model("qwen3-4b").model.architecture
    'Qwen3ForCausalLM'
    >>> find_model("Qwen3-5B")
    Traceback (most recent call last):
    refit_transport.errors.ConfigError: ...
    """
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json" or path.is_file():
        return CatalogModel(name, LogicalModel.from_config(_config(path), source=str(path)))
    entries = _read("models.json")
    known = _pick("model", name, entries, "or give the path of a config.json")
    entry = entries[known]
    return CatalogModel(known, LogicalModel.from_config(entry["config"], source=known), entry.get("stand_in", ""))


def find_system(name: str) -> System:
    """A system by its name.

    Raises:
        ConfigError: no such system, with what is near and what there is.

    >>> find_system("dgx-h100").domain
    8
    """
    entries = _read("systems.json")
    known = _pick("system", name, entries, "")
    entry = entries[known]
    return System(
        known,
        entry["gpus_per_node"],
        entry["domain"],
        entry["nic_gbytes"] * 1e9,
        entry["local_gbytes"] * 1e9,
        entry.get("note", ""),
    )


def _pick(what: str, name: str, known: Iterable[str], more: str) -> str:
    by_lower = {each.lower(): each for each in known}
    found = by_lower.get(name.lower())
    if found is not None:
        return found
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    hint = f"did you mean {by_lower[near[0]]}? " if near else ""
    reason = f"is no {what} that ships: {hint}known: {', '.join(by_lower.values())}"
    raise ConfigError("simulate", (Violation(what, repr(name), reason, more),))


def _config(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = f"can't be read as JSON ({error})"
        raise ConfigError("simulate", (Violation("model", repr(str(path)), reason, ""),)) from error
    if not isinstance(value, dict):
        raise ConfigError("simulate", (Violation("model", repr(str(path)), "must hold a JSON object", ""),))
    return value


def _read(name: str) -> Any:
    return json.loads(files("refit_transport.simulation").joinpath("data", name).read_text(encoding="utf-8"))
