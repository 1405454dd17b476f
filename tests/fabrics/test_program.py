"""What a lowered program packs and unpacks, beside numpy's slices of the full tensors."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refit_transport.fabrics.program import lower
from refit_transport.fabrics.slots import Slots, SlotSizes
from refit_transport.planning.planner import plan_transfer
from refit_transport.scheduling.scheduler import build_schedule
from refit_transport.scheduling.topology import Topology
from refit_transport.testing.oracle import HeldSide, coordinate_tensor
from refit_transport.testing.strategies import manifest_pairs
from refit_transport.views import torch_dtype

# What is in no parcel.
_UNTOUCHED = 0x5A


def _expected(schedule, payload, tensors):
    """A payload's bytes: each parcel's elements in row-major order in the wire's dtype, at the parcel's offset."""
    found = np.full(int(schedule.payloads.size[payload]), _UNTOUCHED, dtype=np.uint8)
    first, last = schedule.payloads.first_parcel[payload : payload + 2].tolist()
    for row in range(first, last):
        tensor = schedule.parcels.tensors[schedule.parcels.tensor[row]]
        dims = len(tensor.shape)
        corners = zip(schedule.parcels.lo[row, :dims].tolist(), schedule.parcels.hi[row, :dims].tolist(), strict=True)
        part = tensors[tensor.name][tuple(slice(start, stop) for start, stop in corners)]
        # numpy has no bfloat16.
        values = torch.from_numpy(np.ascontiguousarray(part).reshape(-1)).to(torch_dtype(tensor.wire_dtype))
        offset = int(schedule.parcels.offset[row])
        data = values.view(torch.uint8).numpy()
        found[offset : offset + data.size] = data
    return found


@settings(deadline=None)
@given(manifest_pairs(), st.sampled_from((16, 64, 4096)))
def test_a_batch_of_copies_packs_and_unpacks_what_numpy_slices(pair, bucket):
    source, target = pair
    schedule = build_schedule(
        plan_transfer(source, target),
        Topology.of([[ranked.rank for side in pair for ranked in side.ranks]]),
        bucket_bytes=bucket,
    )
    tensors = {s.name: coordinate_tensor(s.name, s.shape, "float32") for s in source.tensors}
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    held, wanted = HeldSide.of(source, tensors), HeldSide.of(target)
    sizes = SlotSizes.of([schedule], staging_bytes=0)
    for side, bindings in (("source", held.bindings), ("target", wanted.bindings)):
        for rank, binding in bindings.items():
            memory = Slots.private(sizes.nbytes)
            program = lower(
                schedule, rank, memory=memory, sizes=sizes, **{"source": None, "target": None, side: binding}
            )
            for step in program.steps:
                expected = _expected(schedule, step.payload, arrays)
                if side == "source":
                    if step.slot_offset is not None:
                        step.memory.fill_(_UNTOUCHED)
                    step.pack.make()
                    packed = step.memory.numpy().copy()
                    assert np.array_equal(packed, expected)
                else:
                    step.memory.copy_(torch.from_numpy(expected))
                    step.unpack.make()
    assert wanted.differences(tensors) == []
