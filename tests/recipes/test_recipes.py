"""Every shipped recipe: valid, minimal, and for real clusters planned and simulated at full size."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from refit_transport.config.document import read_document
from refit_transport.config.rl import RlConfig, load_rl_config
from refit_transport.layout.presets.sizes import serving_sizes, training_sizes
from refit_transport.preview import preset_job
from refit_transport.simulation.case import FFN_GROUPS, Ask, Case, machine
from refit_transport.simulation.catalog import catalog_entry, find_model, find_system, model_names
from refit_transport.simulation.methods import lower_bound, predict
from refit_transport.simulation.published import published_rows
from refit_transport.transports.registry import resolve

ROOT = Path(__file__).parents[2]
RECIPES = {path.stem: path for path in sorted((ROOT / "recipes").glob("*.yaml"))}
TINY = [name for name in RECIPES if name.endswith("-cpu")]
# The published refit of the same layout, where there is one.
REAL = {
    "grpo-qwen3-30b-a3b-4n8g-h100": "nemo-qwen3-30b-h100",
    "grpo-qwen3-30b-a3b-4n4g-gb200": None,
    "grpo-qwen3-235b-a22b-32n8g-h100": "blog-qwen3-235b-h100",
    "grpo-qwen3-235b-a22b-32n4g-gb200": None,
    "grpo-deepseek-v3-64n8g-h100": "nemo-deepseek-v3-h100",
    "grpo-deepseek-v3-64n4g-gb200": "paper-deepseek-v3-gb200",
    "grpo-nemotron-3-super-120b-32n8g-h100": None,
    "grpo-nemotron-3-ultra-550b-32n4g-gb200": "nemo-nemotron-ultra-gb200",
}
SYSTEMS = {"h100": "dgx-h100", "gb200": "dgx-gb200"}


def test_every_recipe_is_here() -> None:
    assert sorted([*TINY, *REAL]) == sorted(RECIPES)
    assert len(TINY) == 6


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from leaves(value, f"{prefix}.{key}".removeprefix("."))
    else:
        yield prefix, node


def own(path: Path) -> dict[str, Any]:
    config = OmegaConf.load(path)
    assert isinstance(config, DictConfig)
    return OmegaConf.to_container(config, resolve=False)  # type: ignore[return-value]


def inherited(path: Path) -> dict[str, Any]:
    """What the bases of a file give, as written."""
    names = own(path).get("defaults", [])
    merged = OmegaConf.create({})
    for name in [names] if isinstance(names, str) else names:
        base = path.parent / name
        values = own(base)
        values.pop("defaults", None)
        merged = OmegaConf.merge(merged, inherited(base), values)
    return OmegaConf.to_container(merged, resolve=False)  # type: ignore[return-value]


@pytest.mark.parametrize("path", [*RECIPES.values(), *(ROOT / "configs").rglob("*.yaml")], ids=lambda path: path.stem)
def test_nothing_repeats_what_the_bases_say(path: Path) -> None:
    given = dict(leaves(inherited(path)))
    values = own(path)
    values.pop("defaults", None)
    repeated = [key for key, value in leaves(values) if key in given and given[key] == value]
    assert repeated == []


@pytest.mark.parametrize("name", TINY)
def test_tiny_recipes_are_valid(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_rl_config(RECIPES[name], resolve_transport=resolve)
    assert config.refit.transport == "nccl_reshard"
    assert config.sections.rollouts.samples_per_step == config.sections.global_batch_size == 512
    assert config.sections.max_new_tokens == config.task().response_length == 8  # type: ignore[attr-defined]
    assert not config.needs_reference
    assert config.sections.asynchronous.enabled == ("async" in name)
    assert (config.refit.vllm_precision == "bfloat16") == ("bf16" in name)
    assert (config.sections.ppo is not None) == name.startswith("ppo")


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Loads a real recipe beside a checkpoint folder that has a config.json only."""

    def load(name: str) -> RlConfig:
        folder = read_document(RECIPES[name], ()).values["policy"]["model_name"]
        model = model_of(folder)
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "config.json").write_text(json.dumps(catalog_entry(model)["config"]))
        monkeypatch.chdir(tmp_path)
        task = ("data.train.dataset_name=first_digit_echo",)
        return load_rl_config(RECIPES[name], resolve_transport=resolve, overrides=task)

    return load


def model_of(checkpoint: str) -> str:
    """The catalog's name for a checkpoint on the Hub."""
    return next(name for name in model_names() if catalog_entry(name).get("checkpoint") == checkpoint)


# The largest takes longest; its layout differs from its sibling's in sizes only.
PLANNED = [pytest.param(name, marks=[pytest.mark.nightly] * (name == "grpo-deepseek-v3-64n8g-h100")) for name in REAL]


@pytest.mark.parametrize("name", REAL)
def test_real_recipes_are_valid(name: str, real: Any) -> None:
    config = real(name)
    if (row := REAL[name]) is not None:
        assert_layout_is(config, next(each.ask for each in published_rows() if each.id == row))


@pytest.mark.parametrize("name", PLANNED)
def test_real_recipes_are_planned_and_simulated(name: str, real: Any) -> None:
    case = case_of(real(name), system=SYSTEMS[name.rpartition("-")[2]])
    least = lower_bound(case)
    prediction = predict("full", case, least=least)
    assert least <= prediction.seconds <= 1.6 * least


def case_of(config: RlConfig, *, system: str) -> Case:
    """The recipe's own manifests on the machine that its name says."""
    job = preset_job(config.refit)
    kind, model = find_system(system), find_model(model_of(config.refit.policy.model_name))
    assert config.refit.cluster.gpus_per_node == kind.gpus_per_node
    names = tuple(tensor.name for tensor in model.model.main)
    return Case(
        Ask(model.name, "", "", system),
        model,
        kind,
        job.source,
        job.target,
        machine(kind, sizes=(len(job.source.ranks), len(job.target.ranks)), domain=min(kind.domain, 64)),
        names,
        frozenset(tensor.name for tensor in model.model.main if tensor.group in FFN_GROUPS),
    )


def assert_layout_is(config: RlConfig, ask: Ask) -> None:
    """The recipe has the published row's model, layouts and ranks."""
    training = training_sizes(ask.source, ranks=ask.sources)
    engines = serving_sizes(ask.target, ranks=ask.targets)
    ours, theirs = config.refit.policy.megatron_cfg.parallelism, training.parallelism
    for size in ("tensor", "pipeline", "expert"):
        assert getattr(ours, size) == getattr(theirs, size)
    assert ours.expert_tensor == 1
    assert config.refit.training_ranks == training.ranks
    assert (config.refit.policy.generation.vllm_cfg.tensor_parallel_size, config.refit.engines) == (
        engines.tensor,
        engines.data,
    )
    assert model_of(config.refit.policy.model_name) == ask.model
