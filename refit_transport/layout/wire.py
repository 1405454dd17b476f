"""Rank manifests as JSON, and stable digests. Nothing that arrives from a peer is ever unpickled."""

from __future__ import annotations

import hashlib
import json
import zlib
from typing import Any

from refit_transport.errors import LayoutError
from refit_transport.layout.box import Box
from refit_transport.layout.manifest import Opaque, Piece, RankManifest, TensorSpec

SCHEMA = 1
MAX_BYTES = 1 << 28


def encode(value: Any) -> bytes:
    """JSON of `value`, with sorted keys and compressed; equal values give equal bytes."""
    return zlib.compress(canonical_json(value).encode(), level=1)


def decode(data: bytes) -> Any:
    """The inverse of `encode`; LayoutError when the text is larger than 256 MiB or isn't JSON."""
    inflate = zlib.decompressobj()
    try:
        text = inflate.decompress(data, MAX_BYTES)
        if inflate.unconsumed_tail:
            raise LayoutError("", -1, f"a message of at most {MAX_BYTES} bytes", "a larger one")
        return json.loads(text)
    except (zlib.error, ValueError) as error:
        raise LayoutError("", -1, "a compressed JSON message", str(error)) from error


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
    """A plain value for `encode`. Names are stored once and referred to by index."""
    tensors = {spec.name: index for index, spec in enumerate(manifest.tensors)}
    buffers = {name: index for index, name in enumerate(dict.fromkeys(piece.buffer for piece in manifest.pieces))}
    return {
        "schema": SCHEMA,
        "rank": manifest.rank,
        "role": manifest.role,
        "tensors": [[spec.name, spec.shape, spec.dtype] for spec in manifest.tensors],
        "buffers": list(buffers),
        "pieces": [
            [
                tensors[piece.tensor],
                [[span.start, span.stop] for span in piece.box.spans],
                buffers[piece.buffer],
                piece.offset,
                piece.strides,
            ]
            for piece in manifest.pieces
        ],
        "opaque": [[opaque.tensor, opaque.reason] for opaque in manifest.opaque],
    }


def manifest_from_json(value: dict[str, Any]) -> RankManifest:
    """The inverse of `manifest_to_json`; LayoutError when the schema version or the structure isn't ours."""
    if value.get("schema") != SCHEMA:
        raise LayoutError("", int(value.get("rank", -1)), f"manifest schema {SCHEMA}", str(value.get("schema")))
    try:
        tensors = tuple(TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in value["tensors"])
        return RankManifest(
            value["rank"],
            value["role"],
            tensors,
            tuple(
                Piece(
                    tensors[tensor].name, Box.of(*map(tuple, spans)), value["buffers"][buffer], offset, tuple(strides)
                )
                for tensor, spans, buffer, offset, strides in value["pieces"]
            ),
            tuple(Opaque(tensor, reason) for tensor, reason in value["opaque"]),
        )
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise LayoutError("", -1, "a rank manifest", f"a malformed one ({error!r})") from error
