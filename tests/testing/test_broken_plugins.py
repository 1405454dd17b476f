"""The suites find what plugins get wrong, and say which tensor, rank or deadline it is: each class breaks one rule."""

from __future__ import annotations

from dataclasses import replace

import pytest
import test_contracts as own
import torch

from refit_transport.config.settings import RefitSettings
from refit_transport.connect import connect_fabric
from refit_transport.fabrics.deadline import Deadline
from refit_transport.layout.box import Box
from refit_transport.testing.contracts import FabricContract, TransportContract
from refit_transport.transports.gather_broadcast import GatherBroadcast
from refit_transport.transports.nccl_reshard import NcclReshard


class Wrapped:
    """A side that passes everything on to another one."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


def broken(suite, make, wrapper):
    """A suite like `suite` whose side is wrapped."""
    return type("Broken", (suite,), {make: lambda self: wrapper(getattr(suite, make)(self))})()


class OtherRank(Wrapped):
    def manifest(self, rank):
        return self.inner.manifest(0)


class Target(Wrapped):
    def manifest(self, rank):
        return replace(self.inner.manifest(rank), role="target")


class WrongDtype(Wrapped):
    def manifest(self, rank):
        found = self.inner.manifest(rank)
        return replace(found, tensors=tuple(replace(spec, dtype="bfloat16") for spec in found.tensors))


class Shifted(Wrapped):
    """The first piece begins one element late."""

    def manifest(self, rank):
        found = self.inner.manifest(rank)
        first, *others = found.pieces
        return replace(found, pieces=(replace(first, offset=first.offset + 1), *others))


class Remembered(Wrapped):
    """Has the weights of when it was made."""

    def __init__(self, inner):
        super().__init__(inner)
        self.kept = {name: buffer.clone() for name, buffer in inner.buffers().items()}

    def buffers(self):
        return self.kept


class Growing(Wrapped):
    def __init__(self, inner):
        super().__init__(inner)
        self.calls = 0

    def manifest(self, rank):
        self.calls += 1
        found = self.inner.manifest(rank)
        return replace(found, pieces=tuple(found.pieces)[: self.calls])


@pytest.mark.parametrize(
    ("wrapper", "test", "message"),
    [
        (OtherRank, "test_the_manifest_is_of_the_asked_rank_and_role", r"manifest\(rank=3\) describes rank 0"),
        (Target, "test_the_manifest_is_of_the_asked_rank_and_role", "role is 'target', expected 'source'"),
        (WrongDtype, "test_pieces_lie_in_their_buffers", r"declared torch.bfloat16, its buffer is float32"),
        (Shifted, "test_pieces_lie_in_their_buffers", r"scale\[0:3\] ends 1 elements behind its buffer"),
        (Remembered, "test_buffers_follow_training", "train.. left every weight as it was|elements are others"),
        (Remembered, "test_a_refit_delivers_and_leaves_the_source_as_it_was", r"arrived wrong: \['rank 4: scale"),
        (Growing, "test_the_manifest_stays_as_it_is", r"a second manifest\(\) differs"),
    ],
)
def test_broken_sources(wrapper, test, message):
    with pytest.raises(AssertionError, match=message):
        getattr(broken(own.TestModuleSource, "make_source", wrapper), test)()


class SwappedRows(Wrapped):
    """Describes its columns with the strides of rows, so that what it sends lies elsewhere."""

    def manifest(self, rank):
        found = self.inner.manifest(rank)
        first, *others = found.pieces
        return replace(found, pieces=(replace(first, strides=(4, 1)), *others))


def test_a_source_with_wrong_strides_holds_something_else():
    with pytest.raises(AssertionError, match=r"a\[0:6, 4:8\]: \d+ of 24 elements are others"):
        broken(own.TestTensorSource, "make_source", SwappedRows).test_pieces_hold_what_they_say()


class NeverServed(Wrapped):
    """Receives into memory of which it makes nothing."""

    def buffers(self):
        if not hasattr(self, "aside"):
            self.aside = {name: buffer.clone() for name, buffer in self.inner.buffers().items()}
        return self.aside


class ServedAtBegin(NeverServed):
    """Wrong order: takes over what has arrived when the next refit begins, not when one ends."""

    def begin(self):
        for name, buffer in self.inner.buffers().items():
            buffer.copy_(self.buffers()[name])


class LosesByte(Wrapped):
    """The last element keeps its old value."""

    def begin(self):
        self.inner.begin()
        self.last = self.inner.buffers()["up.weight"].flatten()[-1].clone()

    def finish(self):
        self.inner.buffers()["up.weight"].view(-1)[-1] = self.last
        self.inner.finish()


class IgnoresUnknown(Wrapped):
    """Takes what the source has and leaves the rest as it was."""

    def manifest(self, rank, tensors):
        known = {spec.name for spec in tensors}
        everything = [*tensors, *(spec for spec in self.inner.manifest(rank, FULL).tensors if spec.name not in known)]
        found = self.inner.manifest(rank, everything)
        pieces = tuple(piece for piece in found.pieces if piece.tensor in known)
        return replace(found, tensors=tuple(spec for spec in found.tensors if spec.name in known), pieces=pieces)


FULL = own.TestModuleTarget()._manifest(own.TestModuleTarget().make_target()).tensors


class LoadsOnce(Wrapped):
    def load(self, weights):
        if not hasattr(self, "loaded"):
            self.inner.load(weights)
        self.loaded = True


class Overlapping(Wrapped):
    """Both halves of a tensor in the same memory."""

    def manifest(self, rank, tensors):
        found = self.inner.manifest(rank, tensors)
        whole = next(piece for piece in found.pieces if piece.tensor == "up.weight")
        halves = [replace(whole, box=Box.at((start, 0), (2, 6))) for start in (0, 2)]
        return replace(found, pieces=(*(piece for piece in found.pieces if piece is not whole), *halves))


@pytest.mark.parametrize(
    ("wrapper", "test", "message"),
    [
        (NeverServed, "test_shards_are_served_after_each_refit", "after the refit to version 1: .* elements differ"),
        (ServedAtBegin, "test_shards_are_served_after_each_refit", "after the refit to version 1: .* elements differ"),
        (LosesByte, "test_shards_are_served_after_each_refit", "version 1: up.weight: 1 of 24 elements differ"),
        (LosesByte, "test_what_is_served_is_what_was_written", r"something else at up.weight\[0:4, 0:6\]"),
        (IgnoresUnknown, "test_a_missing_tensor_is_refused_by_name", "without 'norm.bias' is accepted"),
        (LoadsOnce, "test_whole_tensors_are_served_after_each_refit", "after the refit to version 2: .* differ"),
        (
            Overlapping,
            "test_pieces_lie_in_their_buffers_and_apart",
            r"up.weight\[2:4, 0:6\] shares memory with up.weight",
        ),
    ],
)
def test_broken_targets(wrapper, test, message):
    with pytest.raises(AssertionError, match=message):
        getattr(broken(own.TestModuleTarget, "make_target", wrapper), test)()


class LostByte(NcclReshard):
    """The last element that a target needs doesn't arrive."""

    def run(self, endpoint, fabric, *, deadline):
        spent = super().run(endpoint, fabric, deadline=deadline)
        if endpoint.rank == 6:
            view = endpoint.target_binding().view(0)
            view[(-1,) * view.dim()] = 250
        return spent


class FirstVersion(NcclReshard):
    """Wrong order: packs what it sends once, before training."""

    def run(self, endpoint, fabric, *, deadline):
        if endpoint.source is not None:
            if not hasattr(self, "kept"):
                self.kept = {n: b.clone() for n, b in endpoint.source.buffers().items()}
            for name, buffer in endpoint.source.buffers().items():
                buffer.copy_(self.kept[name])
        return super().run(endpoint, fabric, deadline=deadline)


class RoundedSource(NcclReshard):
    """Converts the trainer's own weights for the wire."""

    def run(self, endpoint, fabric, *, deadline):
        if endpoint.source is not None:
            for buffer in endpoint.source.buffers().values():
                buffer.mul_(0.5)
        return super().run(endpoint, fabric, deadline=deadline)


class Forgetful(GatherBroadcast):
    """Plans for all tensors but one."""

    def __init__(self, job, tensors):
        super().__init__(job, tensors[1:])


class Uncounted(NcclReshard):
    def run(self, endpoint, fabric, *, deadline):
        spent = super().run(endpoint, fabric, deadline=deadline)
        spent.sent_bytes = 0
        return spent


class Random(NcclReshard):
    def digest(self):
        return str(torch.rand(1).item())


class WithoutDeadline(NcclReshard):
    """Gives itself as long as it likes."""

    def run(self, endpoint, fabric, *, deadline):
        return super().run(endpoint, fabric, deadline=Deadline(deadline.seconds * 4))


class OthersError(NcclReshard):
    def run(self, endpoint, fabric, *, deadline):
        try:
            return super().run(endpoint, fabric, deadline=deadline)
        except Exception as error:
            raise RuntimeError("oops") from error


@pytest.mark.parametrize(
    ("transport", "test", "message"),
    [
        (LostByte, "test_weights_follow_training", r"run to version 1 these are wrong: \['rank 6: model"),
        (FirstVersion, "test_weights_follow_training", r"run to version 2 these are wrong: \['rank 4: model"),
        (RoundedSource, "test_sources_are_left_as_they_are", r"wrote into the source of rank 0: \['model"),
        (Forgetful, "test_the_plan_proves_itself", r"plans 0 of the \d+ elements of model"),
        (Uncounted, "test_what_is_reported_is_what_was_planned", r"rank 0 reports \[0, 0, 0\] bytes sent"),
        (Random, "test_planning_is_the_same_on_every_rank", "ranks would refuse each other's plan"),
        (
            WithoutDeadline,
            "test_a_silent_rank_ends_the_run_by_the_deadline",
            r"waited \d+\.\d s for rank 0, .* was 2 s",
        ),
        (OthersError, "test_a_silent_rank_ends_the_run_by_the_deadline", "fails with RuntimeError, which isn't"),
    ],
)
def test_broken_transports(transport, test, message):
    suite = type("Broken", (TransportContract,), {"transport_class": transport})()
    with pytest.raises(AssertionError, match=message):
        getattr(suite, test)()


class Fabrics(FabricContract):
    """Gloo, wrapped."""

    def __init__(self, wrapper):
        self.wrapper = wrapper

    def connect(self, channel, topology, *, slot_bytes, deadline):
        settings = RefitSettings(shared_memory="off", timeout_s=20.0)
        return self.wrapper(connect_fabric(channel, topology, settings, slot_bytes=slot_bytes, deadline=deadline))


class Backwards(Wrapped):
    """Wrong order: unpacks before the payload is there."""

    def run(self, program, *, deadline):
        for step in program.steps:
            step.unpack.make()
        quiet = tuple(replace(step, unpack=type(step.unpack)()) for step in program.steps)
        return self.inner.run(replace(program, steps=quiet), deadline=deadline)


class Patient(Wrapped):
    def run(self, program, *, deadline):
        return self.inner.run(program, deadline=Deadline(4 * deadline.seconds))


class Twice(Wrapped):
    def run(self, program, *, deadline):
        spent = self.inner.run(program, deadline=deadline)
        spent.add(spent)
        return spent


@pytest.mark.parametrize(
    ("wrapper", "test", "message"),
    [
        (
            Backwards,
            "test_payloads_of_any_size_arrive",
            r"payloads of up to \d+ bytes: after the run to version 1 these",
        ),
        (Patient, "test_a_silent_rank_ends_the_run_by_the_deadline", r"waited \d+\.\d s for rank 0"),
        (Twice, "test_what_is_reported_is_what_was_planned", r"rank 0 reports .* bytes sent, the schedule has"),
    ],
)
def test_broken_fabrics(wrapper, test, message):
    with pytest.raises(AssertionError, match=message):
        getattr(Fabrics(wrapper), test)()
