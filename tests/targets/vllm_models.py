"""vLLM models without engines, loaded by vLLM's own loader on real ranks, and everything that they keep.

Imports vLLM, so only processes of ranks import it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.models import utils as models_utils
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from refit_transport.integrations.vllm_plugin import register
from refit_transport.layout.presets.vllm import EngineParallelism
from refit_transport.targets.base import Target
from refit_transport.targets.joined import JoinedTarget
from refit_transport.targets.vllm import VllmTarget

State = dict[str, torch.Tensor]


def prepare_process() -> None:
    """Once per process, before the first model."""
    register()
    torch.accelerator.empty_cache = lambda: None  # as vLLM's own runner does on CPU, where it raises


def engine_config(folder: Path, cut: EngineParallelism, *, drafts: bool) -> VllmConfig:
    return EngineArgs(
        str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=64,
        tensor_parallel_size=cut.tensor,
        pipeline_parallel_size=cut.pipeline,
        distributed_executor_backend="external_launcher",
        enable_expert_parallel=cut.expert > 1,
        speculative_config={"method": "mtp", "num_speculative_tokens": 1} if drafts else None,
    ).create_engine_config()


def join_ranks(cut: EngineParallelism) -> None:
    """Makes vLLM's groups of all ranks, as the launcher's variables say; inside a config's context."""
    if not torch.distributed.is_initialized():
        rank = int(os.environ["RANK"])
        init_distributed_environment(int(os.environ["WORLD_SIZE"]), rank, "env://", rank, "gloo")
    # There is no group for experts where the last model had none.
    if parallel_state._EP is None or parallel_state.get_pp_group().world_size != cut.pipeline:
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        initialize_model_parallel(cut.tensor, cut.pipeline)


def leave_ranks() -> None:
    """This process may join others afterwards."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


class Model:
    """A vLLM model as it is after loading a checkpoint. If it `drafts`, its drafter is beside it, as in an engine."""

    def __init__(self, folder: Path, cut: EngineParallelism, *, drafts: bool = False) -> None:
        self.config = engine_config(folder, cut, drafts=drafts)
        # vLLM remembers which layers other stages have by the model's id, which a later model may have again.
        models_utils._model_to_pp_missing_layer_names.clear()
        with set_current_vllm_config(self.config):
            join_ranks(cut)
            self.module = get_model(vllm_config=self.config)
            self.drafter = self._drafter() if drafts else None

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


def differing(first: State, second: State) -> list[str]:
    """The names of the tensors that differ in any bit, form or presence."""
    names = sorted(first.keys() | second.keys())
    return [name for name in names if not _same(first.get(name), second.get(name))]


def _same(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    if first is None or second is None or first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(first.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8))


def tails(model: torch.nn.Module, rows: int) -> dict[str, list[int]]:
    """By vocabulary parameter: its rows behind the true ones on this rank, and how many elements aren't zero there."""
    found = {}
    for name, module in model.named_modules():
        if hasattr(module, "shard_indices") and isinstance(module.weight, torch.Tensor):
            start = module.shard_indices.padded_org_vocab_start_index
            tail = module.weight.data[max(0, rows - start) :]
            found[name] = [len(tail), int(torch.count_nonzero(tail))]
    return found
