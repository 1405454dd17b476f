"""Modules and Megatron models as targets: the oracles are Hugging Face's own loading and an exporter by hand."""

from __future__ import annotations

import warnings

import pytest
import torch
from forked_ranks import run_forked
from megatron_models import checkpoint_tensors, make_checkpoint
from megatron_refits import export_after_refits
from rank_pool import RankPool, free_port
from small_models import SMALL
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from refit_transport.config.settings import RefitSettings
from refit_transport.errors import LayoutError
from refit_transport.layout.box import Box
from refit_transport.layout.manifest import Piece, RankManifest, TensorSpec
from refit_transport.layout.parallelism import MegatronParallelism
from refit_transport.session import RefitSession
from refit_transport.sources.dtensor import source_of
from refit_transport.targets.module import DescribedTarget

transformers = pytest.importorskip("transformers")

KINDS = ("qwen3 tied", "qwen3 moe", "mixtral", "deepseek", "glm", "gpt-oss", "qwen3 next", "gemma text")


def _checkpoint(kind, folder, seed):
    """A checkpoint of random values, buffers too, and the state that Hugging Face loads from it."""
    config = {key: value for key, value in SMALL[kind].items() if key != "architectures"}
    model_class = getattr(transformers, SMALL[kind]["architectures"][0])
    torch.manual_seed(seed)
    model = model_class(model_class.config_class(**config))
    for tensor in {**dict(model.named_parameters()), **dict(model.named_buffers())}.values():
        if tensor.is_floating_point() and any(
            tensor.data_ptr() == kept.data_ptr() for kept in model.state_dict().values()
        ):
            tensor.data.copy_(torch.randn(tensor.shape) / 10)
    model.save_pretrained(folder)
    loaded = model_class.from_pretrained(folder)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())
    return checkpoint_tensors(folder), loaded


class _Models(nn.ModuleDict):
    def forward(self) -> None:
        """FSDP2 takes no container without one."""


def _on_ranks(channel, models, sources):
    """Refits modules, sharded by FSDP2, from A to B, A and B; the gathered state after each."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{PORT}", rank=channel.rank, world_size=channel.world_size
    )
    module = _Models(models)
    fully_shard(module, mesh=init_device_mesh("cpu", (channel.world_size,)))
    held = {"state": {}}
    source = source_of(lambda: held["state"]) if channel.rank == 0 else None
    held["state"] = sources["a"]
    target = DescribedTarget(source_of(module.state_dict))
    settings = RefitSettings(coverage="all", verify="full", timeout_s=60.0) if channel.rank == 0 else None
    session = RefitSession.prepare(channel, settings=settings, source=source, target=target)
    states = []
    for version, name in enumerate("bab"):
        held["state"] = sources[name]
        session.run(version)
        whole = {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
            for name, value in module.state_dict().items()
        }
        states.append({name: value.numpy() for name, value in whole.items()})
    return states, sum(isinstance(value, DTensor) for value in module.state_dict().values())


PORT = 0


def test_hugging_face_modules_sharded_by_fsdp2_are_as_loaded(tmp_path):
    global PORT
    PORT = free_port()
    sources, states = {"a": {}, "b": {}}, {"a": {}, "b": {}}
    models = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, kind in enumerate(KINDS):
            for seed, name in enumerate("ab"):
                tensors, loaded = _checkpoint(kind, tmp_path / f"{number}{name}", seed)
                sources[name] |= {f"m{number}.{key}": value for key, value in tensors.items()}
                states[name] |= {f"m{number}.{key}": value.numpy() for key, value in loaded.state_dict().items()}
                if name == "a":
                    models[f"m{number}"] = loaded
    # The fused experts of transformers 5 are in the modules, and per expert in the checkpoints.
    assert any(name.endswith("experts.gate_up_proj") for name in states["a"])
    assert any("block_sparse_moe.experts.0.w1" in name for name in sources["a"])
    for rank_states, sharded in run_forked(2, lambda channel: _on_ranks(channel, models, sources), timeout_s=120):
        assert sharded > 300
        for found, name in zip(rank_states, "bab", strict=True):
            assert found.keys() == states[name].keys()
            differing = [key for key, value in found.items() if (value != states[name][key]).any()]
            assert differing == []


CASES = {
    "dense": (
        {},
        MegatronParallelism(2),
        MegatronParallelism(1, pipeline=2, first_stage_layers=3, last_stage_layers=1),
    ),
    "tied": ({"tie_word_embeddings": True, "vocab_size": 151}, MegatronParallelism(2), MegatronParallelism(pipeline=2)),
    "moe": (
        {"kind": "qwen3_moe", "vocab_size": 151},
        MegatronParallelism(1, expert=2),
        MegatronParallelism(2, sequence_parallel=True),
    ),
    "moe by experts": ({"kind": "qwen3_moe"}, MegatronParallelism(pipeline=2), MegatronParallelism(1, expert=2)),
    "zero-centred": ({}, MegatronParallelism(pipeline=2), MegatronParallelism(2, sequence_parallel=True)),
}


@pytest.mark.e2e
@pytest.mark.parametrize("case", CASES)
def test_a_megatron_model_for_generation_follows_training(tmp_path, four_ranks: RankPool, case):
    overrides, source, target = CASES[case]
    folders = [make_checkpoint(tmp_path / name, seed=seed, **overrides) for seed, name in enumerate("ab")]
    outcomes = four_ranks.run(
        export_after_refits,
        checkpoints=folders,
        parallelism=[source, target],
        ports=[free_port(), free_port()],
        vocab=overrides.get("vocab_size", 256),
        zero_centered=case == "zero-centred",
        timeout_s=180.0,
    )
    trained, generating = outcomes[:2], outcomes[2:]
    for number in range(len(outcomes[0].exported)):
        wanted = _joined(outcome.exported[number] for outcome in trained)
        found = _joined(outcome.exported[number] for outcome in generating)
        if case == "zero-centred":
            wanted = {name: value - 1 if "norm" in name else value for name, value in wanted.items()}
        assert found.keys() == wanted.keys()
        assert [name for name in wanted if (found[name] != wanted[name]).any()] == []
        assert [outcome.padding[number] for outcome in generating] == [0.0, 0.0]
    first, _, again = (_joined(outcome.exported[number] for outcome in generating) for number in range(3))
    assert all((first[name] == again[name]).all() for name in first)
    # What is stored in another form is compared too, from the second comparison on.
    assert outcomes[0].differing == [0, 0, 0, 2 if case == "zero-centred" else 0]
    loaded = {name: value.float().numpy() for name, value in checkpoint_tensors(folders[0]).items()}
    if case == "zero-centred":
        loaded = {name: value - 1 if "norm" in name else value for name, value in loaded.items()}
    assert all((first[name] == loaded[name]).all() for name in loaded.keys() & first.keys())
    assert len(loaded.keys() & first.keys()) > 20


def _joined(exports):
    return {name: value for export in exports for name, value in export.items()}


class _Described:
    """A description given as it is: tensors by name, each whole in a buffer of its own, or in given pieces."""

    def __init__(self, *pieces, shapes=None, **buffers):
        self._buffers = {name.replace("__", "."): buffer for name, buffer in buffers.items()}
        shapes = shapes or {name: buffer.shape for name, buffer in self._buffers.items()}
        whole = (Piece(n, Box.full(b.shape), n, 0, b.stride()) for n, b in self._buffers.items() if n in shapes)
        specs = tuple(TensorSpec(name, tuple(shape), "float32") for name, shape in shapes.items())
        self._manifest = RankManifest(RANK, "source", specs, pieces or tuple(whole))

    def manifest(self, rank):
        return self._manifest

    def buffers(self):
        return self._buffers

    def copies(self):
        return [name for name in self._buffers if name.endswith("-1")]

    def stored(self, copies, /):
        for name, values in copies.items():
            yield name.removesuffix("-1"), self._buffers[name.removesuffix("-1")], values - 1


RANK = 3
EXPERTS = "m.experts.gate_up_proj"


def _specs(**shapes):
    return [TensorSpec(name.replace("__", "."), shape, "float32") for name, shape in shapes.items()]


def test_elements_of_no_tensor_are_padding_and_zero_after_each_refit():
    buffer = torch.full((6, 4), 7.0)
    rows = Piece("w", Box.of((10, 13), (0, 4)), "b", 0, (4, 1))
    target = DescribedTarget(_Described(rows, shapes={"w": (13, 4)}, b=buffer, cache=torch.ones(3)))
    assert target.manifest(RANK, _specs(w=(13, 4))).pieces == (rows,)
    assert list(target.buffers()) == ["b"]
    target.finish()
    assert (buffer[:3] == 7).all()
    assert (buffer[3:] == 0).all()
    strided = DescribedTarget(_Described(rows, shapes={"w": (13, 4)}, b=torch.zeros(8, 6).t()[:, :4]))
    with pytest.raises(LayoutError, match="tensor w: rank 3: expected boxes of a contiguous buffer, with padding"):
        strided.manifest(RANK, _specs(w=(13, 4)))


def test_what_no_source_tensor_fills_is_refused_unless_kept_or_tied():
    pieces = [Piece(name, Box.of((0, 3), (0, 2)), "embed", 0, (2, 1)) for name in ("embed", "head")]
    pieces.append(Piece("extra", Box.of((0, 4)), "extra", 0, (1,)))
    shapes = {"embed": (3, 2), "head": (3, 2), "extra": (4,)}
    described = _Described(*pieces, shapes=shapes, embed=torch.zeros(3, 2), extra=torch.zeros(4))
    known = _specs(embed=(3, 2), of_nobody=(9,))
    with pytest.raises(LayoutError, match="tensor extra: rank 3: expected a tensor that the source has, or one that"):
        DescribedTarget(described).manifest(RANK, known)
    manifest = DescribedTarget(described, kept=("extra",)).manifest(RANK, known)
    assert [piece.tensor for piece in manifest.pieces] == ["embed"]


@pytest.mark.parametrize(
    ("gate", "up"), [((2, 3, 5), (2, 4, 5)), ((2, 4, 5), (2, 4, 6)), ((2, 4, 5), (3, 4, 5)), ((2, 4), (2, 4))]
)
def test_fused_experts_of_another_size_are_refused_with_both_sizes(gate, up):
    known = _specs(m__experts__gate_proj__weight=gate, m__experts__up_proj__weight=up)
    with pytest.raises(LayoutError, match=rf"tensor {EXPERTS}: rank 3: .*gate_proj.*up_proj.*got \[2, 8, 5\]"):
        DescribedTarget(_Described(m__experts__gate_up_proj=torch.zeros(2, 8, 5))).manifest(RANK, known)


def test_a_size_that_disagrees_names_both():
    with pytest.raises(LayoutError, match=r"tensor w: rank 3: .*\[5, 3\].*got \[4, 3\]"):
        DescribedTarget(_Described(w=torch.zeros(4, 3))).manifest(RANK, _specs(w=(5, 3)))


def test_memory_that_elements_share_is_refused():
    with pytest.raises(LayoutError, match="tensor w: rank 3: expected memory of its own for each element"):
        DescribedTarget(_Described(w=torch.zeros(3).expand(2, 3))).manifest(RANK, _specs(w=(2, 3)))


def test_whole_tensors_are_loaded_expert_by_expert_into_fused_parameters():
    fused, parts = torch.zeros(2, 4, 3), ("gate_proj", "up_proj")
    target = DescribedTarget(_Described(m__experts__gate_up_proj=fused))
    target.manifest(RANK, [TensorSpec(f"m.experts.{part}.weight", (2, 2, 3), "float32") for part in parts])
    tensors = {f"m.experts.{expert}.{part}.weight": torch.randn(2, 3) for expert in range(2) for part in parts}
    target.load(tensors.items())
    for expert in range(2):
        assert torch.equal(fused[expert], torch.cat([tensors[f"m.experts.{expert}.{part}.weight"] for part in parts]))


def test_columns_in_turn_are_a_dim_of_their_own():
    """gpt-oss, the only one with biases of fused experts; cut anywhere, read back by its checkpoint name."""
    names = ("m.experts.gate_up_proj", "m.experts.gate_up_proj_bias")
    state = {name: torch.zeros(shape) for name, shape in zip(names, ((2, 3, 8), (2, 8)), strict=True)}
    target = DescribedTarget(source_of(state))
    specs = [TensorSpec(names[0], (2, 3, 4, 2), "float32"), TensorSpec(names[1], (2, 4, 2), "float32")]
    manifest = target.manifest(RANK, specs)
    assert list(manifest.tensors) == specs
    assert [(piece.box, piece.strides) for piece in manifest.pieces] == [
        (Box.full((2, 3, 4, 2)), (24, 8, 2, 1)),
        (Box.full((2, 4, 2)), (8, 2, 1)),
    ]
    whole = {name: torch.randn_like(tensor) for name, tensor in state.items()}
    target.load(whole.items())
    assert all(torch.equal(state[name], whole[name]) for name in names)


def test_what_is_stored_in_another_form_is_received_beside_it_and_compared():
    """A norm that is stored less 1, of values that adding 1 again wouldn't give back exactly."""
    stored = torch.zeros(3, dtype=torch.bfloat16)
    described = _Described(Piece("w", Box.full((3,)), "w-1", 0, (1,)), shapes={"w": (3,)}, w=stored)
    described._buffers["w-1"] = torch.zeros(3, dtype=torch.bfloat16)
    target = DescribedTarget(described)
    target.manifest(RANK, _specs(w=(3,)))
    assert list(target.derived()) == []
    values = torch.tensor([0.01, 1.5, -2.0], dtype=torch.bfloat16)
    for _ in range(2):
        target.begin()
        target.buffers()["w-1"].copy_(values)
        described._buffers["w-1"].fill_(9)  # as a description does that is asked for its buffers in between
        target.finish()
        assert torch.equal(stored, values - 1)
        assert not torch.equal(stored + 1, values)
        assert target.served() == {}
        [found] = target.derived()
        assert (found.name, found.served.data_ptr()) == ("w", stored.data_ptr())
        assert torch.equal(found.served, found.recomputed)
        values = values * 3
    stored[0] += 1
    [found] = target.derived()
    assert not torch.equal(found.served, found.recomputed)
