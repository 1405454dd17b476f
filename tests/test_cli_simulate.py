"""`refit-transport simulate`: figures against sums by hand, the published rows' data, and what is refused."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from refit_transport.cli import app
from refit_transport.layout.presets import megatron, vllm
from refit_transport.layout.presets.sizes import FullySharded, serving_sizes, training_sizes
from refit_transport.simulation import published, study
from refit_transport.simulation.case import Ask, Case
from refit_transport.simulation.catalog import find_model, system_names
from refit_transport.simulation.methods import METHODS, Prediction, lower_bound
from refit_transport.simulation.published import published_rows

ROWS = published_rows()
QWEN3_4B = 2 * 4_022_468_096
SMALL_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 4,
    "vocab_size": 4096,
}


def simulate(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["simulate", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def simulated(*arguments: str) -> dict:
    code, out, err = simulate("--json", *arguments)
    assert code == 0, err
    return json.loads(out)


@pytest.fixture
def small_moe(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL_MOE))
    return str(tmp_path)


def test_one_node_to_one_node_by_hand():
    """DP8 -> TP8 on two hosts with 8 NICs of 50 GB/s each: each byte of the model enters once."""
    found = simulated("Qwen3-4B", "--source", "dp8", "--target", "tp8")
    assert (found["sources"], found["targets"], found["domains"], found["nbytes"]) == (8, 8, 2, QWEN3_4B)
    assert found["bound"] == pytest.approx(QWEN3_4B / 8 / 50e9)
    by_method = {each["method"]: each for each in found["predictions"]}
    assert list(by_method) == list(METHODS)
    assert by_method["full"]["network_bytes"] == QWEN3_4B
    assert by_method["full"]["nic_bytes"] == pytest.approx(QWEN3_4B / 8, rel=0.01)
    # One chain: all through the NIC of the first rank. Flat: the first holder sends everything, norms 8 times.
    assert by_method["broadcast_single"]["nic_bytes"] == QWEN3_4B
    assert by_method["broadcast_single"]["seconds"] == pytest.approx(QWEN3_4B / 50e9, rel=0.02)
    assert QWEN3_4B < by_method["flat"]["nic_bytes"] < 1.01 * QWEN3_4B
    # The embedding, which the loader takes whole, beside the slots.
    assert by_method["broadcast"]["staging_bytes"] == (128 << 20) + 2 * 151936 * 2560
    assert by_method["full"]["staging_bytes"] == 128 << 20


def test_methods_keep_their_order_and_the_bound(small_moe):
    """Tensor-parallel ranks over several domains: whole tensors cost most."""
    found = simulated(small_moe, "--source", "pp2 ep8", "--target", "tp16 dp2", "--sources", "16", "--targets", "32")
    seconds = {each["method"]: each["seconds"] for each in found["predictions"]}
    assert found["bound"] <= min(seconds.values()) * (1 + 1e-9)
    assert seconds["full"] <= 1.01 * seconds["hybrid"] < seconds["broadcast"] < seconds["broadcast_single"]
    assert seconds["full"] < seconds["flat"]


def test_a_table_for_people(small_moe):
    code, out, _ = simulate(small_moe, "--source", "tp2", "--target", "tp4", "--system", "dgx-a100")
    assert code == 0
    assert all(name in out for name in ("busiest NIC", "staging", "coverage all", "dgx-a100", "2 fast domains"))


def test_a_stand_in_is_marked_in_both_forms(monkeypatch):
    monkeypatch.setattr(study, "lower_bound", lambda _: 1.0)
    arguments = ("Qwen3.8-2.4T-A95B", "--source", "pp4 ep4", "--target", "tp4")
    monkeypatch.setattr(study, "predict", lambda method, _, least: _prediction(method, least))
    assert "stand_in" in simulated(*arguments)
    code, out, _ = simulate(*arguments)
    assert code == 0
    assert "(stand-in)" in out
    assert "shapes not public" in out


def _prediction(method, least):
    return Prediction(method, 2.0, least, 10, 20, 30)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("DeepSeekV3", "--source", "tp1", "--target", "tp1"), "did you mean DeepSeek-V3? known: Qwen3-4B, "),
        (("Qwen3-4B", "--source", "tp1", "--target", "tp1", "--system", "dgx-b100"), "did you mean dgx-"),
        (("no/such/config.json", "--source", "tp1", "--target", "tp1"), "can't be read as JSON"),
        (("Qwen3-4B",), "--source: must be a layout such as 'pp16 ep16'"),
        ((), "MODEL: must be one of Qwen3-4B, "),
        (("Qwen3-4B", "--source", "tp3", "--target", "tp1"), "must divide the model's 32 attention heads"),
        (("Qwen3-4B", "--source", "tp8", "--target", "tp8", "--sources", "12"), "needs a multiple of 8 training ranks"),
        (("Qwen3-4B", "--source", "tp8", "--target", "cp2"), "is no parallel size; known: tp, pp, dp, ep"),
    ],
)
def test_what_is_refused_says_why(arguments, message):
    code, _, err = simulate(*arguments)
    assert code == 2
    assert message in " ".join(err.split())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_a_published_row_can_be_laid_out(row):
    model = find_model(row.ask.model).model
    training = training_sizes(row.ask.source, ranks=row.ask.sources)
    if not isinstance(training.parallelism, FullySharded):
        cut = megatron.balanced(model, training.parallelism)
        assert megatron.misfits(model, cut, world_size=training.ranks) == ()
    engines = serving_sizes(row.ask.target, ranks=row.ask.targets)
    assert vllm.misfits(model, engines) == ()
    assert (training.ranks, engines.ranks) == (row.ask.sources, row.ask.targets)
    assert 0 < row.seconds[0] <= row.seconds[1]
    assert row.status in ("read", "retold", "summary")
    assert row.nearest in METHODS
    assert row.baseline_nearest in METHODS
    assert row.why.endswith(".")
    assert len(row.why.split()) > 5
    assert row.ask.system in system_names()


def test_published_rows_are_told_apart():
    assert len({row.id for row in ROWS}) == len(ROWS) >= 20


def test_no_published_time_is_below_the_bound():
    """What was measured can't beat the bound of the same work at full link rate; the smallest row is planned here."""
    row = next(row for row in ROWS if row.id == "nemo-qwen3-4b-h100")
    assert lower_bound(Case.of(row.ask)) < row.seconds[0]


def test_a_domain_may_be_smaller_than_the_systems():
    row = next(row for row in ROWS if row.id == "m2n-deepseek-v3-gb200")
    assert [len(domain) for domain in Case.of(row.ask).topology.domains] == [64] * 4


def test_published_rows_are_printed_with_their_reasons(monkeypatch):
    row = next(row for row in ROWS if row.id == "nemo-qwen3-4b-h100")
    monkeypatch.setattr(study, "published_rows", lambda: (row,))
    code, out, _ = simulate("--published")
    text = " ".join(out.split())
    assert code == 0
    assert "0.21-0.34" in out
    assert " ".join(row.why.split())[:60] in text
    (found,) = simulated("--published")
    assert found["published"]["id"] == row.id
    assert found["deviation"] > 1
    assert published.published_rows() == ROWS


def test_deviation_of_a_range():
    row = next(row for row in ROWS if row.seconds == (0.21, 0.34))
    for seconds, deviation in ((0.105, 2.0), (0.3, 1.0), (0.68, 0.5)):
        assert row.deviation(Prediction("hybrid", seconds, 0.1, 1, 1, 1)) == pytest.approx(deviation)


def test_one_tensor_can_be_asked_for_alone():
    case = Case.of(
        Ask("DeepSeek-V3", "ep16", "tp8 dp2", "dgx-gb200", tensors="model.layers.3.mlp.experts.gate_proj.weight")
    )
    assert case.bytes == 7168 << 20
