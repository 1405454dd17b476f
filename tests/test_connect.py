"""Which fabric a refit gets: every rank's offer, one decision, one error with its remedy."""

import pytest
import torch

from refit_transport import connect
from refit_transport.config.settings import RefitSettings
from refit_transport.connect import Offer, choose_fabric, connect_fabric
from refit_transport.errors import TransferError
from refit_transport.fabrics.deadline import Deadline
from refit_transport.fabrics.gloo import GlooFabric
from refit_transport.fabrics.nccl import NcclFabric
from refit_transport.scheduling.topology import Topology
from refit_transport.testing.threads import run_ranks

GPUS = [Offer(f"GPU-{rank}", {"nccl": ()}) for rank in range(3)]
NO_CUDA = Offer("", {"nccl": ("it sees no CUDA device",)})
# A rank may hold nothing: then it has no GPU to name and nothing is in the way.
IDLE = Offer("", {"nccl": ()})


@pytest.mark.parametrize(
    ("wanted", "offers", "chosen"),
    [
        ("auto", GPUS, "nccl"),
        ("auto", [*GPUS[:2], NO_CUDA], "gloo"),
        ("auto", [*GPUS[:2], IDLE], "gloo"),
        ("auto", [GPUS[0], GPUS[0]], "gloo"),
        ("nccl", GPUS, "nccl"),
        ("nccl_m2n", GPUS, "nccl_m2n"),
        ("gloo", GPUS, "gloo"),
    ],
)
def test_the_choice(wanted, offers, chosen):
    assert choose_fabric(wanted, offers) == chosen


@pytest.mark.parametrize(
    ("wanted", "offers", "message"),
    [
        ("nccl", [GPUS[0], NO_CUDA, NO_CUDA], r"rank 1: it sees no CUDA device \(also ranks 2\)"),
        ("nccl", [GPUS[0], GPUS[1], GPUS[0]], "rank 2: it has the same GPU as rank 0, NCCL needs one for each rank"),
        ("nccl", [GPUS[0], IDLE], "rank 1: it holds no buffer on a GPU"),
        ("nccl_m2n", [Offer("GPU-0", {"nccl": (), "nccl_m2n": ("no package",)})], "rank 0: no package"),
    ],
)
def test_what_cannot_be_had_is_one_error_with_a_remedy(wanted, offers, message):
    with pytest.raises(TransferError, match=message) as caught:
        choose_fabric(wanted, offers)
    assert f"fabric {wanted} can't be used" in caught.value.reason
    assert caught.value.reason.endswith("set refit_cfg's fabric to gloo or auto")
    assert caught.value.phase == "connect"


def connected(channel, fabric, *, buffers=None):
    topology = Topology.of((range(channel.world_size),))
    made = connect_fabric(
        channel,
        topology,
        RefitSettings(fabric=fabric, timeout_s=20.0),
        slot_bytes=64,
        deadline=Deadline(20.0),
        buffers=buffers,
    )
    channel.agree("connected", "", deadline=Deadline(20.0))
    made.close()
    return made


def test_auto_on_cpus_is_gloo():
    assert {type(made) for made in run_ranks(3, lambda channel: connected(channel, "auto"))} == {GlooFabric}


@pytest.mark.parametrize("fabric", ["nccl", "nccl_m2n"])
def test_every_rank_gets_the_same_error_where_there_is_no_gpu(fabric):
    def rank_main(channel):
        with pytest.raises(TransferError) as caught:
            connected(channel, fabric, buffers={"w": torch.device("cpu")})
        channel.agree("refused", "", deadline=Deadline(20.0))
        return str(caught.value)

    first, second = run_ranks(2, rank_main)
    assert first == second
    assert f"fabric {fabric} can't be used: rank 0: " in first
    assert "1 of its buffers are not on a GPU, such as w" in first
    assert ("nccl-extensions" in first) is (fabric == "nccl_m2n")


def test_auto_with_a_gpu_for_every_rank_is_nccl(monkeypatch):
    """Everything but the group and the memory is real; each thread is a rank with a GPU of its number."""
    made = []

    class Group:
        def abort(self):
            made.append("abort")

    def fake_group(store, *, rank, world_size, device, timeout_s):
        made.append((rank, world_size, device, timeout_s))
        return Group()

    monkeypatch.setattr(connect, "obstacles", lambda _: ())
    monkeypatch.setattr(connect, "gpu_identity", str)
    monkeypatch.setattr(connect, "make_group", fake_group)
    monkeypatch.setattr(connect, "CudaDevice", lambda device: type("Device", (), {"new_stream": lambda _: device})())
    monkeypatch.setattr(connect, "_slot_memory", lambda nbytes, _: torch.empty(nbytes, dtype=torch.uint8))
    fabrics = run_ranks(
        2, lambda channel: connected(channel, "auto", buffers={"w": torch.device("cuda", channel.rank)})
    )
    assert {type(fabric) for fabric in fabrics} == {NcclFabric}
    assert sorted(item for item in made if item != "abort") == [
        (0, 2, torch.device("cuda", 0), 20.0),
        (1, 2, torch.device("cuda", 1), 20.0),
    ]
    assert made.count("abort") == 2
