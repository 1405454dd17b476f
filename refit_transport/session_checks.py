"""Verification of one rank's refits: what is prepared once, what runs beside the transfer, and who waits for whom."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import Literal

import torch

from refit_transport.errors import DeadlineError
from refit_transport.fabrics.binding import Binding
from refit_transport.fabrics.deadline import Deadline
from refit_transport.fabrics.rendezvous import ControlChannel
from refit_transport.refit_plan import RefitPlan
from refit_transport.transports.base import Endpoint
from refit_transport.verification import (
    SAMPLED_SHARE,
    Atoms,
    BoxesHere,
    Comparison,
    Findings,
    SideSums,
    compare,
    compare_derived,
)


class SourceReading:
    """A source's checksums, computed in a thread of its own, after what the caller has done on its stream."""

    def __init__(self, source: Binding, compute: Callable[[Callable[[], bool]], SideSums]) -> None:
        self._rank, self._over = source.manifest.rank, Event()
        device = next((buffer.device for buffer in source.buffers.values()), torch.device("cpu"))
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

        def read() -> SideSums:
            with torch.cuda.stream(stream):
                return compute(self._over.is_set)

        beside = ThreadPoolExecutor(max_workers=1, thread_name_prefix="refit-checksums")
        self._sums = beside.submit(read)
        beside.shutdown(wait=False)

    def result(self, deadline: Deadline) -> SideSums:
        """Waits for them.

        Raises:
            DeadlineError: they were not there in time.
        """
        try:
            return self._sums.result(timeout=deadline.remaining())
        except TimeoutError as error:
            self.give_up()
            rank = f"rank {self._rank}"
            raise DeadlineError(rank, "its own checksums", "verify", deadline.seconds) from error

    def give_up(self) -> None:
        """Ends the thread soon."""
        self._over.set()


class SessionChecks:
    """Collective like the session's own methods. `verify` of the settings says how much of a refit is compared."""

    def __init__(self, channel: ControlChannel, endpoint: Endpoint, plan: RefitPlan) -> None:
        self._channel, self._endpoint, self._plan = channel, endpoint, plan
        self._share = plan.job.settings.verify
        self._sources = [ranked.rank for ranked in plan.job.source.ranks]
        self._are_replicas_equal = False
        # Every box, and what this rank has of them: the same in each refit, while its memory stays where it is.
        self._all: tuple[Atoms, ...] = ()
        self._bound: dict[str, tuple[tuple[int, ...], BoxesHere]] = {}

    @property
    def are_on(self) -> bool:
        """Whether refits are verified."""
        return self._share != "off"

    def replicas(self, version: int, deadline: Deadline) -> None:
        """Once, before any byte moves: a tensor that several source ranks hold must have one value.

        Raises:
            AgreementError: it has two.
        """
        if not self.are_on or self._are_replicas_equal:
            return
        shared = [atoms for atoms in self._everything() if len(atoms.holders) > 1]
        source = self._endpoint.source_binding()
        held = None if source is None else BoxesHere.of_source(source, shared).checksums()
        self._compare(shared, held, None, "before", deadline).comparison(version, {}).require_equal()
        self._channel.agree("the sources' replicas/before", None, deadline=deadline)
        self._channel.forget(("checksums/before", "boxes/before"))
        self._are_replicas_equal = True

    @contextmanager
    def reading_sources(self, refit: int) -> Iterator[SourceReading | None]:
        """Computes what this rank's source has while the block sends it; given up when the block fails.

        Sources don't change during a refit, and their ranks mostly wait for the network. Yields None on other ranks,
        and where nothing is verified.
        """
        if not self.are_on or (source := self._endpoint.source_binding()) is None:
            yield None
            return
        chosen = self._chosen(refit)
        reading = SourceReading(source, lambda is_over: self._here("source", source, chosen).checksums(is_over))
        try:
            yield reading
        except BaseException:
            reading.give_up()
            raise

    def arrived(self, version: int, refit: int, held: SourceReading | None, deadline: Deadline) -> int:
        """Compares what the targets have received; how many boxes this rank did.

        Raises:
            AgreementError: replicas of a source differ.
            VerificationError: this rank's target has something else than the sources.
            DeadlineError: this rank didn't read its source's weights in time.
        """
        if not self.are_on:
            return 0
        chosen = self._chosen(refit)
        sums = None if held is None else held.result(deadline)
        target = self._endpoint.target_binding()
        served = None if target is None else self._here("target", target, chosen)
        found = self._compare(chosen, sums, served, str(refit), deadline).comparison(version, {})
        if sums is not None:
            found.require_equal("replica")
            self._channel.publish(f"replicas/{refit}", "agree")
        if found.differing:
            # Where replicas differ, that is the cause of what a target finds.
            self._channel.collect(f"replicas/{refit}", self._sources, deadline=deadline)
        return found.require_equal().boxes

    def derived(self, version: int, refit: int) -> int:
        """Compares what the target derives from its weights with what they give; how many tensors.

        Raises:
            VerificationError: it serves others.
        """
        if not self.are_on or self._endpoint.target is None:
            return 0
        every = SAMPLED_SHARE if self._share == "sample" else 1
        found = compare_derived(self._endpoint.target, self._channel.rank, every=every, first=refit)
        return found.comparison(version, {}).require_equal().boxes

    def everything(self, served: Binding | None, topic: str, version: int, deadline: Deadline) -> Comparison:
        """What this rank finds when all is compared as it is now; needs no refit and no setting."""
        source, chosen = self._endpoint.source_binding(), self._everything()
        held = None if source is None else self._here("source", source, chosen).checksums()
        there = None if served is None else BoxesHere.of_target(served, chosen)
        found = self._compare(chosen, held, there, topic, deadline)
        parts = [found.comparison(version, self._plan.verifier.unverified)]
        if self._endpoint.target is not None:
            parts.append(compare_derived(self._endpoint.target, self._channel.rank).comparison(version, {}))
        return Comparison.joined(parts)

    def _compare(
        self,
        chosen: Sequence[Atoms],
        held: SideSums | None,
        served: BoxesHere | None,
        topic: str,
        deadline: Deadline,
    ) -> Findings:
        return compare(
            self._channel, chosen, held=held, served=served, sources=self._sources, topic=topic, deadline=deadline
        )

    def _everything(self) -> tuple[Atoms, ...]:
        if not self._all:
            self._all = tuple(self._plan.verifier.atoms(0, share="full"))
        return self._all

    def _chosen(self, refit: int) -> Sequence[Atoms]:
        return self._plan.verifier.atoms(refit, share="sample") if self._share == "sample" else self._everything()

    def _here(self, side: Literal["source", "target"], binding: Binding, chosen: Sequence[Atoms]) -> BoxesHere:
        make = BoxesHere.of_source if side == "source" else BoxesHere.of_target
        target = self._endpoint.target
        is_staged = side == "target" and target is not None and bool(target.private_layers())
        if chosen is not self._all or is_staged:
            # What is staged for the engine's own layouts is other memory each time, which views would keep.
            return make(binding, chosen)
        known, addresses = self._bound.get(side), binding.addresses()
        if known is None or known[0] != addresses:
            known = self._bound[side] = (addresses, make(binding, chosen))
        return known[1]
