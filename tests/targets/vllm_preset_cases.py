"""What two real vLLM ranks load of small models of many architectures: a script, one process per rank.

    RANK=0 WORLD_SIZE=2 ... python vllm_preset_cases.py RESULTS.json FOLDER SPREAD KIND...

Models are built without weights, their loaders traced. SPREAD is "experts" (spread over the ranks) or "none". Writes
`{kind: {"config": ..., "manifest": ...}}`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_DIST_IDENT": "presets",
}

import torch
import transformers
from small_models import SMALL
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model

from refit_transport.layout.manifest import TensorSpec
from refit_transport.layout.presets.model import LogicalModel
from refit_transport.layout.wire import manifest_to_json
from refit_transport.targets.vllm_layers import layers_of, on_meta
from refit_transport.targets.vllm_manifest import describe, trace_model

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
# Sizes that vLLM's kernels take, by the keys that a small config has.
SIZES = {
    "hidden_size": 256,
    "head_dim": 64,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "mamba_head_dim": 32,
    "ssm_state_size": 16,
}


def enlarged(config: dict[str, Any]) -> dict[str, Any]:
    larger = config | {key: size for key, size in SIZES.items() if key in config} | {"max_position_embeddings": 128}
    if "kv_lora_rank" in config:
        del larger["head_dim"]
        larger["topk_method"] = "noaux_tc"
    return larger


def engine_config(config: dict[str, Any], folder: Path, spread: str) -> VllmConfig:
    architecture = config["architectures"][0]
    values = {key: value for key, value in config.items() if key != "architectures"}
    written = getattr(transformers, architecture).config_class(**values)
    written.architectures = [architecture]
    written.save_pretrained(folder)
    return EngineArgs(
        str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=64,
        tensor_parallel_size=WORLD,
        distributed_executor_backend="external_launcher",
        enable_expert_parallel=spread == "experts",
    ).create_engine_config()


def run(kind: str, folder: Path, spread: str) -> dict[str, Any]:
    config = enlarged(SMALL[kind])
    vllm_config = engine_config(config, folder, spread)
    with set_current_vllm_config(vllm_config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(WORLD, RANK, "env://", RANK, "gloo")
            initialize_model_parallel(WORLD)
        torch.set_default_dtype(torch.bfloat16)
        model = initialize_model(vllm_config)
        torch.set_default_dtype(torch.float32)
        tensors = [TensorSpec(each.name, each.shape, "bfloat16") for each in LogicalModel.from_config(config).main]
        layers = layers_of(model)
        with on_meta(layers):
            traced = trace_model(model.load_weights, layers, tensors, RANK)
    return {"config": config, "manifest": manifest_to_json(describe(traced, tensors, RANK))}


def main() -> None:
    results, folder, spread, *kinds = sys.argv[1:]
    found = {kind: run(kind, Path(folder) / kind.replace(" ", "-"), spread) for kind in kinds}
    Path(results).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
