"""Domains and NICs from where the ranks are, against hand-made expectations."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest
import torch

from refit_transport.config.settings import RefitSettings
from refit_transport.errors import LayoutError
from refit_transport.layout.layout import Layout, manifest_from_layouts
from refit_transport.layout.mesh import Mesh
from refit_transport.layout.placement import Replicate, Shard
from refit_transport.places import Place, place_here, topology_of
from refit_transport.scheduling.topology import DEFAULT_NIC_RATE
from refit_transport.session import RefitSession
from refit_transport.testing.oracle import HeldSide
from refit_transport.testing.sides import HeldSource, HeldTarget
from refit_transport.testing.threads import run_ranks


def domains(places, **settings):
    return topology_of(dict(enumerate(places)), RefitSettings(**settings)).domains


def nics(places, **settings):
    return tuple(nic.ranks for nic in topology_of(dict(enumerate(places)), RefitSettings(**settings)).nics)


def gpus(count, *, host=lambda rank: "h", **place):
    return [Place(host(rank), gpu=f"g{rank}", **place) for rank in range(count)]


def test_ranks_of_one_host_are_a_domain_with_one_nic():
    places = [Place("a"), Place("b"), Place("a"), Place("b")]
    assert domains(places) == nics(places) == ((0, 2), (1, 3))


def test_a_node_counts_more_than_a_host_name():
    same_name = [Place("pod", node="n1"), Place("pod", node="n2"), Place("pod", node="n1")]
    assert domains(same_name) == ((0, 2), (1,))
    two_names = [Place("a", node="n1"), Place("b", node="n1")]
    assert domains(two_names) == ((0, 1),)
    # A host may have any name, also that of a node.
    assert domains([Place("n1"), Place("a", node="n1")]) == ((0,), (1,))


def test_one_nvlink_domain_joins_gpus_of_several_hosts():
    rack = gpus(4, host=lambda rank: f"h{rank // 2}", nvlink="rack/1")
    assert domains(rack, fabric="nccl") == domains(rack) == ((0, 1, 2, 3),)
    assert nics(rack) == ((0,), (1,), (2,), (3,))
    other_clique = [*rack[:3], Place("h1", gpu="g3", nvlink="rack/2")]
    assert domains(other_clique) == ((0, 1, 2), (3,))


def test_nvlink_is_no_way_for_bytes_from_host_memory():
    rack = gpus(4, host=lambda rank: f"h{rank // 2}", nvlink="rack/1")
    assert domains(rack, fabric="gloo") == nics(rack, fabric="gloo") == ((0, 1), (2, 3))
    # auto takes gloo where a rank has no GPU, or two share one.
    assert domains([*rack[:3], Place("h1")]) == ((0, 1), (2, 3))
    shared = [*rack[:3], Place("h1", gpu="g2", nvlink="rack/1")]
    assert domains(shared) == ((0, 1), (2, 3))


@pytest.mark.parametrize("fabric", ["auto", "gloo", "nccl"])
def test_what_is_configured_stays(fabric):
    places = gpus(4)
    assert domains(places, domains=((0, 3), (1, 2)), fabric=fabric) == ((0, 3), (1, 2))
    assert nics(places, nics="domain", fabric=fabric) == ((0, 1, 2, 3),)
    assert nics([Place("a"), Place("a")], nics="rank") == ((0,), (1,))


def test_rates_are_those_of_the_configured_domains():
    places = dict(enumerate([Place("a")] * 4))
    both = {"domains": ((2, 3), (0, 1)), "nic_rates": (1e9, 4e9)}
    assert [(nic.ranks, nic.rate) for nic in topology_of(places, RefitSettings(**both)).nics] == [
        ((0, 1), 4e9),
        ((2, 3), 1e9),
    ]
    per_rank = topology_of(places, RefitSettings(**both, nics="rank")).nics
    assert [nic.rate for nic in per_rank] == [4e9, 4e9, 1e9, 1e9]
    assert {nic.rate for nic in topology_of(places, RefitSettings(nic_rates=(7e9,))).nics} == {7e9}
    assert {nic.rate for nic in topology_of(places, RefitSettings()).nics} == {DEFAULT_NIC_RATE}
    with pytest.raises(LayoutError, match="a NIC rate for each of 2 domains, got 3 rates"):
        topology_of(places, RefitSettings(domains=both["domains"], nic_rates=(1.0, 2.0, 3.0)))


def test_settings_survive_the_control_channel():
    settings = RefitSettings(domains=((0,), (1,)), nics="rank", nic_rates=(1e9, 2e9))
    assert RefitSettings.from_json(settings.to_json()) == settings


def test_the_place_of_weights_in_host_memory_asks_no_driver():
    def no_driver(gpu):
        raise AssertionError(gpu)

    here = place_here([torch.device("cpu")], node="n7", nvlink=no_driver)
    assert here == Place(socket.gethostname(), node="n7")


def test_the_place_of_weights_on_a_gpu(monkeypatch):
    asked = []
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"uuid-{device.index}")
    )
    devices = [torch.device("cpu"), torch.device("cuda", 3)]
    place = place_here(devices, nvlink=lambda gpu: asked.append(gpu) or "rack/1")
    assert (place.gpu, place.nvlink, asked) == ("uuid-3", "rack/1", ["uuid-3"])


def test_every_rank_of_a_session_has_the_same_topology():
    shapes = {"w": (8, 4)}
    source = manifest_from_layouts(
        "source", {n: Layout(s, Mesh.of(tp=2), (Shard(0),)) for n, s in shapes.items()}, dtype="float32"
    )
    mesh = Mesh.of(first_rank=2, dp=2)
    target = manifest_from_layouts(
        "target", {n: Layout(s, mesh, (Replicate(),)) for n, s in shapes.items()}, dtype="float32"
    )
    held, wanted = HeldSide.of(source).bindings, HeldSide.of(target).bindings

    def main(channel):
        rank = channel.rank
        session = RefitSession.prepare(
            channel,
            settings=RefitSettings(coverage="all", timeout_s=20.0) if rank == 0 else None,
            source=HeldSource(held[rank]) if rank in held else None,
            target=HeldTarget(wanted[rank]) if rank in wanted else None,
            node=f"node {rank % 2}",
        )
        session.run(1)
        session.close()
        return session.plan.job.topology

    found = run_ranks(4, main)
    assert {topology.domains for topology in found} == {((0, 2), (1, 3))}
