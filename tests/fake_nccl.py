"""A GPU and a process group that only record, and a simulation that carries out what all ranks have recorded.

The simulation has CUDA's and NCCL's rules and nothing more: a stream goes in order, a wait holds until its event was
passed, a group of messages begins when the stream reaches it and ends when all its messages are done, and messages
between two ranks match in the order in which they were posted. What the rules leave open is chosen at random.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import strategies as st

from refit_transport.fabrics.program import Moves, Program
from refit_transport.planning.planner import plan_transfer
from refit_transport.scheduling.scheduler import PASSES, build_schedule
from refit_transport.scheduling.topology import Topology
from refit_transport.testing.strategies import manifest_pairs


@dataclass(eq=False)
class FakeEvent:
    name: str
    gpu: FakeGpu
    is_recorded: bool = False
    is_passed: bool = False

    def record(self, stream: FakeStream) -> None:
        self.gpu.log.append(f"{self.name} on {stream.name}")
        self.is_recorded = True
        self.gpu.issue(stream, Pass(self))

    def query(self) -> bool:
        self.gpu.host_waits_for(self)
        return True

    def elapsed_time(self, end_event: FakeEvent) -> float:
        assert self.is_recorded
        assert end_event.is_recorded
        return 1.0


@dataclass(eq=False)
class FakeStream:
    name: str
    gpu: FakeGpu
    queue: deque[tuple[Any, tuple[FakeEvent, ...]]] = field(default_factory=deque)

    def wait_event(self, event: FakeEvent) -> None:
        assert event.is_recorded, "CUDA would not wait for it"
        self.gpu.log.append(f"{self.name} waits for {event.name}")
        self.gpu.issue(self, Hold(event))


@dataclass(eq=False)
class Pass:
    event: FakeEvent


@dataclass(eq=False)
class Hold:
    event: FakeEvent


@dataclass(eq=False)
class Call:
    function: Callable[[], None]


@dataclass(eq=False)
class Message:
    kind: str
    peer: int
    tensor: torch.Tensor
    is_done: bool = False


@dataclass(eq=False)
class Messages:
    members: list[Message]
    is_posted: bool = False


class FakeGpu:
    """Implements `fabrics.cuda.Device`; `log` lists the calls in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._events = (f"e{number}" for number in itertools.count())
        self.caller = FakeStream("caller", self)
        self.nccl = FakeStream("nccl", self)
        self.streams = [self.caller, self.nccl]
        self.current = self.caller
        self._host: tuple[FakeEvent, ...] = ()

    def current_stream(self) -> FakeStream:
        return self.current

    def new_stream(self) -> FakeStream:
        self.streams.append(FakeStream(("side", "wire")[len(self.streams) % 2], self))
        return self.streams[-1]

    def new_event(self) -> FakeEvent:
        return FakeEvent(next(self._events), self)

    @contextmanager
    def using(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def issue(self, stream: FakeStream, operation: Any) -> None:
        stream.queue.append((operation, self._host))

    def host_waits_for(self, event: FakeEvent) -> None:
        """What is issued from now on comes after it."""
        self._host = (*self._host, event)

    def call(self, what: str, function: Callable[[], None]) -> None:
        self.log.append(f"{what} on {self.current.name}")
        self.issue(self.current, Call(function))


@dataclass(frozen=True)
class DeferredMoves(Moves):
    """Copies that are issued to the current stream of a fake GPU."""

    gpu: FakeGpu | None = None
    what: str = ""

    def make(self) -> None:
        assert self.gpu is not None
        if self.into:
            self.gpu.call(self.what, super().make)


def deferred(program: Program, gpu: FakeGpu) -> Program:
    """The program with its copies on the fake GPU's streams."""

    def moves(what: str, payload: int, found: Moves) -> DeferredMoves:
        return DeferredMoves(found.into, found.out_of, gpu, f"{what} {payload}")

    steps = tuple(
        replace(step, pack=moves("pack", step.payload, step.pack), unpack=moves("unpack", step.payload, step.unpack))
        for step in program.steps
    )
    return replace(program, steps=steps)


class FakeWork:
    def __init__(self, gpu: FakeGpu, done: FakeEvent, *, hangs: bool) -> None:
        self._gpu, self._done, self._hangs = gpu, done, hangs

    def is_completed(self) -> bool:
        if not self._hangs:
            self._gpu.host_waits_for(self._done)
        return not self._hangs

    def wait(self) -> bool:
        self._gpu.log.append(f"{self._gpu.current.name} waits for work")
        self._gpu.issue(self._gpu.current, Hold(self._done))
        return True


class FakeGroup:
    """Implements `fabrics.cuda.Group` for one rank. With `hangs` no group of messages is ever done."""

    def __init__(self, gpu: FakeGpu, *, hangs: bool = False) -> None:
        self.gpu, self._hangs = gpu, hangs
        self._open: list[Message] | None = None
        self.aborts = 0

    def _start_coalescing(self) -> None:
        assert self._open is None
        self._open = []

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self._add("send", tensors, peer, tag)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self._add("receive", tensors, peer, tag)

    def _end_coalescing(self) -> FakeWork:
        assert self._open
        members, self._open = self._open, None
        self.gpu.log.append("group " + ", ".join(f"{m.kind} {m.tensor.numel()} {m.peer}" for m in members))
        # As torch does it: NCCL's own stream comes after what is on the current one.
        before, done = FakeEvent("before", self.gpu, is_recorded=True), FakeEvent("done", self.gpu, is_recorded=True)
        self.gpu.issue(self.gpu.current, Pass(before))
        for operation in (Hold(before), Messages(members), Pass(done)):
            self.gpu.issue(self.gpu.nccl, operation)
        return FakeWork(self.gpu, done, hangs=self._hangs)

    def abort(self) -> None:
        self.gpu.log.append("abort")
        self.aborts += 1

    def _comm_ptr(self) -> int:
        return 77

    def _add(self, kind: str, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        assert self._open is not None, "outside of a group"
        assert tag == 0
        (tensor,) = tensors
        assert tensor.is_contiguous()
        assert tensor.dtype == torch.uint8
        self._open.append(Message(kind, peer, tensor))


class Simulation:
    """Carries out what the GPUs of all ranks have recorded, in an order that the seed chooses.

    `run` raises AssertionError where nothing can go on.
    """

    def __init__(self, gpus: dict[int, FakeGpu], *, seed: int) -> None:
        self._gpus, self._random = gpus, random.Random(seed)
        # Posted and not yet matched, by sender, receiver and end.
        self._posted: dict[tuple[int, int, str], deque[Message]] = {}

    def run(self) -> None:
        streams = [(rank, stream) for rank, gpu in self._gpus.items() for stream in gpu.streams]
        while any(stream.queue for _, stream in streams):
            self._random.shuffle(streams)
            moved = [self._step(rank, stream) for rank, stream in streams] + [self._transfer()]
            stuck = {(rank, stream.name): stream.queue[0][0] for rank, stream in streams if stream.queue}
            assert any(moved), f"nothing can go on: {stuck}"

    def _step(self, rank: int, stream: FakeStream) -> bool:
        if not stream.queue or self._random.random() < 0.3:
            return bool(stream.queue)
        operation, host = stream.queue[0]
        if not all(event.is_passed for event in host):
            return False
        match operation:
            case Pass(event):
                event.is_passed = True
            case Hold(event) if not event.is_passed:
                return False
            case Call(function):
                function()
            case Messages():
                if not operation.is_posted:
                    self._post(rank, operation)
                    return True
                if not all(member.is_done for member in operation.members):
                    return False
        stream.queue.popleft()
        return True

    def _post(self, rank: int, group: Messages) -> None:
        group.is_posted = True
        for member in group.members:
            ends = (rank, member.peer) if member.kind == "send" else (member.peer, rank)
            self._posted.setdefault((*ends, member.kind), deque()).append(member)

    def _transfer(self) -> bool:
        pairs = [
            (sends, receives)
            for (sender, receiver, kind), sends in self._posted.items()
            if kind == "send" and sends and (receives := self._posted.get((sender, receiver, "receive")))
        ]
        if not pairs:
            return False
        sends, receives = self._random.choice(pairs)
        send, receive = sends.popleft(), receives.popleft()
        assert send.tensor.numel() == receive.tensor.numel(), "a message meets another one's place"
        receive.tensor.copy_(send.tensor)
        send.is_done = receive.is_done = True
        return True


@st.composite
def schedules(draw):
    """Any pair of manifests on any domains, and their schedule with any passes."""
    pair = draw(manifest_pairs(ranks="any"))
    ranks = sorted({ranked.rank for side in pair for ranked in side.ranks})
    homes = [draw(st.integers(0, 2)) for _ in ranks]
    domains = [[r for r, home in zip(ranks, homes, strict=True) if home == domain] for domain in range(3)]
    topology = Topology.of([ranks for ranks in domains if ranks], nics=draw(st.sampled_from(("domain", "rank"))))
    disabled = draw(st.sets(st.sampled_from(PASSES)))
    bucket = draw(st.sampled_from((1, 7, 64, 4096)))
    plan = plan_transfer(*pair)
    return pair, build_schedule(plan, topology, bucket_bytes=bucket, disabled=tuple(sorted(disabled)))
