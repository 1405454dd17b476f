"""Trains a model under FSDP2 and refits running vLLM servers after each step; see vllm_serve.md.

torchrun --nproc-per-node 2 docs/howto/vllm_serve.py --model FOLDER --url http://localhost:8000
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from refit_transport import RefitSettings, source_of
from refit_transport.config.checkpoint_config import read_config
from refit_transport.integrations.vllm_server import ServerClient
from refit_transport.integrations.vllm_trainer import RefitSource, RefitTrainerInitInfo
from refit_transport.layout.presets.model import LogicalModel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True, help="folder of a Hugging Face checkpoint")
    parser.add_argument("--url", action="append", required=True, help="a vLLM server; may be given several times")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--save", type=Path, help="write each version's checkpoint there")
    arguments = parser.parse_args()

    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).to(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    # The refit: who sends, who receives, what is sent.
    client = ServerClient(*arguments.url)
    logical = LogicalModel.from_config(dict(read_config(arguments.model)))
    engine = WeightTransferTrainerFactory.trainer_init(
        RefitTrainerInitInfo(
            rank=rank,
            engine_ranks=sum(client.ranks()),
            settings=RefitSettings(coverage="all", verify="sample", timeout_s=60.0),
        ),
        client=client,
        source=RefitSource(source_of(model.state_dict, model=logical)),
    )

    generator = torch.Generator().manual_seed(rank)
    for step in range(arguments.steps):
        tokens = torch.randint(0, model.config.vocab_size, (2, 16), generator=generator).to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report = engine.send_weights()
        if report is not None:
            print(f"step {step + 1}: loss {loss.item():.3f}, version {report.version} served", flush=True)
        if arguments.save is not None:
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            whole = get_model_state_dict(model, options=options)
            if rank == 0:
                plain = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(arguments.model))
                plain.load_state_dict(whole)
                plain.save_pretrained(arguments.save / f"version-{engine.version}")

    engine.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
