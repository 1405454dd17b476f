"""Refits of real vLLM engines of many architectures: a script, one process per rank.

    RANK=0 WORLD_SIZE=1 CHANNEL_PORTS=... python vllm_engine_refits.py RESULTS.json FOLDER KIND...

For each kind an engine that has loaded checkpoint A is refitted to B, A and B from their state dicts. After each refit
its tokens and their log-probabilities are compared with those of an engine that has loaded that checkpoint. Engines of
kinds that end with " with a drafter" draft by the checkpoint's own layers; all their tensors are compared, bit by bit.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from vllm_cases import Case, Engine
from vllm_models import State, differing, kept
from vllm_refits import by_rows, prepare, write_checkpoint

from refit_transport.integrations.vllm_plugin import register
from refit_transport.sources.dtensor import StateDictSource
from refit_transport.targets.base import Target
from refit_transport.targets.joined import JoinedTarget
from refit_transport.targets.vllm import VllmTarget

MTP = {"method": "mtp", "num_speculative_tokens": 1}


def drafter_of(engine: Engine) -> Any:
    return engine.llm.llm_engine.model_executor.driver_worker.worker.get_draft_model()


def tensors(engine: Engine) -> State:
    """Copies of all tensors of an engine's model and of its drafter, if it has one."""
    models = {"": engine.model, "drafter.": drafter_of(engine)}
    named = ((prefix + name, tensor) for prefix, model in models.items() if model for name, tensor in kept(model))
    return {name: tensor.detach().clone() for name, tensor in named if "kv_cache" not in name}


def target_of(engine: Engine) -> Target:
    config, drafter = engine.llm.llm_engine.vllm_config, drafter_of(engine)
    target = VllmTarget(engine.model, config)
    if drafter is None:
        return target
    own = config.speculative_config.draft_model_config
    return JoinedTarget(target, VllmTarget(drafter, config, model_config=own, beside=engine.model))


def run(kind: str, folder: Path, port: int) -> dict[str, Any]:
    case = Case(kind, "bfloat16", engine={"speculative_config": MTP} if kind.endswith(" with a drafter") else {})
    fresh = Engine(folder / "b", case)
    wanted, fresh_tensors = {"b": fresh.outputs()}, {"b": tensors(fresh)}
    del fresh
    gc.collect()
    engine = Engine(folder / "a", case)
    wanted["a"], fresh_tensors["a"] = engine.outputs(), tensors(engine)
    states = {name: by_rows(load_file(folder / name / "model.safetensors")) for name in "ab"}
    held = {"state": states["a"]}
    target = target_of(engine)
    session = prepare(StateDictSource(lambda: held["state"]), target, port)
    found: dict[str, Any] = {"differ": wanted["a"] != wanted["b"], "private": dict(target.private_layers())}
    found["skipped"] = dict(session.plan.summary().skipped)
    found["tensors of the drafter that differ"] = sum(
        name.startswith("drafter.") for name in differing(fresh_tensors["a"], fresh_tensors["b"])
    )
    for version, name in enumerate("bab"):
        held["state"] = states[name]
        session.run(version)
        found[f"{version}: differs from a fresh {name}"] = differing(tensors(engine), fresh_tensors[name])
        found[f"{version}: says what a fresh {name} says"] = engine.outputs() == wanted[name]
    found["shard to shard"] = session.plan.summary().shard_to_shard
    session.close()
    return found


def main() -> None:
    results, folder, *kinds = sys.argv[1:]
    register()
    paths = {kind: Path(folder) / kind.replace(" ", "-") for kind in kinds}
    for kind, path in paths.items():  # before there is a process group, in which only the first rank would write
        for seed, name in enumerate("ab"):
            write_checkpoint(kind, path / name, seed=seed)
    found = {}
    for kind, port in zip(kinds, map(int, os.environ["CHANNEL_PORTS"].split(",")), strict=True):
        found[kind] = run(kind, paths[kind], port)
        Path(results).write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # vLLM's exit handlers of several engines in one process are slow


if __name__ == "__main__":
    main()
