"""The manifest of small modules whose hand-written loaders do one thing each."""

import re

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from refit_transport.errors import LayoutError
from refit_transport.layout.box import Box
from refit_transport.layout.manifest import Piece, TensorSpec
from refit_transport.targets.vllm_composed import ComposedParameters
from refit_transport.targets.vllm_layers import layers_of, on_meta
from refit_transport.targets.vllm_manifest import describe, trace_model


class _Model(nn.Module):
    """One parameter `w` of a given shape; `load` gets it and the loaded tensors by name."""

    def __init__(self, load, *shape, dtype=torch.float32, **attributes):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
        vars(self.w).update(attributes)
        self._load = load

    def load_weights(self, weights):
        self._load(self.w, dict(weights))


def _manifest(model, **shapes):
    specs = [TensorSpec(name.replace("__", "."), shape, "float32") for name, shape in shapes.items()]
    layers = layers_of(model)
    with on_meta(layers):
        loaded = trace_model(model.load_weights, layers, specs, 3)
    return describe(loaded, specs, 3)


def _moves_like_the_loader(model, manifest, **shapes):
    """Fills the parameter by the pieces and by the loader, from tensors of distinct values."""
    total, weights = 1, {}
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        weights[name.replace("__", ".")] = torch.arange(total, total + size, dtype=torch.float32).reshape(shape)
        total += size
    for piece in manifest.pieces:
        part = weights[piece.tensor][tuple(slice(s.start, s.stop) for s in piece.box.spans)]
        torch.as_strided(model.w.data, piece.box.shape, piece.strides, piece.offset).copy_(part)
    got = model.w.data.clone()
    model.load_weights(weights.items())
    return torch.equal(got, model.w.data)


def _fused(parameter, weights):
    parameter.data.narrow(0, 0, 2).copy_(weights["gate"])
    parameter.data.narrow(0, 2, 2).copy_(weights["up"])


@pytest.mark.parametrize(
    ("load", "shape", "shapes"),
    [
        (lambda p, w: p.data.copy_(w["a"]), (4, 6), {"a": (4, 6)}),
        (lambda p, w: p.data.copy_(w["a"].t()), (6, 4), {"a": (4, 6)}),
        (lambda p, w: p.data.t().copy_(w["a"]), (6, 4), {"a": (4, 6)}),
        (lambda p, w: p.data.copy_(w["a"].t().contiguous()), (6, 4), {"a": (4, 6)}),
        (lambda p, w: p.data.copy_(w["a"].t().contiguous()[1:3].to(torch.float32)), (2, 4), {"a": (4, 6)}),
        (lambda p, w: p.data.copy_(w["a"][1:3]), (2, 6), {"a": (4, 6)}),
        (lambda p, w: p.data.copy_(w["a"].squeeze(1)), (4, 6), {"a": (4, 1, 6)}),
        (lambda p, w: p.data.copy_(w["a"]), (1, 6), {"a": (6,)}),
        (lambda p, w: p.data.view(2, 3, 6).copy_(w["a"].view(2, 3, 6)), (6, 6), {"a": (6, 6)}),
        (lambda p, w: p.data.copy_(w["a"].reshape(-1)), (24,), {"a": (4, 6)}),
        (lambda p, w: p.data[::2].copy_(w["a"]) + p.data[1::2].copy_(w["b"]), (4, 3), {"a": (2, 3), "b": (2, 3)}),
        (_fused, (4, 3), {"gate": (2, 3), "up": (2, 3)}),
        (lambda p, w: p.data.copy_(w["a"].reshape(())), (), {"a": (1,)}),
        (lambda p, w: p.data[2:].copy_(w["a"]) + p.data[:2].fill_(0), (4, 3), {"a": (2, 3)}),
        (lambda p, w: p.data[2:].copy_(w["a"]) + p.data[:2].copy_(torch.zeros_like(w["a"])), (4, 3), {"a": (2, 3)}),
        (lambda p, w: p.data[2:].copy_(w["a"]) + p.data[:2].copy_(w["a"].zero_()), (4, 3), {"a": (2, 3)}),
    ],
    ids=[
        "whole", "transposed", "into a transposed view", "transposed copy", "part of a cast copy", "rows", "squeezed",
        "leading dim", "split dims", "flattened", "interleaved", "fused", "scalar", "zeroed padding",
        "copied zeros", "zeroed after it is copied",
    ],
)  # fmt: skip
def test_pieces_put_elements_where_the_loader_puts_them(load, shape, shapes):
    model = _Model(load, *shape)
    manifest = _manifest(model, **shapes)
    assert manifest.opaque == ()
    assert {piece.tensor for piece in manifest.pieces} == set(shapes)
    assert {piece.buffer for piece in manifest.pieces} == {"w"}
    assert _moves_like_the_loader(model, manifest, **shapes)


def _looks(parameter, weights):
    scale = weights["a"]
    parameter.data.copy_(scale * 2 if scale.max().item() > 1 else scale)


def _temporary(parameter, weights):
    joined = torch.empty(4, 3)
    joined[:2].copy_(weights["a"])
    joined[2:].copy_(weights["a"])
    parameter.data.copy_(joined)


def _twice(parameter, weights):
    parameter.data.copy_(weights["a"])
    parameter.data[1:].copy_(weights["b"])


def _zeroes_afterwards(parameter, weights):
    parameter.data.copy_(weights["a"])
    parameter.data[3:].zero_()


@pytest.mark.parametrize(
    ("load", "shapes", "reason"),
    [
        (lambda p, w: p.data.copy_(w["a"] + 1), {"a": (4, 3)}, "add"),
        (lambda p, w: p.data.copy_(w["a"].mul_(2)), {"a": (4, 3)}, "mul_"),
        (lambda p, w: w["a"][1:].zero_() + p.data.copy_(w["a"])[1:], {"a": (4, 3)}, "zero_"),
        (lambda p, w: p.data.copy_(w["a"].to(torch.bfloat16)), {"a": (4, 3)}, "bfloat16"),
        (lambda p, w: p.data.copy_(w["a"]), {"a": (1, 3)}, "broadcast"),
        (lambda p, w: p.data.copy_(w["a"][::2]), {"a": (8, 3)}, "box"),
        (lambda p, w: p.data.copy_(torch.cat([w["a"], w["b"]])), {"a": (2, 3), "b": (2, 3)}, "cat"),
        (_temporary, {"a": (2, 3)}, "temporary"),
        (_twice, {"a": (4, 3), "b": (3, 3)}, "overlaps"),
        (_zeroes_afterwards, {"a": (4, 3)}, "zeroes"),
        (_looks, {"a": (4, 3)}, "looks at its values"),
    ],
    ids=[
        "computed", "in place", "zeroed in part", "narrower cast", "broadcast", "steps", "concatenated", "temporary",
        "overlapping", "zeroed after", "values",
    ],
)  # fmt: skip
def test_anything_but_plain_copies_arrives_whole(load, shapes, reason):
    manifest = _manifest(_Model(load, 4, 3), **shapes)
    assert manifest.pieces == ()
    assert {opaque.tensor for opaque in manifest.opaque} == set(shapes)
    assert all(re.search(reason, opaque.reason) for opaque in manifest.opaque)


def _composed(parameter, weights):
    parameter.data[:2].copy_(weights["a"][2:])
    parameter.data[2:].copy_(weights["b"].t())
    parameter.data.copy_(-torch.exp(parameter.float()))


def test_what_a_loader_computes_from_its_copies_is_received_as_copied_and_computed_by_the_loader():
    shapes = {"a": (4, 3), "b": (3, 2)}
    model = _Model(_composed, 4, 3, dtype=torch.bfloat16)
    layers = layers_of(model)
    specs = [TensorSpec(name, shape, "float32") for name, shape in shapes.items()]
    with on_meta(layers):
        loaded = trace_model(model.load_weights, layers, specs, 3)
    manifest, composed = describe(loaded, specs, 3), ComposedParameters(loaded, layers)
    assert manifest.opaque == ()
    assert {(piece.tensor, piece.box) for piece in manifest.pieces} == {
        ("a", Box.of((2, 4), (0, 3))),
        ("b", Box.of((0, 3), (0, 2))),
    }
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    for piece in manifest.pieces:
        part = weights[piece.tensor][tuple(slice(s.start, s.stop) for s in piece.box.spans)]
        received = composed.received[piece.buffer]
        torch.as_strided(received, piece.box.shape, piece.strides, piece.offset).copy_(part)
    assert not model.w.data.any()
    model.load_weights(composed.weights())
    got = model.w.data.clone()
    model.load_weights(weights.items())
    assert torch.equal(got, model.w.data)
    read = {"a": weights["a"][2:], "b": weights["b"]}
    assert composed.differing(model.load_weights, lambda write: read[write.source]) == frozenset()
    assert composed.differing(model.load_weights, None) == frozenset()
    model.w.data[1, 1] += 1
    assert composed.differing(model.load_weights, lambda write: read[write.source]) == {"w"}
    assert composed.differing(model.load_weights, lambda write: None) == {"w"}
    assert model.w.data[1, 1] == got[1, 1] + 1
    # Whole tensors for the loader are kept for the same computation.
    composed.received["w"].zero_()
    assert list(composed.take([*weights.items(), ("c", weights["a"])])) == [("c", weights["a"])]
    model.load_weights(composed.weights())
    assert torch.equal(got, model.w.data)


@pytest.mark.parametrize(
    "load",
    [
        lambda p, w: (p.data.copy_(w["a"]), p.data.copy_(p.data * w["b"])),
        lambda p, w: (p.data.copy_(w["a"]), p.data.mul_(2), w["c"].copy_(w["a"])),
        lambda p, w: (p.data.copy_(w["a"]), p.data.mul_(2), p.data[1:].copy_(w["d"])),
    ],
    ids=["with another tensor", "of a tensor that is needed elsewhere", "and overwritten"],
)
def test_only_what_is_computed_from_its_copies_alone_is_replayed(load):
    class Pair(_Model):
        def __init__(self):
            super().__init__(load, 4, 3)
            self.c = nn.Parameter(torch.zeros(4, 3), requires_grad=False)

        def load_weights(self, weights):
            loaded = dict(weights)
            self.c.data.copy_(loaded["b"])
            self._load(self.w, loaded | {"c": self.c.data})

    manifest = _manifest(Pair(), a=(4, 3), b=(4, 3), d=(3, 3))
    assert "a" in {opaque.tensor for opaque in manifest.opaque}


def test_a_tensor_that_another_parameter_needs_too_arrives_whole():
    class Shared(_Model):
        def __init__(self):
            super().__init__(_doubled, 4, 3)
            self.v = nn.Parameter(torch.zeros(4, 3), requires_grad=False)

        def load_weights(self, weights):
            loaded = dict(weights)
            super().load_weights(loaded.items())
            self.v.data.copy_(loaded["a"])

    manifest = _manifest(Shared(), a=(4, 3))
    assert (manifest.pieces, [opaque.tensor for opaque in manifest.opaque]) == ((), ["a"])


def _doubled(parameter, weights):
    parameter.data.copy_(weights["a"])
    parameter.data.mul_(2)


def test_what_one_computation_needs_arrives_whole_together():
    class Stacked(_Model):
        def __init__(self):
            super().__init__(None, 2, 3)
            self.v = nn.Parameter(torch.zeros(3), requires_grad=False)

        def load_weights(self, weights):
            loaded = dict(weights)
            self.w.data[0].copy_(loaded["m.experts.0.up.weight"])
            self.w.data[1].copy_(loaded["n"])
            self.w.data.mul_(2)
            self.v.data.copy_(loaded["m.experts.1.up.weight"] * 2)

    manifest = _manifest(Stacked(), m__experts__up__weight=(2, 3), n=(3,))
    assert manifest.pieces == ()
    assert {opaque.tensor for opaque in manifest.opaque} == {"m.experts.up.weight", "n"}


def test_a_parameter_computed_from_another_makes_the_tensors_of_both_opaque():
    class Derived(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.v = nn.Linear(3, 4, bias=False), nn.Linear(3, 4, bias=False)

        def load_weights(self, weights):
            loaded = dict(weights)
            self.w.weight.data.copy_(loaded["a"])
            self.v.weight.data.copy_(self.w.weight.data * 2)

    manifest = _manifest(Derived(), a=(4, 3))
    assert (manifest.pieces, [opaque.tensor for opaque in manifest.opaque]) == ((), ["a"])


def test_one_opaque_expert_makes_its_whole_stack_opaque():
    def load(parameter, weights):
        parameter.data[0].copy_(weights["m.experts.0.up.weight"])
        parameter.data[1].copy_(weights["m.experts.1.up.weight"] * 2)
        parameter.data[2].copy_(weights["n"])

    manifest = _manifest(_Model(load, 3, 2, 5), m__experts__up__weight=(2, 2, 5), n=(2, 5))
    assert [opaque.tensor for opaque in manifest.opaque] == ["m.experts.up.weight"]
    assert [piece.tensor for piece in manifest.pieces] == ["n"]


def test_experts_are_boxes_of_the_stacked_tensor_and_remote_ones_are_absent():
    def load(parameter, weights):
        for local, expert in enumerate((2, 3)):
            parameter.data[local, :4].copy_(weights[f"m.experts.{expert}.up.weight"])
            parameter.data[local, 4:].copy_(weights[f"m.experts.{expert}.gate.weight"])

    manifest = _manifest(_Model(load, 2, 8, 5), m__experts__up__weight=(4, 4, 5), m__experts__gate__weight=(4, 4, 5))
    # Copied expert by expert, held at one stride: one piece per projection.
    assert manifest.pieces == (
        Piece("m.experts.up.weight", Box.of((2, 4), (0, 4), (0, 5)), "w", 0, (40, 5, 1)),
        Piece("m.experts.gate.weight", Box.of((2, 4), (0, 4), (0, 5)), "w", 20, (40, 5, 1)),
    )


def test_specs_carry_the_parameters_dtype_and_ignored_tensors_are_absent():
    model = _Model(lambda p, w: p.data.copy_(w["a"]), 4, 3, dtype=torch.bfloat16)
    manifest = _manifest(model, a=(4, 3), ignored=(7,))
    assert manifest.tensors == (TensorSpec("a", (4, 3), "bfloat16"),)


@pytest.mark.parametrize(
    ("load", "shapes"),
    [
        (lambda p, w: p.data[:3].copy_(w["a"]), {"a": (3, 3)}),
        (lambda p, w: p.data[:3].copy_(w["a"]) + p.data[3:].fill_(1), {"a": (3, 3)}),
        (lambda p, w: None, {"a": (4, 3)}),
    ],
    ids=["a row is missing", "a constant other than zero", "nothing"],
)
def test_a_hole_is_refused(load, shapes):
    with pytest.raises(LayoutError) as caught:
        _manifest(_Model(load, 4, 3), **shapes)
    assert (caught.value.tensor, caught.value.rank) == ("w", 3)


def test_declared_padding_is_no_hole():
    load = lambda p, w: p.data[:3].copy_(w["a"])  # noqa: E731
    assert _manifest(_Model(load, 4, 3, weight_loader_numel=9), a=(3, 3)).pieces
    with pytest.raises(LayoutError):
        _manifest(_Model(load, 4, 3, weight_loader_numel=10), a=(3, 3))


def test_a_refused_tensor_names_tensor_and_both_shapes():
    def load(parameter, weights):
        assert parameter.shape == weights["a"].shape, f"{tuple(parameter.shape)} for {tuple(weights['a'].shape)}"

    with pytest.raises(LayoutError, match=r"tensor a.*\[5, 3\].*\(4, 3\) for \(5, 3\)"):
        _manifest(_Model(load, 4, 3), a=(5, 3))


def test_tracing_touches_nothing():
    model = _Model(lambda p, w: p.data.copy_(w["a"]), 4, 3)
    parameter, before = model.w, model.w.data.clone()
    _manifest(model, a=(4, 3))
    assert model.w is parameter
    assert torch.equal(model.w.data, before)
    with pytest.raises(LayoutError):
        _manifest(model, a=(4, 4))
    assert model.w is parameter


def test_tied_parameters_are_loaded_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 4, bias=False), nn.Linear(3, 4, bias=False)
            self.second.weight = self.first.weight

        def load_weights(self, weights):
            for _, weight in weights:
                dict(self.named_parameters())["first.weight"].data.copy_(weight)

    manifest = _manifest(Tied(), first__weight=(4, 3))
    assert [piece.buffer for piece in manifest.pieces] == ["first.weight"]
