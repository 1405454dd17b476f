"""The board without sockets or a clock: who is answered what, and when, in any order of requests."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from refit_transport.fabrics.board import Board
from refit_transport.fabrics.frames import Frame, FrameError


class Caller:
    """Keeps what it is answered."""

    def __init__(self, rank: int) -> None:
        self.rank, self.host = rank, f"host{rank}"
        self.answers: list[tuple[dict[str, Any], tuple[bytes, ...]]] = []

    def answer(self, header, parts=()) -> None:
        self.answers.append((dict(header), tuple(parts)))

    @property
    def last(self) -> dict[str, Any]:
        return self.answers[-1][0]


def ask(board: Board, caller: Caller, now: float = 0.0, parts=(), **header: Any) -> None:
    board.request(caller, Frame(header, tuple(parts)), now)


def get(board: Board, caller: Caller, *keys: str, now: float = 0.0, patience: float = 5.0) -> None:
    ask(board, caller, now, op="get", keys=list(keys), patience=patience)


def put(board: Board, caller: Caller, **values: bytes) -> None:
    ask(board, caller, op="set", keys=list(values), parts=list(values.values()))


def vote(board: Board, caller: Caller, value: str | None, *, what="w", now: float = 0.0, patience: float = 5.0) -> None:
    ask(board, caller, now, op="vote", what=what, value=value, patience=patience, parts=[b"report %d" % caller.rank])


def test_a_wait_ends_with_its_last_value_in_the_order_of_its_keys() -> None:
    board, reader, writer = Board(2), Caller(1), Caller(0)
    get(board, reader, "b", "a")
    put(board, writer, a=b"1")
    assert reader.answers == []
    put(board, writer, b=b"2")
    assert reader.answers == [({}, (b"2", b"1"))]
    put(board, writer, b=b"3")
    board.expire(100.0)
    assert len(reader.answers) == 1


def test_a_wait_that_ends_too_late_names_what_is_missing() -> None:
    board, reader, writer = Board(2), Caller(1), Caller(0)
    get(board, reader, "a", "b", "c", now=10.0, patience=5.0)
    put(board, writer, b=b"2")
    assert board.next_expiry() == 15.0
    board.expire(14.999)
    assert reader.answers == []
    board.expire(15.0)
    assert reader.answers == [({"late": ["a", "c"]}, ())]
    put(board, writer, a=b"1", c=b"3")
    assert len(reader.answers) == 1
    assert board._waiting == {}


def test_a_failure_answers_everybody_who_waits_and_whoever_asks_for_more() -> None:
    board, callers = Board(4), [Caller(rank) for rank in range(4)]
    get(board, callers[0], "never")
    vote(board, callers[1], "x")
    put(board, callers[3], there=b"1")
    ask(board, callers[2], op="fail", reason="of a cause")
    failure = {"rank": 2, "host": "host2", "reason": "of a cause"}
    assert [caller.last for caller in callers[:3]] == [{"failure": failure}] * 3
    board.fail(3, "host3", "what follows from it")
    for action in (lambda: get(board, callers[3], "never"), lambda: vote(board, callers[3], "x")):
        action()
        assert callers[3].last == {"failure": failure}
    # What is there is there.
    get(board, callers[3], "there")
    assert callers[3].answers[-1] == ({}, (b"1",))
    ask(board, callers[3], op="failure")
    assert callers[3].last == {"failure": failure}
    assert board._waiting == board._ballots == {}


def test_a_rank_that_leaves_while_others_are_heard_is_not_silent() -> None:
    board, callers = Board(3), [Caller(rank) for rank in range(3)]
    ask(board, callers[0], op="fail", reason="it waited", late=True)
    board.leave(1)
    board.expire(100.0)
    assert callers[0].last["failure"]["silent"] == "nothing is heard of rank 2"


def test_a_rank_that_left_ends_waits_for_its_values_and_no_others() -> None:
    failure = {"failure": {"rank": 1, "host": "", "reason": "it left the refit"}}
    board, callers = Board(3), [Caller(rank) for rank in range(3)]
    get(board, callers[0], "topic/2")
    board.leave(1)
    assert callers[0].answers == []
    get(board, callers[2], "topic/0", "topic/1")
    assert callers[0].last == callers[2].last == failure

    board, callers = Board(3), [Caller(rank) for rank in range(3)]
    put(board, callers[1], **{"topic/1": b"was there"})
    get(board, callers[0], "topic/1", "topic/2")
    board.leave(1)
    get(board, callers[0], "topic/1")
    assert callers[0].answers == [({}, (b"was there",))]
    get(board, callers[2], "other/1")
    assert callers[0].last == callers[2].last == failure


def test_a_rank_that_left_ends_open_and_later_agreements_but_not_one_in_which_it_has_voted() -> None:
    board, callers = Board(3), [Caller(rank) for rank in range(3)]
    vote(board, callers[2], "x")
    board.leave(2)
    vote(board, callers[0], "x")
    vote(board, callers[1], "x")
    assert callers[0].answers == [({"agreed": True}, (b"report 0", b"report 1", b"report 2"))]
    assert callers[1].answers == [({"agreed": True}, ())]
    vote(board, callers[0], "x", what="next")
    assert callers[0].last == {"failure": {"rank": 2, "host": "", "reason": "it left the refit"}}

    board, callers = Board(3), [Caller(rank) for rank in range(3)]
    vote(board, callers[0], "x")
    board.leave(2)
    assert callers[0].last["failure"]["rank"] == 2


def late(board: Board, caller: Caller, reason: str, *, now: float) -> None:
    ask(board, caller, now, op="fail", reason=reason, late=True)


def test_of_ranks_that_wait_for_each_other_the_one_is_named_that_is_silent() -> None:
    board, callers = Board(4), [Caller(rank) for rank in range(4)]
    put(board, callers[3], place=b"here")
    vote(board, callers[0], "x", patience=2.0)
    board.expire(2.0)
    late(board, callers[1], "rank 1 waits for rank 2", now=2.1)
    late(board, callers[2], "rank 2 waits for rank 3", now=2.4)
    board.expire(2.49)
    assert [caller.answers for caller in callers[:3]] == [[], [], []]
    assert board.next_expiry() == 2.5
    board.expire(2.5)
    assert callers[0].answers == [({"late": [3]}, ())]
    failure = callers[1].last["failure"]
    assert callers[1].answers == callers[2].answers == [({"failure": failure}, ())]
    assert (failure["rank"], failure["silent"]) == (0, "nothing is heard of rank 3 on host3")
    assert failure["reason"].endswith(failure["silent"])
    # It comes back.
    vote(board, callers[3], "x")
    assert callers[3].last == {"failure": failure}


def test_where_all_are_heard_there_is_nothing_to_wait_for() -> None:
    board, callers = Board(3), [Caller(rank) for rank in range(3)]
    get(board, callers[0], "never")
    late(board, callers[1], "rank 1 waits for rank 2", now=2.0)
    assert callers[0].answers == callers[1].answers == []
    late(board, callers[2], "rank 2 waits for rank 1", now=2.1)
    failure = {"rank": 1, "host": "host1", "reason": "rank 1 waits for rank 2"}
    assert [caller.answers for caller in callers] == [[({"failure": failure}, ())]] * 3
    assert not any(expiry[2].is_open for expiry in board._expiries)


def test_a_process_that_ended_is_the_cause_of_what_others_wait_for() -> None:
    board, callers = Board(3), [Caller(rank) for rank in range(3)]
    late(board, callers[1], "rank 1 waits for rank 2", now=2.0)
    board.fail(2, "host2", "its process ended")
    assert callers[1].answers == [({"failure": {"rank": 2, "host": "host2", "reason": "its process ended"}}, ())]
    board.expire(10.0)
    assert len(callers[1].answers) == 1


def test_a_vote_that_comes_while_others_are_heard_decides_nothing() -> None:
    board, callers = Board(2), [Caller(rank) for rank in range(2)]
    vote(board, callers[0], "x", patience=2.0)
    board.expire(2.0)
    vote(board, callers[1], "x", now=2.1)
    assert callers[0].answers == [({"late": [1]}, ())]
    assert callers[1].last["failure"]["rank"] == 0


def test_rank_0_hears_last() -> None:
    order: list[int] = []

    class Ordered(Caller):
        def answer(self, header, parts=()) -> None:
            order.append(self.rank)

    board = Board(4)
    for rank in (2, 0, 3, 1):
        vote(board, Ordered(rank), "x")
    assert order == [3, 2, 1, 0]


def test_numbers_and_exchanges_are_as_in_torchs_store() -> None:
    board, caller = Board(1), Caller(0)
    for amount, total in ((3, 3), (-1, 2)):
        ask(board, caller, op="add", key="n", amount=amount)
        assert caller.last == {"total": total}
    for expected, desired, held in ((b"x", b"y", b"x"), (b"", b"a", b"a"), (b"b", b"c", b"a"), (b"a", b"c", b"c")):
        ask(board, caller, op="exchange", key="e", parts=[expected, desired])
        assert caller.answers[-1] == ({}, (held,))
    ask(board, caller, op="count")
    assert caller.last == {"count": 2}
    ask(board, caller, op="delete", keys=["n", "e", "none"])
    assert caller.last == {"count": 2}
    ask(board, caller, op="check", keys=["n"])
    assert caller.last == {"there": [False]}


BAD: list[tuple[dict[str, Any], list[bytes]]] = [
    ({}, []),
    ({"op": "no such"}, []),
    ({"op": ["set"]}, []),
    ({"op": None}, []),
    ({"op": "set"}, []),
    ({"op": "set", "keys": ["a", "b"]}, [b"1"]),
    ({"op": "set", "keys": "ab"}, [b"1", b"2"]),
    ({"op": "set", "keys": [1]}, [b"1"]),
    ({"op": "get", "keys": ["a"]}, []),
    *[({"op": "get", "keys": ["a"], "patience": bad}, []) for bad in ("x", None, [], float("nan"), -1.0, 1e300)],
    ({"op": "get", "keys": ["a"], "patience": 10**400}, []),
    ({"op": "get", "keys": ["a"], "patience": float("inf")}, []),
    ({"op": "add", "key": "text", "amount": 1}, []),
    ({"op": "add", "key": "n", "amount": float("inf")}, []),
    ({"op": "exchange", "key": "n"}, [b"1"]),
    ({"op": "vote", "what": "w", "value": 3, "patience": 1}, [b""]),
    ({"op": "vote", "what": "w", "value": "x", "patience": 1}, []),
    ({"op": "vote", "what": "w", "value": "x", "patience": float("nan")}, [b""]),
    ({"op": "vote", "what": "w", "value": "x"}, [b""]),
    ({"op": "fail"}, []),
    ({"op": "leave"}, []),
]


@pytest.mark.parametrize(("header", "parts"), BAD)
def test_what_is_no_request_is_an_error_and_leaves_no_trace(header, parts) -> None:
    board, caller = Board(2), Caller(0)
    put(board, caller, text=b"no number")
    caller.answers.clear()
    with pytest.raises(FrameError) as caught:
        ask(board, caller, parts=parts, **header)
    assert caught.value.kind == "garbage"
    assert caller.answers == []
    assert board.next_expiry() is None
    assert board._ballots == board._waiting == {}
    assert board.failure is None


@given(st.dictionaries(st.sampled_from(["op", "keys", "key", "amount", "what", "value", "patience", "reason"]),
       st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
       | st.lists(st.text(max_size=2), max_size=2)
       | st.sampled_from(["set", "get", "add", "exchange", "vote", "delete", "forget", "check"])),
       st.lists(st.binary(max_size=3), max_size=3))  # fmt: skip
def test_any_request_is_answered_waits_or_is_refused(header, parts) -> None:
    board, caller = Board(2), Caller(0)
    with contextlib.suppress(FrameError):
        board.request(caller, Frame(header, tuple(parts)), 1.0)
    expiry = board.next_expiry()
    assert expiry is None or expiry >= 1.0
    board.expire(1e12)
    assert board.next_expiry() is None


def test_what_was_answered_in_time_is_not_kept() -> None:
    board, reader, writer = Board(2), Caller(1), Caller(0)
    for number in range(5000):
        get(board, reader, "k")
        put(board, writer, k=b"1")
        ask(board, writer, op="forget", keys=["k"])
        vote(board, reader, "x", what=f"{number}")
        vote(board, writer, "x", what=f"{number}")
    assert len(board._expiries) <= 2048
    assert board._values == board._ballots == board._waiting == {}


class Agreements(RuleBasedStateMachine):
    """Ranks vote, give up, leave and fail in any order; the model is what each was answered in each agreement."""

    SIZE = 3

    @initialize()
    def begin(self) -> None:
        self.board = Board(self.SIZE)
        self.now = 0.0
        # What each rank is at: the number of its agreement, and whether it waits.
        self.at = dict.fromkeys(range(self.SIZE), 0)
        self.waiting: dict[int, Caller] = {}
        self.gone: set[int] = set()
        self.decisions: dict[int, set[str]] = {}
        self.values: dict[int, dict[int, str | None]] = {}

    def settle(self) -> None:
        for rank, caller in list(self.waiting.items()):
            assert len(caller.answers) <= 1
            if caller.answers:
                [kind] = set(caller.last) - {"report"}
                number = self.at[rank]
                self.decisions.setdefault(number, set()).add("no" if kind in ("late", "failure") else kind)
                del self.waiting[rank]
                self.at[rank] += 1

    @rule(rank=st.integers(0, SIZE - 1), value=st.sampled_from(["x", "x", "x", None, "y"]), patience=st.integers(1, 5))
    def vote(self, rank: int, value: str | None, patience: int) -> None:
        if rank in self.waiting or rank in self.gone:
            return
        caller = self.waiting[rank] = Caller(rank)
        number = self.at[rank]
        self.values.setdefault(number, {})[rank] = value
        vote(self.board, caller, value, what=f"{number}", now=self.now, patience=patience)
        self.settle()

    @rule(seconds=st.integers(0, 3))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds
        self.board.expire(self.now)
        self.settle()

    @precondition(lambda self: len(self.gone) < self.SIZE)
    @rule(rank=st.integers(0, SIZE - 1), how=st.sampled_from(["leave", "die"]))
    def go(self, rank: int, how: str) -> None:
        if rank in self.gone or (how == "leave" and rank in self.waiting):
            return
        self.gone.add(rank)
        self.board.leave(rank) if how == "leave" else self.board.fail(rank, "", "died")
        self.settle()

    @invariant()
    def all_get_the_same_decision(self) -> None:
        if not hasattr(self, "board"):
            return
        for number, kinds in self.decisions.items():
            assert len(kinds) == 1, (number, kinds)
            if kinds != {"no"}:
                # Nothing is agreed without everybody.
                values = {value for value in self.values[number].values() if value is not None}
                assert len(self.values[number]) == self.SIZE
                assert kinds == ({"agreed"} if len(values) <= 1 else {"groups"})

    @invariant()
    def nobody_waits_for_what_can_not_come(self) -> None:
        if hasattr(self, "board") and (self.board.failure is not None or len(self.waiting) == self.SIZE):
            assert not self.waiting or len({self.at[rank] for rank in self.waiting}) > 1


Agreements.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestAgreements = Agreements.TestCase
