"""The vLLM entry point: what it registers and patches, and that it refuses a vLLM that it doesn't know."""

import os
import subprocess
import sys
from importlib import import_module
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch

from refit_transport.errors import SeamError
from refit_transport.integrations import vllm_plain_weights, vllm_plugin
from refit_transport.integrations.vllm_seams import attribute, require_parameters


def test_register_is_idempotent_and_registers_the_engine(monkeypatch):
    monkeypatch.delenv(vllm_plugin.PLAIN_WEIGHTS, raising=False)
    vllm_plugin.register()
    vllm_plugin.register()
    factory = attribute("vllm.distributed.weight_transfer.factory", "WeightTransferEngineFactory")
    assert vllm_plugin.ENGINE in factory._registry


def test_before_it_joins_an_engine_is_shown_the_drafter_and_an_open_update_is_ended():
    vllm_plugin.register()
    worker_class = attribute("vllm.v1.worker.gpu_worker", "Worker")
    calls = []
    engine = SimpleNamespace(
        draft_with=lambda drafter: calls.append(("draft_with", drafter)),
        parse_init_info=lambda info: info,
        init_transfer_engine=lambda info: calls.append(("init", info)),
    )
    worker = SimpleNamespace(
        weight_transfer_engine=engine, get_draft_model=lambda: "a drafter", _check_weight_transfer_engine=lambda: None
    )
    with pytest.raises(SeamError, match="flag of an open weight update"):
        worker_class.init_weight_transfer_engine(worker, {"port": 0})
    worker._weight_update_active = True
    worker_class.init_weight_transfer_engine(worker, {"port": 1})
    assert calls == [("draft_with", "a drafter"), ("init", {"port": 1})]
    assert worker._weight_update_active is False
    del engine.draft_with  # an engine of somebody else
    worker_class.init_weight_transfer_engine(worker, {"port": 2})
    assert calls[2:] == [("init", {"port": 2})]


def test_only_drafters_of_the_models_own_checkpoint_are_delivered_to():
    from refit_transport.integrations.vllm_engine import RefitTransportEngine
    from refit_transport.targets.joined import JoinedTarget

    for checkpoint, joined in (("theirs", False), ("ours", True)):
        engine = object.__new__(RefitTransportEngine)
        draft = SimpleNamespace(model=checkpoint)
        engine.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(model="ours"), speculative_config=SimpleNamespace(draft_model_config=draft)
        )
        engine.model, engine._target, engine._drafter = torch.nn.Linear(2, 2), None, None
        engine.draft_with(None)
        assert engine._target is None
        engine.draft_with(torch.nn.Linear(2, 2))
        assert isinstance(engine._target, JoinedTarget) is joined


def test_a_misspelt_mode_is_refused(monkeypatch):
    monkeypatch.setenv(vllm_plugin.PLAIN_WEIGHTS, "yes")
    with pytest.raises(ValueError, match="must be 0 or 1"):
        vllm_plugin.register()


@pytest.mark.parametrize("ident", ["", "//"])
def test_shared_memory_is_named_by_job_when_an_outside_launcher_starts_the_ranks(monkeypatch, ident):
    vllm_plugin.register()
    owner = attribute("vllm.distributed.device_communicators.cpu_communicator", "_CPUSHMDistributed")
    group = SimpleNamespace(unique_name="tp:0", ranks=[0, 1])
    monkeypatch.setenv("VLLM_DIST_IDENT", ident)
    names = []
    for port in ("29500", "29501"):
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", port)
        names.append(owner.make_group_name(group))
    assert len(set(names)) == 2
    assert not any("/" in name for name in names)
    monkeypatch.setenv("VLLM_DIST_IDENT", "41234")
    assert owner.make_group_name(group) == "41234-tp:0-[0-1]-cpushm"


def test_an_unknown_seam_names_the_vllm_version_and_the_place():
    with pytest.raises(SeamError, match=r"vllm \S+ isn't supported: vllm.platforms:no_such_thing"):
        attribute("vllm.platforms", "no_such_thing")
    with pytest.raises(SeamError, match=r"some\.place: expected parameters \(a\) instead of \(b\)"):
        require_parameters(lambda b: b, "some.place", ("a",))


def test_plain_mode_refuses_changed_seams(monkeypatch):
    utils = import_module("vllm.model_executor.layers.utils")
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", lambda layer: None)
    with pytest.raises(SeamError, match="dispatch_cpu_unquantized_gemm"):
        vllm_plain_weights.use_plain_weights()


def _experts(tokens, activation, expert_map):
    generator = torch.Generator().manual_seed(0)
    w1, w2 = torch.randn(4, 12, 8, generator=generator), torch.randn(4, 8, 6, generator=generator)
    w1 = w1[:, :6] if activation.endswith("_no_mul") else w1
    hidden, ids = torch.randn(tokens, 8, generator=generator), torch.tensor([[0, 3], [2, 1], [3, 2]])
    weights = torch.rand(tokens, 2, generator=generator)
    if expert_map is not None:
        w1, w2 = w1[expert_map >= 0], w2[expert_map >= 0]
    output = torch.full((tokens, 8), torch.nan)
    vllm_plain_weights._apply_experts(
        SimpleNamespace(w1_bias=None, w2_bias=None), output, hidden, w1, w2, weights, ids,
        SimpleNamespace(value=activation), 4, expert_map, None, None, hidden, hidden, None, False,
    )  # fmt: skip
    return output, (hidden, w1, w2, weights, ids)


def _silu(projected):
    gate, up = projected.chunk(2)
    return torch.nn.functional.silu(gate) * up


def _swiglu_oai(projected):
    layers = import_module("vllm.model_executor.layers.activation")
    return layers.SwigluOAIAndMul.forward_native(SimpleNamespace(alpha=1.702, limit=7.0), projected)


def _squared_relu(projected):
    return import_module("vllm.model_executor.layers.activation").ReLUSquaredActivation.forward_native(None, projected)


@pytest.mark.parametrize(
    ("name", "activation"), [("silu", _silu), ("swigluoai", _swiglu_oai), ("relu2_no_mul", _squared_relu)]
)
def test_plain_experts_sum_the_chosen_ones(name, activation):
    output, (hidden, w1, w2, weights, ids) = _experts(3, name, None)
    for token in range(3):
        wanted = torch.zeros(8)
        for choice in range(2):
            inner = activation(w1[ids[token, choice]] @ hidden[token])
            wanted += weights[token, choice] * (w2[ids[token, choice]] @ inner)
        torch.testing.assert_close(output[token], wanted)


def test_large_inputs_of_gpt_oss_experts_are_clamped():
    projected = torch.tensor([9.0, 9.0, -9.0, -9.0, 0.5, -0.5])
    torch.testing.assert_close(vllm_plain_weights._swiglu_oai(projected), _swiglu_oai(projected))


def test_plain_experts_of_two_ranks_add_up_to_all():
    everything, _ = _experts(3, "silu", None)
    ranks = [
        _experts(3, "silu", torch.tensor(owned, dtype=torch.int32))[0] for owned in ([0, 1, -1, -1], [-1, -1, 0, 1])
    ]
    assert not any(torch.equal(part, everything) for part in ranks)
    torch.testing.assert_close(ranks[0] + ranks[1], everything)


def test_an_unsupported_activation_is_refused():
    with pytest.raises(SeamError, match="swiglustep"):
        _experts(3, "swiglustep", None)
    assert not vllm_plain_weights._supports_activation(SimpleNamespace(value="swiglustep"))


def test_the_package_imports_without_vllm():
    program = "import sys; sys.modules['vllm'] = None; import refit_transport, refit_transport.targets.loader_trace"
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ)
