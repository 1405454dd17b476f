"""The suite for `targets.base.Target`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar

import torch

from refit_transport.errors import RefitTransportError
from refit_transport.fabrics.binding import Binding
from refit_transport.layout.canonical import checkpoint_entries
from refit_transport.layout.layout import Layout, manifest_from_layouts
from refit_transport.layout.manifest import Manifest, RankManifest, TensorSpec
from refit_transport.layout.mesh import Mesh
from refit_transport.layout.placement import Replicate
from refit_transport.planning.planner import check_sides_agree, plan_transfer
from refit_transport.targets.base import Target
from refit_transport.testing.contracts.checks import check_apart, check_manifest, check_pieces, same_values
from refit_transport.testing.delivery import deliver
from refit_transport.testing.oracle import HeldSide, box_of

_RANK = 1


class TargetContract:
    """One process's target. Fill in `make_target`, `tensors`, `values` and `expected`.

    `loads_whole` is False for a target that has nothing to do with whole checkpoint tensors: it then never gets any.
    """

    loads_whole: ClassVar[bool] = True

    def make_target(self) -> Target:
        """A new target over small weights."""
        raise NotImplementedError

    def tensors(self, version: int) -> Mapping[str, torch.Tensor]:
        """A source's whole tensors of a version by canonical name; each version has other values everywhere."""
        raise NotImplementedError

    def values(self, target: Target) -> Mapping[str, torch.Tensor]:
        """What is served now, copied, by any names: read as its users read it, not through the target's manifest."""
        raise NotImplementedError

    def expected(self, version: int) -> Mapping[str, torch.Tensor]:
        """What `values` must be when a version is served."""
        raise NotImplementedError

    def test_the_manifest_is_of_the_asked_rank_and_role(self) -> None:
        """`manifest(rank, tensors)` is about that rank, and about tensors that the source has."""
        manifest = self._manifest(self.make_target())
        check_manifest(manifest, rank=_RANK, role="target")
        known = {name: tuple(tensor.shape) for name, tensor in self.tensors(1).items()}
        for spec in manifest.tensors:
            assert spec.name in known, f"the manifest has {spec.name!r}, which the source doesn't"
            assert spec.shape == known[spec.name], f"{spec.name} is declared {spec.shape}, it is {known[spec.name]}"

    def test_what_arrives_whole_is_not_described_too(self) -> None:
        """A tensor is described by pieces, or opaque and with a reason."""
        manifest = self._manifest(self.make_target())
        both = manifest.held() & {opaque.tensor for opaque in manifest.opaque}
        assert not both, f"described by pieces and opaque: {sorted(both)}"
        silent = [opaque.tensor for opaque in manifest.opaque if not opaque.reason]
        assert not silent, f"opaque without a reason: {silent}"

    def test_pieces_lie_in_their_buffers_and_apart(self) -> None:
        """Names, dtypes and extents of pieces are the buffers', and no element overwrites another."""
        target = self.make_target()
        manifest = self._manifest(target)
        target.begin()
        check_pieces(manifest, target.buffers())
        check_apart(manifest, target.buffers())

    def test_shards_are_served_after_each_refit(self) -> None:
        """Versions 1, 2 and 1 again, each box written into the buffers of then, are served after `finish`."""
        self._follows(self._by_shards)

    def test_whole_tensors_are_served_after_each_refit(self) -> None:
        """The same through `load`, which must take checkpoint names and an iterable that is gone through once."""
        if self.loads_whole:
            self._follows(self._by_load)

    def test_buffers_keep_their_names_and_forms(self) -> None:
        """Storage may move between refits; names, dtypes, shapes and strides may not."""
        target = self.make_target()
        manifest = self._manifest(target)
        forms = []
        for version in (1, 2):
            target.begin()
            forms.append({name: (x.dtype, x.shape, x.stride()) for name, x in target.buffers().items()})
            self._by_shards(target, manifest, version)
            target.finish()
        assert forms[0] == forms[1], f"buffers changed between refits: {forms[0]} then {forms[1]}"

    def test_what_is_served_is_what_was_written(self) -> None:
        """`served()` has buffers of the manifest, and their memory holds what the last refit wrote."""
        target = self.make_target()
        manifest = self._manifest(target)
        self._refit(target, manifest, 1, self._by_shards)
        served = target.served()
        unknown = served.keys() - {piece.buffer for piece in manifest.pieces} - target.buffers().keys()
        assert not unknown, f"served() has buffers that buffers() doesn't: {sorted(unknown)}"
        pieces = tuple(piece for piece in manifest.pieces if piece.buffer in served)
        check_pieces(RankManifest(_RANK, "target", manifest.tensors, pieces), served)
        tensors = self.tensors(1)
        for piece in pieces:
            view = Binding.of(RankManifest(_RANK, "target", manifest.tensors, (piece,)), served).view(0)
            expected = box_of(tensors[piece.tensor], piece.box.offset, piece.box.shape).to(view.dtype)
            assert torch.equal(view, expected), f"served() has something else at {piece.tensor}{piece.box}"

    def test_what_is_derived_follows_the_weights(self) -> None:
        """After a refit, each derived tensor is what the present weights give."""
        target = self.make_target()
        self._refit(target, self._manifest(target), 1, self._by_shards)
        for derived in target.derived():
            assert torch.equal(derived.served, derived.recomputed), f"{derived.name} is of older weights"

    def test_a_missing_tensor_is_refused_by_name(self) -> None:
        """Without one of the needed tensors, `manifest` or the plan refuses; nothing is left as it was in silence."""
        tensors = self.tensors(1)
        for name in sorted(self._manifest(self.make_target()).held()):
            others = {other: tensor for other, tensor in tensors.items() if other != name}
            refusal = self._refusal(self.make_target(), others)
            assert refusal, f"a source without {name!r} is accepted: it would keep its old values"
            assert name in refusal, f"the error about the missing {name!r} doesn't name it: {refusal}"

    def _manifest(self, target: Target) -> RankManifest:
        return target.manifest(_RANK, _specs(self.tensors(1)))

    def _refusal(self, target: Target, tensors: Mapping[str, torch.Tensor]) -> str:
        """What the target or the plan says against these tensors; nothing where they are accepted."""
        try:
            source = _source(tensors)
            wanted = Manifest.of([target.manifest(_RANK, source.tensors)])
            check_sides_agree(source, wanted)
            plan_transfer(source, wanted)
        except RefitTransportError as error:
            return str(error)
        return ""

    def _follows(self, write: Callable[[Target, RankManifest, int], None]) -> None:
        target = self.make_target()
        manifest = self._manifest(target)
        for version in (1, 2, 1):
            self._refit(target, manifest, version, write)
            same_values(self.values(target), self.expected(version), when=f"after the refit to version {version}")

    def _refit(
        self, target: Target, manifest: RankManifest, version: int, write: Callable[[Target, RankManifest, int], None]
    ) -> None:
        target.begin()
        write(target, manifest, version)
        target.finish()

    def _by_shards(self, target: Target, manifest: RankManifest, version: int) -> None:
        """What is described through a real plan and schedule; what is opaque through `load`."""
        tensors = self.tensors(version)
        wanted = HeldSide({_RANK: Binding.of(manifest, target.buffers())})
        found = deliver(_source(tensors), Manifest.of([manifest]), tensors=tensors, wanted=wanted)
        assert not found.differences, f"not in the buffers after it was written there: {found.differences}"
        opaque = {o.tensor for o in manifest.opaque}
        if opaque:
            target.load(_entries({name: tensor for name, tensor in tensors.items() if name in opaque}))

    def _by_load(self, target: Target, manifest: RankManifest, version: int) -> None:  # noqa: ARG002
        target.load(_entries(self.tensors(version)))


def _specs(tensors: Mapping[str, torch.Tensor]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(n, tuple(x.shape), str(x.dtype).removeprefix("torch.")) for n, x in tensors.items())


def _source(tensors: Mapping[str, torch.Tensor]) -> Manifest:
    """A source of one rank that has these tensors whole."""
    mesh = Mesh.of(tp=1)
    layouts = {name: Layout(tuple(x.shape), mesh, (Replicate(),)) for name, x in tensors.items()}
    dtypes = {str(x.dtype).removeprefix("torch.") for x in tensors.values()}
    assert len(dtypes) == 1, f"give tensors() of one dtype, not of {sorted(dtypes)}"
    return manifest_from_layouts("source", layouts, dtype=dtypes.pop())


def _entries(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors under their checkpoint names, per expert."""
    for spec in _specs(tensors):
        for entry in checkpoint_entries(spec):
            box = entry.box
            yield entry.name, box_of(tensors[spec.name], box.offset, box.shape).reshape(entry.shape).clone()
