"""Every full-size model against the tensors that its checkpoint has, which were listed independently of this package.

`checkpoint_tensors.json` has a line for each kind of tensor: name, shape, which layers and how many experts have it.
"""

from __future__ import annotations

import json
import math
import time
from itertools import product
from pathlib import Path

import pytest

from refit_transport.config.settings import RefitSettings
from refit_transport.layout.box import Box
from refit_transport.layout.canonical import checkpoint_entries
from refit_transport.layout.manifest import TensorSpec
from refit_transport.layout.presets.megatron import balanced, source_manifest
from refit_transport.layout.presets.model import LogicalModel
from refit_transport.layout.presets.sizes import serving_sizes, training_sizes
from refit_transport.layout.presets.vllm import target_manifest
from refit_transport.layout.region import merge_boxes
from refit_transport.places import Place, topology_of
from refit_transport.planning.overlap import boxes_to_array
from refit_transport.planning.planner import plan_transfer
from refit_transport.refit_plan import RefitPlan
from refit_transport.simulation.catalog import find_model, model_names
from refit_transport.sources.naming import Naming, Shard, check_complete
from refit_transport.transports.base import Job

LISTED = json.loads(Path(__file__).with_name("checkpoint_tensors.json").read_text())
# Training and generation layouts; stages and experts that don't divide evenly, and more ranks than key-value heads.
LAYOUTS = {
    "Qwen3-4B": ("tp4 pp2", "tp16"),
    "Qwen3-8B": ("tp2 pp5", "tp4 dp2"),
    "Qwen3-32B": ("tp8 pp3", "tp16 pp2"),
    "Qwen3-30B-A3B": ("tp2 pp5 ep8", "tp8"),
    "Qwen3-235B-A22B": ("tp4 pp8 ep8 etp2", "tp8 dp2 ep16"),
    "Qwen3.5-397B-A17B": ("tp2 pp7 ep16", "tp4 dp3 ep12"),
    "Qwen3-Next-80B-A3B": ("tp4 pp5 ep8", "tp8 dp2"),
    "DeepSeek-V2": ("tp2 pp7 ep8", "tp8 dp2"),
    "DeepSeek-V3": ("pp16 ep16", "tp8 dp6 ep48"),
    "Kimi-K2": ("pp16 ep16", "tp16 dp2 ep32"),
    "Llama-3.1-8B": ("tp16", "tp2 dp3"),
    "Llama-3.1-70B": ("tp8 pp7", "tp8 pp3"),
    "Mixtral-8x7B": ("tp4 pp3 ep8", "tp2 dp3 ep6"),
    "GLM-4.5": ("tp4 pp7 ep16", "tp32"),
    "gpt-oss-20b": ("tp4 pp5 ep8", "tp8"),
    "gpt-oss-120b": ("tp2 pp5 ep16 etp2", "tp4 dp3 ep12"),
    "NemotronH-8B": ("tp4 pp3", "tp8"),
    "NemotronH-47B": ("tp8 pp3", "tp4 pp3"),
    "Nemotron-3-Nano-30B-A3B": ("tp2 pp3 ep8", "tp8"),
    "Nemotron-3-Super-120B-A12B": ("tp2 pp5 ep16", "tp8 dp2 ep16"),
    "Nemotron-3-Ultra-550B-A55B": ("tp8 pp5 ep32", "tp8 dp5 ep40"),
    "Moonlight-16B-A3B": ("pp4 ep8", "tp4 dp3"),
    "Gemma-3-27B": ("tp8 pp7", "tp16 pp2"),
}


def test_every_model_that_ships_is_here():
    assert LAYOUTS.keys() == LISTED.keys() == {name for name in model_names() if not find_model(name).stand_in}


def listed(name):
    """Every tensor of a checkpoint by name, with its shape."""
    return {
        kind["name"].format(layer=layer, expert=expert): tuple(kind["shape"])
        for kind in LISTED[name]
        for start, stop in kind.get("layers", [(0, 1)])
        for layer, expert in product(range(start, stop), range(kind.get("experts", 1)))
    }


def stored(tensors):
    """Checkpoint tensors of logical ones, by name, with their shapes."""
    specs = (TensorSpec(tensor.name, tensor.shape, "bfloat16") for tensor in tensors)
    return {entry.name: entry.shape for spec in specs for entry in checkpoint_entries(spec)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_tensor_is_delivered_or_left_out_for_a_reason(name):
    model = find_model(name).model
    wanted = listed(name)
    assert stored(model.tensors) == wanted
    source, target = manifests(model, *LAYOUTS[name])
    check_complete(source, model)
    plan = plan_transfer(source, target)
    plan.check(source, target)
    delivered = {tensor.name for tensor in plan.tensors}
    left_out = {tensor: reason for reason, names in model.left_out().items() for tensor in names}
    assert not delivered & left_out.keys()
    accounted = [tensor for tensor in model.tensors if tensor.name in delivered | left_out.keys()]
    assert stored(accounted) == wanted
    assert whole_in_each_engine(target, serving_sizes(LAYOUTS[name][1])) == delivered


@pytest.mark.parametrize("name", ["gpt-oss-20b", pytest.param("gpt-oss-120b", marks=pytest.mark.nightly)])
def test_columns_in_turn_are_planned_and_scheduled_in_seconds(name):
    began = time.process_time()
    source, target = manifests(find_model(name).model, *LAYOUTS[name])
    settings = RefitSettings(coverage="all")
    places = {ranked.rank: Place(f"node {ranked.rank // 8}") for side in (source, target) for ranked in side.ranks}
    plan = RefitPlan(Job(source, target, topology_of(places, settings), settings))
    assert list(plan.transports) == ["nccl_reshard"]
    plan.transports["nccl_reshard"].check()
    assert time.process_time() - began < 30
    # Gate and up of an expert are a box each on training ranks, whatever the number of columns.
    naming = Naming(find_model(name).model)
    key = "decoder.layers.0.mlp.experts.experts.linear_fc1.weight"
    shape = naming.shape(key)
    assert len(naming.place(Shard(key, shape, Box.full((1, *shape[1:]))))) == 2


def manifests(model: LogicalModel, training: str, serving: str):
    trained = training_sizes(training)
    cut = balanced(model, trained.parallelism)
    source = source_manifest(model, cut, world_size=trained.ranks)
    return source, target_manifest(model, serving_sizes(serving), first_rank=trained.ranks)


def whole_in_each_engine(target, cut):
    """The tensors of which the ranks of every engine (of all that share out experts) hold all elements together."""
    ranks = max(cut.tensor * cut.pipeline, cut.expert * cut.pipeline)
    found = []
    for first in range(0, len(target.ranks), ranks):
        boxes = {}
        for ranked in target.ranks[first : first + ranks]:
            for piece in ranked.pieces:
                boxes.setdefault(piece.tensor, {})[piece.box] = None
        sizes = {spec.name: math.prod(spec.shape) for spec in target.tensors}
        merged = {
            tensor: merge_boxes(boxes_to_array(held, len(next(iter(held)).spans))) for tensor, held in boxes.items()
        }
        covered = {tensor: int((held[..., 1] - held[..., 0]).prod(axis=1).sum()) for tensor, held in merged.items()}
        found.append({tensor for tensor, elements in covered.items() if elements == sizes[tensor]})
    assert all(each == found[0] for each in found)
    return found[0]
