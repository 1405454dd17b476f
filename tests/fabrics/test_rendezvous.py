"""The control channel when its host, rank 0, has stopped or died: every call ends in time and names it."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from refit_transport.errors import AgreementError, TransferError
from refit_transport.fabrics.deadline import Deadline, DeadlineCaller
from refit_transport.fabrics.rendezvous import ControlChannel, Meeting
from refit_transport.testing.threads import run_ranks

TIMEOUT_S = 1.0
HOST = """
import time
from refit_transport.fabrics.rendezvous import ControlChannel, Meeting
channel = ControlChannel.listen(host="127.0.0.1", port=0, world_size=9, timeout_s=1.0, secret="s")
channel.publish("topic", 5)
print(channel.meeting.port, flush=True)
time.sleep(60)
"""


# To publish needs no answer, so it may seem to succeed.
CALLS: dict[str, Callable[[ControlChannel], object]] = {
    "collect": lambda channel: channel.collect("topic", (0,), deadline=Deadline(TIMEOUT_S)),
    "agree": lambda channel: channel.agree("a thing/0", "x", deadline=Deadline(TIMEOUT_S)),
    "share": lambda channel: channel.share({"0": b"data"}),
    "shared": lambda channel: channel.shared(("0",)),
    "failure": lambda channel: channel.failure(),
    "report_failure": lambda channel: channel.report_failure(ValueError("x")),
}


@pytest.fixture
def host() -> Iterator[tuple[subprocess.Popen[str], dict[str, ControlChannel]]]:
    """Rank 0 in a process of its own, and a channel to it for each call."""
    process = subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        port = int(process.stdout.readline())
        channels = {
            name: ControlChannel.join(Meeting("127.0.0.1", port, "s"), rank=rank, world_size=9, timeout_s=TIMEOUT_S)
            for rank, name in enumerate(CALLS, 1)
        }
        assert channels["collect"].collect("topic", (0,), deadline=Deadline(10.0)) == [5]
        yield process, channels
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_every_call_ends_in_time_and_names_rank_0(
    host: tuple[subprocess.Popen[str], dict[str, ControlChannel]], number: signal.Signals
) -> None:
    process, channels = host
    os.kill(process.pid, number)
    if number == signal.SIGKILL:
        process.wait()
    for name, channel in channels.items():
        began = time.monotonic()
        with pytest.raises(TransferError, match="the control channel") as caught:
            CALLS[name](channel)
        assert caught.value.peer == 0
        assert time.monotonic() - began < TIMEOUT_S + 3.0, name
        # Whoever cleans up afterwards doesn't wait again.
        began = time.monotonic()
        with pytest.raises(TransferError):
            channel.failure()
        assert time.monotonic() - began < 0.5, name


def test_a_rank_without_an_opinion_goes_along() -> None:
    def rank_main(channel: ControlChannel) -> None:
        deadline = Deadline(10.0)
        channel.agree("a/0", "x" if channel.rank == 2 else None, deadline=deadline)
        with pytest.raises(AgreementError, match=r"about b: x on rank \[0\]; y on rank \[2\]"):
            channel.agree("b/0", {0: "x", 2: "y"}.get(channel.rank), deadline=deadline)

    run_ranks(4, rank_main)


def test_a_call_that_comes_back_gives_its_result_or_its_error() -> None:
    caller = DeadlineCaller()
    assert caller.call(divmod, 7, 2, timeout_s=5.0) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        caller.call(divmod, 7, 0, timeout_s=5.0)
    with pytest.raises(TimeoutError, match=r"within 0\.05 s"):
        caller.call(time.sleep, 0.5, timeout_s=0.05)
    with pytest.raises(TimeoutError, match=r"within 0\.05 s"):
        caller.call(divmod, 7, 2, timeout_s=5.0)


def test_the_thread_ends_with_its_owner() -> None:
    caller = DeadlineCaller()
    caller.call(int, timeout_s=5.0)
    [thread] = [thread for thread in threading.enumerate() if thread.name == "refit-deadline-caller"][-1:]
    del caller
    gc.collect()
    thread.join(5.0)
    assert not thread.is_alive()


def test_what_ranks_share_is_there_once_for_all() -> None:
    def rank_main(channel: ControlChannel) -> dict[str, bytes]:
        data = {"same": b"for all", f"own {channel.rank}": bytes(100)}
        channel.share(data)
        channel.publish("shared", sorted(data))
        keys = [key for found in channel.collect("shared", range(3), deadline=Deadline(10.0)) for key in found]
        assert channel.shared(()) == {}
        found = channel.shared(keys)
        with pytest.raises(TransferError, match="never shared"):
            channel.shared([*keys, "another"])
        return found

    expected = {"same": b"for all", **{f"own {rank}": bytes(100) for rank in range(3)}}
    assert run_ranks(3, rank_main) == [expected] * 3
