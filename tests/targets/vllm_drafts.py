"""Refits of a vLLM engine that drafts from Megatron ranks that train the drafter: a script, one process per rank.

    RANK=0 WORLD_SIZE=3 CHANNEL_PORTS=... python vllm_drafts.py RESULTS.json FOLDER CHECKPOINTS ENGINE

All ranks but the last are Megatron's, tensor or pipeline parallel; each refit they load checkpoint B, A and B anew. The
last rank is a vLLM engine that has loaded A, and drafts if ENGINE is "drafts". After each refit all its tensors are
compared with a fresh engine's. The engine joins as users' engines do: through vLLM's own calls and our plugin.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
PORTS = [*map(int, os.environ["CHANNEL_PORTS"].split(","))]
TIMEOUT_S = 240.0


def train(checkpoints: Path) -> dict[str, Any]:
    from channels import open_channel
    from megatron_described import drafting_model, parallel_state

    from refit_transport.cluster.megatron_cpu import tied_embeddings_stay_on_cpu
    from refit_transport.cluster.megatron_model import keep_router_biases_wide, load_checkpoint
    from refit_transport.config.checkpoint_config import read_config
    from refit_transport.config.settings import RefitSettings
    from refit_transport.layout.parallelism import MegatronParallelism
    from refit_transport.layout.presets.model import LogicalModel
    from refit_transport.session import RefitSession
    from refit_transport.sources.megatron import MegatronSource

    config = dict(read_config(checkpoints / "a"))
    model = LogicalModel.from_config(config)
    cut = {"tp2": MegatronParallelism(2, sequence_parallel=False), "pp2": MegatronParallelism(pipeline=2)}
    with (
        parallel_state(RANK, WORLD - 1, PORTS[1], cut[os.environ["LAYOUT"]]),
        tied_embeddings_stay_on_cpu(),
    ):
        chunk = drafting_model(config, model, cut[os.environ["LAYOUT"]], dtype=torch.bfloat16)
        keep_router_biases_wide([chunk])
        source = MegatronSource([chunk], model)
        settings = RefitSettings(coverage="all", verify="full", timeout_s=240.0)
        channel = open_channel(RANK, world_size=WORLD, port=PORTS[0], timeout_s=TIMEOUT_S)
        session = RefitSession.prepare(channel, settings=settings if RANK == 0 else None, source=source)
        reports = []
        for version, name in enumerate("bab"):
            load_checkpoint([chunk], source, checkpoints / name, rank=RANK)
            reports.append(session.run(version))
        session.close()
    return {"reports": [report.to_json() for report in reports if report]}


def generate(checkpoints: Path, *, drafts: bool) -> dict[str, Any]:
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    from channels import HOST, SECRET
    from vllm.config import WeightTransferConfig
    from vllm_cases import Case, Engine
    from vllm_engine_refits import MTP, drafter_of, tensors
    from vllm_refits import same

    from refit_transport.integrations.vllm_plugin import register

    register()
    options: dict[str, Any] = {"speculative_config": MTP} if drafts else {}
    wanted = {}
    for name in "ba":
        engine = Engine(
            checkpoints / name,
            Case(
                "",
                "bfloat16",
                engine=options | {"weight_transfer_config": WeightTransferConfig(backend="refit_transport")},
            ),
        )
        wanted[name] = tensors(engine)
    call = engine.llm.collective_rpc
    where = {"host": HOST, "port": PORTS[0], "world_size": WORLD, "timeout_s": TIMEOUT_S, "secret": SECRET}
    call("init_weight_transfer_engine", args=({**where, "first_rank": WORLD - 1},))
    found: dict[str, Any] = {
        "drafter": drafter_of(engine) is not None,
        "differ before": same(wanted["a"], wanted["b"]),
    }
    for version, name in enumerate("bab"):
        call("start_weight_update")
        call("update_weights", args=({"version": version},))
        call("finish_weight_update")
        found[f"{version}: differs from a fresh {name}"] = same(tensors(engine), wanted[name])
    return found


def main() -> None:
    results, _, checkpoints, engine = sys.argv[1:]
    trains = RANK < WORLD - 1
    found = train(Path(checkpoints)) if trains else generate(Path(checkpoints), drafts=engine == "drafts")
    Path(results).write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # vLLM's exit handlers are slow


if __name__ == "__main__":
    main()
