"""The control channel of a refit: a store for small JSON messages, agreements and causes of failure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import TimeoutError as NoAnswer
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from refit_transport.errors import AgreementError, DeadlineError, RefitTransportError, TransferError
from refit_transport.fabrics.deadline import Deadline, DeadlineCaller
from refit_transport.layout.wire import decode, encode

T = TypeVar("T")

_FAILURE, _AGREED, _VERDICT = "failure", "agreed", "verdict"
# An answer takes a millisecond, or much longer where all cores are busy; a short timeout isn't meant for it.
_LEAST_PATIENCE_S = 1.0
# Whoever waits for a value looks this often whether another rank has failed.
_LOOK_EVERY_S = 0.1
_STORE_LATER_S = 60.0


@dataclass(frozen=True, slots=True)
class _Waits:
    """A connection to the store on which one request at a time waits for keys."""

    store: Store
    calls: DeadlineCaller


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
        self._waits: _Waits | None = None

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

    def collect(self, topic: str, ranks: Iterable[int], *, deadline: Deadline) -> list[Any]:
        """The values of these ranks for a topic, in the given order.

        Raises:
            DeadlineError: a rank published nothing in time; names it.
            TransferError: another rank reported a failure meanwhile.
        """
        return self._wait(topic, list(ranks), deadline)

    def agree(self, what: str, value: str | None, *, deadline: Deadline) -> None:
        """Returns when every rank has called this with an equal value, or with None: it goes along with the others.

        Rank 0 compares and tells the others.

        Raises:
            AgreementError: naming the values and the ranks that hold them.
        """
        topic = f"agree/{what}"
        self.publish(topic, value)
        agreed, verdict = f"{topic}/{_AGREED}", f"{topic}/{_VERDICT}"
        if self.rank == 0:
            groups = _groups(self.collect(topic, range(self.world_size), deadline=deadline))
            self._set(verdict if len(groups) > 1 else agreed, groups)
            if len(groups) > 1:
                raise _disagreement(what, groups)
            return

        def look() -> None:
            if self._ask(topic, self._store.check, [verdict], deadline=deadline):
                raise _disagreement(what, decode(self._ask(topic, self._store.get, verdict)))
            # Rank 0 gives up first: it knows for whom everybody waits.
            if patience.passed:
                raise DeadlineError(f"rank {self.rank}", "rank 0", topic, deadline.seconds)

        patience = Deadline(deadline.remaining() + _LEAST_PATIENCE_S)
        self._until_set([agreed], topic, patience, look)

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

    def _wait(self, topic: str, names: Sequence[int], deadline: Deadline) -> list[Any]:
        """The values of these keys of a topic."""
        keys = [f"{topic}/{name}" for name in names]
        if not keys:
            return []

        def look() -> None:
            if deadline.passed:
                found = {key for key in keys if self._ask(topic, self._store.check, [key])}
                missing = next((name for name, key in zip(names, keys, strict=True) if key not in found), names[-1])
                raise DeadlineError(f"rank {self.rank}", f"rank {missing}", topic, deadline.seconds)

        self._until_set(keys, topic, deadline, look)
        return [decode(value) for value in self._ask(topic, self._store.multi_get, keys)]

    def _until_set(self, keys: Sequence[str], topic: str, deadline: Deadline, look: Callable[[], None]) -> None:
        """Returns when all keys are set, or raises what another rank reports meanwhile, or what `look` raises.

        The store tells when the last key is set, over a connection that serves nothing else: where a NIC is full of a
        refit's bytes, every answer that must be asked for comes later than the one before.
        """
        if self._waits is None:
            own: Store = self._ask("connect", self._store.clone)  # type: ignore[attr-defined]  # the stub lacks it
            self._waits = _Waits(own, DeadlineCaller())
        # The store's own timeout must come after ours: it prints warnings.
        longest = timedelta(seconds=deadline.remaining() + _STORE_LATER_S)
        answer = self._waits.calls.start(self._waits.store.wait, list(keys), longest)
        while True:
            try:
                answer.result(_LOOK_EVERY_S)
            except NoAnswer:
                # If one of these raises, what still waits is left behind with its connection.
                waits, self._waits = self._waits, None
                failure = self.failure(deadline)
                if failure is not None:
                    raise failure from None
                look()
                self._waits = waits
            except RuntimeError as error:
                raise self._gone(topic, error) from error
            else:
                return

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


def _disagreement(what: str, groups: Sequence[tuple[str, Sequence[int]]]) -> AgreementError:
    return AgreementError(what.rsplit("/", 1)[0], tuple((held, tuple(ranks)) for held, ranks in groups))


def _delete(store: Store, keys: Iterable[str]) -> None:
    for key in keys:
        store.delete_key(key)


def _groups(values: Sequence[str | None]) -> list[tuple[str, list[int]]]:
    groups: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        if value is not None:
            groups.setdefault(value, []).append(rank)
    return list(groups.items())
