"""From a transfer plan to a schedule, in named passes, each with an off switch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Literal, get_args

import numpy as np

from refit_transport.planning.plan import Ints, TransferPlan
from refit_transport.scheduling.demands import deduplicate, demands_of, separate, split_copies, split_local
from refit_transport.scheduling.pour import Stacks, Stream, aligned, pack, streams_of
from refit_transport.scheduling.routes import Flow, Route
from refit_transport.scheduling.schedule import Hops, Parcels, Payloads, Schedule
from refit_transport.scheduling.senders import Choices, choose_routes
from refit_transport.scheduling.topology import Topology

# local: a holder inside the target's own domain serves it, so the bytes never cross the network.
# deduplicate: bytes that several ranks of a domain want enter the domain once and are passed on inside.
# balance: senders and ways in are chosen so that the busiest NIC has as little to do as possible; else the first holder
#   sends everything.
# stripe: what enters a domain is divided over the ranks that want it, and their NICs.
# forward: a rank that received bytes from the network may pass them on to other domains.
# relay: a rank that doesn't want the bytes may take them in for others of its domain when its NIC is idle.
PassName = Literal["local", "deduplicate", "balance", "stripe", "forward", "relay"]
PASSES: tuple[PassName, ...] = get_args(PassName)

# The busiest NIC's bytes come in this many payloads at least: one more or less is what NICs differ by in the end. Bytes
# that are forwarded come in smaller ones, because the last one's way adds to the time of all.
_PAYLOADS, _FORWARDED_PAYLOADS = 96, 512
_LEAST_PAYLOAD = 64 << 10


def build_schedule(
    plan: TransferPlan, topology: Topology, *, bucket_bytes: int, disabled: Collection[PassName] = ()
) -> Schedule:
    """Schedules a plan in payloads of at most `bucket_bytes` (one element at least); pure and deterministic.

    TP4 -> TP2 x DP2 with both replicas in one domain: each element enters that domain once, and each target receives
    half of its shard from the network and the other half from its replica beside it.

    >>> from refit_transport.layout.layout import Layout, manifest_from_layouts
    >>> from refit_transport.layout.mesh import Mesh
    >>> from refit_transport.layout.placement import Replicate, Shard
    >>> from refit_transport.planning.planner import plan_transfer
    >>> train = Layout((8, 8), Mesh.of(tp=4), (Shard(0),))
    >>> serve = Layout((8, 8), Mesh.of(first_rank=4, dp=2, tp=2), (Replicate(), Shard(0)))
    >>> source = manifest_from_layouts("source", {"w": train}, dtype="uint8")
    >>> target = manifest_from_layouts("target", {"w": serve}, dtype="uint8")
    >>> topology = Topology.of(((0, 1, 2, 3), (4, 5, 6, 7)))
    >>> plan = plan_transfer(source, target)
    >>> schedule = build_schedule(plan, topology, bucket_bytes=1024)
    >>> schedule.check(plan)
    >>> schedule.traffic().network, schedule.traffic().local
    (64, 64)
    >>> schedule.traffic().network_received
    {4: 16, 5: 16, 6: 16, 7: 16}
    """
    on = {name: name not in disabled for name in PASSES}
    demands = split_copies(demands_of(plan, topology))
    if on["local"]:
        demands = split_local(demands, topology)
    demands = deduplicate(demands) if on["deduplicate"] else separate(demands)
    if not (on["forward"] and on["balance"]):
        demands = separate(demands)
    choices = Choices(balance=on["balance"], stripe=on["stripe"], forward=on["forward"], relay=on["relay"])
    flows = choose_routes(demands, topology, choices, bucket_bytes=bucket_bytes)
    return schedule_flows(plan, flows, topology, bucket_bytes=bucket_bytes)


def schedule_flows(plan: TransferPlan, flows: Iterable[Flow], topology: Topology, *, bucket_bytes: int) -> Schedule:
    """Cuts and packs what the flows carry, and orders the payloads (passes 5 and 6).

    Payloads have at most `bucket_bytes`, and less where the busiest NIC has few of them.

    All routes progress alike: the k-th of a route's n payloads comes at the fraction (k + p) / n of the schedule. So at
    any time every NIC has done about the same part of its work; see `_phases` for p.
    """
    stacks = Stacks.of(plan, most_bytes=max(1, bucket_bytes // 8))
    streams = streams_of(plan, stacks, flows)
    routes = list(streams)
    carried = [int(stream.nbytes.sum()) for stream in streams.values()]
    busiest = _busiest_nic(routes, carried, topology)
    # Numbered route by route; columns of parcels, and of payloads.
    parts: list[Stream] = []
    payload_of: list[Ints] = []
    route_of: list[int] = []
    progress: list[float] = []
    phases = _phases(routes, topology)
    for index, (route, stream) in enumerate(streams.items()):
        least = _FORWARDED_PAYLOADS if _forwards(route, topology) else _PAYLOADS
        cuts = pack(stream, bucket_bytes=min(bucket_bytes, max(_LEAST_PAYLOAD, busiest // least)))
        packed = stream.split(cuts)
        parts.append(packed)
        payload_of.append(np.searchsorted(cuts, packed.starts[:-1], side="right") - 1 + len(route_of))
        route_of += [index] * len(cuts)
        progress += [(number + phases[index]) / len(cuts) for number in range(len(cuts))]
    order = np.lexsort((np.array(route_of, dtype=np.int64), np.array(progress)))
    parcels, size, first = _parcels(plan, stacks, parts, payload_of, order)
    hops, first_hop = _hops(routes, np.array(route_of, dtype=np.int64)[order], topology)
    nbytes = np.add.reduceat(parcels.nbytes(), first[:-1]) if len(order) else np.zeros(0, dtype=np.int64)
    return Schedule(parcels, Payloads(size, nbytes, first, first_hop), hops)


def _forwards(route: Route, topology: Topology) -> bool:
    """Whether what arrived over some hop is passed on over the network."""
    return any(hop.parent >= 0 and not topology.is_local(hop.sender, hop.receiver) for hop in route.hops)


def _busiest_nic(routes: Sequence[Route], carried: Sequence[int], topology: Topology) -> int:
    """The bytes of the NIC with most to do in one direction; without network hops, of the busiest rank."""
    crossing, inside = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    for route, nbytes in zip(routes, carried, strict=True):
        for hop in route.hops:
            if topology.is_local(hop.sender, hop.receiver):
                inside["out", hop.sender] += nbytes
                inside["in", hop.receiver] += nbytes
            else:
                crossing["out", topology.nic(hop.sender)] += nbytes
                crossing["in", topology.nic(hop.receiver)] += nbytes
    return max((crossing or inside).values(), default=0)


def _phases(routes: Sequence[Route], topology: Topology) -> list[float]:
    """Each route's phase, in [0, 1): evenly spread over the routes that leave through one NIC.

    So all NICs begin at once and keep pace. Each goes round the NICs that it sends to and round its own ranks, and
    begins at another place than the other NICs, so that at any time different NICs send to different ones.

    >>> from refit_transport.scheduling.routes import Hop
    >>> routes = [Route((Hop(root, receiver),)) for root in (0, 1) for receiver in (2, 3)]
    >>> _phases(routes, Topology.of(((0,), (1,), (2,), (3,))))
    [0.0, 0.5, 0.5, 0.0]
    """
    ways = [(topology.nic(route.root), topology.nic(route.hops[0].receiver)) for route in routes]
    numbers = [{nic: number for number, nic in enumerate(sorted(set(side)))} for side in zip(*ways, strict=True)]
    leaving: dict[int, dict[int, list[int]]] = {}
    for index, (out, into) in enumerate(ways):
        leaving.setdefault(out, {}).setdefault(into, []).append(index)
    phases = [0.0] * len(routes)
    for out, arriving in leaving.items():
        turn = numbers[0][out] * len(numbers[1]) // len(numbers[0])
        places = []
        for into, indices in arriving.items():
            turned = (numbers[1][into] - turn) % len(numbers[1])
            ordered = _diagonally(indices, routes)
            places += [((place + 0.5) / len(ordered), turned, index) for place, index in enumerate(ordered)]
        for number, (_, _, index) in enumerate(sorted(places)):
            phases[index] = number / len(places)
    return phases


def _diagonally(indices: Sequence[int], routes: Sequence[Route]) -> list[int]:
    """Routes between the same two NICs, so that neighbours have other roots and other receivers where they can."""
    pairs = [(routes[index].root, routes[index].hops[0].receiver) for index in indices]
    numbers = [{rank: number for number, rank in enumerate(sorted(set(side)))} for side in zip(*pairs, strict=True)]
    keys = [((numbers[1][into] - numbers[0][out]) % len(numbers[1]), out) for out, into in pairs]
    return [index for _, index in sorted(zip(keys, indices, strict=True))]


def _parcels(
    plan: TransferPlan, stacks: Stacks, parts: Sequence[Stream], payload_of: Sequence[Ints], order: Ints
) -> tuple[Parcels, Ints, Ints]:
    """The columns of all parcels with the payloads in this order, each payload's size, and its first parcel."""
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    payload = place[np.concatenate([np.zeros(0, dtype=np.int64), *payload_of])]
    rows = np.argsort(payload, kind="stable")
    first = np.searchsorted(payload[rows], np.arange(len(order) + 1))
    none = Stream.of(stacks, np.zeros(0, dtype=np.int64))
    stream = Stream.join([none, *parts])[rows]
    padded = aligned(stream.nbytes)
    end = np.cumsum(padded)
    offset = end - padded - (end - padded)[first[:-1]][payload[rows]]
    size = (offset + stream.nbytes)[first[1:] - 1]
    atom, dim = stacks.atom[stream.stack], stacks.dim[stream.stack]
    lo, hi = stacks.lo[stream.stack], stacks.hi[stream.stack]
    each = np.arange(len(rows))
    lo[each, dim] += stream.first
    hi[each, dim] = lo[each, dim] + stream.rows
    return Parcels(plan.tensors, plan.tensor[atom], lo, hi, atom, offset), size, first


def _hops(routes: Sequence[Route], route_of: Ints, topology: Topology) -> tuple[Hops, Ints]:
    """The columns of all hops, and the first hop of each payload."""
    table = np.array(
        [
            (hop.sender, hop.receiver, hop.parent, topology.is_local(hop.sender, hop.receiver))
            for route in routes
            for hop in route.hops
        ],
        dtype=np.int64,
    ).reshape(-1, 4)
    lengths = np.array([len(route.hops) for route in routes], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    counts = lengths[route_of]
    first = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    payload = np.repeat(np.arange(len(route_of)), counts)
    nth = np.arange(first[-1]) - first[payload]
    sender, receiver, parent, local = table[starts[route_of[payload]] + nth].T
    parent = np.where(parent < 0, -1, parent + first[payload])
    return Hops(payload, sender.copy(), receiver.copy(), parent, local.astype(bool)), first
