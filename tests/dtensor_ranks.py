"""What one rank does in the tests of DTensors: real process groups, so that torch itself says what is right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from refit_transport.layout.manifest import TensorSpec
from refit_transport.layout.wire import manifest_to_json
from refit_transport.sources.dtensor import source_of
from refit_transport.targets.module import DescribedTarget


@contextmanager
def gloo(rank: int, world_size: int, port: int) -> Iterator[None]:
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


class Mlp(nn.Module):
    """Sizes that four ranks don't divide, so that shards are uneven; a scalar buffer that nobody shards."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 14)
        self.down = nn.Linear(14, 6, bias=False)
        self.norm = nn.LayerNorm(6)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(torch.relu(self.up(x))) * self.scale
        return self.norm(hidden)


def build(seed: int) -> Mlp:
    torch.manual_seed(seed)
    return Mlp()


def full_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Gathered by torch. Collective."""
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
        for name, t in module.state_dict().items()
    }


def trained_source(rank: int, world_size: int, port: int, kind: str) -> dict[str, Any]:
    """Shards a module (FSDP2 alone, or FSDP2 over tensor parallelism), makes a step, and describes it."""
    with gloo(rank, world_size, port):
        module = build(seed=1)
        if kind == "fsdp":
            fully_shard(module, mesh=init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",)))
        else:
            mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp", "tp"))
            parallelize_module(module, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(module, mesh=mesh["dp"])
        source = source_of(module.state_dict)
        before = source.manifest(rank)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module(torch.ones(2, 6)).square().sum().backward()
        optimizer.step()
        strided = [name for name, t in module.state_dict().items() if "_S" in str(getattr(t, "placements", ""))]
        return {
            "manifest": manifest_to_json(source.manifest(rank)),
            "unchanged": before == source.manifest(rank),
            "buffers": {name: local.clone() for name, local in source.buffers().items()},
            "strided": strided,
            "full": full_state(module),
        }


def refilled_target(rank: int, world_size: int, port: int, full: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A module sharded over all ranks in another way takes `full` through its pieces; torch gathers it again."""
    with gloo(rank, world_size, port):
        mesh = init_device_mesh("cpu", (world_size,))
        module = build(seed=2)
        state = {
            name: distribute_tensor(t.detach(), mesh, [Shard(t.dim() - 1) if t.dim() else Replicate()])
            for name, t in module.state_dict().items()
        }
        target = DescribedTarget(source_of(state))
        specs = [TensorSpec(name, tuple(t.shape), "float32") for name, t in full.items()]
        manifest = target.manifest(rank, specs)
        buffers = target.buffers()
        for piece in manifest.pieces:
            view = buffers[piece.buffer].as_strided(piece.box.shape, piece.strides, piece.offset)
            view.copy_(full[piece.tensor][tuple(slice(span.start, span.stop) for span in piece.box.spans)])
        return {name: t.full_tensor() for name, t in state.items()}


def submesh(rank: int, world_size: int, port: int) -> list[str]:
    """Tensors on a mesh that leaves the last rank out."""
    with gloo(rank, world_size, port):
        mesh = DeviceMesh("cpu", list(range(world_size - 1))[::-1])
        tensor = distribute_tensor(torch.arange(7.0), mesh, [Shard(0)])
        return [f"{piece.box}" for piece in source_of({"w": tensor}).manifest(rank).pieces]


def fully_sharded(rank: int, world_size: int, port: int, folder: Path) -> dict[str, Any]:
    """A transformers model from a checkpoint, sharded by FSDP2, changed by a step; what its pieces hold."""
    import transformers
    from megatron_ranks import held

    from refit_transport.config.checkpoint_config import read_config
    from refit_transport.layout.presets.model import LogicalModel

    with gloo(rank, world_size, port):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        mesh = init_device_mesh("cpu", (world_size,))
        for layer in model.get_decoder().layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        source = source_of(model.state_dict, model=LogicalModel.from_config(read_config(folder)))
        before = source.manifest(rank)
        loss = model(input_ids=torch.arange(1, 9)[None]).logits.square().mean()
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        manifest, pieces = held(source, rank)
        whole = {name: tensor.numpy() for name, tensor in full_state(model).items()}
        return {"manifest": manifest, "pieces": pieces, "whole": whole, "unchanged": before == manifest}
