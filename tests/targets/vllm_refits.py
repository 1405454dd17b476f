"""Refits of real vLLM models of many architectures, without engines: a script, one process per rank.

    RANK=0 WORLD_SIZE=2 CHANNEL_PORTS=... python vllm_refits.py RESULTS.json FOLDER KIND...

For each kind two checkpoints A and B are written by the Hugging Face class, and loaded by vLLM. The model of A is
refitted to B, A and B by a real session, whose source is the checkpoint's state dict, cut over both ranks by rows.
Each time every parameter, buffer and other tensor of the model is compared with the freshly loaded one's, bit by bit.
The experts of a kind that ends with "/spread" are spread over the ranks; the ranks of one that ends with "/stages" are
stages of a pipeline; one that ends with "/drafts" has its drafter beside it, as an engine has.
Writes `{kind: findings}`.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
import vllm._custom_ops
from channels import open_channel
from safetensors.torch import load_file, save_file
from small_models import SMALL, vllm_sizes
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from vllm_models import Model, State, differing, prepare_process, tails

from refit_transport.config.settings import RefitSettings
from refit_transport.layout.canonical import checkpoint_entries
from refit_transport.layout.manifest import TensorSpec
from refit_transport.layout.presets.model import LogicalModel, LogicalTensor
from refit_transport.layout.presets.vllm import EngineParallelism
from refit_transport.layout.wire import manifest_to_json
from refit_transport.session import RefitSession
from refit_transport.sources.dtensor import StateDictSource
from refit_transport.targets.base import Target

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
Spread = Literal["", "spread", "stages", "drafts"]
MORE: dict[str, dict[str, Any]] = {
    # Qwen2's heads always divide the hidden size, whatever `head_dim` says.
    "qwen2 tied": SMALL["qwen2"] | {"tie_word_embeddings": True, "vocab_size": 151, "head_dim": None},
    "llama of 1003 rows": SMALL["llama"] | {"vocab_size": 1003},
    "qwen3 of one kv head": SMALL["qwen3 tied"] | {"num_key_value_heads": 1, "tie_word_embeddings": False},
    "llama of 5 layers": SMALL["llama"] | {"num_hidden_layers": 5},
    "qwen3 moe of 7 experts": SMALL["qwen3 moe"] | {"num_experts": 7, "vocab_size": 151},
    "deepseek with a drafter": SMALL["deepseek"] | {"num_nextn_predict_layers": 1},
    "glm with a drafter": SMALL["glm"] | {"num_nextn_predict_layers": 1},
    "qwen3 next with a drafter": SMALL["qwen3 next"] | {"mtp_num_hidden_layers": 1},
    "deepseek v2": {
        **SMALL["deepseek without q lora"],
        "architectures": ["DeepseekV2ForCausalLM"],
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
    },
    "gemma of one kv head": SMALL["gemma text"] | {"num_key_value_heads": 1, "vocab_size": 1003},
    "gemma 2": SMALL["gemma text"] | {"architectures": ["Gemma2ForCausalLM"]},
}
KINDS = SMALL | MORE


def enlarged(config: dict[str, Any]) -> dict[str, Any]:
    larger = config | vllm_sizes(config) | {"max_position_embeddings": 128}
    if "kv_lora_rank" in config:
        del larger["head_dim"]
        larger["topk_method"] = "noaux_tc"
    return larger


# Tensors that change alone in a last refit, and what a model keeps of them under which names.
PARTS = {
    "kv_b_proj": r"\.(kv_b_proj\.weight|W_UK_T|W_UV)$",
    "e_score_correction_bias": r"\.e_score_correction_bias$",
    "conv1d.weight": r"\.(conv1d\.(weight|_cpu_unpacked_conv_weight)|conv_weights)$",
    "A_log": r"\.(A|A_log)$",
    "mixer.D": r"\.D$",
}


def write_checkpoint(kind: str, folder: Path, *, seed: int, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A checkpoint of random values, norms and buffers too, as the Hugging Face class saves it."""
    config = {key: value for key, value in enlarged(KINDS[kind]).items() if value is not None}
    config |= {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    config |= {key: KINDS[kind][key] for key in ("topk_method",) if key in KINDS[kind]}
    model_class = getattr(transformers, config.pop("architectures")[0])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(model_class.config_class(**config, dtype=dtype)).to(dtype)
        persistent = {tensor.data_ptr() for tensor in model.state_dict().values()}
        for tensor in {**dict(model.named_parameters()), **dict(model.named_buffers())}.values():
            if tensor.data_ptr() in persistent:
                values = torch.randn(tensor.shape)
                tensor.data.copy_(0.08 * values if tensor.dim() > 1 else 1 + 0.1 * values)
        model.save_pretrained(folder)
        file = folder / "model.safetensors"
        drafter = {
            entry.name: torch.randn(entry.shape).to(dtype) / 10
            for each in drafter_of(kind)
            for entry in checkpoint_entries(TensorSpec(each.name, each.shape, "bfloat16"))
        }
        if drafter:
            save_file(load_file(file) | drafter, file, metadata={"format": "pt"})
    return folder


def drafter_of(kind: str) -> list[LogicalTensor]:
    """The layers for multi-token prediction that a checkpoint has besides what its Hugging Face class knows."""
    if not kind.endswith(" with a drafter"):
        return []
    return [each for each in LogicalModel.from_config(enlarged(KINDS[kind])).tensors if each.part == "drafter"]


def cut_of(spread: Spread) -> EngineParallelism:
    if spread == "stages":
        return EngineParallelism(pipeline=WORLD)
    return EngineParallelism(WORLD, expert=WORLD if spread == "spread" else 1)


def by_rows(state: State) -> State:
    """This rank's part of a state dict whose tensors lie over all ranks by rows."""
    if WORLD == 1:
        return state
    mesh = DeviceMesh("cpu", list(range(WORLD)))
    cut = {}
    for name, whole in state.items():
        chunks = [*torch.chunk(whole, WORLD), *[whole[:0]] * WORLD][:WORLD]
        local = chunks[RANK].clone()
        cut[name] = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )
    return cut


def run(kind: str, folder: Path, port: int, spread: Spread) -> dict[str, Any]:
    folders = {name: folder / name for name in "ab"}
    fresh = Model(folders["b"], cut_of(spread), drafts=spread == "drafts")
    wanted = {"b": fresh.tensors()}
    del fresh
    states = {name: by_rows(load_file(path / "model.safetensors")) for name, path in folders.items()}
    model = Model(folders["a"], cut_of(spread), drafts=spread == "drafts")
    wanted["a"] = model.tensors()
    addresses = {name: tensor.data_ptr() for name, tensor in model.kept()}
    held = {"state": states["a"]}
    target = model.target()
    session = prepare(StateDictSource(lambda: held["state"]), target, port)
    found: dict[str, Any] = {
        "config": json.loads((folders["a"] / "config.json").read_text()),
        "manifest": manifest_to_json(session.plan.job.target.ranks[RANK]),
        "private": dict(target.private_layers()),
        "drafter": [each.name for each in drafter_of(kind)],
    }
    if RANK == 0:
        routes = session.plan.routes
        found["whole"] = {route.tensor: route.reason for route in routes if route.transport != "nccl_reshard"}
        found["moved"] = sorted(route.tensor for route in routes)
        found["skipped"] = dict(session.plan.summary().skipped)
        found["shard to shard"] = session.plan.summary().shard_to_shard
    found["differ before"] = len(differing(wanted["a"], wanted["b"]))
    for version, name in enumerate("bab"):
        held["state"] = states[name]
        session.run(version)
        found[f"{version}: differs from a fresh {name}"] = differing(model.tensors(), wanted[name])
    for part, affected in PARTS.items():
        changed = {name: tensor for name, tensor in states["b"].items() if part in name}
        if changed:
            held["state"] = states["a"] | changed
            version += 1
            session.run(version)
            expected = {n: wanted["b" if re.search(affected, n) else "a"].get(n) for n in wanted["a"]}
            found[f"only {part} changes"] = differing(model.tensors(), expected)
            found[f"kept of {part}"] = sorted({n.rsplit(".", 1)[1] for n in wanted["a"] if re.search(affected, n)})
    found["compared"] = len(session.compare().first)
    composed = next(target.derived(), None)
    if composed is not None:
        composed.served.add_(1)
    found["compared after a change"] = [str(found.tensor) for found in session.compare().first]
    found["moved tensors"] = [name for name, tensor in model.kept() if tensor.data_ptr() != addresses[name]]
    found["tails"] = tails(model.module, enlarged(KINDS[kind])["vocab_size"])
    session.close()
    return found


def prepare(source: StateDictSource, target: Target, port: int) -> RefitSession:
    coverage: Any = os.environ.get("COVERAGE", "all")
    settings = RefitSettings(coverage=coverage, verify="full", bucket_bytes=1 << 16, timeout_s=60.0)
    channel = open_channel(RANK, world_size=WORLD, port=port)
    return RefitSession.prepare(channel, settings=settings if RANK == 0 else None, source=source, target=target)


def main() -> None:
    results, folder, *kinds = sys.argv[1:]
    ports = map(int, os.environ["CHANNEL_PORTS"].split(","))
    prepare_process()
    if os.environ.get("PACK_CONVOLUTIONS") == "1":
        # vLLM packs them where the CPU has bfloat16 products; a transposition stands for that kernel's order.
        torch.cpu._is_avx512_bf16_supported = lambda: True
        vllm._custom_ops.causal_conv1d_weight_pack = lambda weight: weight.t().contiguous()
    plans = {}
    for kind, port in zip(kinds, ports, strict=True):
        name, _, spread = kind.partition("/")
        plans[kind] = (name, Path(folder) / kind.replace(" ", "-").replace("/", "-"), port, spread)
    for name, path, *_ in plans.values():  # before there is a process group, in which only the first rank would write
        for seed, letter in enumerate("ab"):
            write_checkpoint(name, path / letter, seed=seed)
    found = {}
    for kind, plan in plans.items():
        found[kind] = run(*plan)
        Path(results).write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # vLLM's exit handlers are slow


if __name__ == "__main__":
    main()
