"""The control channel of a refit: a store for small JSON messages, agreements and causes of failure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from refit_transport.errors import AgreementError, DeadlineError, RefitTransportError, TransferError
from refit_transport.fabrics.deadline import Deadline, DeadlineCaller
from refit_transport.layout.wire import decode, encode

T = TypeVar("T")

_FAILURE, _PART = "failure", "part"
# An answer takes a millisecond, or much longer where all cores are busy; a short timeout isn't meant for it.
_LEAST_PATIENCE_S = 1.0
# Whoever waits for a value looks this often whether another rank has failed.
_LOOK_EVERY_S = 0.1
_STORE_LATER_S = 60.0
# A value is asked for again after an eighth of the time waited so far, which leaves the processors to the others.
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 5e-4, 0.02


@dataclass(frozen=True, slots=True)
class _Waits:
    """A connection to the store on which one request at a time waits for keys."""

    store: Store
    calls: DeadlineCaller


@dataclass(frozen=True, slots=True)
class _Vote:
    """One rank's part of an agreement, cast by one call in a thread: each hand-over between threads costs time."""

    what: str
    rank: int
    world_size: int
    value: str | None
    report: Any

    @property
    def topic(self) -> str:
        return f"agree/{self.what}"

    @property
    def verdict(self) -> str:
        """The key of what the ranks disagree about."""
        return f"{self.topic}/verdict"

    @property
    def count(self) -> str:
        """The key of how many ranks have come."""
        return f"{self.topic}/count"

    def told(self, rank: int) -> str:
        """The key that tells a rank that all agree. Each has its own, to be set by whoever gives up waiting for it."""
        return f"{self.topic}/agreed/{rank}"

    def cast_by(self, rank: int) -> str:
        """The key of a rank's value."""
        return f"{self.topic}/{rank}"

    def report_of(self, rank: int) -> str:
        """The key of a rank's report."""
        return f"{self.topic}/report/{rank}"

    def own_keys(self) -> Iterator[str]:
        """The keys that this rank removes when nobody needs them any more."""
        yield from (self.cast_by(self.rank), self.report_of(self.rank), self.told(self.rank))
        if self.rank == 0:
            yield self.count

    def cast(self, store: Store, longest: timedelta) -> list[Any]:
        """Leaves this rank's value and report, and waits to be told; the last one to come compares.

        Returns all ranks' reports, on rank 0.

        Raises:
            AgreementError: the values differ; only where this rank was the one to compare.
        """
        keys = [self.cast_by(self.rank), self.report_of(self.rank)]
        store.multi_set(keys, [encode(self.value), encode(self.report)])  # type: ignore[attr-defined]  # the stub lacks it
        if store.add(self.count, 1) == self.world_size:
            self._compare(store)
        else:
            store.wait([self.told(self.rank)], longest)
        if self.rank != 0 or not store.get(self.told(0)):  # empty: this rank gave up waiting
            return []
        return [decode(found) for found in store.multi_get([self.report_of(rank) for rank in range(self.world_size)])]

    def _compare(self, store: Store) -> None:
        """All others wait for this: nothing is decoded that is the same everywhere."""
        everyone = range(self.world_size)
        found = store.multi_get([self.cast_by(rank) for rank in everyone])
        if len(set(found)) > 1 and len(groups := _groups([decode(value) for value in found])) > 1:
            store.set(self.verdict, encode(groups))  # type: ignore[arg-type]  # the stub knows text only
            raise _disagreement(self.what, groups)
        store.multi_set([self.told(rank) for rank in everyone], ["yes"] * self.world_size)  # type: ignore[attr-defined]


class ControlChannel:
    """One rank's access to the refit's store: of its own, which rank 0 hosts, or a name space of another one.

    `host` is where the ranks' addresses are looked up from; `port` is 0 when the store isn't the refit's own.
    """

    def __init__(
        self, store: Store, *, host: str, rank: int, world_size: int, timeout_s: float, where: str = ""
    ) -> None:
        self._store = store
        self._calls = DeadlineCaller()
        self.timeout_s = timeout_s
        self.host, self.port = host, int(store.port) if isinstance(store, TCPStore) else 0
        self._where = where or f"at {host}:{self.port}, on rank 0,"
        self.rank, self.world_size = rank, world_size
        self._claimed = False
        self._own: set[str] = set()
        # Made at once: connecting to a rank 0 that has stopped could not be broken off.
        self._waits = _Waits(store.clone(), DeadlineCaller())  # type: ignore[attr-defined]  # the stub lacks it

    def claim(self) -> None:
        """Takes the channel for one session: a second one would read what the first left in the store.

        Raises:
            TransferError: it was taken before.
        """
        if self._claimed:
            raise TransferError(self.rank, -1, "prepare", "", "a control channel serves one session: open a new one")
        self._claimed = True

    @classmethod
    def listen(cls, *, host: str, port: int, world_size: int, timeout_s: float) -> Self:
        """Opens the store as rank 0 on `port` (0: any free one).

        Raises:
            TransferError: the port is taken or the address isn't ours.
        """
        try:
            store = TCPStore(
                host, port, world_size, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
            )
        except (RuntimeError, ValueError) as error:
            reason = f"can't listen on {host}:{port}: {str(error).splitlines()[0]}"
            raise TransferError(0, -1, "rendezvous", "", reason) from error
        return cls(store, host=host, rank=0, world_size=world_size, timeout_s=timeout_s)

    @classmethod
    def join(cls, *, host: str, port: int, rank: int, world_size: int, timeout_s: float) -> Self:
        """Connects to the store of rank 0.

        Raises:
            TransferError: nobody listens there within `timeout_s`.
        """
        try:
            store = TCPStore(
                host, port, world_size, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
            )
        except (RuntimeError, ValueError) as error:
            cause = str(error).splitlines()[0]
            reason = f"no refit rendezvous at {host}:{port} within {timeout_s:g} s (timeout_s): {cause}"
            raise TransferError(rank, 0, "rendezvous", "", reason) from error
        return cls(store, host=host, rank=rank, world_size=world_size, timeout_s=timeout_s)

    def group_store(self, name: str) -> Store:
        """A name space of the store for a process group's own rendezvous."""
        return PrefixStore(name, self._store)

    def publish(self, topic: str, value: Any) -> None:
        """Makes this rank's JSON value for a topic visible to all."""
        self._set(f"{topic}/{self.rank}", value)

    def announce(self, topic: str, value: Any) -> None:
        """`publish`, beside what this rank does next; where the store is gone, the next call says so."""
        key = f"{topic}/{self.rank}"
        self._own.add(key)
        self._calls.post(self._store.set, key, encode(value))

    def collect(self, topic: str, ranks: Iterable[int], *, deadline: Deadline) -> list[Any]:
        """The values of these ranks for a topic, in the given order.

        Raises:
            DeadlineError: a rank published nothing in time; names it.
            TransferError: another rank reported a failure meanwhile.
        """
        return self._wait(topic, list(ranks), deadline)

    def share(self, parts: Mapping[str, bytes]) -> None:
        """Makes data that other ranks may have too visible to all, by its digest."""
        for key, data in parts.items():
            name = f"{_PART}/{key}"
            if not self._ask(_PART, self._store.check, [name]):
                self._ask(_PART, self._store.set, name, data)

    def shared(self, digests: Iterable[str]) -> dict[str, bytes]:
        """What was shared under these digests, by them, before anything was published that names them.

        Raises:
            TransferError: nobody has shared one of them.
        """
        keys = list(dict.fromkeys(digests))
        names = [f"{_PART}/{key}" for key in keys]
        if not names:
            return {}
        if not self._ask(_PART, self._store.check, names):
            raise TransferError(self.rank, -1, _PART, "", "a part that a rank's manifest names was never shared")
        return dict(zip(keys, self._ask(_PART, self._store.multi_get, names), strict=True))

    def agree(self, what: str, value: str | None, *, deadline: Deadline, report: Any = None) -> list[Any]:
        """Returns when every rank has called this with an equal value, or with None: it goes along with the others.

        The last one to come compares and tells the others. It is part of every refit, so nobody asks for an answer: the
        store tells. `report` is a JSON value that goes along; rank 0 gets everybody's, by rank, and the others nothing.

        Raises:
            AgreementError: naming the values and the ranks that hold them.
            DeadlineError: a rank didn't come in time; names it.
            TransferError: another rank reported a failure meanwhile.
        """
        vote = _Vote(what, self.rank, self.world_size, value, report)
        self._own.update(vote.own_keys())
        # Rank 0 gives up first, so that all give the same cause.
        patience = deadline if self.rank == 0 else Deadline(deadline.remaining() + _LEAST_PATIENCE_S)

        def look() -> None:
            if self._ask(vote.topic, self._store.check, [vote.verdict], deadline=deadline):
                raise _disagreement(what, decode(self._ask(vote.topic, self._store.get, vote.verdict)))
            self._give_up(vote.topic, range(self.world_size), patience)

        # The store's own timeout must come after ours: it prints warnings.
        longest = timedelta(seconds=patience.remaining() + _STORE_LATER_S)
        answer = self._waits.calls.start(vote.cast, self._waits.store, longest)
        try:
            while not _is_there(answer):
                self._raise_failure(deadline)
                look()
        except RefitTransportError:
            # Ends the wait, which would else outlive the refit.
            self._calls.post(self._store.set, vote.told(self.rank), "")
            raise
        except RuntimeError as error:
            raise self._gone(vote.topic, error) from error
        return answer.result()

    def require_equal(self, topic: str, what: str, *, deadline: Deadline) -> None:
        """Returns when every rank has published the same value for a topic.

        Raises:
            AgreementError: naming the values and the ranks that hold them.
            DeadlineError, TransferError: as `collect`.
        """
        groups = _groups([str(value) for value in self.collect(topic, range(self.world_size), deadline=deadline)])
        if len(groups) > 1:
            raise _disagreement(f"{what}/", groups)

    def forget(self, topics: Iterable[str]) -> None:
        """Removes this rank's values of topics, agreements included, that nobody will ask for any more.

        It happens beside what this rank does next; where the store is gone by then, so are the values.
        """
        prefixes = tuple(prefix for topic in topics for prefix in (f"{topic}/", f"agree/{topic}/"))
        keys = [key for key in self._own if key.startswith(prefixes)]
        self._own.difference_update(keys)
        self._calls.post(_delete, self._store, keys)

    def erase(self) -> None:
        """Removes all that any rank left in the store, where the store can tell; nobody may use the channel again."""
        # What stays costs memory and nothing else.
        with suppress(TransferError):
            for key in self._ask("erase", getattr(self._store, "list_keys", list)):
                self._ask("erase", self._store.delete_key, key)

    def report_failure(self, error: Exception) -> None:
        """Tells the other ranks why this one gives up; only the first cause is kept."""
        reason = str(error) if isinstance(error, RefitTransportError) else f"{type(error).__name__}: {error}"
        cause = encode({"rank": self.rank, "reason": reason})
        self._ask("report a failure", self._store.compare_set, _FAILURE, "", cause.hex())

    def failure(self, deadline: Deadline | None = None) -> TransferError | None:
        """The first failure that any other rank reported, if any."""
        phase = "look for failures"
        if not self._ask(phase, self._store.check, [_FAILURE], deadline=deadline):
            return None
        cause = decode(bytes.fromhex(self._ask(phase, self._store.get, _FAILURE).decode()))
        if cause["rank"] == self.rank:
            return None
        return TransferError(self.rank, cause["rank"], "peer failure", "", cause["reason"])

    def _wait(self, topic: str, ranks: Sequence[int], deadline: Deadline) -> list[Any]:
        """The values of a topic; asks for them again and again, as what comes once in a session can be."""
        keys = [f"{topic}/{rank}" for rank in ranks]
        began, look = time.monotonic(), Deadline(_LOOK_EVERY_S)
        while not self._ask(topic, self._store.check, keys, deadline=deadline):
            if look.passed:
                look = Deadline(_LOOK_EVERY_S)
                self._raise_failure(deadline)
            self._give_up(topic, ranks, deadline)
            time.sleep(min(max(_SHORTEST_PAUSE_S, (time.monotonic() - began) / 8), _LONGEST_PAUSE_S))
        return [decode(value) for value in self._ask(topic, self._store.multi_get, keys)] if keys else []

    def _give_up(self, topic: str, ranks: Sequence[int], deadline: Deadline) -> None:
        """Raises DeadlineError, naming a rank that published nothing, when the deadline has passed."""
        if deadline.passed:
            found = [rank for rank in ranks if self._ask(topic, self._store.check, [f"{topic}/{rank}"])]
            missing = next((rank for rank in ranks if rank not in found), ranks[-1])
            raise DeadlineError(f"rank {self.rank}", f"rank {missing}", topic, deadline.seconds)

    def _raise_failure(self, deadline: Deadline) -> None:
        failure = self.failure(deadline)
        if failure is not None:
            raise failure

    def _set(self, key: str, value: Any) -> None:
        self._own.add(key)
        self._ask(key, self._store.set, key, encode(value))

    def _ask(self, phase: str, call: Callable[..., T], *arguments: Any, deadline: Deadline | None = None) -> T:
        """One request to the store, answered in time: rank 0 hosts it, and when it is gone, so is every answer."""
        seconds = self.timeout_s if deadline is None else min(self.timeout_s, deadline.remaining())
        try:
            return self._calls.call(call, *arguments, timeout_s=max(_LEAST_PATIENCE_S, seconds))
        except TimeoutError as error:
            reason = f"the control channel {self._where} doesn't answer: {error}"
            raise TransferError(self.rank, 0, phase, "", reason) from error
        except RuntimeError as error:
            raise self._gone(phase, error) from error

    def _gone(self, phase: str, error: RuntimeError) -> TransferError:
        reason = f"the control channel {self._where} is gone: {str(error).splitlines()[0]}"
        return TransferError(self.rank, 0, phase, "", reason)


@contextmanager
def telling_others(channel: ControlChannel) -> Iterator[None]:
    """Publishes an error's cause; where another rank's came first, raises that one."""
    try:
        yield
    except Exception as error:
        try:
            first = channel.failure()
            if first is None:
                channel.report_failure(error)
        except TransferError:
            # The channel is gone as well: what was known before is the better cause.
            raise error from None
        if first is not None:
            raise first from error
        raise


def _disagreement(what: str, groups: Sequence[tuple[str, Sequence[int]]]) -> AgreementError:
    return AgreementError(what.rsplit("/", 1)[0], tuple((held, tuple(ranks)) for held, ranks in groups))


def _is_there(answer: Future[Any]) -> bool:
    """Whether a wait is over, after waiting for it for a while; raises its error."""
    try:
        answer.result(_LOOK_EVERY_S)
    except NoAnswer:
        return False
    return True


def _delete(store: Store, keys: Iterable[str]) -> None:
    for key in keys:
        store.delete_key(key)


def _groups(values: Sequence[str | None]) -> list[tuple[str, list[int]]]:
    groups: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        if value is not None:
            groups.setdefault(value, []).append(rank)
    return list(groups.items())
