"""vLLM servers (`vllm serve` in RL mode) as the engines of a refit, driven over their own HTTP API."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from typing import Any, Literal

import requests

from refit_transport.errors import WorkerError

# What becomes of requests that a refit meets: they stand still and go on, it waits for them, or they are ended.
InFlight = Literal["keep", "wait", "abort"]

_RL_MODE = 'start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{"backend": "refit_transport"}\''
_MOST_TEXT = 500


class ServerClient:
    """What vLLM's trainer engines ask of a client, for one server or several that are refitted together.

    From `start_weight_update` to `finish_weight_update` the servers are paused, and they stay so when a refit fails:
    what they hold may be torn until a complete one. Nothing that was cached under old weights is used afterwards.
    """

    def __init__(self, *urls: str, timeout_s: float = 300.0, in_flight: InFlight = "keep") -> None:
        """`urls` such as "http://node:8000"; `timeout_s` for each call that isn't longer by its nature."""
        if not urls:
            raise ValueError("ServerClient needs the URL of a server at least")
        self._urls = tuple(url.rstrip("/") for url in urls)
        self._timeout_s, self._in_flight = timeout_s, in_flight

    def ranks(self) -> list[int]:
        """How many ranks each server has, over all its data-parallel replicas.

        Raises:
            WorkerError: a server doesn't answer, or isn't in RL mode; names it.
        """
        return [int(self._call(url, "get_world_size", get=True)["world_size"]) for url in self._urls]

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Has every server join, each behind the ranks of the one before."""
        first, bodies = int(init_info["first_rank"]), []
        for ranks in self.ranks():
            bodies.append({"init_info": {**init_info, "first_rank": first}})
            first += ranks
        if first != init_info["world_size"]:
            found = first - int(init_info["first_rank"])
            wanted = int(init_info["world_size"]) - int(init_info["first_rank"])
            reason = (
                f"the servers have {found} ranks and the refit was opened for {wanted}: set engine_ranks to {found}"
            )
            raise WorkerError("servers", -1, "init_weight_transfer_engine", reason)
        self._everywhere("init_weight_transfer_engine", bodies)

    def start_weight_update(self) -> None:
        """Pauses every server, and opens an update. When a server doesn't pause, those that did go on."""
        try:
            self._everywhere("pause", parameters={"mode": self._in_flight, "clear_cache": "false"})
        except WorkerError:
            # Nothing has moved: what they hold is whole.
            with suppress(WorkerError):
                self._everywhere("resume")
            raise
        self._everywhere("start_weight_update")

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        """Has every server receive."""
        self._everywhere("update_weights", [{"update_info": dict(update_info)}] * len(self._urls))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Closes the update under this version everywhere, drops what was cached, and lets the servers go on."""
        self._everywhere("finish_weight_update", [{"weight_version": weight_version}] * len(self._urls))
        answers = self._everywhere("reset_prefix_cache", parameters={"reset_running_requests": "true"})
        for url, answer in answers.items():
            if not answer.get("success", True):
                raise WorkerError(url, -1, "reset_prefix_cache", "the server kept what it had cached under old weights")
        self._everywhere("resume")

    def versions(self) -> list[str]:
        """The weight version that each server says it serves."""
        return [str(self._call(url, "weight_info", get=True)["weight_version"]) for url in self._urls]

    def _everywhere(
        self, path: str, bodies: Sequence[Mapping[str, Any]] = (), *, parameters: Mapping[str, str] | None = None
    ) -> dict[str, dict[str, Any]]:
        """Posts to all servers at once, and waits for all of them; their answers by URL.

        Raises:
            WorkerError: the first in time that failed, after all have answered: what others say often follows from it.
        """
        own = bodies or [{}] * len(self._urls)
        with ThreadPoolExecutor(len(self._urls)) as threads:
            calls = {
                threads.submit(self._call, url, path, body=body, parameters=parameters): url
                for url, body in zip(self._urls, own, strict=True)
            }
            done = list(as_completed(calls))
        return {calls[call]: call.result() for call in done}

    def _call(
        self,
        url: str,
        path: str,
        *,
        get: bool = False,
        body: Mapping[str, Any] | None = None,
        parameters: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        ask: Callable[..., requests.Response] = requests.get if get else requests.post
        arguments = {} if get else {"json": dict(body or {})}
        try:
            response = ask(f"{url}/{path}", params=parameters, timeout=self._timeout_s, **arguments)
        except requests.RequestException as error:
            # requests' own text has the whole request in it.
            reason = (
                f"no answer within {self._timeout_s:g} s" if isinstance(error, requests.Timeout) else "can't be reached"
            )
            raise WorkerError(url, -1, path, f"the server {reason} ({type(error).__name__})") from error
        if response.status_code == requests.codes.not_found:
            raise WorkerError(url, -1, path, f"the server isn't in RL mode: {_RL_MODE}")
        if not response.ok:
            # A server may repeat what it was sent.
            secret = str(dict(body or {}).get("init_info", {}).get("secret", ""))
            text = response.text.replace(secret, "(secret)") if secret else response.text
            raise WorkerError(url, -1, path, f"HTTP status {response.status_code}: {text[:_MOST_TEXT]}")
        found: dict[str, Any] = response.json() if response.content else {}
        return found
