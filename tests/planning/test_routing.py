"""Each tensor's transport and the reason that the report gives."""

import pytest
from small_models import SMALL

from refit_transport.layout.box import Box
from refit_transport.layout.manifest import Manifest, Opaque, Piece, RankManifest, TensorSpec
from refit_transport.layout.presets.model import LogicalModel
from refit_transport.planning.routing import RouteRule, is_ffn_projection, route_tensors, skipped_tensors

NAMES = ("model.layers.0.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight", "unused")


def target(opaque=()):
    specs = tuple(TensorSpec(name, (4,), "float32") for name in NAMES)
    pieces = tuple(Piece(n, Box.of((0, 4)), n, 0, (1,)) for n in NAMES[:3] if n not in opaque)
    return Manifest.of([RankManifest(1, "target", specs, pieces, tuple(Opaque(n, "it computes") for n in opaque))])


def transports(**arguments):
    opaque = arguments.pop("opaque", ())
    return {route.tensor: route.transport for route in route_tensors(target(opaque), **arguments)}


def test_coverage_ffn_sends_projections_shard_to_shard_and_the_rest_whole():
    assert transports(coverage="ffn") == {
        NAMES[0]: "nccl_reshard",
        NAMES[1]: "gather_broadcast",
        NAMES[2]: "gather_broadcast",
    }


def test_coverage_all_sends_everything_that_a_target_needs():
    assert transports(coverage="all") == dict.fromkeys(NAMES[:3], "nccl_reshard")


def test_the_first_matching_rule_wins_over_the_coverage():
    rules = (RouteRule("re:norm", "gather_broadcast"), RouteRule("*norm*", "nccl_reshard"))
    assert transports(coverage="all", rules=rules)[NAMES[2]] == "gather_broadcast"
    assert transports(coverage="ffn", rules=rules[1:])[NAMES[2]] == "nccl_reshard"


def test_what_a_target_takes_whole_goes_by_gather_broadcast_whatever_is_asked():
    for arguments in ({"coverage": "all"}, {"transport": "mine:Class"}, {"rules": (RouteRule("*", "nccl_reshard"),)}):
        found = route_tensors(target((NAMES[0],)), **arguments)
        assert found[0].transport == "gather_broadcast"
        assert found[0].reason == "the target takes it whole: it computes"


def test_another_transport_carries_everything_else():
    assert transports(transport="mine:Class") == dict.fromkeys(NAMES[:3], "mine:Class")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.0.mlp.experts.gate_proj.weight", True),
        ("model.layers.0.mlp.shared_expert.down_proj.weight", True),
        ("model.layers.0.mlp.shared_experts.down_proj.weight", True),
        ("model.layers.0.mlp.gate.weight", False),
        ("model.layers.0.mlp.shared_expert_gate.weight", False),
        ("model.layers.0.self_attn.o_proj.weight", False),
        ("model.layers.0.mlp.up_proj.bias", False),
    ],
)
def test_ffn_projections(name, expected):
    assert is_ffn_projection(name) is expected


@pytest.mark.parametrize("kind", SMALL)
def test_ffn_projections_are_those_of_the_outline(kind):
    """Under every architecture's names: a row is of the FFN by its group, not by its name."""
    tensors = [tensor for tensor in LogicalModel.from_config(SMALL[kind]).tensors if tensor.part != "vision"]
    ffn = {tensor.name for tensor in tensors if tensor.row.group in ("ffn", "expert_ffn", "shared_expert")}
    assert ffn
    assert {tensor.name for tensor in tensors if is_ffn_projection(tensor.name)} == ffn


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize(
    ("kind", "more"), [("deepseek", {"num_nextn_predict_layers": 2}), ("qwen3 next", {"mtp_num_hidden_layers": 1})]
)
def test_what_no_target_takes_is_named_with_the_reason(kind, more, drafts):
    model = LogicalModel.from_config(SMALL[kind] | more)
    drafter = [tensor.name for tensor in model.tensors if tensor.part == "drafter"]
    copies = [name for name in drafter if name.endswith(("embed_tokens.weight", "shared_head.head.weight"))]
    main = {tensor.name for tensor in model.main}
    assert len(drafter) > 10
    source = [*main, *drafter, "model.layers.0.rotary.inv_freq"]
    ignored = {"the targets' loaders ignore it": ("model.layers.0.rotary.inv_freq",)}
    if drafts:
        ignored = {reason: (*copies, *names) for reason, names in ignored.items()}
        assert skipped_tensors(source, main | {*drafter} - {*copies}) == ignored
    else:
        reason = "multi-token prediction: no target drafts"
        assert skipped_tensors(source, main) == {reason: tuple(drafter)} | ignored
