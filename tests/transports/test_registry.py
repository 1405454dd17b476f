"""The registry: names are listed without imports, nothing is replaced silently, and every error is typed."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from refit_transport.errors import DuplicateTransportError, MissingDependencyError, UnknownTransportError
from refit_transport.transports import registry
from refit_transport.transports.registry import (
    BUILT_IN,
    ENTRY_POINT_GROUP,
    PROTOCOL,
    TransportEntry,
    known_transports,
    load,
    resolve,
)


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    """What one test says is installed isn't for any other."""
    registry._installed.cache_clear()
    yield
    registry._installed.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, **targets: str) -> None:
    points = [EntryPoint(name, value, ENTRY_POINT_GROUP) for name, value in targets.items()]
    monkeypatch.setattr(registry, "entry_points", lambda *, group: points if group == ENTRY_POINT_GROUP else [])


def test_built_in_names() -> None:
    assert [entry.name for entry in BUILT_IN] == ["nccl_reshard", "gather_broadcast"]
    assert resolve("nccl_reshard").target == "refit_transport.transports.nccl_reshard:NcclReshard"
    assert resolve("gather_broadcast").target == "refit_transport.transports.gather_broadcast:GatherBroadcast"
    assert all(entry.description for entry in BUILT_IN)


def test_none_is_gather_broadcast() -> None:
    assert resolve(None) == resolve("gather_broadcast")


def test_listing_and_resolving_imports_no_transport() -> None:
    script = (
        "import sys; from refit_transport.transports.registry import known_transports, resolve;"
        "known_transports(); resolve(None); resolve('no.such.module:Class');"
        "print([m for m in sys.modules if m.startswith('refit_transport.transports.') and not m.endswith('registry')]"
        " + [m for m in ('torch', 'ray', 'vllm', 'pydantic', 'no') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_entry_points_are_listed_unimported(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, theirs="does_not_exist.anywhere:Theirs")
    assert list(known_transports()) == ["nccl_reshard", "gather_broadcast", "theirs"]
    assert resolve("theirs").target == "does_not_exist.anywhere:Theirs"


def test_an_entry_point_replaces_no_built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, nccl_reshard="theirs:Theirs")
    for look_up in (known_transports, lambda: resolve("nccl_reshard"), lambda: resolve(None)):
        with pytest.raises(DuplicateTransportError) as caught:
            look_up()
        assert caught.value.name == "nccl_reshard"
        assert any("theirs:Theirs" in claim for claim in caught.value.claims)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_two_entry_points_with_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint("theirs", value, ENTRY_POINT_GROUP) for value in ("a:A", "b:B")]
    monkeypatch.setattr(registry, "entry_points", lambda *, group: points)
    with pytest.raises(DuplicateTransportError, match=r"a:A.*b:B"):
        resolve("theirs")


def test_the_same_entry_point_found_twice_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint("theirs", "a:A", ENTRY_POINT_GROUP)] * 2
    monkeypatch.setattr(registry, "entry_points", lambda *, group: points)
    assert resolve("theirs").target == "a:A"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nccl_rehsard", "did you mean 'nccl_reshard'?"),
        ("carrier_pigeon", "no built-in or installed transport"),
        ("", "no built-in or installed transport"),
        ("a:b:c", "package.module:Class"),
        (":Class", "package.module:Class"),
        ("module:", "package.module:Class"),
        ("some path:Class", "package.module:Class"),
    ],
)
def test_unknown_names_list_the_known(name: str, reason: str) -> None:
    with pytest.raises(UnknownTransportError) as caught:
        resolve(name)
    assert caught.value.known == ("nccl_reshard", "gather_broadcast")
    assert reason in caught.value.reason
    assert "gather_broadcast" in str(pickle.loads(pickle.dumps(caught.value)))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    calls = f"{' = '.join(PROTOCOL)} = print"
    lines = ("class Outer:", f"    {calls}", f"    class Inner: {calls}", "value = 3", "class Other: run = print")
    (tmp_path / "their_transport.py").write_text("\n".join(lines))
    (tmp_path / "their_broken.py").write_text("import a_package_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)
    return "their_transport"


def test_load_by_path(package: str) -> None:
    assert load(resolve(f"{package}:Outer")).__name__ == "Outer"
    assert load(resolve(f"{package}:Outer.Inner")).__name__ == "Inner"


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("nowhere_at_all.sub:Class", "no module 'nowhere_at_all'"),
        ("{0}:Nobody", "no class"),
        ("{0}:value", "no class"),
        ("{0}:Other", "lacks digest, traffic, check, footprint, legs"),
    ],
)
def test_load_of_what_is_not_there(package: str, target: str, reason: str) -> None:
    with pytest.raises(UnknownTransportError) as caught:
        load(resolve(target.format(package)))
    assert reason in caught.value.reason


def test_load_with_a_missing_package_names_the_extra(package: str) -> None:
    entry = TransportEntry("theirs", "their_broken:Class", "", extra="nccl")
    with pytest.raises(MissingDependencyError) as caught:
        load(entry)
    assert (caught.value.package, caught.value.extra) == ("a_package_nobody_has", "nccl")
