"""Rank manifests as JSON, and stable digests. Nothing that arrives from a peer is ever unpickled."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar, get_args

import numpy as np

from refit_transport.errors import LayoutError
from refit_transport.layout.box import Box
from refit_transport.layout.manifest import Opaque, PieceColumns, RankManifest, Role, Rows, TensorSpec

T = TypeVar("T")

SCHEMA = 2
# What ranks of one side have in common, or even both sides, however they cut their tensors.
_SHARED = ("tensors", "buffers", "rows")
MAX_BYTES = 1 << 28
# Compressing takes more time than so many bytes on the way.
_SMALL = 1 << 12
# How zlib's streams begin, and no JSON.
_COMPRESSED = b"x"


def encode(value: Any) -> bytes:
    """JSON of `value`, with sorted keys, compressed unless it is small; equal values give equal bytes."""
    text = canonical_json(value).encode()
    return text if len(text) <= _SMALL else zlib.compress(text, level=1)


def decode(data: bytes) -> Any:
    """The inverse of `encode`; LayoutError when the text is larger than 256 MiB or isn't JSON."""
    try:
        return json.loads(_inflated(data) if data.startswith(_COMPRESSED) else data)
    except (zlib.error, ValueError, RecursionError) as error:
        raise LayoutError("", -1, "a JSON message", str(error)) from error


def _inflated(data: bytes) -> bytes:
    inflate = zlib.decompressobj()
    text = inflate.decompress(data, MAX_BYTES)
    if inflate.unconsumed_tail:
        raise LayoutError("", -1, f"a message of at most {MAX_BYTES} bytes", "a larger one")
    return text


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def digest(*parts: bytes | str) -> str:
    """A stable SHA-256 hex digest of the parts, each length-prefixed."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


def manifest_to_json(manifest: RankManifest) -> dict[str, Any]:
    """A plain value for `encode`. What is distinct is stored once; "rows" has a list of differences per column."""
    names = tuple(spec.name for spec in manifest.tensors)
    columns = PieceColumns.of(manifest.pieces, tensors=names)
    if columns.tensors != names:
        columns = PieceColumns.of(tuple(columns), tensors=names)
    return {
        "schema": SCHEMA,
        "rank": manifest.rank,
        "role": manifest.role,
        "tensors": [[spec.name, spec.shape, spec.dtype] for spec in manifest.tensors],
        "boxes": [[[span.start, span.stop] for span in box.spans] for box in columns.boxes],
        "buffers": columns.buffers,
        "strides": columns.strides,
        "rows": np.diff(columns.rows, axis=0, prepend=0).T.tolist(),
        "opaque": [[opaque.tensor, opaque.reason] for opaque in manifest.opaque],
    }


def manifest_from_json(value: dict[str, Any]) -> RankManifest:
    """The inverse of `manifest_to_json`; LayoutError when the schema version or the structure isn't ours."""
    return ManifestReader({}).manifest(value)


def shared_parts(manifest: RankManifest) -> tuple[dict[str, Any], dict[str, bytes]]:
    """A manifest's JSON value with a digest in place of each part that other ranks have too, and the encoded parts."""
    value, parts = manifest_to_json(manifest), {}
    for name in _SHARED:
        data = encode(value[name])
        value[name] = digest(data)
        parts[value[name]] = data
    return value, parts


def part_digests(value: Any) -> list[str]:
    """The digests that stand in such a value."""
    return [value[name] for name in _SHARED if isinstance(value, dict) and isinstance(value.get(name), str)]


class ManifestReader:
    """Reads manifests whose parts may be shared; each part is decoded once, and what is read from it is one object."""

    def __init__(self, parts: Mapping[str, bytes]) -> None:
        """`parts` are by digest.

        Raises:
            LayoutError: a part isn't what its digest says.
        """
        for key, data in parts.items():
            if digest(data) != key:
                raise LayoutError("", -1, f"a part of a manifest with digest {key}", f"one with {digest(data)}")
        self._parts = parts
        self._read: dict[tuple[str, str], Any] = {}
        self._manifests: dict[str, RankManifest] = {}

    def manifest(self, value: Any) -> RankManifest:
        """The manifest; where another rank's is the same but for the rank, its replica.

        Raises:
            LayoutError: the schema version or the structure isn't ours.
        """
        rank = value.get("rank") if isinstance(value, dict) else None
        if type(rank) is not int:
            raise LayoutError("", -1, "a rank manifest", f"a malformed one (rank {rank!r})")
        if value.get("schema") != SCHEMA:
            raise LayoutError("", rank, f"manifest schema {SCHEMA}", str(value.get("schema")))
        key = canonical_json({**value, "rank": 0})
        try:
            if key not in self._manifests:
                self._manifests[key] = self._new(value)
        except (KeyError, IndexError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise LayoutError("", rank, "a rank manifest", f"a malformed one ({error!r})") from error
        return self._manifests[key].replica(rank)

    def _new(self, value: dict[str, Any]) -> RankManifest:
        tensors: _Tensors = self._part(value, "tensors", _Tensors.of)
        columns = PieceColumns(
            tensors.names,
            tuple(Box.of(*(_integers(span, count=2) for span in spans)) for spans in value["boxes"]),
            self._part(value, "buffers", _names),
            tuple(map(_integers, value["strides"])),
            self._part(value, "rows", _rows),
        )
        columns.check()
        opaque = tuple(Opaque(*_names(pair)) for pair in value["opaque"])
        if value["role"] not in get_args(Role):
            raise ValueError(f"role {value['role']!r}")
        return RankManifest(value["rank"], value["role"], tensors.specs, columns, opaque)

    def _part(self, value: dict[str, Any], name: str, read: Callable[[Any], T]) -> T:
        """What `read` makes of a part of the manifest, which stands there or is shared."""
        found = value[name]
        if not isinstance(found, str):
            return read(found)
        if (name, found) not in self._read:
            self._read[name, found] = read(decode(self._parts[found]))
        part: T = self._read[name, found]
        return part


@dataclass(frozen=True, slots=True)
class _Tensors:
    """A manifest's tensors, and their names."""

    specs: tuple[TensorSpec, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, value: Any) -> Self:
        names = _names([name for name, _, _ in value])
        return cls(tuple(TensorSpec(name, _integers(shape), dtype) for name, shape, dtype in value), names)


def _names(value: Any) -> tuple[str, ...]:
    if not all(isinstance(name, str) for name in value):
        raise ValueError("a name that isn't text")
    return tuple(value)


def _integers(value: Any, *, count: int | None = None) -> Any:
    found = tuple(value)
    if not all(type(number) is int for number in found) or count not in (None, len(found)):
        raise ValueError(f"{value!r} where integers belong")
    return found


def _rows(value: Any) -> Rows:
    columns = np.array(value)
    if columns.ndim != 2 or len(columns) != PieceColumns.WIDTH or (columns.size and columns.dtype != np.int64):
        raise ValueError(f"rows of shape {columns.shape} and {columns.dtype}")
    return np.cumsum(columns.astype(np.int64), axis=1).T.copy()
