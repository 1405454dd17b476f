"""Refits of real vLLM engines of many architectures: a script, one process per rank.

    RANK=0 WORLD_SIZE=1 CHANNEL_PORTS=... python vllm_engine_refits.py RESULTS.json FOLDER KIND...

For each kind an engine that has loaded checkpoint A is refitted to B, A and B from their state dicts. After each refit
its tokens and their log-probabilities are compared with those of an engine that has loaded that checkpoint.
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
from vllm_refits import by_rows, prepare, write_checkpoint

from refit_transport.integrations.vllm_plugin import register
from refit_transport.sources.dtensor import StateDictSource
from refit_transport.targets.vllm import VllmTarget


def run(kind: str, folder: Path, port: int) -> dict[str, Any]:
    case = Case(kind, "bfloat16")
    fresh = Engine(folder / "b", case)
    wanted = {"b": fresh.outputs()}
    del fresh
    gc.collect()
    engine = Engine(folder / "a", case)
    wanted["a"] = engine.outputs()
    states = {name: by_rows(load_file(folder / name / "model.safetensors")) for name in "ab"}
    held = {"state": states["a"]}
    target = VllmTarget(engine.model, engine.llm.llm_engine.vllm_config)
    session = prepare(StateDictSource(lambda: held["state"]), target, port)
    found: dict[str, Any] = {"differ": wanted["a"] != wanted["b"], "private": dict(target.private_layers())}
    for version, name in enumerate("bab"):
        held["state"] = states[name]
        session.run(version)
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
