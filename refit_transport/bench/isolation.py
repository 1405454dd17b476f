"""Runs a function in a child process with network and mount namespaces of its own.

The caller's namespaces are never touched, and everything made in the child's vanishes with its last process.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from refit_transport.errors import ConfigError, RefitTransportError, Violation, WorkerError

Announce = Callable[[str], None]

_TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "mount": "util-linux"}
_UNSHARE = ("unshare", "--net", "--mount", "--propagation", "private")
_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET = 0x40000000
_END_SECONDS = 10.0


def check_requirements() -> None:
    """Whether this process may make namespaces and has the tools to.

    Raises:
        ConfigError: everything that is missing, with remedies.
    """
    found = [
        Violation(tool, "not found", "the lab builds its network with it", f"install {package}")
        for tool, package in _TOOLS.items()
        if shutil.which(tool) is None
    ]
    if os.geteuid() != 0:
        found.append(
            Violation("user", f"uid {os.geteuid()}", "network namespaces and rate limits need root", "run it as root")
        )
    elif not found and subprocess.run([*_UNSHARE, "true"], capture_output=True, check=False).returncode:
        remedy = "in a container, give it the capabilities SYS_ADMIN and NET_ADMIN"
        found.append(Violation("unshare", "refused", "the kernel makes no new namespaces for this process", remedy))
    if found:
        raise ConfigError("bench --lab", tuple(found))


def isolated(function: Callable[[Any, Announce], Any], request: Any, *, announce: Announce) -> Any:
    """Calls `function(request, announce)` in a child with namespaces of its own; returns or raises what it does.

    Args:
        function: of a module, so that the child can import it.
        request: its argument; the request, the result and errors are pickled.
        announce: called here with each text that the function announces there.
    """
    check_requirements()
    here, there = Pipe()
    command = [*_UNSHARE, sys.executable, "-m", __name__, str(there.fileno())]
    # One thread per process: a lab has many more ranks than the machine has cores.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    process = subprocess.Popen(command, pass_fds=(there.fileno(),), env=environment, stdin=subprocess.DEVNULL)
    there.close()
    try:
        here.send((function, request))
        return _result(here, announce)
    except (EOFError, ConnectionError) as error:
        raise WorkerError("lab", 0, "run", f"ended with exit code {process.wait(_END_SECONDS)}") from error
    finally:
        here.close()
        if process.poll() is None:
            process.kill()
        process.wait()


def _result(pipe: Connection, announce: Announce) -> Any:
    while True:
        kind, value = pipe.recv()
        if kind == "announce":
            announce(value)
        elif kind == "error":
            raise value
        else:
            return value


def die_with_parent() -> None:
    """Has the kernel end this process when the one that started it ends, however that happens."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def enter_namespace(name: str) -> None:
    """Moves this thread into a named network namespace; before it starts threads, that is the whole process.

    Raises:
        OSError: there is no such namespace, or it may not be entered.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        if libc.setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"can't enter the network namespace {name}")
    finally:
        os.close(descriptor)


def _serve(pipe: Connection) -> None:
    """The child: private mounts for `ip netns`, then the function."""
    function, request = pipe.recv()
    # Over /run itself, so that not even an empty folder is left behind.
    subprocess.run(["mount", "-t", "tmpfs", "none", "/run"], check=True)
    Path("/run/netns").mkdir()
    try:
        pipe.send(("result", function(request, lambda text: pipe.send(("announce", text)))))
    except RefitTransportError as error:
        pipe.send(("error", error))
    except Exception as error:  # noqa: BLE001  # the boundary: whatever it was, the caller must see it
        reason = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        pipe.send(("error", WorkerError("lab", 0, "run", reason)))


if __name__ == "__main__":
    die_with_parent()
    # An interrupt of the terminal reaches this process too; the caller ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _serve(Connection(int(sys.argv[1])))
