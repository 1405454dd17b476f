"""Traces the loader of a full-size model on one rank of many, without weights: a script in a process of its own.

    python vllm_full_size.py RESULTS.json FOLDER MODEL TENSOR_PARALLEL RANK

MODEL is one of the package's model shapes. The groups of ranks are described, not connected: loaders ask them for
numbers only. Writes the manifest, the seconds that tracing and describing took, and how much the process grew by it.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model

from refit_transport.layout.manifest import TensorSpec
from refit_transport.layout.presets.model import LogicalModel
from refit_transport.layout.wire import manifest_to_json
from refit_transport.simulation.catalog import catalog_entry
from refit_transport.targets.vllm_layers import layers_of, on_meta
from refit_transport.targets.vllm_manifest import describe, trace_model


def described_group(name: str, size: int, rank: int) -> parallel_state.GroupCoordinator:
    """A group that knows its numbers and is connected to nobody."""
    group = object.__new__(parallel_state.GroupCoordinator)
    group.unique_name, group.world_size, group.ranks = name, size, [*range(size)]
    group.rank = group.rank_in_group = group.local_rank = rank if size > 1 else 0
    group.device_communicator = group.mq_broadcaster = None
    group.device_group = group.cpu_group = SimpleNamespace(size=lambda: size, rank=lambda: group.rank)
    return group


def describe_groups(tensor: int, rank: int) -> None:
    for name in ("_WORLD", "_TP", "_EP"):
        setattr(parallel_state, name, described_group(name, tensor, rank))
    for name in ("_PP", "_DP", "_PCP", "_DCP"):
        setattr(parallel_state, name, described_group(name, 1, 0))


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    results, folder, name, tensor, rank = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:])
    config = dict(catalog_entry(name)["config"])
    model_class = getattr(transformers, config.pop("architectures")[0])
    written = model_class.config_class(**config, architectures=[model_class.__name__])
    written.save_pretrained(folder)
    vllm_config = EngineArgs(
        str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=64,
        load_format="dummy",
    ).create_engine_config()
    vllm_config.parallel_config.tensor_parallel_size = tensor
    describe_groups(tensor, rank)
    logical = LogicalModel.from_config(json.loads((folder / "config.json").read_text()))
    specs = [TensorSpec(each.name, each.shape, "bfloat16") for each in logical.main]
    torch.set_default_dtype(torch.bfloat16)
    with set_current_vllm_config(vllm_config), torch.device("meta"):
        model = initialize_model(vllm_config)
    torch.set_default_dtype(torch.float32)
    before, began = peak_bytes(), time.process_time()
    layers = layers_of(model)
    with set_current_vllm_config(vllm_config), on_meta(layers):
        manifest = describe(trace_model(model.load_weights, layers, specs, rank), specs, rank)
    found = {
        "seconds": time.process_time() - began,
        "grown": peak_bytes() - before,
        "weight bytes": sum(parameter.nbytes for parameter in model.parameters()),
        "manifest": manifest_to_json(manifest),
        "config": json.loads((folder / "config.json").read_text()),
    }
    results.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
