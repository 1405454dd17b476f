"""The control channel's messages on the wire: a fixed prefix, a JSON header, raw bytes; each with a limit.

Whatever arrives is a number of bounded length, JSON, or bytes that somebody else interprets. Nothing is unpickled.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

SCHEMA = 1
# Of a peer that hasn't proved anything yet, only as much is read as a proof needs.
STRANGER_BYTES = 1 << 10
MAX_HEADER_BYTES = 1 << 22
MAX_PAYLOAD_BYTES = 1 << 28

_PREFIX = struct.Struct("!4sHHII")
_MAGIC = b"RFTC"


class FrameError(Exception):
    """What arrived is no message of ours; `kind` says which counter it belongs to."""

    def __init__(self, kind: Literal["garbage", "oversized", "schema"], what: str) -> None:
        super().__init__(what)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Frame:
    """One message. `parts` are its raw bytes, cut where the sender's list of them was."""

    header: dict[str, Any]
    parts: tuple[bytes, ...] = ()


def pack(header: dict[str, Any], parts: Sequence[bytes] = ()) -> bytes:
    """A message's bytes.

    Raises:
        FrameError: it is larger than a receiver takes.
    """
    text = json.dumps({**header, "sizes": [len(part) for part in parts]}, separators=(",", ":")).encode()
    size = sum(map(len, parts))
    if len(text) > MAX_HEADER_BYTES or size > MAX_PAYLOAD_BYTES:
        limits = f"{MAX_HEADER_BYTES} and {MAX_PAYLOAD_BYTES}"
        raise FrameError("oversized", f"{len(text)} and {size} bytes; at most {limits} are sent")
    return b"".join((_PREFIX.pack(_MAGIC, SCHEMA, 0, len(text), size), text, *parts))


class FrameReader:
    """Cuts a stream of bytes into messages; keeps no more of it than one message may have."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._most = (STRANGER_BYTES, 0)

    def trust(self) -> None:
        """From now on, takes messages of the full size."""
        self._most = (MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES)

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The messages that are complete with this data.

        Raises:
            FrameError: the stream isn't one of messages, or one is too large; the reader is of no use afterwards.
        """
        self._data += data
        while (frame := self._next()) is not None:
            yield frame

    def _next(self) -> Frame | None:
        if len(self._data) < _PREFIX.size:
            # A wrong beginning is known as such before it is complete.
            if not _MAGIC.startswith(bytes(self._data[: len(_MAGIC)])):
                raise FrameError("garbage", "it doesn't begin as a message does")
            return None
        magic, schema, _, header_bytes, payload_bytes = _PREFIX.unpack_from(self._data)
        if magic != _MAGIC:
            raise FrameError("garbage", "it doesn't begin as a message does")
        if schema != SCHEMA:
            raise FrameError("schema", f"message schema {schema}, this side has {SCHEMA}")
        if header_bytes > self._most[0] or payload_bytes > self._most[1]:
            raise FrameError("oversized", f"a message of {header_bytes} and {payload_bytes} bytes")
        end = _PREFIX.size + header_bytes + payload_bytes
        if len(self._data) < end:
            return None
        with memoryview(self._data) as view:
            text = bytes(view[_PREFIX.size : _PREFIX.size + header_bytes])
            payload = bytes(view[_PREFIX.size + header_bytes : end])
        del self._data[:end]
        return _frame(text, payload)


def _frame(text: bytes, payload: bytes) -> Frame:
    try:
        header = json.loads(text)
        sizes = header.pop("sizes")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise FrameError("garbage", "its header isn't what a message has") from error
    if not isinstance(sizes, list) or not all(type(size) is int and size >= 0 for size in sizes):
        raise FrameError("garbage", "its header isn't what a message has")
    if sum(sizes) != len(payload):
        raise FrameError("garbage", "its parts don't add up")
    parts, begin = [], 0
    for size in sizes:
        parts.append(payload[begin : begin + size])
        begin += size
    return Frame(header, tuple(parts))
