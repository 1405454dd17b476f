"""Names of transports and the classes behind them, imported only when they are used.

A name comes from the table here, from an installed package's entry point in the group `refit_transport.transports`, or
is itself a class, "package.module:Class". None means `gather_broadcast`, as in NeMo RL.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from refit_transport.errors import DuplicateTransportError, MissingDependencyError, UnknownTransportError

ENTRY_POINT_GROUP = "refit_transport.transports"
PROTOCOL = ("digest", "traffic", "check", "footprint", "legs", "run")
DEFAULT_TRANSPORT = "gather_broadcast"


@dataclass(frozen=True, slots=True)
class TransportEntry:
    """A transport by name: where its class is, what it does, and which extra of this package it needs ("" for none)."""

    name: str
    target: str
    description: str
    extra: str = ""
    provider: str = "refit-transport"


BUILT_IN: tuple[TransportEntry, ...] = (
    TransportEntry(
        name="nccl_reshard",
        target="refit_transport.transports.nccl_reshard:NcclReshard",
        description="each rank receives only its own shards; `coverage` and `routes` say which parameters",
    ),
    TransportEntry(
        name="gather_broadcast",
        target="refit_transport.transports.gather_broadcast:GatherBroadcast",
        description="full tensors, gathered and broadcast in packed buckets (the default)",
    ),
)


def known_transports() -> Mapping[str, TransportEntry]:
    """Every transport by name, the built-in ones first; imports none of them.

    Raises:
        DuplicateTransportError: an entry point takes a name that is taken.
    """
    return _merged(BUILT_IN, _installed())


@cache
def _installed() -> tuple[EntryPoint, ...]:
    """What is installed, which every session asks for: a look at all packages costs 10 ms and more."""
    return tuple(entry_points(group=ENTRY_POINT_GROUP))


def _merged(built_in: Iterable[TransportEntry], installed: Iterable[EntryPoint]) -> Mapping[str, TransportEntry]:
    entries = {entry.name: entry for entry in built_in}
    for point in sorted(installed, key=lambda point: (point.name, point.value)):
        entry = _from_entry_point(point)
        taken = entries.setdefault(entry.name, entry)
        if taken != entry:
            raise DuplicateTransportError(
                entry.name, (f"{taken.target} ({taken.provider})", f"{entry.target} ({entry.provider})")
            )
    return entries


def _from_entry_point(point: EntryPoint) -> TransportEntry:
    package = point.dist.name if point.dist is not None else "an installed package"
    return TransportEntry(point.name, point.value.replace(" ", ""), f"from {package}", provider=package)


def resolve(name: str | None) -> TransportEntry:
    """The entry of a name, without importing it.

    >>> resolve(None).name
    'gather_broadcast'
    >>> resolve("my_package.transports:Mine").target
    'my_package.transports:Mine'

    Raises:
        UnknownTransportError: nothing has that name.
        DuplicateTransportError: an installed package takes a name that is taken.
    """
    known = known_transports()
    if name is None:
        return known[DEFAULT_TRANSPORT]
    if name in known:
        return known[name]
    module, colon, attribute = name.partition(":")
    if colon:
        if not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
            raise UnknownTransportError(name, tuple(known), "it isn't of the form 'package.module:Class'")
        return TransportEntry(name, name, "a class by its path", provider=module.partition(".")[0])
    near = difflib.get_close_matches(name, known, n=1)
    reason = f"did you mean {near[0]!r}?" if near else "no built-in or installed transport has that name"
    raise UnknownTransportError(name, tuple(known), reason)


def load(entry: TransportEntry) -> type:
    """Imports the class of an entry.

    Raises:
        MissingDependencyError: a package that the transport imports isn't installed.
        UnknownTransportError: the module or the class doesn't exist, or isn't a class.
    """
    module_name, _, attribute = entry.target.partition(":")
    known = tuple(known_transports())
    try:
        found: object = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name == missing or module_name.startswith(f"{missing}."):
            raise UnknownTransportError(entry.name, known, f"there is no module {missing!r}") from error
        raise MissingDependencyError(missing, f"transport {entry.name!r}", entry.extra or "all") from error
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type):
        raise UnknownTransportError(entry.name, known, f"{module_name!r} has no class {attribute!r}")
    missing_calls = [call for call in PROTOCOL if not callable(getattr(found, call, None))]
    if missing_calls:
        reason = f"{attribute!r} is no transport: it lacks {', '.join(missing_calls)} (see transports.base.Transport)"
        raise UnknownTransportError(entry.name, known, reason)
    return found
