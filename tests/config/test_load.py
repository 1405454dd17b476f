"""Files, `defaults:`, `${...}`, overrides, unknown keys and NeMo RL's keys."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml

from refit_transport.config.keys import split_foreign
from refit_transport.config.load import config_from, load_config
from refit_transport.config.schema import RefitConfig
from refit_transport.errors import ConfigError, Violation
from refit_transport.planning.routing import RouteRule
from refit_transport.transports.registry import resolve

ROOT = Path(__file__).parents[2]
# Those that are whole jobs; tests/recipes has the recipes.
SHIPPED = [ROOT / "configs/base.yaml", ROOT / "configs/demo.yaml"]


def load(path: Path, *overrides: str) -> RefitConfig:
    return load_config(path, resolve_transport=resolve, overrides=overrides)


def problems(path: Path, *overrides: str) -> list[Violation]:
    with pytest.raises(ConfigError) as caught:
        load(path, *overrides)
    return list(caught.value.violations)


def write(path: Path, text: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text if isinstance(text, str) else yaml.safe_dump(text))
    return path


@pytest.fixture
def base(tmp_path: Path, document: dict[str, Any]) -> Path:
    return write(tmp_path / "base.yaml", document)


class TestDefaults:
    def test_child_overrides_parents_in_order(self, tmp_path: Path, base: Path) -> None:
        write(tmp_path / "sub/one.yaml", "defaults: ../base.yaml\nrefit_run: {refits: 5, seed: 1, batch_size: 7}\n")
        write(tmp_path / "two.yaml", "refit_run: {refits: 6, seed: 2}\n")
        top = write(tmp_path / "top.yaml", "defaults: [sub/one.yaml, two.yaml]\nrefit_run: {refits: 9}\n")
        run = load(top).refit_run
        assert (run.refits, run.seed, run.batch_size) == (9, 2, 7)

    def test_lists_are_replaced(self, tmp_path: Path, base: Path) -> None:
        top = write(tmp_path / "top.yaml", "defaults: base.yaml\nrefit_run: {prompts: [[1, 2]]}\n")
        assert load(top).refit_run.prompts == ((1, 2),)

    @pytest.mark.parametrize(("path", "text"), [("cluster", "[]"), ("policy.generation.vllm_cfg", "[1]")])
    def test_a_list_for_a_section_is_one_problem(self, base: Path, path: str, text: str) -> None:
        (found,) = problems(base, f"{path}={text}")
        assert found.path == path
        assert found.reason == "must be a section of keys"

    def test_a_section_for_a_list_is_one_problem(self, base: Path) -> None:
        (found,) = problems(base, "refit_run.prompts=[[1, 2]]", "refit_run.prompts={a: 1}")
        assert found.path == "refit_run.prompts"
        assert found.reason == "must be a list"

    @pytest.mark.parametrize("word", ["off", "'off'", "false"])
    def test_off_is_what_yaml_makes_of_it(self, tmp_path: Path, base: Path, word: str) -> None:
        text = f"defaults: {base}\npolicy: {{generation: {{refit_cfg: {{nccl_reshard: {{verify: {word}}}}}}}}}\n"
        assert load(write(tmp_path / "top.yaml", text)).settings.verify == "off"

    @pytest.mark.parametrize("mark", ["true", "false"])
    def test_override_replaces_a_section(self, tmp_path: Path, base: Path, mark: str) -> None:
        vllm = f"vllm_cfg: {{_override_: {mark}, tensor_parallel_size: 4}}"
        top = write(tmp_path / "top.yaml", f"defaults: base.yaml\npolicy: {{generation: {{{vllm}}}}}\n")
        inherited = load(top).policy.generation.vllm_cfg.max_model_len
        assert inherited == (None if mark == "true" else 64)

    def test_a_circle_is_told(self, tmp_path: Path) -> None:
        write(tmp_path / "a.yaml", "defaults: b.yaml\n")
        write(tmp_path / "b.yaml", "defaults: a.yaml\n")
        (found,) = problems(tmp_path / "a.yaml")
        assert found.path == f"{tmp_path / 'b.yaml'}: defaults"
        assert "a.yaml -> b.yaml -> a.yaml" in found.reason

    def test_a_diamond_is_no_circle(self, tmp_path: Path, base: Path) -> None:
        for name in ("left", "right"):
            write(tmp_path / f"{name}.yaml", "defaults: base.yaml\n")
        load(write(tmp_path / "top.yaml", "defaults: [left.yaml, right.yaml]\n"))

    def test_every_missing_parent_is_told_with_who_asked(self, tmp_path: Path) -> None:
        top = write(tmp_path / "top.yaml", "defaults: [no.yaml, nor.yaml]\n")
        found = problems(top)
        assert [violation.path for violation in found] == [str(tmp_path / "no.yaml"), str(tmp_path / "nor.yaml")]
        assert all("can't be read" in violation.reason and str(top) in violation.remedy for violation in found)

    def test_defaults_of_another_type(self, tmp_path: Path) -> None:
        (found,) = problems(write(tmp_path / "top.yaml", "defaults: {a: b}\n"))
        assert "list of paths" in found.reason

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("policy: {a: 1\ncluster: x", "not valid YAML (line 2"),
            ("a: 1\na: 2\n", "not valid YAML (line 2"),
            ("- 1\n", "must be a mapping"),
        ],
    )
    def test_a_file_that_is_no_mapping(self, tmp_path: Path, text: str, reason: str) -> None:
        (found,) = problems(write(tmp_path / "bad.yaml", text))
        assert found.path == str(tmp_path / "bad.yaml")
        assert reason in found.reason

    def test_a_value_from_another_file_says_so(self, tmp_path: Path, document: dict[str, Any]) -> None:
        document["policy"]["precision"] = "float16"
        base = write(tmp_path / "base.yaml", document)
        (found,) = problems(write(tmp_path / "top.yaml", "defaults: base.yaml\n"))
        assert found.value == f"'float16', set in {base}"


class TestInterpolation:
    def test_values_follow_overrides(self, base: Path) -> None:
        reference = "policy.generation.vllm_cfg.precision=${policy.precision}"
        assert load(base, reference, "policy.precision=bfloat16").vllm_precision == "bfloat16"

    def test_arithmetic(self, base: Path) -> None:
        config = load(
            base, "refit_run.sequence_length=${mul:${cluster.gpus_per_node}, 4}", "refit_run.seed=${div:8, 2}"
        )
        assert (config.refit_run.sequence_length, config.refit_run.seed) == (32, 4)

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("${policy.nothing}", "can't be worked out"),
            ("${nobody:1}", "can't be worked out"),
            ("${div:1,0}", "can't be worked out"),
            ("???", "must be set"),
            ("${refit_run.refits}", "can't be worked out"),
        ],
    )
    def test_an_unknown_reference_is_one_problem(self, base: Path, text: str, reason: str) -> None:
        (found,) = problems(base, f"refit_run.refits={text}")
        assert found.path == "refit_run.refits"
        assert reason in found.reason

    def test_a_circle_is_told(self, base: Path) -> None:
        found = problems(base, "refit_run.refits=${refit_run.seed}", "refit_run.seed=${refit_run.refits}")
        assert {violation.path for violation in found} == {"refit_run.refits", "refit_run.seed"}

    def test_what_follows_an_unset_key_is_not_told_again(self, base: Path) -> None:
        references = ("refit_run.seed=${refit_run.batch_size}", "refit_run.batch_size=${refit_run.refits}")
        (found,) = problems(base, "refit_run.refits=???", *references)
        assert found.path == "refit_run.refits"

    def test_a_section_inside_itself(self, base: Path) -> None:
        found = problems(base, "refit_run.tiny_model.kind=moe", "refit_run.tiny_model.seed=${refit_run.tiny_model}")
        assert any(violation.path.startswith("refit_run.tiny_model") for violation in found)

    def test_foreign_sections_may_hold_what_only_nemo_rl_can_work_out(self, base: Path) -> None:
        config = load(base, "logger.log_dir=${their_resolver:x}", "data.path=???")
        assert config.document["logger"] == {"log_dir": "${their_resolver:x}"}
        assert config.document["data"] == {"path": "???"}


class TestOverrides:
    def test_types(self, base: Path) -> None:
        config = load(base, "refit_run.prompts=[[5, 6, 7]]", "policy.generation.refit_transport=null")
        assert config.refit_run.prompts == ((5, 6, 7),)
        assert config.transport == "gather_broadcast"

    @pytest.mark.parametrize("text", ["policy.precision", "=3", "a=[1"])
    def test_not_an_assignment(self, base: Path, text: str) -> None:
        (found,) = problems(base, text)
        assert found.path == "--set"

    def test_origin(self, base: Path) -> None:
        (found,) = problems(base, "refit_run.refits=0")
        assert found.value == "0, set in --set"


class TestUnknownKeys:
    @pytest.mark.parametrize(
        ("path", "hint"),
        [
            ("polcy", "did you mean 'policy'?"),
            ("policy.megatron_cfg.tensor_model_paralel_size", "did you mean 'tensor_model_parallel_size'?"),
            ("policy.megatron_cfg.sequence_packing", "belongs under 'policy'"),
            ("policy.tensor_model_parallel_size", "belongs under 'policy.megatron_cfg'"),
            ("policy.coverage", "belongs under 'policy.generation.refit_cfg.nccl_reshard'"),
            ("policy.generation.refit_cfg.nccl_reshard.covrage", "did you mean 'coverage'?"),
            ("policy.generation.refit_cfg.gather_broadcast.coverage", "belongs under"),
            ("policy.generation.vllm_cfg.tensor_model_parallel_size", "did you mean 'tensor_parallel_size'?"),
            ("policy.max_model_leng", "did you mean 'policy.generation.vllm_cfg.max_model_len'?"),
            ("cluster.colour", "known here: gpus_per_node"),
            ("zebra", "remove it"),
            ("gpus_per_node", "belongs under 'policy.generation.colocated.resources' or 'cluster'"),
        ],
    )
    def test_hint(self, base: Path, path: str, hint: str) -> None:
        (found,) = problems(base, f"{path}=1")
        assert found.path == path
        assert hint in found.remedy
        assert "is not a key of" in found.reason

    def test_a_misspelt_required_key_is_one_problem(self, base: Path, document: dict[str, Any]) -> None:
        document["policy"]["model_nam"] = document["policy"].pop("model_name")
        (found,) = problems(write(base, document))
        assert found.path == "policy.model_nam"
        assert "did you mean 'model_name'?" in found.remedy

    def test_a_misspelt_size_does_not_set_off_the_rules(self, base: Path, document: dict[str, Any]) -> None:
        document["policy"]["megatron_cfg"]["tensor_model_parallel_sise"] = document["policy"]["megatron_cfg"].pop(
            "tensor_model_parallel_size"
        )
        (found,) = problems(write(base, document))
        assert found.path.endswith("tensor_model_parallel_sise")

    def test_an_unrelated_unknown_key_hides_no_rule(self, base: Path) -> None:
        found = problems(base, "policy.megatron_cfg.zebra=1", "policy.megatron_cfg.sequence_parallel=false")
        assert [violation.path.rpartition(".")[2] for violation in found] == ["zebra", "sequence_parallel"]


FULL_NEMO_RL = """
grpo: {num_prompts_per_step: 32, seed: 42, async_grpo: {enabled: false}, val_period: 10}
loss_fn: {reference_policy_kl_penalty: 0.01, ratio_clip_min: 0.2, token_level_loss: true}
checkpointing: {enabled: true, checkpoint_dir: results/grpo, save_period: 10}
policy:
  model_name: %s
  tokenizer: {name: "${policy.model_name}", chat_template_kwargs: null}
  train_global_batch_size: 512
  train_micro_batch_size: 4
  logprob_batch_size: "${policy.train_micro_batch_size}"
  max_total_sequence_length: 512
  precision: bfloat16
  dtensor_cfg: {_v2: true, enabled: false, tensor_parallel_size: 1, lora_cfg: {enabled: false}}
  megatron_cfg:
    enabled: true
    tensor_model_parallel_size: 2
    expert_model_parallel_size: 2
    expert_tensor_parallel_size: 1
    pipeline_model_parallel_size: 1
    num_layers_in_first_pipeline_stage: null
    num_layers_in_last_pipeline_stage: null
    context_parallel_size: 1
    pipeline_dtype: "${policy.precision}"
    sequence_parallel: true
    freeze_moe_router: true
    moe_token_dispatcher_type: alltoall
    apply_rope_fusion: true
    peft: {enabled: false, dim: 8}
    optimizer: {optimizer: adam, lr: 5.0e-6, min_lr: 5.0e-7, bf16: true, clip_grad: "${policy.max_grad_norm}"}
    scheduler: {lr_decay_style: constant, lr_warmup_iters: 13}
    distributed_data_parallel_config: {overlap_grad_reduce: true}
    fp8_cfg: {enabled: false}
    env_vars: null
  dynamic_batching:
    enabled: false
    train_mb_tokens: "${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}"
  sequence_packing: {enabled: true, algorithm: modified_first_fit_decreasing}
  make_sequence_length_divisible_by: "${policy.megatron_cfg.tensor_model_parallel_size}"
  max_grad_norm: 1.0
  optimizer: null
  scheduler: null
  generation:
    port_range_low: 3000
    port_range_high: 4999
    backend: vllm
    max_new_tokens: "${policy.max_total_sequence_length}"
    temperature: 1.0
    top_p: 1.0
    top_k: null
    val_temperature: "${.temperature}"
    stop_token_ids: null
    refit_transport: nccl_reshard
    refit_cfg:
      nixl: {device: cuda}
      nccl_reshard: {coverage: all}
    mcore_generation_config: {buffer_size_gb: 10}
    vllm_cfg:
      async_engine: false
      precision: "${policy.precision}"
      kv_cache_dtype: auto
      tensor_parallel_size: 2
      pipeline_parallel_size: 1
      expert_parallel_size: 1
      gpu_memory_utilization: 0.6
      max_model_len: "${policy.max_total_sequence_length}"
      enforce_eager: False
      use_tqdm: true
      env_vars: {A: "1"}
    vllm_kwargs: {compilation_config: {backend: eager}}
    colocated: {enabled: false, resources: {gpus_per_node: 4, num_nodes: null}}
data: {max_input_seq_length: "${policy.max_total_sequence_length}", train: {dataset_name: OpenMathInstruct-2}}
env: {math: {num_workers: 8}}
logger: {log_dir: logs, wandb_enabled: false, wandb: {project: grpo-dev}}
cluster: {gpus_per_node: 8, num_nodes: 1, master_port_range_low: 1400, master_port_range_high: 1999, segment_size: null}
data_plane: {enabled: false}
on_policy_distillation: null
"""


class TestNemoRl:
    def test_a_whole_file_is_accepted_and_kept(self, tmp_path: Path, model_folder: Path) -> None:
        path = write(tmp_path / "grpo.yaml", FULL_NEMO_RL % model_folder)
        config = load(path)
        assert config.policy.megatron_cfg.optimizer.lr == 5e-6
        assert config.policy.generation.vllm_cfg.max_model_len == 512
        assert (config.training_ranks, config.data_parallel_size, config.engines) == (4, 2, 2)
        assert config.document["policy"]["dynamic_batching"]["train_mb_tokens"] == 2048
        assert config.document["policy"]["generation"]["val_temperature"] == 1.0
        assert config.document["data"]["max_input_seq_length"] == 512
        written = yaml.safe_load(path.read_text())
        assert set(config.document) == set(written)
        assert config.document["grpo"] == written["grpo"]

    def test_what_cannot_run_yet_is_all_that_is_told(self, tmp_path: Path, model_folder: Path) -> None:
        changes = {
            "context_parallel_size: 1": "context_parallel_size: 2",
            "peft: {enabled: false, dim: 8}": "peft: {enabled: true, dim: 8}",
            "fp8_cfg: {enabled: false}": "fp8_cfg: {enabled: true}",
            "      expert_parallel_size: 1": "      expert_parallel_size: 4",
        }
        text = FULL_NEMO_RL
        for old, new in changes.items():
            assert text.count(old) == 1
            text = text.replace(old, new)
        found = problems(write(tmp_path / "grpo.yaml", text % model_folder))
        assert {violation.path for violation in found} == {
            "policy.megatron_cfg.context_parallel_size",
            "policy.megatron_cfg.peft.enabled",
            "policy.megatron_cfg.fp8_cfg.enabled",
            "policy.generation.vllm_cfg.expert_parallel_size",
        }
        assert len(found) == len(changes)
        assert all("not available yet" in violation.reason and violation.remedy for violation in found)

    def test_the_kept_document_is_accepted_again(self, tmp_path: Path, model_folder: Path) -> None:
        config = load(write(tmp_path / "grpo.yaml", FULL_NEMO_RL % model_folder))
        assert config_from(config.document, resolve_transport=resolve) == config

    def test_settings_of_another_packages_transport(self, base: Path) -> None:
        transport = "their.module:Class"
        document = yaml.safe_load(base.read_text())
        document["policy"]["generation"] |= {"refit_transport": transport, "refit_cfg": {transport: {"speed": 3}}}
        assert load(write(base, document)).plugin_settings == {"speed": 3}
        document["policy"]["generation"]["refit_transport"] = "nccl_reshard"
        (found,) = problems(write(base, document))
        assert transport in found.path


class TestConfig:
    @pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
    def test_shipped_files(
        self, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_folder: Path
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "demo-output").mkdir()
        model_folder.rename(tmp_path / "demo-output/model")
        config = load(path)
        dumped = write(tmp_path / "dumped.yaml", config.model_dump(mode="json"))
        assert load(dumped).model_dump() == config.model_dump()
        assert split_foreign(config.document)[1] == []

    def test_the_demo_is_the_main_job(self) -> None:
        config = load(ROOT / "configs/demo.yaml")
        megatron = config.policy.megatron_cfg
        assert (megatron.tensor_model_parallel_size, megatron.expert_model_parallel_size) == (2, 2)
        assert megatron.expert_tensor_ranks == 1
        assert megatron.sequence_parallel
        assert (config.training_ranks, config.generation_ranks, config.engines) == (2, 2, 1)
        assert config.domains() == ((0, 1), (2, 3))
        assert config.refit_run.tiny_model is not None
        assert config.refit_run.tiny_model.hf_config()["num_experts"] == 8

    def test_domains(self, accept: Any) -> None:
        key = "policy.generation.refit_cfg.nccl_reshard.topology.domains"
        assert accept({}).domains() is None
        assert accept({key: "single"}).domains() == (tuple(range(8)),)
        assert accept({key: "per_role"}).domains() == ((0, 1, 2, 3), (4, 5, 6, 7))
        assert accept({key: [[7, 6, 5, 4], [3, 2, 1, 0]]}).domains() == ((7, 6, 5, 4), (3, 2, 1, 0))

    def test_nic_rates(self, accept: Any) -> None:
        key = "policy.generation.refit_cfg.nccl_reshard.topology"
        assert accept({}).refit_settings().nic_rates == ()
        assert accept({f"{key}.nic_rates": None}).refit_settings().nic_rates == ()
        assert accept({f"{key}.nic_rates": "50GB"}).refit_settings().nic_rates == (50e9,)
        two = {"domains": "per_role", "nic_rates": ["50GB", "25GB"]}
        assert accept({key: two}).refit_settings().nic_rates == (50e9, 25e9)

    def test_buffer_defaults_follow_the_staging_memory(self, accept: Any) -> None:
        key = "policy.generation.refit_cfg.nccl_reshard.staging_bytes"
        settings = accept({key: "2MiB"}).settings
        assert (settings.staging_bytes, settings.bucket_bytes) == (2**21, 2**17)

    def test_settings_follow_the_transport(self, accept: Any) -> None:
        generation = "policy.generation"
        changes = {
            f"{generation}.refit_cfg.{name}.timeout_s": t for name, t in (("nccl_reshard", 1), ("gather_broadcast", 2))
        }
        assert accept(changes).settings.timeout_s == 1
        assert accept(changes | {f"{generation}.refit_transport": None}).settings.timeout_s == 2

    def test_routes_reach_the_ranks(self, accept: Any) -> None:
        key = "policy.generation.refit_cfg.nccl_reshard.routes"
        config = accept({key: [{"pattern": "*.mlp", "transport": "gather_broadcast"}]})
        [rule] = config.refit_settings().routes
        assert rule.matches("layers.0.mlp")
        assert not rule.matches("layers.0.mlp.up")
        assert not RouteRule("mlp.*", "nccl_reshard").matches("layers.0.mlp.up")

    def test_frozen_and_picklable(self, accept: Any) -> None:
        config = accept({})
        with pytest.raises(ValueError, match="frozen"):
            config.policy.precision = "bfloat16"
        copy = pickle.loads(pickle.dumps(config))
        assert copy == config
        assert copy.document == config.document

    def test_the_error_is_picklable_and_tells_everything(self, base: Path) -> None:
        with pytest.raises(ConfigError) as caught:
            load(base, "policy.precision=int8", "zebra=1")
        copy = pickle.loads(pickle.dumps(caught.value))
        assert copy.violations == caught.value.violations
        assert str(copy) == str(caught.value)
        for violation in copy.violations:
            assert all(
                part in str(copy) for part in (violation.path, violation.value, violation.reason, violation.remedy)
            )
