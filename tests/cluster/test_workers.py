"""What is said about workers that don't answer."""

from __future__ import annotations

import time

import pytest
import ray
from ray.exceptions import ActorDiedError, RayTaskError

from refit_transport.cluster import workers
from refit_transport.cluster.workers import Pending, WorkerGroup, collect
from refit_transport.errors import WorkerError


def silent_group(name: str) -> WorkerGroup:
    group = WorkerGroup.__new__(WorkerGroup)
    group.name = name
    return group


@pytest.mark.parametrize(
    ("ranks", "named", "unnamed"),
    [
        (1, (), ("nor from",)),
        (3, ("(nor from policy rank 1, policy rank 2)",), ()),
        (12, ("rank 8, 3 more)",), ("rank 9",)),
    ],
)
def test_every_silent_worker_is_named_with_the_settings(
    monkeypatch: pytest.MonkeyPatch, ranks: int, named: tuple[str, ...], unnamed: tuple[str, ...]
) -> None:
    monkeypatch.setattr(ray, "wait", lambda references, **_: ([], references))
    pending = Pending(silent_group("policy"), "logprobs", {rank: object() for rank in range(ranks)})
    with pytest.raises(WorkerError) as caught:
        collect([pending], timeout_s=0.5)
    message = str(caught.value)
    assert message.startswith("worker policy (rank 0) failed in phase logprobs: no answer within 0.5 s")
    assert "refit_run.worker_timeout_s" in message
    assert all(text in message for text in named)
    assert not any(text in message for text in unnamed)


class _Answers:
    """Stands in for Ray: references answer in order, with a value or an error; the last ones never do."""

    def __init__(self, *answers: object) -> None:
        self.answers = answers

    def wait(self, references: list[int], *, timeout: float, **_: object) -> tuple[list[int], list[int]]:
        for reference in references:
            if self.answers[reference] != "never":
                return [reference], [other for other in references if other != reference]
        time.sleep(min(timeout, 0.05))
        return [], references

    def get(self, reference: int) -> object:
        answer = self.answers[reference]
        if isinstance(answer, Exception):
            raise answer
        return answer


def _failed(error: Exception) -> RayTaskError:
    return RayTaskError("call", "trace", error)


@pytest.mark.parametrize(
    ("answers", "rank", "texts"),
    [
        # Peers fail first, and the one that died is told.
        ((1, _failed(ValueError("closed by peer")), ActorDiedError()), 2, ("the process died",)),
        # A worker that stopped gives no answer at all.
        ((_failed(ValueError("timed out")), 1, "never"), 0, ("ValueError: timed out", "no answer from policy rank 2")),
        # One failure alone.
        ((1, _failed(ValueError("bad input")), 1), 1, ("ValueError: bad input",)),
    ],
)
def test_the_cause_is_told_and_not_what_follows_from_it(
    monkeypatch: pytest.MonkeyPatch, answers: tuple[object, ...], rank: int, texts: tuple[str, ...]
) -> None:
    stand_in = _Answers(*answers)
    monkeypatch.setattr(ray, "wait", stand_in.wait)
    monkeypatch.setattr(ray, "get", stand_in.get)
    monkeypatch.setattr(workers, "_LATECOMERS_S", 0.2)
    pending = Pending(silent_group("policy"), "train_step", {rank: rank for rank in range(len(answers))})
    with pytest.raises(WorkerError) as caught:
        collect([pending], timeout_s=5.0)
    assert caught.value.rank == rank
    assert all(text in caught.value.reason for text in texts), caught.value.reason
    assert ("no answer" in caught.value.reason) == ("never" in answers)


def test_a_whole_group_has_no_rank() -> None:
    assert "rank" not in str(WorkerError("policy", -1, "placement", "no room"))
    assert workers._MOST_NAMED < 12
