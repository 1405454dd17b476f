"""What runs in NeMo RL's actors through Ray's `__ray_call__`: it gives an actor one of our workers, and calls it.

So no class of NeMo RL is changed, and none needs a virtual environment of its own. An actor of vLLM's asynchronous
engine has an event loop, and must stay free for requests: there a call starts a task, and `Relay` asks for its end.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayTaskError

from refit_transport.cluster.network import HeldPort, PortRange

_WORKER, _TASKS, _PORT = (f"_refit_transport_{what}" for what in ("worker", "tasks", "port"))
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.05


def build(actor: Any, worker_class: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Gives the actor a worker of ours, made from the actor itself and `arguments`."""
    setattr(actor, _WORKER, worker_class(actor, **arguments))


def call(actor: Any, method: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Calls a method of the actor's worker."""
    return getattr(getattr(actor, _WORKER), method)(*arguments, **named)


def start(actor: Any, method: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> int:
    """Starts an asynchronous method of the actor's worker in the worker's `loop`; returns a ticket for `poll`.

    Ray runs `__ray_call__` beside an actor's event loop, not in it.
    """
    tasks = actor.__dict__.setdefault(_TASKS, {})
    ticket = max(tasks, default=0) + 1
    loop = getattr(actor, _WORKER).loop()
    tasks[ticket] = asyncio.run_coroutine_threadsafe(call(actor, method, arguments, named), loop)
    return ticket


def poll(actor: Any, ticket: int) -> tuple[Any] | None:
    """The result of a started method, None while it runs; raises what it raised."""
    task = actor.__dict__[_TASKS][ticket]
    if not task.done():
        return None
    del actor.__dict__[_TASKS][ticket]
    return (task.result(),)


def address(actor: Any, ports: PortRange, host: str | None) -> tuple[str, int]:
    """This node's IP address and a port on it, held until the next one is asked for."""
    port = actor.__dict__.setdefault(_PORT, HeldPort()).renew(ports)
    return host or ray.util.get_node_ip_address(), port


def process_id(_actor: Any) -> int:
    """The actor's process id."""
    return os.getpid()


def node(_actor: Any) -> str:
    """The id of the actor's node."""
    return str(ray.get_runtime_context().get_node_id())


class Relay:
    """A small Ray actor that waits for what runs in asynchronous actors, as a reference can be waited for."""

    async def call(self, handle: Any, method: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """The result of an asynchronous method of the worker in the actor `handle`."""
        try:
            ticket = await handle.__ray_call__.remote(start, method, arguments, named)
            pause = _FIRST_PAUSE_S
            while (answer := await handle.__ray_call__.remote(poll, ticket)) is None:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
        except RayTaskError as error:
            raise (error.cause or error) from None
        return answer[0]
