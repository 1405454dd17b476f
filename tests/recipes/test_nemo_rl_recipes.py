"""The recipes for NeMo RL: ours in them is valid, and on its own bases, where they are, each is minimal and fits."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from refit_transport.integrations.nemo_rl.limits import require_supported
from refit_transport.integrations.nemo_rl.settings import read_settings

ROOT = Path(__file__).parents[2] / "recipes" / "nemo_rl"
RECIPES = {path.stem: path for path in sorted(ROOT.glob("*.yaml"))}
MODELS = ("qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3", "nemotron-3-super-120b")
CHECKOUT = os.environ.get("NEMO_RL_SOURCE", "")
on_bases = pytest.mark.skipif(not CHECKOUT, reason="NEMO_RL_SOURCE doesn't name a checkout of NeMo RL")
each = pytest.mark.parametrize("path", RECIPES.values(), ids=RECIPES.keys())


def own(path: Path) -> DictConfig:
    config = OmegaConf.load(path)
    assert isinstance(config, DictConfig)
    return config


def merged(path: Path) -> DictConfig:
    """As NeMo RL merges: bases first, named from the folder of the file that names them, mandatory values left out."""
    config = own(path)
    bases = config.pop("defaults", [])
    whole = OmegaConf.create({})
    for base in [bases] if isinstance(bases, str) else bases:
        whole = OmegaConf.merge(whole, merged(path.parent / str(base)))
    missing = [key for key in config if OmegaConf.is_missing(config, key)]
    for key in missing:
        config.pop(key)
    found = OmegaConf.merge(whole, config)
    assert isinstance(found, DictConfig)
    return found


def plain(config: DictConfig) -> dict[str, Any]:
    for name, resolver in {"mul": lambda a, b: a * b, "div": lambda a, b: a / b, "max": max}.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)
    found = OmegaConf.to_container(config, resolve=True)
    assert isinstance(found, dict)
    return found


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from leaves(value, f"{prefix}.{key}".removeprefix("."))
    else:
        yield prefix, node


def test_every_model_on_both_machines_with_both_algorithms() -> None:
    kinds = {(name.partition("-")[0], name.rpartition("-")[2]) for name in RECIPES}
    assert kinds == {(algorithm, machine) for algorithm in ("grpo", "ppo") for machine in ("h100", "gb200")}
    for model in MODELS:
        assert sum(model in name for name in RECIPES) == 4
    assert len(RECIPES) == 16


@each
def test_our_settings_are_valid_and_send_everything_shard_to_shard(path: Path) -> None:
    config = OmegaConf.to_container(own(path), resolve=False)
    assert isinstance(config, dict)
    generation = config["policy"]["generation"]
    assert generation["refit_transport"] == "nccl_reshard"
    settings = read_settings(generation, training_ranks=8, generation_ranks=8)
    assert (settings.coverage, settings.fabric, settings.nics) == ("all", "nccl", "rank")


@on_bases
@each
def test_a_recipe_sets_only_what_differs_from_its_bases(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = own(path)
    base = Path(str(config.pop("defaults")))
    assert base.is_file(), base
    inherited = dict(leaves(OmegaConf.to_container(merged(base), resolve=False)))
    changes = dict(leaves(OmegaConf.to_container(config, resolve=False)))
    assert {key for key, value in changes.items() if key in inherited and inherited[key] == value} == set()


@on_bases
@each
def test_a_recipe_on_its_bases_is_one_that_we_serve(path: Path) -> None:
    config = merged(path)
    if OmegaConf.is_missing(config.policy, "model_name"):
        config.policy.model_name = "somewhere"
    found = plain(config)
    require_supported(found["policy"])
    generation, cluster = found["policy"]["generation"], found["cluster"]
    resources = generation["colocated"]["resources"]
    generating = resources["num_nodes"] * resources["gpus_per_node"]
    training = cluster["num_nodes"] * cluster["gpus_per_node"] - generating
    assert training > 0
    read_settings(generation, training_ranks=training, generation_ranks=generating)
    assert (
        generating % (generation["vllm_cfg"]["tensor_parallel_size"] * generation["vllm_cfg"]["pipeline_parallel_size"])
        == 0
    )
    for section in ("policy", *(["value"] if "ppo" in found else [])):
        megatron = found[section]["megatron_cfg"]
        assert megatron["enabled"]
        sizes = [megatron[f"{kind}_parallel_size"] for kind in ("tensor_model", "pipeline_model", "context")]
        ranks = sizes[0] * sizes[1] * sizes[2]
        assert training % ranks == 0
        experts = megatron["expert_model_parallel_size"] * (megatron.get("expert_tensor_parallel_size") or 1) * sizes[1]
        assert training % experts == 0
