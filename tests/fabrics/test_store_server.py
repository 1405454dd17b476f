"""Members of a session at its store: who has a place, what ends it for all, and what nobody is shown."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest
from store_sessions import HOST, SECRET, SIZE, SOON_S, joined, oversized, works

from refit_transport.errors import TransferError
from refit_transport.fabrics import frames
from refit_transport.fabrics.deadline import Deadline
from refit_transport.fabrics.frames import pack
from refit_transport.fabrics.rendezvous import ControlChannel, Meeting, telling_others
from refit_transport.fabrics.secret import Secret
from refit_transport.fabrics.store_client import Membership, StoreClient, StoreGoneError


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rank": SIZE}, "has ranks 0 to 2, not 3"),
        ({"rank": -1}, "has ranks 0 to 2, not -1"),
        ({"rank": 0}, "another process has joined as rank 0"),
        ({"rank": 1, "incarnation": 3}, "incarnation 4 of its worker now; this one is incarnation 3"),
        ({"rank": 1, "incarnation": 5}, "incarnation 4 of its worker now; this one is incarnation 5"),
    ],
)
def test_who_knows_the_secret_but_has_no_place_is_told_why(session: ControlChannel, changes, reason: str) -> None:
    with pytest.raises(TransferError, match=reason):
        joined(session, changes["rank"], incarnation=changes.get("incarnation", 0))
    assert session.refused == {"member": 1}
    works(session)


def test_a_second_process_of_a_rank_is_refused_even_after_the_first_has_left(session: ControlChannel) -> None:
    first = joined(session, 2)
    for _ in range(2):
        with pytest.raises(TransferError, match="another process has joined as rank 2"):
            joined(session, 2)
        first.close()
    assert session.refused["member"] == 2


def client_of(session: ControlChannel, rank: int) -> StoreClient:
    client = StoreClient(
        host=HOST, port=session.meeting.port, secret=Secret(SECRET), member=Membership.of(rank, 4 if rank == 1 else 0)
    )
    client.join(SOON_S)
    return client


@pytest.mark.parametrize(
    "message",
    [
        b"garbage",
        oversized(frames.MAX_HEADER_BYTES + 1, 0),
        oversized(2, frames.MAX_PAYLOAD_BYTES + 1),
        pack({"op": "no such"}),
        pack({"op": "get", "keys": ["never"], "patience": "long"}),
        pack({"op": "get", "keys": ["never"], "patience": float("inf")}),
        pack({"op": "vote", "what": "w", "value": "x", "patience": 1.0}),
        pack({"op": "add", "key": "k", "amount": 10**300}) + b"garbage",
    ],
)
def test_a_member_that_sends_garbage_is_lost_and_the_session_fails_with_its_name(
    session: ControlChannel, message: bytes
) -> None:
    client, waiting = client_of(session, 2), joined(session, 1, incarnation=4)
    [first] = client._free
    second = client._connect(Deadline(SOON_S))  # another connection of the same rank doesn't save it
    errors: list[Exception] = []

    def wait() -> None:
        try:
            waiting.collect("never", (2,), deadline=Deadline(SOON_S))
        except TransferError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    began = time.monotonic()
    first.send(message, Deadline(SOON_S))
    thread.join(SOON_S)
    assert time.monotonic() - began < 2.0
    [error] = errors
    assert error.peer == 2
    assert "rank 2 on " in str(error)
    assert "sent rank 0 what isn't a message" in str(error)
    second.close()


def test_a_member_that_dies_is_told_of_at_once_and_one_that_leaves_is_not(session: ControlChannel) -> None:
    leaving, dying = joined(session, 1, incarnation=4), client_of(session, 2)
    leaving.close()
    time.sleep(0.2)
    assert session.failure() is None
    for connection in dying._free:
        connection.close()
    end = time.monotonic() + SOON_S
    while session.failure() is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert session.failure().peer == 2
    assert session.refused == {}


def test_a_patience_beyond_what_the_system_can_wait_is_no_trouble(session: ControlChannel) -> None:
    answer: list[list[Any]] = []
    thread = threading.Thread(
        target=lambda: answer.append(session.collect("topic", (2,), deadline=Deadline(1e8))), daemon=True
    )
    session.timeout_s = 1e8
    thread.start()
    time.sleep(0.1)
    joined(session, 2).publish("topic", 1)
    thread.join(SOON_S)
    assert answer == [[1]]


def test_a_request_that_is_too_large_is_an_error_of_its_own(
    session: ControlChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "MAX_PAYLOAD_BYTES", 1000)
    with pytest.raises(TransferError, match="a message can't be sent"):
        session.share({"a": bytes(1001)})
    monkeypatch.undo()
    works(session)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_no_store_listens_on_every_interface(host: str) -> None:
    with pytest.raises(TransferError, match="every interface"):
        ControlChannel.listen(host=host, port=0, world_size=1, timeout_s=1.0)


def test_the_port_is_there_on_its_own_address_alone(session: ControlChannel) -> None:
    for address in ("127.0.0.2", "127.1.1.1", *_other_addresses()):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address, session.meeting.port), timeout=SOON_S)
    assert session.refused == {}


def _other_addresses() -> list[str]:
    found = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    return sorted(str(address) for address in found if not str(address).startswith("127."))


def test_nothing_that_is_shown_contains_the_secret(session: ControlChannel) -> None:
    channel = joined(session, 2)
    shown = [repr(part) + str(part) for part in (session, channel, session.meeting, Secret(SECRET), channel._client)]
    for cause in (
        lambda: joined(session, 2),
        lambda: ControlChannel.join(
            Meeting(HOST, session.meeting.port, SECRET[:-1]), rank=1, world_size=SIZE, timeout_s=0.5
        ),
    ):
        with pytest.raises(TransferError) as caught:
            cause()
        shown.append(repr(caught.value) + str(caught.value))
    with pytest.raises(ValueError, match="xyz"), telling_others(channel):
        raise ValueError("xyz")
    shown.append(str(session.failure()))
    assert not any(SECRET[:-1] in text for text in shown)


def test_every_session_has_a_secret_of_its_own_that_nobody_could_guess() -> None:
    secrets = {Secret.new().text for _ in range(100)}
    assert len(secrets) == 100
    assert {len(bytes.fromhex(text)) for text in secrets} == {32}
    with pytest.raises(ValueError, match="empty"):
        Secret("")


def test_a_gone_store_is_no_new_wait(session: ControlChannel) -> None:
    client = client_of(session, 2)
    client.close()
    with pytest.raises(StoreGoneError, match="left the refit"):
        client.request({"op": "count"}, patience=1.0)
