"""What the ranks of one session leave for each other, and whom it answers when: no sockets, no clock of its own."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

from refit_transport.errors import DeadlineError
from refit_transport.fabrics.frames import Frame, FrameError

# What was answered in time is swept out of the expiries when so many are there.
_CROWDED = 1024
_MOST_PATIENCE_S = 1e9
_LEFT = "it left the refit"
# Ranks whose deadlines began at the same agreement give up this close to each other: whoever is silent for longer than
# that after the first of them isn't one that waits.
_HEARING_S = 0.5
_MOST_NAMED = 4


class Caller(Protocol):
    """One connection of a rank. Its requests come one after the other, each after the answer to the last."""

    rank: int
    host: str

    def answer(self, header: dict[str, Any], parts: Sequence[bytes] = ()) -> None:
        """Sends the answer to the caller's request; nothing when it is gone."""


@dataclass(frozen=True, slots=True)
class _Request:
    caller: Caller
    header: dict[str, Any]
    parts: tuple[bytes, ...]
    now: float


@dataclass(eq=False, slots=True)
class _Wait:
    """A caller that waits for keys."""

    caller: Caller
    keys: tuple[str, ...]
    missing: set[str]
    is_open: bool = True


@dataclass(eq=False, slots=True)
class _Ballot:
    """One agreement: the votes so far, by rank."""

    what: str
    votes: dict[int, _Vote] = field(default_factory=dict)
    is_open: bool = True


@dataclass(eq=False, slots=True)
class _Vote:
    """A caller that waits for the others' votes."""

    caller: Caller
    ballot: _Ballot
    value: str | None
    report: bytes
    patience: float

    @property
    def is_open(self) -> bool:
        return self.ballot.is_open


@dataclass(eq=False, slots=True)
class _Hearing:
    """Somebody has waited in vain, maybe for one that waits itself: who is silent is known when it is over.

    `heard` are the ranks that are known to do something; `callers` wait for what it comes to. Where it began with a
    vote that `missing` kept waiting, its rank hears it as the answer to that.
    """

    rank: int
    host: str
    reason: str
    heard: set[int]
    vote: _Vote | None = None
    missing: int = -1
    callers: list[Caller] = field(default_factory=list)
    is_open: bool = True


class Board:
    """Values by key, agreements, and the first failure that any rank told or suffered.

    A failure answers everybody who waits and everybody who asks for something that others must still bring: a session
    has one, and then it is over. Where it is that somebody has waited in vain, the others are heard first, so that it
    names who is silent. Times are in seconds of any clock that never goes back.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.failure: dict[str, Any] | None = None
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, list[_Wait]] = {}
        self._ballots: dict[str, _Ballot] = {}
        self._left: set[int] = set()
        self._hosts: dict[int, str] = {}
        self._hearing: _Hearing | None = None
        self._expiries: list[tuple[float, int, _Wait | _Vote | _Hearing]] = []
        self._order, self._crowded = count(), _CROWDED
        self._requests: dict[str, Callable[[_Request], None]] = {
            "set": self._on_set,
            "get": self._on_get,
            "check": self._on_check,
            "add": self._on_add,
            "exchange": self._on_exchange,
            "delete": self._on_delete,
            "count": self._on_count,
            "forget": self._on_forget,
            "vote": self._on_vote,
            "fail": self._on_fail,
            "failure": self._on_failure,
        }

    def request(self, caller: Caller, frame: Frame, now: float) -> None:
        """Does what a rank asks, and answers it and whoever has waited for it.

        Raises:
            FrameError: it isn't a request.
        """
        try:
            self._requests[frame.header["op"]](_Request(caller, frame.header, frame.parts, now))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise FrameError("garbage", f"a request that can't be understood: {error!r}") from error
        self._hosts[caller.rank] = caller.host
        self._note(caller.rank)

    def next_expiry(self) -> float | None:
        """When somebody's patience ends next."""
        return self._expiries[0][0] if self._expiries else None

    def expire(self, now: float) -> None:
        """Answers those whose patience has ended."""
        while self._expiries and self._expiries[0][0] <= now:
            _, _, waited = heapq.heappop(self._expiries)
            if not waited.is_open:
                continue
            if isinstance(waited, _Hearing):
                self._judge(waited)
            elif isinstance(waited, _Vote):
                self._give_up(waited, now)
            else:
                self._close(waited)
                waited.caller.answer({"late": [key for key in waited.keys if key in waited.missing]})

    def leave(self, rank: int) -> None:
        """A rank goes in order: agreements and values that it still owes will never come."""
        self._left.add(rank)
        self._note(rank)
        if any(rank not in ballot.votes for ballot in self._ballots.values()) or any(
            _is_of(key, rank) for key in self._waiting
        ):
            self.fail(rank, "", _LEFT)

    def has_left(self, rank: int) -> bool:
        """Whether a rank has gone in order."""
        return rank in self._left

    def fail(self, rank: int, host: str, reason: str) -> None:
        """Keeps the first cause, and answers everybody who waits with it."""
        self._fail({"rank": rank, "host": host, "reason": reason})

    def _fail(self, failure: dict[str, Any]) -> None:
        if self.failure is not None:
            return
        self.failure = failure
        for waits in list(self._waiting.values()):
            for wait in list(waits):
                if wait.is_open:
                    self._close(wait)
                    wait.caller.answer({"failure": self.failure})
        for ballot in self._ballots.values():
            ballot.is_open = False
            for vote in ballot.votes.values():
                vote.caller.answer({"failure": self.failure})
        self._ballots.clear()
        if self._hearing is not None:
            self._hearing.is_open = False
            for caller in self._hearing.callers:
                caller.answer({"failure": self.failure})
            self._hearing = None

    def _on_set(self, asked: _Request) -> None:
        keys = _texts(asked.header["keys"])
        if len(keys) != len(asked.parts):
            raise ValueError("keys and values differ in number")
        for key, value in zip(keys, asked.parts, strict=True):
            self._put(key, value)
        asked.caller.answer({})

    def _on_get(self, asked: _Request) -> None:
        keys = _texts(asked.header["keys"])
        missing = {key for key in keys if key not in self._values}
        if not missing:
            self._give(asked.caller, keys)
            return
        if gone := [rank for rank in sorted(self._left) if any(_is_of(key, rank) for key in missing)]:
            self.fail(gone[0], "", _LEFT)
        if self.failure is not None:
            asked.caller.answer({"failure": self.failure})
        else:
            patience, wait = _seconds(asked.header["patience"]), _Wait(asked.caller, keys, missing)
            for key in missing:
                self._waiting.setdefault(key, []).append(wait)
            self._expire_at(asked.now + patience, wait)

    def _on_check(self, asked: _Request) -> None:
        asked.caller.answer({"there": [key in self._values for key in _texts(asked.header["keys"])]})

    def _on_add(self, asked: _Request) -> None:
        key = str(asked.header["key"])
        total = int(self._values.get(key, b"0")) + int(asked.header["amount"])
        self._put(key, str(total).encode())
        asked.caller.answer({"total": total})

    def _on_exchange(self, asked: _Request) -> None:
        """torch's compare_set: an empty expectation means that there is no value yet."""
        key, (expected, desired) = str(asked.header["key"]), asked.parts
        held = self._values.get(key)
        if held == expected or (held is None and not expected):
            self._put(key, desired)
            held = desired
        asked.caller.answer({}, (expected if held is None else held,))

    def _on_delete(self, asked: _Request) -> None:
        found = [self._values.pop(key, None) is not None for key in _texts(asked.header["keys"])]
        asked.caller.answer({"count": sum(found)})

    def _on_count(self, asked: _Request) -> None:
        asked.caller.answer({"count": len(self._values)})

    def _on_forget(self, asked: _Request) -> None:
        """`delete` without an answer."""
        for key in _texts(asked.header["keys"]):
            self._values.pop(key, None)

    def _on_vote(self, asked: _Request) -> None:
        what, value = str(asked.header["what"]), asked.header["value"]
        patience, [report] = _seconds(asked.header["patience"]), asked.parts
        if not isinstance(value, str | None):
            raise TypeError("a vote is a text or nothing")
        ballot = self._ballots.get(what) or _Ballot(what)
        if gone := self._left - ballot.votes.keys():
            self.fail(min(gone), "", _LEFT)
        if self.failure is not None:
            asked.caller.answer({"failure": self.failure})
            return
        self._ballots[what] = ballot
        vote = ballot.votes[asked.caller.rank] = _Vote(asked.caller, ballot, value, report, patience)
        if len(ballot.votes) == self.world_size and self._hearing is None:
            self._decide(ballot)
        else:
            self._expire_at(asked.now + patience, vote)

    def _on_fail(self, asked: _Request) -> None:
        caller, reason = asked.caller, str(asked.header["reason"])
        if asked.header.get("late") and self.failure is None:
            hearing = self._hear(caller, reason, asked.now)
            hearing.callers.append(caller)
            return
        self.fail(caller.rank, caller.host, reason)
        caller.answer({"failure": self.failure})

    def _on_failure(self, asked: _Request) -> None:
        """Whether there is one is known without a wait."""
        asked.caller.answer({"failure": self.failure})

    def _decide(self, ballot: _Ballot) -> None:
        """All have voted. Rank 0, which may end the session with the answer, gets it last."""
        del self._ballots[ballot.what]
        ballot.is_open = False
        groups = _groups([ballot.votes[rank].value for rank in range(self.world_size)])
        answer = {"groups": groups} if len(groups) > 1 else {"agreed": True}
        for rank in range(self.world_size - 1, 0, -1):
            ballot.votes[rank].caller.answer(answer)
        ballot.votes[0].caller.answer(answer, [ballot.votes[rank].report for rank in range(self.world_size)])

    def _give_up(self, vote: _Vote, now: float) -> None:
        """Who gives up first ends the agreement for all, so that nobody can agree to what another has given up."""
        ballot, rank = vote.ballot, vote.caller.rank
        missing = next(other for other in range(self.world_size) if other not in ballot.votes)
        late = DeadlineError(f"rank {rank}", f"rank {missing}", f"agree/{ballot.what}", vote.patience)
        if self._hearing is None:
            hearing = self._hear(vote.caller, str(late), now)
            hearing.vote, hearing.missing = vote, missing

    def _hear(self, caller: Caller, reason: str, now: float) -> _Hearing:
        """The hearing that is under way, else a new one: who waits for something is heard already."""
        if self._hearing is None:
            waiting = {wait.caller.rank for waits in self._waiting.values() for wait in waits}
            voting = {rank for ballot in self._ballots.values() for rank in ballot.votes}
            heard = {caller.rank, *waiting, *voting, *self._left}
            self._hearing = _Hearing(caller.rank, caller.host, reason, heard)
            self._expire_at(now + _HEARING_S, self._hearing)
        return self._hearing

    def _note(self, rank: int) -> None:
        """A rank has done something: where there is a hearing, it is heard."""
        if self._hearing is not None:
            self._hearing.heard.add(rank)
            if len(self._hearing.heard) == self.world_size:
                self._judge(self._hearing)

    def _judge(self, hearing: _Hearing) -> None:
        """The failure is the first one's, with the names of those who were not heard."""
        silent = [rank for rank in range(self.world_size) if rank not in hearing.heard]
        failure = {"rank": hearing.rank, "host": hearing.host, "reason": hearing.reason}
        if silent:
            words = f"nothing is heard of {self._named(silent)}"
            failure |= {"reason": f"{hearing.reason}; {words}", "silent": words}
        if (vote := hearing.vote) is not None:
            del vote.ballot.votes[vote.caller.rank]
            vote.caller.answer({"late": silent or [hearing.missing]})
        self._fail(failure)

    def _named(self, ranks: Sequence[int]) -> str:
        """Ranks and, as far as they ever said anything, their hosts."""
        hosts = (self._hosts.get(rank, "") for rank in ranks)
        names = [f"rank {rank}{f' on {host}' if host else ''}" for rank, host in zip(ranks, hosts, strict=True)]
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        return ", ".join(names[:_MOST_NAMED]) + more

    def _put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        for wait in self._waiting.pop(key, ()):
            wait.missing.discard(key)
            if wait.is_open and not wait.missing:
                wait.is_open = False
                self._give(wait.caller, wait.keys)

    def _give(self, caller: Caller, keys: Sequence[str]) -> None:
        """Gives values; one that was deleted while others were waited for is empty."""
        caller.answer({}, [self._values.get(key, b"") for key in keys])

    def _close(self, wait: _Wait) -> None:
        wait.is_open = False
        for key in wait.missing:
            waits = self._waiting.get(key, [])
            if wait in waits:
                waits.remove(wait)
                if not waits:
                    del self._waiting[key]

    def _expire_at(self, time: float, waited: _Wait | _Vote | _Hearing) -> None:
        heapq.heappush(self._expiries, (time, next(self._order), waited))
        if len(self._expiries) > self._crowded:
            self._expiries = [expiry for expiry in self._expiries if expiry[2].is_open]
            heapq.heapify(self._expiries)
            self._crowded = max(_CROWDED, 2 * len(self._expiries))


def _groups(values: Iterable[str | None]) -> list[tuple[str, list[int]]]:
    """The ranks that hold each value, in the order of the first of them; None has no opinion.

    >>> _groups(["a", None, "b", "a"])
    [('a', [0, 3]), ('b', [2])]
    """
    groups: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        if value is not None:
            groups.setdefault(value, []).append(rank)
    return list(groups.items())


def _is_of(key: str, rank: int) -> bool:
    """Whether a key is that of a rank's own value."""
    return key.endswith(f"/{rank}")


def _seconds(value: Any) -> float:
    """A patience that orders among others; NaN does not."""
    seconds = float(value)
    if not 0.0 <= seconds <= _MOST_PATIENCE_S:
        raise ValueError(f"{seconds} is no patience")
    return seconds


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise TypeError("keys are texts")
    return tuple(value)
