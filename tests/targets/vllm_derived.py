"""What vLLM models derive from weights, hold twice and keep at fixed addresses: a script, one process per rank.

    RANK=0 WORLD_SIZE=2 CHANNEL_PORTS=... python vllm_derived.py RESULTS.json FOLDER KIND...

The model of checkpoint A gets a refit in which only the tensors of one kind are checkpoint B's, once so that each rank
receives its part in one bucket, and once in at least ten; before the latter, what is a view of weights on CPU gets
memory of its own, as where a kernel wants another dtype or order. Every tensor of the model is compared with the
freshly loaded models', bit by bit. Then each derived tensor is changed by itself, and both sides are compared.
Writes `{kind: findings}`.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from channels import open_channel
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from vllm_models import Model, State, differing, kept, prepare_process
from vllm_refits import PARTS, RANK, WORLD, cut_of, write_checkpoint

from refit_transport.config.settings import RefitSettings
from refit_transport.session import RefitSession
from refit_transport.sources.dtensor import StateDictSource
from refit_transport.targets.vllm import VllmTarget

# Of each kind, the tensors that change alone.
CHANGES = {"deepseek": "kv_b_proj", "nemotron dense": "mixer.D", "qwen2 tied": "embed_tokens"}
# A model whose only change is a buffer.
BUFFER = "e_score_correction_bias"
AFFECTED = PARTS | {"embed_tokens": r"(embed_tokens|lm_head)\.weight$"}

# A bucket that holds all that two ranks have for each other, and one for a tenth of a rank's rows of `kv_b_proj` (four
# heads of 2 x 128 rows, 512 wide, in bfloat16).
BUCKETS: dict[str, dict[str, Any]] = {
    "in one bucket": {"transport": "gather_broadcast", "bucket_bytes": 1 << 28, "staging_bytes": 1 << 29},
    "in ten": {"coverage": "all", "bucket_bytes": -(-4 * 2 * 128 * 512 * 2 // 10)},
}


def crossed(state: State) -> State:
    """Tensors that lie over the ranks by rows in the opposite order, so that all of them have to travel."""
    ranks = list(reversed(range(WORLD)))
    mesh, cut = DeviceMesh("cpu", ranks), {}
    for name, whole in state.items():
        chunks = [*torch.chunk(whole, WORLD), *[whole[:0]] * WORLD][:WORLD]
        form: dict[str, Any] = {"shape": whole.shape, "stride": whole.stride()}
        cut[name] = DTensor.from_local(chunks[ranks.index(RANK)].clone(), mesh, [Shard(0)], run_check=False, **form)
    return cut


def aliases(model: torch.nn.Module) -> list[tuple[str, str]]:
    """The pairs of names, by their last parts, under which modules keep one memory."""
    names: dict[tuple[int, int], set[str]] = {}
    for name, tensor in kept(model):
        if tensor.numel() > 1:
            names.setdefault((tensor.data_ptr(), tensor.numel()), set()).add(name)
    pairs = (pair for held in names.values() for pair in itertools.combinations(sorted(held), 2))
    return sorted({(first.rsplit(".", 1)[1], second.rsplit(".", 1)[1]) for first, second in pairs})


def payloads_of(session: RefitSession, tensor: str) -> dict[str, int]:
    """How many payloads bring each rank something of a tensor, by the rank."""
    found: dict[str, set[int]] = {}
    for leg in (leg for transport in session.plan.transports.values() for leg in transport.legs()):
        parcels, payloads, hops = leg.schedule.parcels, leg.schedule.payloads, leg.schedule.hops
        numbers = [number for number, each in enumerate(parcels.tensors) if each.name == tensor]
        for parcel in np.flatnonzero(np.isin(parcels.tensor, numbers)):
            payload = int(np.searchsorted(payloads.first_parcel, parcel, side="right")) - 1
            for hop in range(payloads.first_hop[payload], payloads.first_hop[payload + 1]):
                if hops.sender[hop] != hops.receiver[hop]:
                    found.setdefault(str(hops.receiver[hop]), set()).add(payload)
    return {rank: len(numbers) for rank, numbers in found.items()}


def spoilt(model: torch.nn.Module, target: VllmTarget) -> Iterator[str]:
    """The names of what is derived from weights, each while it isn't what these give."""
    modules = dict(model.named_modules())
    for name in sorted({derived.name for derived in target.derived()}):
        path, attribute = name.rsplit(".", 1)
        tensor = getattr(modules[path], attribute)
        before = tensor.data
        # In memory of its own: it may be a view of the very weights.
        tensor.data = before + 1
        yield name
        tensor.data = before


def set_apart(model: torch.nn.Module, target: VllmTarget) -> None:
    """Gives what is derived from weights memory of its own."""
    modules = dict(model.named_modules())
    for path, attribute in (derived.name.rsplit(".", 1) for derived in target.derived()):
        tensor = getattr(modules[path], attribute)
        tensor.data = tensor.data.clone()


def run(kind: str, folder: Path, ports: Iterator[int]) -> dict[str, Any]:
    wanted = {name: Model(folder / name, cut_of("")).tensors() for name in "ab"}
    states = {name: crossed(load_file(folder / name / "model.safetensors")) for name in "ab"}
    model = Model(folder / "a", cut_of(""))
    addresses = {name: tensor.data_ptr() for name, tensor in kept(model.module)}
    found: dict[str, Any] = {
        "aliases": aliases(model.module),
        "addresses": sorted({name.rsplit(".", 1)[1] for name in addresses}),
        "payloads": {},
    }
    target = VllmTarget(model.module, model.config)
    for label, settings in BUCKETS.items():
        held = {"state": states["a"]}
        session = prepare(StateDictSource(lambda held=held: held["state"]), target, next(ports), settings)
        session.run(1)
        if label == "in ten":
            set_apart(model.module, target)
            addresses = {name: tensor.data_ptr() for name, tensor in kept(model.module)}
        for version, part in enumerate((CHANGES[kind], BUFFER), start=2):
            changed = {name: tensor for name, tensor in states["b"].items() if part in name}
            if not changed:
                continue
            held["state"] = states["a"] | changed
            session.run(version)
            expected = {n: wanted["b" if re.search(AFFECTED[part], n) else "a"].get(n) for n in wanted["a"]}
            found[f"only {part} changes, {label}"] = differing(model.tensors(), expected)
            found["payloads"][f"{part}, {label}"] = payloads_of(session, sorted(changed)[0])
        found["found after a change"] = {
            name: [each.tensor for each in session.compare().first] for name in spoilt(model.module, target)
        }
        found[f"compared, {label}"] = session.compare().differing
        session.close()
        found[f"moved, {label}"] = [n for n, tensor in kept(model.module) if tensor.data_ptr() != addresses[n]]
    found["derived"] = sorted({derived.name.rsplit(".", 1)[1] for derived in target.derived()})
    found["aliases later"] = aliases(model.module)
    return found


def prepare(source: StateDictSource, target: VllmTarget, port: int, settings: dict[str, Any]) -> RefitSession:
    agreed = RefitSettings(verify="full", timeout_s=60.0, **settings) if RANK == 0 else None
    channel = open_channel(RANK, world_size=WORLD, port=port)
    return RefitSession.prepare(channel, settings=agreed, source=source, target=target)


def main() -> None:
    results, folder, *kinds = sys.argv[1:]
    ports = iter([int(port) for port in os.environ["CHANNEL_PORTS"].split(",")])
    prepare_process()
    for kind in kinds:  # before there is a process group, in which only the first rank would write
        for seed, letter in enumerate("ab"):
            write_checkpoint(kind, Path(folder) / kind.replace(" ", "-") / letter, seed=seed)
    found = {}
    for kind in kinds:
        found[kind] = run(kind, Path(folder) / kind.replace(" ", "-"), ports)
        Path(results).write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # vLLM's exit handlers are slow


if __name__ == "__main__":
    main()
