"""The control channel of a refit: a store for small JSON messages, agreements and causes of failure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Self, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from refit_transport.errors import AgreementError, DeadlineError, RefitTransportError, TransferError
from refit_transport.fabrics.deadline import Deadline, DeadlineCaller
from refit_transport.layout.wire import decode, encode

T = TypeVar("T")

_FAILURE, _VERDICT = "failure", "verdict"
# An answer takes a millisecond, or much longer where all cores are busy; a short timeout isn't meant for it.
_LEAST_PATIENCE_S = 1.0
# Whoever waits for a value looks this often whether another rank has failed.
_LOOK_EVERY_S = 0.1
# An agreement is part of every refit, so its answer is looked for often.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2e-4, 4e-3


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
        if self.rank == 0:
            values = self.collect(topic, range(self.world_size), deadline=deadline)
            self._set(f"{topic}/{_VERDICT}", _groups(values))
        [groups] = self._wait(topic, [_VERDICT], deadline)
        if len(groups) > 1:
            raise AgreementError(what.rsplit("/", 1)[0], tuple((held, tuple(ranks)) for held, ranks in groups))

    def forget(self, topics: Iterable[str]) -> None:
        """Removes this rank's values of topics, agreements included, that nobody will ask for any more."""
        mine = [str(self.rank), _VERDICT] if self.rank == 0 else [str(self.rank)]
        for topic in topics:
            for key in mine:
                self._ask("forget", self._store.delete_key, f"{topic}/{key}")
                self._ask("forget", self._store.delete_key, f"agree/{topic}/{key}")

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

    def failure(self) -> TransferError | None:
        """The first failure that any other rank reported, if any."""
        phase = "look for failures"
        if not self._ask(phase, self._store.check, [_FAILURE]):
            return None
        cause = decode(bytes.fromhex(self._ask(phase, self._store.get, _FAILURE).decode()))
        if cause["rank"] == self.rank:
            return None
        return TransferError(self.rank, cause["rank"], "peer failure", "", cause["reason"])

    def _wait(self, topic: str, names: Sequence[int | str], deadline: Deadline) -> list[Any]:
        """The values of all these keys of a topic.

        It asks again and again: where torch's store is asked to wait, every wait that ends in vain prints a warning.
        """
        keys = [f"{topic}/{name}" for name in names]
        # Of a verdict rank 0 gives up first: it knows for whom everybody waits.
        patience = Deadline(deadline.remaining() + (_LEAST_PATIENCE_S if _VERDICT in names else 0.0))
        pause, look = _FIRST_PAUSE_S, Deadline(_LOOK_EVERY_S)
        while not self._ask(topic, self._store.check, keys, deadline=deadline):
            if look.passed:
                look = Deadline(_LOOK_EVERY_S)
                failure = self.failure()
                if failure is not None:
                    raise failure
            if patience.passed:
                missing = next(
                    n for n, k in zip(names, keys, strict=True) if not self._ask(topic, self._store.check, [k])
                )
                late = "rank 0" if missing == _VERDICT else f"rank {missing}"
                raise DeadlineError(f"rank {self.rank}", late, topic, deadline.seconds)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return [decode(value) for value in self._ask(topic, self._store.multi_get, keys)] if keys else []

    def _set(self, key: str, value: Any) -> None:
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
            reason = f"the control channel {self._where} is gone: {str(error).splitlines()[0]}"
            raise TransferError(self.rank, 0, phase, "", reason) from error


def _groups(values: Sequence[str | None]) -> list[tuple[str, list[int]]]:
    groups: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        if value is not None:
            groups.setdefault(value, []).append(rank)
    return list(groups.items())
