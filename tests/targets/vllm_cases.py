"""Refits of real vLLM engines, run as a script in processes of its own: one mode (stock or plain weights) per process.

    python vllm_cases.py RESULTS.json FOLDER CASE...

For each case an engine is loaded with checkpoint A and refitted; the oracle is another engine, freshly loaded with B.
Writes `{case: {check: passed}}`. Started with RANK and WORLD_SIZE 2, the engines are tensor parallel
(`external_launcher`), and each rank writes its own results.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from vllm import LLM, SamplingParams

from refit_transport.errors import LayoutError
from refit_transport.layout.canonical import canonical_name
from refit_transport.layout.manifest import RankManifest, TensorSpec
from refit_transport.layout.wire import manifest_to_json
from refit_transport.targets.vllm import VllmTarget
from refit_transport.testing.models import save_tiny_model

PROMPTS = [{"prompt_token_ids": [index + 1, 7 * index + 2, 3 * index + 5]} for index in range(4)]
SAMPLING = SamplingParams(max_tokens=10, temperature=0, logprobs=1, detokenize=False, ignore_eos=True)


@dataclass(frozen=True)
class Case:
    kind: str
    dtype: str
    overrides: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)


CASES = {
    "dense-fp32": Case("dense", "float32", {"vocab_size": 250}),
    "dense-bf16": Case("dense", "bfloat16"),
    "moe-fp32": Case("moe", "float32"),
    # Stock kernels pad this expert width.
    "moe-bf16": Case("moe", "bfloat16", {"vocab_size": 250, "moe_intermediate_size": 48}),
    "tied-bf16": Case("dense", "bfloat16", {"tie_word_embeddings": True, "num_hidden_layers": 1}),
    "bias-bf16": Case("dense", "bfloat16", {"attention_bias": True, "num_hidden_layers": 1}),
    "dummy-bf16": Case("moe", "bfloat16", {"num_hidden_layers": 1}, {"load_format": "dummy"}),
    "kv1-fp32": Case("dense", "float32", {"vocab_size": 250, "num_key_value_heads": 1}),
    "moe-tp-fp32": Case("moe", "float32"),
    "moe-ep-fp32": Case("moe", "float32", {"vocab_size": 250}, {"enable_expert_parallel": True}),
}


class Checkpoint:
    """A saved checkpoint, as files, as per-expert tensors and as logical tensors."""

    def __init__(self, folder: Path, case: Case, seed: int) -> None:
        self.folder = save_tiny_model(folder, kind=case.kind, seed=seed, dtype=case.dtype, **case.overrides)
        self.tensors = load_file(self.folder / "model.safetensors")
        stacks: dict[str, dict[int, torch.Tensor]] = {}
        self.logical = {}
        for name, tensor in self.tensors.items():
            canonical = canonical_name(name)
            if canonical.expert is None:
                self.logical[canonical.tensor] = tensor
            else:
                stacks.setdefault(canonical.tensor, {})[canonical.expert] = tensor
        for name, stack in stacks.items():
            self.logical[name] = torch.stack([stack[expert] for expert in range(len(stack))])

    def specs(self) -> list[TensorSpec]:
        return [
            TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in self.logical.items()
        ]


class Engine:
    def __init__(self, folder: Path, case: Case) -> None:
        parallel = {}
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            parallel = {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}
        self.llm = LLM(
            str(folder),
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype=case.dtype,
            max_model_len=64,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            enable_prefix_caching=False,
            disable_log_stats=True,
            **parallel,
            **case.engine,
        )
        self.model = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner.model

    def outputs(self) -> list[Any]:
        found = self.llm.generate(PROMPTS, SAMPLING, use_tqdm=False)
        return [
            (output.outputs[0].token_ids, [next(iter(p.values())).logprob for p in output.outputs[0].logprobs])
            for output in found
        ]

    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: tensor.data.clone() for name, tensor in self.model.named_parameters()}

    def experts(self) -> dict[str, list[int]]:
        """How many elements the experts' weights have, and how many of them aren't zero."""
        weights = {
            name: tensor for name, tensor in self.parameters().items() if name.endswith(("w13_weight", "w2_weight"))
        }
        return {name: [tensor.numel(), int(torch.count_nonzero(tensor))] for name, tensor in weights.items()}

    def addresses(self) -> dict[str, int]:
        return {name: tensor.data_ptr() for name, tensor in self.model.named_parameters()}


def write_pieces(
    manifest: RankManifest, target: VllmTarget, weights: dict[str, torch.Tensor], *, only: str = ""
) -> None:
    buffers = target.buffers()
    for piece in manifest.pieces:
        if only in piece.tensor:
            buffer = buffers[piece.buffer]
            offset = buffer.storage_offset() + piece.offset
            part = weights[piece.tensor][tuple(slice(span.start, span.stop) for span in piece.box.spans)]
            torch.as_strided(buffer, piece.box.shape, piece.strides, offset).copy_(part)


def refit(manifest: RankManifest, target: VllmTarget, weights: dict[str, torch.Tensor]) -> None:
    target.begin()
    write_pieces(manifest, target, weights)
    target.finish()


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def swapped(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights with gate and up of one matrix, or of one expert, exchanged."""
    changed = {name: tensor.clone() for name, tensor in weights.items()}
    gate = next(name for name in changed if "gate_proj" in name)
    up = gate.replace("gate_proj", "up_proj")
    row = 1 if changed[gate].dim() == 3 else slice(None)
    changed[gate][row], changed[up][row] = weights[up][row], weights[gate][row]
    return changed


def boxes(manifest: RankManifest) -> dict[str, list[str]]:
    """The boxes held of each tensor of the first layer and of the head, as text."""
    held: dict[str, list[str]] = {}
    for piece in manifest.pieces:
        if "layers.0." in piece.tensor or "layers" not in piece.tensor:
            held.setdefault(piece.tensor.removeprefix("model.layers.0."), []).append(str(piece.box))
    return held


def run(name: str, folder: Path) -> dict[str, Any]:
    case = CASES[name]
    a, b = (Checkpoint(folder / f"{name}-{letter}", case, seed) for letter, seed in (("a", 1), ("b", 2)))
    engine = Engine(a.folder, case)
    first, addresses = engine.outputs(), engine.addresses()
    target = VllmTarget(engine.model, engine.llm.llm_engine.vllm_config)
    manifest = target.manifest(int(os.environ.get("RANK", "0")), b.specs())
    oracle_case = Case(case.kind, case.dtype, case.overrides, case.engine | {"load_format": "auto"})
    fresh = Engine(b.folder, oracle_case)
    wanted, parameters = fresh.outputs(), fresh.parameters()
    found: dict[str, Any] = {
        "nothing is opaque": not manifest.opaque,
        "private": dict(target.private_layers()),
        "boxes": boxes(manifest),
        "manifest": manifest_to_json(manifest),
        "config": json.loads((b.folder / "config.json").read_text()),
        "source": [[spec.name, spec.shape, spec.dtype] for spec in b.specs()],
        "manifest changes nothing": engine.outputs() == first,
        "experts": [],
    }

    def check(label: str) -> None:
        found[f"{label}: outputs"] = engine.outputs() == wanted
        found[f"{label}: parameters"] = equal(engine.parameters(), parameters)
        found["experts"].append(engine.experts())

    refit(manifest, target, b.logical)
    check("A -> B by pieces")
    refit(manifest, target, a.logical)
    found["B -> A by pieces"] = "load_format" in case.engine or engine.outputs() == first
    found["A and B differ"] = first != wanted
    target.begin()
    target.load(b.tensors.items())
    target.finish()
    check("A -> B by load")
    refit(manifest, target, swapped(b.logical))
    found["swapped gate and up are noticed"] = engine.outputs() != wanted
    found["swapped parameters are the oracle's"] = equal(engine.parameters(), parameters)
    target.begin()
    write_pieces(manifest, target, a.logical, only="mlp")
    target.begin()
    write_pieces(manifest, target, b.logical, only="mlp")
    target.load((n, t) for n, t in b.tensors.items() if "mlp" not in n)
    target.finish()
    check("aborted, then FFN by pieces and the rest by load")
    found["addresses stay"] = engine.addresses() == addresses
    check_rebinding(engine, target, manifest, a, b)
    check("rebound parameter")
    found["changed parameter is refused"] = refuses_changed_form(engine, target)
    return found


def check_rebinding(engine: Engine, target: VllmTarget, manifest: RankManifest, a: Checkpoint, b: Checkpoint) -> None:
    """The engine moves a parameter to new storage; the next refit must follow it."""
    refit(manifest, target, a.logical)
    norm = engine.model.model.norm
    norm.weight.data = norm.weight.data.clone()
    refit(manifest, target, b.logical)


def refuses_changed_form(engine: Engine, target: VllmTarget) -> bool:
    norm = engine.model.model.norm
    saved = norm.weight.data
    norm.weight.data = saved[:-1].clone()
    try:
        target.begin()
    except LayoutError as error:
        return error.tensor == "model.norm.weight"
    finally:
        norm.weight.data = saved
    return False


def main() -> None:
    results, folder, *names = sys.argv[1:]
    found = {name: run(name, Path(folder)) for name in names}
    Path(results).write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # vLLM's exit handlers of several engines in one process are slow


if __name__ == "__main__":
    main()
