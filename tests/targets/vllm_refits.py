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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
import vllm._custom_ops
from safetensors.torch import load_file, save_file
from small_models import SMALL
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.models import utils as models_utils
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from refit_transport.config.settings import RefitSettings
from refit_transport.fabrics.rendezvous import ControlChannel
from refit_transport.integrations.vllm_plugin import register
from refit_transport.layout.canonical import checkpoint_entries
from refit_transport.layout.manifest import TensorSpec
from refit_transport.layout.presets.model import LogicalModel, LogicalTensor
from refit_transport.layout.wire import manifest_to_json
from refit_transport.session import RefitSession
from refit_transport.sources.dtensor import StateDictSource
from refit_transport.targets.base import Target
from refit_transport.targets.joined import JoinedTarget
from refit_transport.targets.vllm import VllmTarget

State = dict[str, torch.Tensor]
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
    "gemma 1": SMALL["gemma text"] | {"architectures": ["GemmaForCausalLM"]},
    "gemma 2": SMALL["gemma text"] | {"architectures": ["Gemma2ForCausalLM"]},
}
KINDS = SMALL | MORE


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
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "mamba_head_dim": 32,
    "ssm_state_size": 16,
}


def enlarged(config: dict[str, Any]) -> dict[str, Any]:
    larger = config | {key: size for key, size in SIZES.items() if config.get(key)} | {"max_position_embeddings": 128}
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


def engine_config(folder: Path, spread: Spread) -> VllmConfig:
    return EngineArgs(
        str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=64,
        tensor_parallel_size=1 if spread == "stages" else WORLD,
        pipeline_parallel_size=WORLD if spread == "stages" else 1,
        distributed_executor_backend="external_launcher",
        enable_expert_parallel=spread == "spread",
        speculative_config={"method": "mtp", "num_speculative_tokens": 1} if spread == "drafts" else None,
    ).create_engine_config()


def join_ranks(tensor: int, pipeline: int) -> None:
    """Makes vLLM's groups of all ranks; inside a config's context."""
    if not torch.distributed.is_initialized():
        init_distributed_environment(WORLD, RANK, "env://", RANK, "gloo")
    # There is no group for experts where the last model had none.
    if parallel_state._EP is None or parallel_state.get_pp_group().world_size != pipeline:
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        initialize_model_parallel(tensor, pipeline)


class Model:
    """A vLLM model as it is after loading a checkpoint."""

    def __init__(self, folder: Path, spread: Spread) -> None:
        self.config = engine_config(folder, spread)
        # vLLM remembers which layers other stages have by the model's id, which a later model may have again.
        models_utils._model_to_pp_missing_layer_names.clear()
        with set_current_vllm_config(self.config):
            parallel = self.config.parallel_config
            join_ranks(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
            self.module = get_model(vllm_config=self.config)
            self.drafter = self._drafter() if spread == "drafts" else None

    def _drafter(self) -> torch.nn.Module:
        """Loaded and joined to the model by vLLM's own proposer, without what that needs to run."""
        proposer = object.__new__(SpecDecodeBaseProposer)
        proposer.vllm_config, proposer.speculative_config = self.config, self.config.speculative_config
        proposer.use_local_argmax_reduction = False
        proposer.model = proposer._get_model()
        proposer._maybe_share_embeddings(self.module)
        proposer._maybe_share_lm_head(self.module)
        return proposer.model

    def target(self) -> Target:
        target = VllmTarget(self.module, self.config)
        if self.drafter is None:
            return target
        own = self.config.speculative_config.draft_model_config
        return JoinedTarget(target, VllmTarget(self.drafter, self.config, model_config=own, beside=self.module))

    def kept(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors that any module, its kernel or its attention keeps, by where it keeps them."""
        yield from kept(self.module)
        for name, tensor in kept(self.drafter) if self.drafter is not None else ():
            yield f"drafter.{name}", tensor

    def tensors(self) -> State:
        """Copies of what is kept."""
        return {name: tensor.detach().clone() for name, tensor in self.kept()}


def kept(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in model.named_modules():
        holders = {"": module, "impl.": vars(module).get("impl"), "method.": vars(module).get("quant_method")}
        for prefix, holder in holders.items():
            for name, value in (vars(holder) if holder is not None else {}).items():
                if isinstance(value, torch.Tensor):
                    yield f"{path}.{prefix}{name}", value
        for name, value in {**module._parameters, **module._buffers}.items():
            if value is not None:
                yield f"{path}.{name}", value


def same(first: State, second: State) -> list[str]:
    """The names of the tensors that differ in any bit, form or presence."""
    names = sorted(first.keys() | second.keys())
    return [name for name in names if not _same(first.get(name), second.get(name))]


def _same(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    if first is None or second is None or first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(first.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8))


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
    fresh = Model(folders["b"], spread)
    wanted = {"b": fresh.tensors()}
    del fresh
    states = {name: by_rows(load_file(path / "model.safetensors")) for name, path in folders.items()}
    model = Model(folders["a"], spread)
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
    found["differ before"] = len(same(wanted["a"], wanted["b"]))
    for version, name in enumerate("bab"):
        held["state"] = states[name]
        session.run(version)
        found[f"{version}: differs from a fresh {name}"] = same(model.tensors(), wanted[name])
    for part, affected in PARTS.items():
        changed = {name: tensor for name, tensor in states["b"].items() if part in name}
        if changed:
            held["state"] = states["a"] | changed
            version += 1
            session.run(version)
            expected = {n: wanted["b" if re.search(affected, n) else "a"].get(n) for n in wanted["a"]}
            found[f"only {part} changes"] = same(model.tensors(), expected)
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
    common: dict[str, Any] = {"host": "127.0.0.1", "port": port, "world_size": WORLD, "timeout_s": 60.0}
    if RANK == 0:
        channel = ControlChannel.listen(**common)
        return RefitSession.prepare(channel, settings=settings, source=source, target=target)
    return RefitSession.prepare(ControlChannel.join(**common, rank=RANK), source=source, target=target)


def tails(model: torch.nn.Module, rows: int) -> dict[str, list[int]]:
    """By vocabulary parameter: its rows behind the true ones on this rank, and how many elements aren't zero there."""
    found = {}
    for name, module in model.named_modules():
        if hasattr(module, "shard_indices") and isinstance(module.weight, torch.Tensor):
            start = module.shard_indices.padded_org_vocab_start_index
            tail = module.weight.data[max(0, rows - start) :]
            found[name] = [len(tail), int(torch.count_nonzero(tail))]
    return found


def main() -> None:
    results, folder, *kinds = sys.argv[1:]
    ports = map(int, os.environ["CHANNEL_PORTS"].split(","))
    register()
    torch.accelerator.empty_cache = lambda: None  # as vLLM's own runner does on CPU, where it raises
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
