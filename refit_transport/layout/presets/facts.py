"""Reading a model's `config.json`: sizes with a reason where one is missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from refit_transport.errors import ConfigError, Violation


@dataclass(frozen=True, slots=True)
class Facts:
    """The keys of a Hugging Face `config.json`, or of a section of it; `source` names the file in errors.

    With a list of `problems`, sizes that are missing are added to it and stand as 1 meanwhile, so that one error can
    tell all of them.

    >>> facts = Facts({"hidden_size": 64, "text_config": {"num_hidden_layers": 2}}, "config.json")
    >>> facts.size("hidden_size"), facts.section("text_config").size("num_hidden_layers")
    (64, 2)
    >>> facts.size("vocab_size")
    Traceback (most recent call last):
    refit_transport.errors.ConfigError: config.json: 1 problem
      vocab_size: must be a whole number, at least 1 (got nothing)
    """

    config: Mapping[str, Any]
    source: str
    problems: list[Violation] | None = None

    def get(self, name: str) -> Any:
        """The value, or None."""
        return self.config.get(name)

    def flag(self, name: str) -> bool:
        """The value of a switch; absent is off."""
        return bool(self.config.get(name))

    def size(self, *names: str, default: int | None = None) -> int:
        """The first of these keys that is present (transformers may write an attribute under its mapped name).

        Raises:
            ConfigError: none is, and there is no default; or it is no whole number above 0.
        """
        value = next((self.config[name] for name in names if self.config.get(name) is not None), default)
        if type(value) is not int or value < 1:
            got = "nothing" if value is None else repr(value)
            return self._stand_in(names[0], got, "must be a whole number, at least 1")
        return value

    def count(self, *names: str) -> int:
        """The first of these keys that is present, 0 where none is."""
        value = next((self.config[name] for name in names if self.config.get(name) is not None), 0)
        if type(value) is not int or value < 0:
            return self._stand_in(names[0], repr(value), "must be a whole number, at least 0")
        return value

    def _stand_in(self, key: str, got: str, reason: str) -> int:
        if self.problems is None:
            raise self.error(key, got, reason)
        problem = Violation(key, got, reason, "")
        if problem not in self.problems:
            self.problems.append(problem)
        return 1

    def section(self, name: str) -> Self:
        """A nested section; the keys themselves where there is none: text configs are written both ways."""
        inner = self.config.get(name)
        return self if inner is None else type(self)({**inner}, f"{self.source}: {name}", self.problems)

    def error(self, key: str, got: str, reason: str) -> ConfigError:
        """One problem with one key."""
        return ConfigError(self.source, (Violation(key, got, reason, ""),))
