"""What is said about workers that don't answer."""

from __future__ import annotations

import pytest
import ray

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


def test_a_whole_group_has_no_rank() -> None:
    assert "rank" not in str(WorkerError("policy", -1, "placement", "no room"))
    assert workers._MOST_NAMED < 12
