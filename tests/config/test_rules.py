"""Each rule and each limit of the schema: one change, exactly one violation, with its path, reason and remedy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rule_cases import CASES, DENSE, DENSE_RANKS, REMOVED, G, M, N, R, V
from small_models import SMALL

from refit_transport.config import rules_limits
from refit_transport.config.base import Section
from refit_transport.config.facts import job_of
from refit_transport.config.keys import section_of, sections
from refit_transport.config.model import logical_model
from refit_transport.config.rl_schema import RlSections
from refit_transport.config.rules import RULES, Rule
from refit_transport.config.rules_limits import OTHER_WEIGHTS, TRAINED
from refit_transport.config.schema import RefitConfig
from refit_transport.config.tiny_models import TINY_MODELS, TinyKind
from refit_transport.config.translate import PLACEHOLDERS
from refit_transport.errors import Violation
from refit_transport.layout.presets.families import FAMILIES


@pytest.mark.parametrize(("changes", "path", "reason", "remedy"), CASES)
def test_one_problem_is_one_violation(violations: Any, changes: Any, path: str, reason: str, remedy: str) -> None:
    found = violations(changes)
    assert [violation.path for violation in found] == [path]
    assert reason in found[0].reason
    assert remedy in found[0].remedy


def test_the_unchanged_document_is_fine(violations: Any) -> None:
    assert violations({}) == ()


@pytest.mark.parametrize(
    ("model", "changes", "path", "reason"),
    [
        (
            {"num_attention_heads": 9, "num_key_value_heads": 1},
            {f"{V}.tensor_parallel_size": 1},
            f"{M}.tensor_model_parallel_size",
            "9 attention heads",
        ),
        (
            {"num_attention_heads": 9, "num_key_value_heads": 1},
            {f"{M}.tensor_model_parallel_size": 1, f"{M}.sequence_parallel": False},
            f"{V}.tensor_parallel_size",
            "9 attention heads",
        ),
        (
            {"num_key_value_heads": 3},
            {f"{V}.tensor_parallel_size": 1},
            f"{M}.tensor_model_parallel_size",
            "3 key-value heads",
        ),
        (
            {"num_key_value_heads": 3},
            {f"{M}.tensor_model_parallel_size": 1, f"{M}.sequence_parallel": False},
            f"{V}.tensor_parallel_size",
            "3 key-value heads",
        ),
        (
            {"intermediate_size": 127, "mlp_only_layers": [1]},
            {f"{V}.tensor_parallel_size": 1},
            f"{M}.tensor_model_parallel_size",
            "FFN width 127",
        ),
        ({"moe_intermediate_size": 95}, {}, f"{V}.tensor_parallel_size", "experts' width 95"),
        ({"num_experts": 7}, {}, f"{M}.expert_model_parallel_size", "7 experts"),
        (DENSE, {}, f"{M}.expert_model_parallel_size", "no experts"),
        (
            DENSE,
            {**DENSE_RANKS, f"{V}.expert_parallel_size": 2},
            f"{V}.expert_parallel_size",
            "no experts",
        ),
    ],
)
def test_sizes_that_do_not_divide(
    violations: Any, model_folder: Path, model: Any, changes: Any, path: str, reason: str
) -> None:
    config = model_folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | model))
    found = violations(changes)
    assert [violation.path for violation in found] == [path]
    assert reason in found[0].reason


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ({"num_key_value_heads": 1}, {}),
        (DENSE, {**DENSE_RANKS, f"{M}.sequence_parallel": False}),
        ({"moe_intermediate_size": 95}, {f"{V}.expert_parallel_size": 2}),
        ({"num_experts": 6}, {f"{V}.tensor_parallel_size": 4, f"{V}.expert_parallel_size": 4}),
        ({"intermediate_size": 127}, {}),
        ({}, {f"{M}.pipeline_model_parallel_size": 2, f"{M}.virtual_pipeline_model_parallel_size": 2}),
        (
            {"num_hidden_layers": 5},
            {f"{M}.pipeline_model_parallel_size": 2, f"{M}.num_layers_in_first_pipeline_stage": 2},
        ),
        ({}, {f"{G}.refit_cfg.gather_broadcast.fabric": "nccl"}),
        ({}, {f"{M}.peft": {"enabled": False, "dim": 8}, f"{M}.mtp_num_layers": None, "policy.quant_cfg": None}),
        ({}, {f"{G}.vllm_kwargs": {"compilation_config": {"backend": "eager"}}, "policy.hf_config_overrides": {}}),
        ({}, {f"{G}.refit_transport": "their.module:Class", f"{G}.refit_cfg": {"their.module:Class": {"speed": 3}}}),
        ({}, {f"{G}.refit_transport": None}),
        ({}, {f"{G}.refit_cfg": None}),
        ({}, {"cluster.num_nodes": 2, f"{R}.num_nodes": 1, f"{R}.gpus_per_node": 8}),
        ({}, {f"{N}.topology": {"domains": "per_role", "nic_rates": ["50GB", "25GB"], "nics": "rank"}}),
        ({}, {f"{N}.topology.nic_rates": "50GB"}),
        ({}, {f"{N}.topology.domains": [[7, 0], [1, 2, 3], [4, 5, 6]], f"{N}.staging_bytes": "64MiB"}),
    ],
)
def test_what_looks_odd_but_works(violations: Any, model_folder: Path, model: Any, changes: Any) -> None:
    config = model_folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | model))
    assert violations(changes) == ()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "config.json is missing"),
        ("[1]", "can't be read"),
        ("{", "can't be read"),
        ("{}", "no supported architecture; supported: LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM"),
        ('{"architectures": ["GPT9ForCausalLM"]}', "(got ['GPT9ForCausalLM'])"),
        ('{"architectures": 3}', "no supported architecture"),
        (
            '{"architectures": ["Qwen3ForCausalLM"]}',
            "num_hidden_layers must be a whole number, at least 1 (got nothing)",
        ),
    ],
)
def test_a_model_folder_that_cannot_be_read(violations: Any, model_folder: Path, text: str | None, reason: str) -> None:
    (model_folder / "config.json").unlink()
    if text is not None:
        (model_folder / "config.json").write_text(text)
    (found,) = violations({})
    assert found.path == "policy.model_name"
    assert reason in found.reason
    assert "Hugging Face checkpoint" in found.remedy


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("hidden_size", REMOVED, "hidden_size must be a whole number, at least 1 (got nothing)"),
        ("num_experts", REMOVED, "num_experts must be a whole number"),
        ("num_hidden_layers", "many", "num_hidden_layers must be a whole number, at least 1 (got 'many')"),
        ("num_attention_heads", 0, "num_attention_heads must be a whole number, at least 1 (got 0)"),
        ("num_key_value_heads", [2], "num_key_value_heads must be a whole number"),
        ("vocab_size", True, "vocab_size must be a whole number"),
        ("mlp_only_layers", 3, "mlp_only_layers must be a list"),
    ],
)
def test_a_size_that_is_none(violations: Any, model_folder: Path, key: str, value: object, reason: str) -> None:
    path = model_folder / "config.json"
    sizes = json.loads(path.read_text()) | {key: value}
    path.write_text(json.dumps({name: size for name, size in sizes.items() if size != REMOVED}))
    (found,) = violations({})
    assert found.path == "policy.model_name"
    assert reason in found.reason


def test_every_missing_size_is_named(violations: Any, model_folder: Path) -> None:
    (model_folder / "config.json").write_text(json.dumps(DENSE))
    (found,) = violations({})
    for key in ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "intermediate_size"):
        assert key in found.reason


def test_a_tiny_model_needs_no_folder(accept: Any) -> None:
    tiny = {"refit_run.tiny_model": {"kind": "moe"}, "policy.model_name": "no/such/folder"}
    assert logical_model(accept(tiny)).experts == 8
    dense = {**tiny, "refit_run.tiny_model": {"kind": "dense"}, **DENSE_RANKS}
    assert logical_model(accept(dense)).experts == 0


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("policy.dtensor_cfg.enabled", True),
        ("policy.draft.enabled", True),
        ("policy.hf_config_overrides", {"num_hidden_layers": 3}),
        ("policy.is_vlm", True),
        ("policy.quant_cfg", "NVFP4_DEFAULT_CFG"),
        ("policy.reward_model_cfg.enabled", True),
        (f"{M}.fp8_cfg.enabled", True),
        (f"{M}.model_overrides", {"num_layers": 3}),
        (f"{M}.mtp_num_layers", 1),
        (f"{M}.peft.enabled", True),
        (f"{G}.quant_cfg", "NVFP4_DEFAULT_CFG"),
        (f"{G}.real_quant", True),
        (f"{G}.vllm_kwargs.hf_overrides", {"num_hidden_layers": 3}),
        (f"{G}.vllm_kwargs.quantization", "fp8"),
        (f"{G}.vllm_kwargs.speculative_config", {"method": "mtp"}),
    ],
)
def test_other_weights_than_the_checkpoints_are_refused(violations: Any, path: str, value: object) -> None:
    (found,) = violations({path: value})
    assert found.path == path
    assert "not available yet" in found.reason
    assert "false or null" in found.remedy
    assert path in OTHER_WEIGHTS


def test_what_else_is_wrong_is_told_beside_a_refused_size(violations: Any) -> None:
    refused = {f"{M}.context_parallel_size": 2, f"{V}.expert_parallel_size": 4}
    wrong = {f"{M}.expert_model_parallel_size": 8, f"{V}.tensor_parallel_size": 8}
    found = {violation.path for violation in violations(refused | wrong)}
    assert found == refused.keys() | wrong.keys()


# Sizes that fit every kind.
TINY_RANKS = {**DENSE_RANKS, f"{M}.tensor_model_parallel_size": 1, f"{M}.sequence_parallel": False}

INDEPENDENT = [
    ("policy.model_name", 3),
    ("policy.precision", "float8"),
    (f"{M}.sequence_parallel", "maybe"),
    (f"{M}.optimizer.lr", -1),
    (f"{M}.tensor_parallel", 3),
    (f"{V}.async_engine", "maybe"),
    (f"{V}.gpu_memory_utilization", 0),
    (f"{V}.precision", "fp8"),
    (f"{G}.refit_transport", "nccl_rshard"),
    (f"{N}.commit", "later"),
    (f"{N}.coverage", "some"),
    (f"{N}.timeout", 3),
    (f"{G}.refit_cfg.gather_broadcast.bucket_bytes", "17MiB"),
    ("cluster.master_port_range_low", 5000),
    ("refit_run.refits", 0),
    ("loggers", {}),
]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(INDEPENDENT), unique_by=lambda change: change[0]))
def test_all_problems_are_told_at_once(violations: Any, changes: list[tuple[str, Any]]) -> None:
    expected = {path.replace("range_low", "range_high") for path, _ in changes}
    found = violations(dict(changes))
    assert len(found) == len(changes)
    assert {violation.path for violation in found} == expected


def test_a_value_taken_over_from_a_wrong_one_is_not_told_twice(violations: Any) -> None:
    (found,) = violations({"policy.precision": "fp8", f"{V}.precision": "${policy.precision}"})
    assert found.path == "policy.precision"


def test_every_required_key_has_a_placeholder() -> None:
    required = {
        f"{path}.{name}".removeprefix(".")
        for path, model in sections().items()
        for name, field in model.model_fields.items()
        if field.is_required()
    }
    assert required | set(required_keys(RlSections)) == set(PLACEHOLDERS)


def required_keys(model: type[Section], path: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        where = f"{path}.{name}".removeprefix(".")
        if field.is_required():
            yield where
        if (inner := section_of(field.annotation)) is not None:
            yield from required_keys(inner, where)


class _Recorder:
    """Stands in for a section and notes which keys a rule reads, through properties too."""

    def __init__(self, section: Any, path: str, read: set[str]) -> None:
        self._section, self._path, self._read = section, path, read

    def __getattr__(self, name: str) -> Any:
        section, path = self._section, f"{self._path}.{name}".removeprefix(".")
        if name not in type(section).model_fields:
            attribute = getattr(type(section), name)
            getter = attribute.fget if isinstance(attribute, property) else getattr(attribute, "func", None)
            return getter(self) if getter is not None else getattr(section, name)
        value = getattr(section, name)
        if section_of(type(value)) is not None:
            return _Recorder(value, path, self._read)
        self._read.add(path)
        return value

    def model_dump(self, *, include: set[str]) -> dict[str, Any]:
        return {name: getattr(self, name) for name in include}


class _RecordedDocument(dict[str, Any]):
    """A section of the whole YAML that notes which keys are looked up."""

    def __init__(self, values: Mapping[str, Any], path: str, read: set[str]) -> None:
        super().__init__(values)
        self._path, self._read = path, read

    def get(self, key: str, default: Any = None) -> Any:
        path, value = f"{self._path}.{key}".removeprefix("."), super().get(key, default)
        if isinstance(value, dict):
            return _RecordedDocument(value, path, self._read)
        if key in self:
            self._read.add(path)
        return value


TRICKY: list[Mapping[str, Any]] = [
    {},
    {f"{G}.refit_transport": None},
    {f"{M}.pipeline_model_parallel_size": 2, f"{M}.virtual_pipeline_model_parallel_size": 2},
    {f"{N}.topology.domains": [[*range(8)]], "refit_run.sequence_length": 64},
    {"refit_run.tiny_model": {"kind": "moe", "num_hidden_layers": 4}},
    {f"{V}.expert_parallel_size": 2},
    {"policy.draft": {"enabled": False}, f"{M}.peft": {"enabled": False}, f"{M}.mtp_num_layers": 0},
]


@pytest.mark.parametrize("changes", TRICKY)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.check.__name__)
def test_rules_read_only_what_they_declare(
    accept: Callable[[Mapping[str, Any]], RefitConfig], rule: Rule, changes: Mapping[str, Any]
) -> None:
    read: set[str] = set()
    config = accept(changes)
    document = _RecordedDocument(config.document, "", read)
    job = job_of(config, document=document, resolve_transport=lambda _: None)
    read.clear()
    job = replace(job, config=_Recorder(config, "", read))  # type: ignore[arg-type]
    found: list[Violation] = list(rule.check(job))
    assert found == []
    undeclared = {path for path in read if not any(path == own or path.startswith(f"{own}.") for own in rule.reads)}
    assert undeclared == set()


def test_an_architecture_that_only_plans_know_is_refused(violations: Any, model_folder: Path) -> None:
    (model_folder / "config.json").write_text(json.dumps(SMALL["gemma text"]))
    (found,) = [violation for violation in violations({}) if "architecture" in violation.reason]
    assert found.path == "policy.model_name"
    assert "Gemma3ForCausalLM, whose training is not available yet: Megatron-core has no norms" in found.reason


def test_what_is_trained_is_what_workers_build_and_what_is_not_has_a_reason() -> None:
    from refit_transport.cluster.megatron_families import FAMILIES as BUILT

    assert set(TRAINED) == BUILT.keys()
    assert set(TRAINED) | rules_limits._MISSING.keys() == FAMILIES.keys()
    assert not set(TRAINED) & rules_limits._MISSING.keys()


@pytest.mark.parametrize("kind", TINY_MODELS)
def test_every_tiny_model_is_one_that_is_trained(accept: Any, kind: str) -> None:
    model = logical_model(accept({"refit_run.tiny_model": {"kind": kind}, **TINY_RANKS}))
    assert model.architecture in TRAINED
    assert get_args(TinyKind) == tuple(TINY_MODELS)
