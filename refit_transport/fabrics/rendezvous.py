"""The control channel of a refit: small JSON messages, agreements and causes of failure, among ranks that belong."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self

from torch._C._distributed_c10d import Store

from refit_transport.errors import AgreementError, DeadlineError, PeerLateError, RefitTransportError, TransferError
from refit_transport.fabrics.deadline import Deadline
from refit_transport.fabrics.frames import Frame, FrameError
from refit_transport.fabrics.secret import Secret
from refit_transport.fabrics.store_client import GroupStore, Membership, StoreClient, StoreGoneError
from refit_transport.fabrics.store_server import StoreServer
from refit_transport.layout.wire import decode, encode

_PART = "part"
# The others give up later than rank 0, so that all give the same cause.
_AFTER_RANK_0_S = 1.0


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where a session's rank 0 listens, and what only those know who belong to it."""

    host: str
    port: int
    secret: str = field(repr=False)


class ControlChannel:
    """One rank's access to the session's store, which rank 0 hosts.

    Rank 0 makes it with `listen` and hands `meeting` to the others, who `join`. Every call ends by its
    deadline, and at once when any rank has failed or its process has ended.
    """

    def __init__(
        self, client: StoreClient, secret: Secret, *, world_size: int, timeout_s: float, server: StoreServer | None
    ) -> None:
        self._client, self._secret, self._server = client, secret, server
        self.timeout_s, self.world_size = timeout_s, world_size
        self._claimed = False
        self._own: set[str] = set()
        if server is not None:
            weakref.finalize(self, server.close)

    @classmethod
    def listen(
        cls,
        *,
        host: str,
        port: int,
        world_size: int,
        timeout_s: float,
        secret: str | None = None,
        incarnations: Mapping[int, int] | None = None,
    ) -> Self:
        """Opens the session as rank 0, on this address alone; `port` 0 is any free one.

        Args:
            host, port: where the other ranks reach this one.
            world_size: of the session.
            timeout_s: how long a request may take, in seconds, where a call has no deadline of its own.
            secret: of the session; a new one when None.
            incarnations: of the workers that belong, by rank; a rank that isn't in it may be any.

        Raises:
            TransferError: the port is taken or the address isn't ours.
        """
        known = Secret.new() if secret is None else Secret(secret)
        server = StoreServer(host=host, port=port, secret=known, world_size=world_size, incarnations=incarnations)
        member = Membership.of(0, (incarnations or {}).get(0, 0))
        client = StoreClient(host=host, port=server.port, secret=known, member=member)
        client.join(timeout_s)
        return cls(client, known, world_size=world_size, timeout_s=timeout_s, server=server)

    @classmethod
    def join(cls, meeting: Meeting, *, rank: int, world_size: int, timeout_s: float, incarnation: int = 0) -> Self:
        """Connects to rank 0.

        Raises:
            TransferError: nobody listens there within `timeout_s`, or it doesn't let this rank in.
        """
        known, member = Secret(meeting.secret), Membership.of(rank, incarnation)
        client = StoreClient(host=meeting.host, port=meeting.port, secret=known, member=member)
        client.join(timeout_s)
        return cls(client, known, world_size=world_size, timeout_s=timeout_s, server=None)

    @property
    def rank(self) -> int:
        return self._client.member.rank

    @property
    def host(self) -> str:
        """The address of rank 0, from which the ranks' own addresses are looked up."""
        return self._client.host

    @property
    def meeting(self) -> Meeting:
        """What the other ranks need in order to join."""
        return Meeting(self._client.host, self._client.port, self._secret.text)

    @property
    def refused(self) -> Mapping[str, int]:
        """On rank 0: how many connections were dropped, by what was wrong with them."""
        return {} if self._server is None else dict(self._server.refused)

    def claim(self) -> None:
        """Takes the channel for one session: a second one would read what the first left in the store.

        Raises:
            TransferError: it was taken before.
        """
        if self._claimed:
            raise TransferError(self.rank, -1, "prepare", "", "a control channel serves one session: open a new one")
        self._claimed = True

    def close(self) -> None:
        """Leaves the session. What others still wait to hear from this rank, they wait for no longer."""
        self._client.close()
        if self._server is not None:
            self._server.close()

    def group_store(self, name: str) -> Store:
        """A name space of the store for a process group's own rendezvous."""
        store: Store = GroupStore(self._client, name, timeout_s=self.timeout_s)
        return store

    def publish(self, topic: str, value: Any) -> None:
        """Makes this rank's JSON value for a topic visible to all."""
        self.publish_all({topic: value})

    def publish_all(self, values: Mapping[str, Any]) -> None:
        """Publishes several at once, by topic."""
        keys = [f"{topic}/{self.rank}" for topic in values]
        self._own.update(keys)
        self._ask(next(iter(values)), {"op": "set", "keys": keys}, [encode(value) for value in values.values()])

    def collect(self, topic: str, ranks: Iterable[int], *, deadline: Deadline) -> list[Any]:
        """The values of these ranks for a topic, in the given order.

        Raises:
            DeadlineError: a rank published nothing in time; names it.
            TransferError: another rank reported a failure, or its process ended, meanwhile.
        """
        keys = [f"{topic}/{rank}" for rank in ranks]
        if not keys:
            return []
        return [decode(part) for part in self._ask(topic, {"op": "get", "keys": keys}, deadline=deadline).parts]

    def share(self, parts: Mapping[str, bytes]) -> None:
        """Makes data that other ranks may have too visible to all, by its digest."""
        names = [f"{_PART}/{key}" for key in parts]
        there = self._ask(_PART, {"op": "check", "keys": names}).header["there"]
        for name, data, is_there in zip(names, parts.values(), there, strict=True):
            if not is_there:
                self._ask(_PART, {"op": "set", "keys": [name]}, [data])

    def shared(self, digests: Iterable[str]) -> dict[str, bytes]:
        """What was shared under these digests, by them, before anything was published that names them.

        Raises:
            TransferError: nobody has shared one of them.
        """
        keys = list(dict.fromkeys(digests))
        names = [f"{_PART}/{key}" for key in keys]
        if not all(self._ask(_PART, {"op": "check", "keys": names}).header["there"]):
            raise TransferError(self.rank, -1, _PART, "", "a part that a rank's manifest names was never shared")
        # One by one: together they may be larger than a message.
        found = (self._ask(_PART, {"op": "get", "keys": [name]}).parts[0] for name in names)
        return dict(zip(keys, found, strict=True))

    def agree(self, what: str, value: str | None, *, deadline: Deadline, report: Any = None) -> list[Any]:
        """Returns when every rank has called this with an equal value, or with None: it goes along with the others.

        All get the same answer: who gives up first ends it for all. `report` is a JSON value that goes along; rank 0
        gets everybody's, by rank, and the others nothing.

        Raises:
            AgreementError: naming the values and the ranks that hold them.
            DeadlineError: a rank didn't come in time; names it.
            TransferError: another rank reported a failure, or its process ended, meanwhile.
        """
        patience = deadline.remaining() + (_AFTER_RANK_0_S if self.rank else 0.0)
        header = {"op": "vote", "what": what, "value": value, "patience": patience}
        answer = self._ask(f"agree/{what}", header, [encode(report)], deadline=deadline)
        if "groups" in answer.header:
            groups = answer.header["groups"]
            raise AgreementError(what.rsplit("/", 1)[0], tuple((held, tuple(ranks)) for held, ranks in groups))
        return [] if report is None else [decode(part) for part in answer.parts]

    def forget(self, topics: Iterable[str]) -> None:
        """Removes this rank's values of topics that nobody will ask for any more; nobody waits for it."""
        prefixes = tuple(f"{topic}/" for topic in topics)
        keys = [key for key in self._own if key.startswith(prefixes)]
        self._own.difference_update(keys)
        if keys:
            self._client.tell({"op": "forget", "keys": keys})

    def kept(self) -> int:
        """How many values the store holds, of all ranks."""
        return int(self._ask("count", {"op": "count"}).header["count"])

    def report_failure(self, error: Exception) -> RefitTransportError | None:
        """Tells the other ranks why this one gives up. Only the first cause is kept; returns it if another rank's.

        Who has waited in vain gets its own error back where ranks are silent, with their names.
        """
        reason = str(error) if isinstance(error, RefitTransportError) else f"{type(error).__name__}: {error}"
        header = {"op": "fail", "reason": reason, "late": isinstance(error, DeadlineError | PeerLateError)}
        cause = self._ask("report a failure", header).header["failure"]
        if cause["rank"] != self.rank:
            return self._of_peer(cause)
        return _naming(error, cause["silent"]) if "silent" in cause else None

    def failure(self, deadline: Deadline | None = None) -> TransferError | None:
        """The first failure, if it is another rank's."""
        cause = self._ask("look for failures", {"op": "failure"}, deadline=deadline).header["failure"]
        return None if cause is None or cause["rank"] == self.rank else self._of_peer(cause)

    def _of_peer(self, cause: Mapping[str, Any]) -> TransferError:
        host = f" on {cause['host']}" if cause["host"] else ""
        return TransferError(
            self.rank, cause["rank"], "peer failure", "", f"rank {cause['rank']}{host}: {cause['reason']}"
        )

    def _ask(
        self, phase: str, header: dict[str, Any], parts: Sequence[bytes] = (), *, deadline: Deadline | None = None
    ) -> Frame:
        """The answer to a request that others may have to come for first, until the deadline."""
        seconds = self.timeout_s if deadline is None else min(self.timeout_s, deadline.remaining())
        patience = header.setdefault("patience", seconds)
        try:
            answer = self._client.request(header, parts, patience=patience)
        except StoreGoneError as error:
            reason = f"the control channel at {self.host}:{self._client.port}, on rank 0, is gone: {error}"
            raise TransferError(self.rank, 0, phase, "", reason) from error
        except FrameError as error:
            raise TransferError(self.rank, 0, phase, "", f"a message can't be sent: {error}") from error
        if "late" in answer.header:
            late = answer.header["late"][0]
            missing = late if isinstance(late, int) else str(late).rsplit("/", 1)[1]
            raise DeadlineError(
                f"rank {self.rank}", f"rank {missing}", phase, patience if deadline is None else deadline.seconds
            )
        if header["op"] not in ("fail", "failure") and "failure" in answer.header:
            raise self._of_peer(answer.header["failure"])
        return answer


def _naming(error: Exception, silent: str) -> RefitTransportError | None:
    """The error of who has waited in vain, with the names of those who are silent."""
    if isinstance(error, DeadlineError):
        return replace(error, waited_for=f"{error.waited_for} ({silent})")
    return replace(error, reason=f"{error.reason}; {silent}") if isinstance(error, TransferError) else None


@contextmanager
def telling_others(channel: ControlChannel) -> Iterator[None]:
    """Publishes an error's cause; where another rank's came first, raises that one."""
    try:
        yield
    except Exception as error:
        try:
            first = channel.report_failure(error)
        except TransferError as gone:
            # The channel is gone as well: rank 0 may be the cause of what was known before.
            if isinstance(error, TransferError) and gone.reason not in error.reason:
                raise replace(error, reason=f"{error.reason}; besides, {gone.reason}") from error
            raise error from None
        if first is not None:
            raise first from error
        raise
