"""Messages on the wire: however the stream is cut they are the same; whatever else comes is known for what it is."""

from __future__ import annotations

import itertools
import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refit_transport.fabrics import frames
from refit_transport.fabrics.frames import SCHEMA, STRANGER_BYTES, Frame, FrameError, FrameReader, pack

PREFIX = struct.Struct("!4sHHII")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
HEADERS = st.dictionaries(st.text(max_size=6).filter(lambda name: name != "sizes"), JSON, max_size=4)
MESSAGES = st.lists(st.tuples(HEADERS, st.lists(st.binary(max_size=40), max_size=4)), max_size=5)


def trusting() -> FrameReader:
    reader = FrameReader()
    reader.trust()
    return reader


def raw(text: bytes, payload: bytes = b"", *, magic: bytes = b"RFTC", schema: int = SCHEMA) -> bytes:
    return PREFIX.pack(magic, schema, 0, len(text), len(payload)) + text + payload


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({min(place, len(data)) for place in places} | {0, len(data)})
    return [data[begin:end] for begin, end in itertools.pairwise(ends)]


@given(MESSAGES, st.lists(st.integers(0, 2000), max_size=20))
def test_any_split_of_a_stream_gives_the_same_messages(messages, places) -> None:
    stream = b"".join(pack(header, parts) for header, parts in messages)
    reader = trusting()
    found = [frame for chunk in cut(stream, places) for frame in reader.feed(chunk)]
    assert found == [Frame(header, tuple(parts)) for header, parts in messages]


@given(st.binary(min_size=1, max_size=300), st.lists(st.integers(0, 300), max_size=5))
def test_garbage_is_an_error_or_an_unfinished_message_and_never_anything_else(data, places) -> None:
    for reader in (FrameReader(), trusting()):
        kind, found = "", []
        try:
            found = [frame for chunk in cut(data, places) for frame in reader.feed(chunk)]
        except FrameError as error:
            kind = error.kind
        assert found == []
        assert kind in ("garbage", "oversized", "schema") or data.startswith(b"RFTC"[: len(data)])


@given(HEADERS, st.lists(st.binary(max_size=20), max_size=3), st.data())
def test_a_flipped_bit_never_gives_another_kind_of_error(header, parts, data) -> None:
    stream = bytearray(pack(header, parts))
    place = data.draw(st.integers(0, len(stream) - 1))
    stream[place] ^= 1 << data.draw(st.integers(0, 7))
    try:
        for frame in trusting().feed(bytes(stream)):
            assert isinstance(frame.header, dict)
            assert sum(map(len, frame.parts)) == sum(map(len, parts))
    except FrameError:
        pass


@pytest.mark.parametrize(
    ("stream", "kind"),
    [
        (b"G", "garbage"),
        (b"GET / HTTP/1.1\r\n\r\n", "garbage"),
        (raw(b"{}", magic=b"RFTD"), "garbage"),
        (raw(b'{"sizes":[]}', schema=SCHEMA + 1), "schema"),
        (raw(b"{}"), "garbage"),
        (raw(b"not json"), "garbage"),
        (raw(b"\xff\xfe"), "garbage"),
        (raw(b'[{"sizes":[]}]'), "garbage"),
        (raw(b'"sizes"'), "garbage"),
        (raw(b"7"), "garbage"),
        (raw(b'{"sizes":3}', b"abc"), "garbage"),
        (raw(b'{"sizes":[4]}', b"abc"), "garbage"),
        (raw(b'{"sizes":[2]}', b"abc"), "garbage"),
        (raw(b'{"sizes":[5,-2]}', b"abc"), "garbage"),
        (raw(b'{"sizes":[true,2]}', b"abc"), "garbage"),
        (raw(b'{"sizes":[3.0]}', b"abc"), "garbage"),
        (raw(b'{"sizes":["3"]}', b"abc"), "garbage"),
        (raw(b'{"sizes":[]' + b"[" * 100_000), "garbage"),
        (raw(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b',"sizes":[]}'), "garbage"),
        (raw(b'{"a":' + b"9" * 10_000 + b',"sizes":[]}'), "garbage"),
        (PREFIX.pack(b"RFTC", SCHEMA, 0, frames.MAX_HEADER_BYTES + 1, 0), "oversized"),
        (PREFIX.pack(b"RFTC", SCHEMA, 0, 2, frames.MAX_PAYLOAD_BYTES + 1), "oversized"),
        (PREFIX.pack(b"RFTC", SCHEMA, 0, 2**32 - 1, 2**32 - 1), "oversized"),
    ],
)
def test_what_is_wrong_with_a_stream_is_known(stream: bytes, kind: str) -> None:
    with pytest.raises(FrameError) as caught:
        list(trusting().feed(stream))
    assert caught.value.kind == kind


def test_a_stranger_may_send_as_much_as_a_proof_needs_and_no_payload() -> None:
    fits = json.dumps({"a": "x" * (STRANGER_BYTES - 100), "sizes": []}).encode()
    assert len(list(FrameReader().feed(raw(fits)))) == 1
    large = json.dumps({"a": "x" * STRANGER_BYTES, "sizes": []}).encode()
    for stream in (raw(large), raw(b'{"sizes":[1]}', b"1")):
        with pytest.raises(FrameError) as caught:
            list(FrameReader().feed(stream[: PREFIX.size]))  # before any of it is kept
        assert caught.value.kind == "oversized"
        assert len(list(trusting().feed(stream))) == 1


def test_a_reader_that_trusts_in_the_middle_of_a_stream_takes_what_follows() -> None:
    reader = FrameReader()
    stream = reader.feed(pack({"hello": 1}) + pack({"op": "set"}, [bytes(5000)]))
    assert next(stream).header == {"hello": 1}
    reader.trust()
    assert next(stream).parts == (bytes(5000),)


def test_memory_is_bounded_by_one_message_however_much_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_PAYLOAD_BYTES", 1000)
    reader, chunk = trusting(), 64
    stream = b"".join(pack({"n": number}, [bytes(1000)]) for number in range(50))
    longest = 0
    for begin in range(0, len(stream), chunk):
        list(reader.feed(stream[begin : begin + chunk]))
        longest = max(longest, len(reader._data))
    assert longest < len(pack({"n": 50}, [bytes(1000)])) + chunk


@pytest.mark.parametrize(("header", "parts"), [({"a": "x" * frames.MAX_HEADER_BYTES}, []), ({}, [bytes(1001)])])
def test_what_no_receiver_takes_is_not_sent(monkeypatch: pytest.MonkeyPatch, header, parts) -> None:
    monkeypatch.setattr(frames, "MAX_PAYLOAD_BYTES", 1000)
    with pytest.raises(FrameError, match="at most") as caught:
        pack(header, parts)
    assert caught.value.kind == "oversized"
