"""The client of vLLM servers, against a server that answers as it is told."""

import http.server
import json
import threading
import time

import pytest

pytest.importorskip("vllm")

from refit_transport.errors import TransferError, WorkerError
from refit_transport.integrations.vllm_server import ServerClient
from refit_transport.integrations.vllm_trainer import RefitSource, RefitTrainerEngine, RefitTrainerInitInfo

INFO = {"host": "h", "port": 1, "secret": "hush", "first_rank": 2, "world_size": 5, "timeout_s": 1.0}


class Told:
    """A server: `answers` by path, `seen` in order."""

    def __init__(self, answers, log):
        told = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def answer(self):
                size = int(self.headers.get("Content-Length", 0))
                body = json.loads(self.rfile.read(size) or b"null")
                path, _, query = self.path[1:].partition("?")
                log.append((told.url, path, query, body))
                code, found = answers.get(path, (200, {}))
                data = json.dumps(found(body) if callable(found) else found).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = answer  # noqa: N815 - the library's names

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def servers():
    made, log = [], []

    def make(*answers):
        made.extend(Told(own, log) for own in answers)
        return [each.url for each in made], log

    yield make
    for each in made:
        each.close()


def of(ranks, **others):
    return {"get_world_size": (200, {"world_size": ranks}), **others}


def test_servers_are_refitted_together_each_behind_the_ranks_of_the_one_before(servers):
    urls, log = servers(of(1), of(2))
    client = ServerClient(*urls)
    assert client.ranks() == [1, 2]
    client.init_weight_transfer_engine(INFO)
    client.start_weight_update()
    client.update_weights({"version": 4})
    client.finish_weight_update("4")
    joined = {url: body["init_info"] for url, path, _, body in log if path == "init_weight_transfer_engine"}
    assert joined == {urls[0]: INFO, urls[1]: {**INFO, "first_rank": 3}}
    for url in urls:
        calls = [(path, query, body) for where, path, query, body in log if where == url and "world" not in path]
        assert calls[1:] == [
            ("pause", "mode=keep&clear_cache=false", {}),
            ("start_weight_update", "", {}),
            ("update_weights", "", {"update_info": {"version": 4}}),
            ("finish_weight_update", "", {"weight_version": "4"}),
            ("reset_prefix_cache", "reset_running_requests=true", {}),
            ("resume", "", {}),
        ]


def test_a_number_of_ranks_that_was_not_asked_for_is_told_with_the_right_one(servers):
    urls, log = servers(of(1), of(1))
    with pytest.raises(WorkerError, match=r"have 2 ranks and the refit was opened for 3: set engine_ranks to 2"):
        ServerClient(*urls).init_weight_transfer_engine(INFO)
    assert not any("init" in path for _, path, _, _ in log)


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"get_world_size": (404, {})}, "isn't in RL mode: start it with VLLM_SERVER_DEV_MODE=1"),
        (of(3, init_weight_transfer_engine=(500, {"error": "no such backend"})), "status 500: .*no such backend"),
        (of(3, init_weight_transfer_engine=(422, lambda body: {"input": body})), r"status 422: .*\(secret\)"),
    ],
)
def test_a_server_that_refuses_is_named_and_says_why(servers, answers, words):
    urls, _ = servers(answers)
    with pytest.raises(WorkerError, match=words) as caught:
        ServerClient(*urls).init_weight_transfer_engine(INFO)
    assert caught.value.actor == urls[0]
    assert "hush" not in str(caught.value)


def test_a_server_that_is_not_there_is_named(servers):
    urls, _ = servers({})
    with pytest.raises(WorkerError, match=r"can't be reached \(ConnectionError\)"):
        ServerClient("http://127.0.0.1:9").versions()
    with pytest.raises(ValueError, match="URL of a server"):
        ServerClient()
    assert urls


def test_when_a_server_does_not_pause_the_others_go_on(servers):
    urls, log = servers(of(1), of(1, pause=(500, {"error": "busy"})))
    with pytest.raises(WorkerError, match="busy"):
        ServerClient(*urls).start_weight_update()
    assert (urls[0], "resume") in [(url, path) for url, path, _, _ in log]
    assert "start_weight_update" not in [path for _, path, _, _ in log]


def test_the_server_that_failed_first_is_named(servers):
    def late(_):
        time.sleep(0.5)
        return {"error": "the other one failed"}

    urls, _ = servers(of(1, update_weights=(500, late)), of(1, update_weights=(500, {"error": "a loader"})))
    with pytest.raises(WorkerError, match="a loader"):
        ServerClient(*urls).update_weights({"version": 1})


def test_a_server_that_keeps_its_cache_stays_paused(servers):
    urls, log = servers(of(1, reset_prefix_cache=(200, {"success": False})))
    with pytest.raises(WorkerError, match="kept what it had cached"):
        ServerClient(*urls).finish_weight_update("1")
    assert "resume" not in [path for _, path, _, _ in log]


def test_one_that_refuses_to_close_stays_paused(servers):
    urls, log = servers(of(3, finish_weight_update=(500, {"error": "torn"})))
    with pytest.raises(WorkerError, match="torn"):
        ServerClient(*urls).finish_weight_update("1")
    assert "resume" not in [path for _, path, _, _ in log]


def test_what_a_trainer_gets_wrong_is_told_before_anything_is_called():
    client = ServerClient("http://127.0.0.1:9")
    with pytest.raises(ValueError, match=r"engine_ranks must be at least 1: .*\(got 0\)"):
        RefitTrainerInitInfo(rank=0, engine_ranks=0)
    info = RefitTrainerInitInfo(rank=0, engine_ranks=1)
    with pytest.raises(TransferError, match=r"must be a RefitSource.*got NoneType"):
        RefitTrainerEngine.trainer_init(info, client=client)
    with pytest.raises(TransferError, match="call init_process_group first"):
        RefitTrainerEngine.trainer_init(info, client=client, source=RefitSource(None))
