"""YAML files, `defaults:`, overrides and `${...}`: from text to plain values, with the file that set each of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from refit_transport.config.keys import KeyPath, dotted, shown
from refit_transport.errors import ConfigError, Violation

_MAX_DEPTH = 64
_COMMAND_LINE = "--set"
# Arithmetic that NeMo RL's YAML files use.
_RESOLVERS: Mapping[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "max": lambda a, b: max(a, b),
}
_REFERENCE = re.compile(r"\$\{(\w[\w.]*)\}")


@dataclass(frozen=True, slots=True)
class Document:
    """Plain values as the files say, after merging and interpolation.

    `problems` are the values that could not be worked out; they stand in `values` as they were written. `origins` names
    the file that set a key, `references` the key whose value it takes over by `${...}`, both by dotted path.
    """

    source: str
    values: dict[str, Any]
    problems: tuple[Violation, ...]
    origins: Mapping[str, str]
    references: Mapping[str, str]

    def root_of(self, path: str) -> str:
        """The key whose value a key takes over in the end; itself if it goes in a circle."""
        passed = [path]
        while (target := self.references.get(passed[-1])) is not None:
            if target in passed:
                return path
            passed.append(target)
        return passed[-1]

    def with_origin(self, violation: Violation) -> Violation:
        """Says where the value comes from, if it isn't the file that was asked for."""
        origin = self.origins.get(violation.path, self.source)
        return violation if origin == self.source else replace(violation, value=f"{violation.value}, set in {origin}")


def read_document(path: Path, overrides: Sequence[str]) -> Document:
    """Reads a file, the files that its `defaults:` name, and `key=value` overrides, the later over the earlier.

    A `defaults:` path is relative to the file that says it. `_override_: true` in a section replaces the inherited
    section instead of merging with it, as in NeMo RL.

    Raises:
        ConfigError: a file can't be read, or an override can't.
    """
    reader = _Reader()
    merged = reader.merge(DictConfig({}), reader.read(path, chain=()))
    for text in overrides:
        merged = reader.merge(merged, reader.parse_override(text))
    if reader.problems:
        raise ConfigError(str(path), tuple(reader.problems))
    return _resolved(merged, source=str(path), origins=reader.origins)


def read_mapping(values: Mapping[str, Any], source: str) -> Document:
    """The same for values that were read elsewhere."""
    return _resolved(OmegaConf.create(dict(values)), source=source, origins={})


@dataclass(slots=True)
class _Reader:
    """Collects the problems of all the files, so that one error tells them all."""

    problems: list[Violation] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)

    def read(self, path: Path, *, chain: tuple[Path, ...]) -> DictConfig:
        identity = path.resolve()
        if identity in chain:
            loop = " -> ".join(step.name for step in (*chain[chain.index(identity) :], identity))
            self._problem(
                chain[-1], "defaults", str(path), f"goes in a circle: {loop}", "remove one of these `defaults:`"
            )
            return DictConfig({})
        config = self._parse_file(path, asked_by=chain[-1] if chain else None)
        merged = DictConfig({})
        for name in self._parents(path, config):
            merged = self.merge(merged, self.read(path.parent / name, chain=(*chain, identity)))
        for where in _paths(OmegaConf.to_container(config, resolve=False)):
            self.origins[dotted(where)] = str(path)
        return self.merge(merged, config)

    def merge(self, base: DictConfig, over: DictConfig) -> DictConfig:
        _replace_marked_sections(base, over)
        _drop_other_kinds(base, over)
        merged = OmegaConf.merge(base, over)
        assert isinstance(merged, DictConfig)  # for the type checker: both are
        return merged

    def parse_override(self, text: str) -> DictConfig:
        if "=" not in text.lstrip("="):
            self.problems.append(
                Violation(_COMMAND_LINE, shown(text), "is not key=value", "write it as policy.precision=float32")
            )
            return DictConfig({})
        try:
            override = OmegaConf.from_dotlist([text])
        except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
            self.problems.append(Violation(_COMMAND_LINE, shown(text), f"can't be read ({_first_line(error)})", ""))
            return DictConfig({})
        for where in _paths(OmegaConf.to_container(override, resolve=False)):
            self.origins[dotted(where)] = _COMMAND_LINE
        return override

    def _parse_file(self, path: Path, *, asked_by: Path | None) -> DictConfig:
        try:
            config = OmegaConf.load(path)
        except OSError as error:
            reason = f"can't be read ({error.strerror or _first_line(error)})"
            remedy = f"`defaults:` in {asked_by} names it, relative to that file" if asked_by else "name a YAML file"
            self._problem(path, "", str(path), reason, remedy)
        except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
            mark = getattr(error, "problem_mark", None)
            line = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
            what = getattr(error, "problem", None) or _first_line(error)
            self._problem(path, "", "text", f"is not valid YAML ({line}{what})", "correct that line")
        else:
            if isinstance(config, DictConfig):
                return config
            self._problem(path, "", "a list", "must be a mapping of keys", "start with `policy:` and `cluster:`")
        return DictConfig({})

    def _parents(self, path: Path, config: DictConfig) -> list[str]:
        defaults = OmegaConf.to_container(config, resolve=False).get("defaults")  # type: ignore[union-attr]
        config.pop("defaults", None)
        if defaults is None:
            return []
        names = defaults if isinstance(defaults, list) else [defaults]
        if all(isinstance(name, str) for name in names):
            return names
        self._problem(path, "defaults", shown(defaults), "must be a path or a list of paths", "for example base.yaml")
        return []

    def _problem(self, path: Path, key: str, value: str, reason: str, remedy: str) -> None:
        self.problems.append(Violation(f"{path}: {key}" if key else str(path), value, reason, remedy))


def _replace_marked_sections(base: DictConfig, over: DictConfig) -> None:
    """Removes from `base` what a section of `over` marked `_override_: true` replaces, and the marks."""
    for key in list(over.keys()):
        section = _section(over, key)
        if section is None:
            continue
        if OmegaConf.to_container(section, resolve=False).get("_override_"):  # type: ignore[union-attr]
            base.pop(key, None)
        section.pop("_override_", None)
        _replace_marked_sections(_section(base, key) or DictConfig({}), section)


def _drop_other_kinds(base: DictConfig, over: DictConfig) -> None:
    """Removes from `base` what is a section where `over` has a list, or a list where it has a section.

    OmegaConf can't merge these; the later one counts, and the schema tells if it is wrong.
    """
    for key in list(over.keys()):
        earlier, later = _container(base, key), _container(over, key)
        if isinstance(earlier, DictConfig) and isinstance(later, DictConfig):
            _drop_other_kinds(earlier, later)
        elif isinstance(earlier, ListConfig) or isinstance(later, ListConfig):
            base.pop(key, None)


def _section(config: DictConfig, key: Any) -> DictConfig | None:
    value = _container(config, key)
    return value if isinstance(value, DictConfig) else None


def _container(config: DictConfig, key: Any) -> DictConfig | ListConfig | None:
    if key not in config or OmegaConf.is_missing(config, key) or OmegaConf.is_interpolation(config, key):
        return None
    value = config[key]
    return value if isinstance(value, DictConfig | ListConfig) else None


def _paths(values: object, prefix: KeyPath = ()) -> Iterator[KeyPath]:
    if prefix:
        yield prefix
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from _paths(value, (*prefix, str(key)))
    elif isinstance(values, list):
        for index, value in enumerate(values):
            yield from _paths(value, (*prefix, index))


def _resolved(config: DictConfig, *, source: str, origins: Mapping[str, str]) -> Document:
    # OmegaConf 2.4 renamed it.
    register = getattr(OmegaConf, "register_resolver", None) or OmegaConf.register_new_resolver
    for name, function in _RESOLVERS.items():
        if not OmegaConf.has_resolver(name):
            register(name, function)
    problems: list[Violation] = []
    references: dict[str, str] = {}

    def plain(node: Any, where: KeyPath) -> Any:
        if not OmegaConf.is_config(node):
            return node
        if len(where) > _MAX_DEPTH:
            raise RecursionError
        written = OmegaConf.to_container(node, resolve=False)
        if isinstance(written, dict):
            return {key: read(node, key, written[key], (*where, str(key))) for key in written}
        if isinstance(written, list):
            return [read(node, index, text, (*where, index)) for index, text in enumerate(written)]
        return written

    def read(node: Any, key: Any, written: Any, where: KeyPath) -> Any:
        if isinstance(written, str) and (reference := _REFERENCE.fullmatch(written)) is not None:
            references[dotted(where)] = reference[1]
        try:
            return plain(node[key], where)
        except RecursionError:
            if len(where) > 1 and not isinstance(written, str):
                raise
            problem = "refers to itself"
        except (OmegaConfBaseException, ValueError, TypeError, ArithmeticError) as error:
            is_unset = isinstance(written, str) and written == "???"
            problem = "must be set" if is_unset else f"can't be worked out ({_first_line(error)})"
        problems.append(Violation(dotted(where), shown(written), problem, "correct the `${...}`" * (written != "???")))
        return written

    return Document(source, plain(config, ()), tuple(problems), origins, references)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", maxsplit=1)[0] or type(error).__name__
