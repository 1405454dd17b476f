"""A Megatron script refits what serves its policy, by vLLM's own clients and by ours; and a server dies meanwhile."""

from __future__ import annotations

import json
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import requests
from vllm_servers import ENVIRONMENT, save_served_model, serving, torchrun

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]
SCRIPT = str(Path(__file__).parents[1] / "serving_trainer.py")
# Of log-probabilities in fp32, Megatron's against vLLM's.
TOLERANCE = 1e-4
# A dead server is noticed by its connections, long before the refit's deadline of 60 s.
NOTICED_S = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_served_model(tmp_path_factory.mktemp("model"))


def train(model, client, at, *, ranks, seeds, strike=None):
    arguments = ["--model", str(model), "--client", client, "--at", *at, "--engine-ranks", str(ranks), "--seeds"]
    arguments += [str(seed) for seed in seeds]
    if strike is not None:
        arguments += ["--strike", str(strike)]
    done = torchrun(SCRIPT, *arguments)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def apart(one, other):
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def assert_served(found, *, servers, versions):
    assert [each["version"] for each in found] == versions
    for each in found:
        assert len(each["answers"]) == servers
        for (_, served), trained in zip(each["answers"], each["trained"], strict=True):
            assert apart(served, trained) < TOLERANCE
    for before, after in pairwise(found):
        assert all(
            one[0] != other[0] or apart(one[1], other[1]) > 100 * TOLERANCE
            for one, other in zip(before["answers"], after["answers"], strict=True)
        )


def test_servers_of_different_sizes_are_refitted_together(model, tmp_path):
    with serving(model, tmp_path / "1.log", tensor=2) as large, serving(model, tmp_path / "2.log") as small:
        found = train(model, "servers", [large.url, small.url], ranks=3, seeds=(11, 12))
        assert_served(found, servers=2, versions=[0, 1])
        for server in (large, small):
            assert requests.get(f"{server.url}/weight_info", timeout=10).json() == {"weight_version": "1"}


def test_vllms_own_http_client(model, tmp_path):
    with serving(model, tmp_path / "server.log", tensor=2) as server:
        found = train(model, "http", [server.url], ranks=2, seeds=(11, 12))
        assert_served(found, servers=1, versions=[0, 1])
        assert requests.get(f"{server.url}/weight_info", timeout=10).json() == {"weight_version": "1"}


def test_vllms_own_ray_client(model, monkeypatch):
    import ray
    from serving_actor import ServingActor

    from refit_transport.cluster.job import ray_cluster

    with ray_cluster(address=None, cpus=4):
        monkeypatch.setenv("SERVING_CLUSTER", ray.get_runtime_context().gcs_address)
        actor = (
            ray.remote(ServingActor)
            .options(name="served", namespace="serving", num_cpus=1, runtime_env={"env_vars": ENVIRONMENT})
            .remote(str(model), 2)
        )
        found = train(model, "ray", ["served"], ranks=2, seeds=(11, 12))
        assert_served(found, servers=1, versions=[0, 1])
        assert ray.get(actor.get_weight_version.remote(), timeout=60) == "1"
        actor.shutdown.remote()


def test_a_server_that_dies_in_a_refit_is_named_and_replaced(model, tmp_path):
    with ExitStack() as stack:
        stays = stack.enter_context(serving(model, tmp_path / "stays.log"))
        dies = stack.enter_context(serving(model, tmp_path / "dies.log"))
        both = [stays.url, dies.url]
        assert_served(train(model, "servers", both, ranks=2, seeds=(11,)), servers=2, versions=[0])

        errors = train(model, "servers", both, ranks=2, seeds=(12,), strike=dies.process.pid)
        assert sorted(each["rank"] for each in errors) == [0, 1]
        assert all(each["seconds"] < NOTICED_S for each in errors), errors
        # The server by its URL, or its engine by its rank in the refit, behind the policy's two and the other's one.
        assert all(dies.url in each["error"] or "rank 3" in each["error"] for each in errors), errors
        # What stays may be torn: it answers nobody until a refit is complete.
        assert requests.get(f"{stays.url}/is_paused", timeout=10).json() == {"is_paused": True}
        assert requests.get(f"{stays.url}/weight_info", timeout=10).json() == {"weight_version": "0"}

        dies.process.wait(60)
        port = urlsplit(dies.url).port
        stack.enter_context(serving(model, tmp_path / "again.log", port=port))
        # Above what the one that stayed has served.
        assert_served(train(model, "servers", both, ranks=2, seeds=(13,)), servers=2, versions=[1])
        assert requests.get(f"{stays.url}/is_paused", timeout=10).json() == {"is_paused": False}
