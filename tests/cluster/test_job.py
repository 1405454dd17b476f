"""How ranks share a cluster's CPUs, and how signals end a job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import ray

from refit_transport.cluster import job
from refit_transport.errors import WorkerError

# Waits until a signal ends it, and takes a while to clean up.
WAITING = """
import sys, time
from refit_transport.cluster.job import _ending_in_order
with _ending_in_order() as go_on:
    go_on()
    try:
        print("ready", flush=True)
        time.sleep(60)
    finally:
        print("cleaning up", flush=True)
        time.sleep(1.0)
        print("cleaned up", flush=True)
"""


@pytest.mark.parametrize(
    ("cluster", "ranks", "resources"),
    [
        ({"CPU": 8.0}, 4, {"CPU": 1.0}),
        ({"CPU": 2.0}, 4, {"CPU": 0.5}),
        ({"CPU": 2.0}, 2000, {"CPU": 0.001}),
        ({"CPU": 8.0, "GPU": 4.0}, 4, {"GPU": 1.0, "CPU": 1.0}),
    ],
)
def test_ranks_share_what_there_is(
    monkeypatch: pytest.MonkeyPatch, cluster: dict[str, float], ranks: int, resources: dict[str, float]
) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: cluster)
    roles = [job.Role("policy", ranks - 2), job.Role("engine 0", 1, ranks_each=2)]
    assert job._rank_resources(roles) == resources


def test_more_ranks_than_ray_can_place_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
    with pytest.raises(WorkerError, match=r"2001 ranks are too many for 2 CPUs; lower cluster\.gpus_per_node"):
        job._rank_resources([job.Role("policy", 2001)])


def test_more_ranks_than_gpus_are_refused_with_their_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 64.0, "GPU": 7.0})
    roles = [job.Role("policy", 2), job.Role("critic", 2), job.Role("engine 0", 1, ranks_each=4)]
    with pytest.raises(WorkerError, match=r"8 ranks \(policy: 2, critic: 2, engine 0: 4\) need a GPU each, .* has 7"):
        job._rank_resources(roles)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_second_signal_does_not_disturb_the_cleaning_up(number: signal.Signals, code: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", WAITING], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.kill(process.pid, number)
    assert process.stdout.readline() == "cleaning up\n"
    os.kill(process.pid, number)
    assert process.communicate(timeout=30.0)[0] == "cleaned up\n"
    assert process.returncode == code


def test_an_ignored_signal_stays_ignored() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n{WAITING}"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.kill(process.pid, signal.SIGHUP)
    time.sleep(0.3)
    assert process.poll() is None
    process.terminate()
    assert process.wait(30.0) == 143
    process.stdout.close()


STARTING = """
import time
from refit_transport.cluster.job import _ending_in_order
try:
    with _ending_in_order() as go_on:
        print("starting", flush=True)
        time.sleep(1.0)
        print("started", flush=True)
        go_on()
        print("never", flush=True)
except KeyboardInterrupt:
    raise SystemExit(130)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_waits_until_what_is_half_started_can_be_ended(number: signal.Signals, code: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STARTING], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "starting\n"
    os.kill(process.pid, number)
    assert process.communicate(timeout=30.0)[0] == "started\n"
    assert process.returncode == code
