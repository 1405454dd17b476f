"""Small refits in real namespaces: bytes on every uplink, every element, and what happens when a rank fails.

Bytes and elements are exact whatever else the machine does. Times are compared with the bound alone: nothing beats it.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import lab_jobs
import pytest

from refit_transport.bench.isolation import check_requirements, isolated
from refit_transport.bench.measure import LabRequest, run_lab
from refit_transport.errors import ConfigError, DeadlineError, WorkerError


@pytest.fixture(autouse=True)
def _namespaces(monkeypatch):
    try:
        check_requirements()
    except ConfigError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(Path(lab_jobs.__file__).parent), *_python_path())))
    before = lab_jobs.network(), Path("/run/netns").exists()
    yield
    assert before == (lab_jobs.network(), Path("/run/netns").exists())


def _python_path():
    return (str(Path(__file__).parents[2]), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))


def is_alive(pid):
    return Path(f"/proc/{pid}").exists()


def until_gone(pids):
    end = time.monotonic() + 10.0
    while any(map(is_alive, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    return not any(map(is_alive, pids))


@pytest.mark.parametrize("nics", ["domain", "rank"])
def test_every_uplink_carries_what_is_planned_and_every_element_arrives(nics):
    case = lab_jobs.small_case(nics)
    found = run_lab(LabRequest((case,), repetitions=1), announce=lambda _: None)
    assert found.misses == []
    (result,) = found.cases
    ours, chain = result.variants
    assert len(ours.uplinks) == len(chain.uplinks) == 2 * len(case.wiring.nic_ranks)
    # Each of the two target nodes takes the model in once, and each source node sends half of both copies.
    size = case.model.nbytes
    into, out = ([u for u in ours.uplinks if u.direction == d] for d in ("in", "out"))
    per_node = len(into) // 4
    assert [sum(u.planned for u in into[n * per_node : (n + 1) * per_node]) for n in range(4)] == [0, 0, size, size]
    assert [sum(u.planned for u in out[n * per_node : (n + 1) * per_node]) for n in range(4)] == [size, size, 0, 0]
    assert 2 * size < sum(u.measured for u in into) < 2.3 * size
    assert ours.bound.seconds == pytest.approx(size / (200e6 / 8 * 8948 / 9014))
    assert len(ours.extra_memory) == 16
    assert max(ours.extra_memory) > 0


@pytest.mark.parametrize(("rank_class", "rank"), [(lab_jobs.FlippingRank, 11), (lab_jobs.ForgetfulRank, None)])
def test_a_wrong_or_stale_element_shows(rank_class, rank):
    found = isolated(lab_jobs.with_rank_class, (lab_jobs.small_case(), rank_class), announce=lambda _: None)
    assert any("ours: pieces delivered wrongly" in line for line in found.misses)
    wrong = found.variants[0].wrong
    assert rank is None or {line.split(":")[0] for line in wrong} == {f"rank {rank}"}


def test_ranks_are_in_their_nodes_namespaces_and_end_with_the_crew():
    pids = []
    found = isolated(lab_jobs.odd_crew, ("network", (), 20.0), announce=lambda text: pids.extend(json.loads(text)))
    # Four ranks of one node, which has a link of its own; four nodes share the switch.
    assert {tuple(links) for links, _ in found} == {("eth0", "lo")}
    assert len({namespace for _, namespace in found} - {lab_jobs.network()[1]}) == 1
    assert until_gone(pids)
    assert len(pids) == 4


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (("fail", (2,), 20.0), WorkerError, r"\(rank 2\) failed in phase fail: .*(?s:.)*it is broken"),
        (("leave", (1,), 20.0), WorkerError, r"\(rank 1\).*exit code 7"),
        (("hang", (3,), 0.5), DeadlineError, r"ranks \[3\] in phase hang within 0.5 s"),
    ],
)
def test_what_happens_to_a_rank_reaches_the_caller_with_its_number(request_, error, words):
    pids, began = [], time.monotonic()
    with pytest.raises(error, match=words):
        isolated(lab_jobs.odd_crew, request_, announce=lambda text: pids.extend(json.loads(text)))
    assert until_gone(pids)
    assert time.monotonic() - began < 50.0


def test_no_rank_outlives_the_process_that_forked_it():
    pids = []
    with pytest.raises(WorkerError, match="exit code 9"):
        isolated(lab_jobs.end_abruptly, None, announce=lambda text: pids.extend(json.loads(text)))
    assert len(pids) == 2
    assert until_gone(pids)
