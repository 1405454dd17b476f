"""`refit-transport bench --ranks` as a user starts it: what it finds, how it fails, and that nothing is left."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from test_run_command import Run, processes, with_changes

pytestmark = pytest.mark.e2e

REFIT = "policy__generation__refit_cfg__nccl_reshard"
CONFIG = with_changes(
    **{
        "cluster__gpus_per_node": 4,
        "policy__megatron_cfg__tensor_model_parallel_size": 2,
        "policy__generation__colocated": {"enabled": False, "resources": {"gpus_per_node": 2}},
        "policy__generation__vllm_cfg": {"tensor_parallel_size": 1},
        f"{REFIT}__topology": {"domains": "per_role", "nics": "rank", "nic_rates": ["10GB", "20GB"]},
    }
)


def bench(folder: Path, *arguments: str) -> Run:
    return Run(folder, CONFIG, *arguments, command=("bench", "--ranks", "job.yaml"))


def test_every_variant_delivers_what_is_planned_and_the_advice_is_one_of_them(tmp_path):
    code, out, err = bench(tmp_path, "--reps", "2", "--step-seconds", "2", "--json", "--output", "out").finish(120.0)
    assert code == 0, err
    found = json.loads(out)["ranks"]
    assert json.loads((tmp_path / "out" / "ranks.json").read_text()) == found
    assert "Advice: " in (tmp_path / "out" / "ranks.txt").read_text()
    measured = {each["variant"]["name"]: each for each in found["measured"]}
    assert measured.keys() == {
        "nccl_reshard, all",
        "nccl_reshard, ffn",
        "nccl_reshard, flat",
        "gather_broadcast",
        "gather_broadcast, single chain",
        "nccl_reshard, all, without shared memory",
        "gather_broadcast, without shared memory",
    }
    assert found["missing"].keys() == {"fabric nccl", "fabric nccl_m2n"}
    assert found["misses"] == []
    # Two replicas in one domain: the model crosses the network once, and twice when every target is fed alone.
    model = found["nbytes"]
    assert measured["nccl_reshard, all"]["network_bytes"] == model
    assert measured["nccl_reshard, flat"]["network_bytes"] == 2 * model
    assert found["elements"] == 2 * model // 4
    for each in measured.values():
        assert each["moved"] == [each["network_bytes"] + each["local_bytes"]] * 2
        assert all(r["seconds"] > 0 for r in each["result"]["repetitions"])
        # Into the targets' domain, through two NICs of 20 GB/s each, what two NICs of 10 GB/s send.
        assert each["result"]["bound"] == {"seconds": pytest.approx(model / 20e9), "binds": "sending"}
    topology = found["topology"]
    assert topology["domains"] == [[0, 1], [2, 3]]
    assert [(nic["ranks"], nic["rate"]) for nic in topology["nics"]] == [
        ([0], 10e9),
        ([1], 10e9),
        ([2], 20e9),
        ([3], 20e9),
    ]
    advice = found["advice"]
    assert advice["variant"] in advice["ties"]
    assert set(advice["ties"]) <= measured.keys()
    seconds = measured[advice["variant"]]["result"]["seconds"]
    assert advice["share"] == pytest.approx(seconds / (2 + seconds))


def test_a_rank_that_dies_ends_it_with_one_message(tmp_path):
    run = bench(tmp_path, "--reps", "500", "--set", f"{REFIT.replace('__', '.')}.timeout_s=20")
    end = time.monotonic() + 60.0
    victims: list[int] = []
    while len(victims) < 4 and time.monotonic() < end:
        time.sleep(0.5)
        victims = [pid for pid, command in processes(run.mark) if command.startswith("ray::_Host")]
    time.sleep(6.0)
    os.kill(victims[-1], signal.SIGKILL)
    code, out, err = run.finish(90.0)
    assert (code, out) == (1, "")
    [message] = [line for line in err.splitlines() if line.startswith("refit-transport:")]
    assert "the process died" in message
    assert "Traceback" not in err
