"""torchrun --nproc-per-node 4 docs/howto/reshard_two_dtensors.py"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from refit_transport import RefitSettings, Resharder

dist.init_process_group("gloo")
weight = torch.arange(48.0).view(8, 6)
rows = DeviceMesh("cpu", [0, 1, 2])  # 8 rows over 3 ranks: 3, 3 and 2
grid = DeviceMesh("cpu", [[2, 3]], mesh_dim_names=("replica", "columns"))  # rank 2 is in both
src = distribute_tensor(weight, rows, [Shard(0)])
dst = distribute_tensor(torch.zeros(8, 6, dtype=torch.bfloat16), grid, [Replicate(), Shard(1)])

with Resharder.prepare(src, dst, settings=RefitSettings(timeout_s=60, verify="full")) as resharder:
    for step in (1, 2):
        if rows.get_coordinate() is not None:
            src.to_local().mul_(2)  # "train"
        report = resharder.run()
        if report is not None:  # on rank 0
            print(f"step {step}: {report.summary.received_bytes} bytes received, verified")
        if grid.get_coordinate() is not None:
            assert torch.equal(dst.full_tensor(), (weight * 2**step).bfloat16())
if dist.get_rank() == 3:
    print(f"rank 3 has columns 3 to 5; its first row is {dst.to_local()[0].tolist()}")
dist.destroy_process_group()
