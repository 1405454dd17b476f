"""What a refit did: seconds by phase, bytes by transport and rank, and why some tensors went whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from rich.console import Group
from rich.table import Table

from refit_transport.layout.manifest import RankRole
from refit_transport.planning.routing import RESHARD, Route
from refit_transport.scheduling.schedule import Traffic

PHASES = ("plan", "agree", "pack", "network", "exchange", "unpack", "load", "verify")


@dataclass(frozen=True, slots=True)
class RankReport:
    """One rank's part. `seconds` by phase; bytes are payload that really crossed the fabric on this rank.

    `private_layers`: layers of which the engine keeps its own layout, with the remedy (see `targets.vllm_proof`) and
    the proof that failed. `verified`: boxes compared with the source.
    """

    rank: int
    role: RankRole
    host: str
    seconds: Mapping[str, float]
    sent_bytes: int
    received_bytes: int
    verified: int = 0
    private_layers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TransportReport:
    """What one transport carries: number of tensors, and payload bytes over the network, inside domains, and copied.

    `model_bytes` are those of its tensors, each element once however many ranks need it.
    """

    name: str
    tensors: int
    model_bytes: int
    network_bytes: int
    local_bytes: int
    copied_bytes: int

    @classmethod
    def of(cls, name: str, sizes: Collection[int], traffic: Traffic) -> Self:
        """From its tensors' bytes and a transport's planned traffic."""
        return cls(name, len(sizes), sum(sizes), traffic.network, traffic.local, sum(traffic.copied.values()))


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """What is planned for every refit of a session: the same on every rank.

    `old_way_*` is what gathering and broadcasting every tensor would move. `whole` gives, by reason, the tensors that
    don't go shard-to-shard; `skipped` those that aren't moved, because no target takes them or no source has them.
    """

    transports: tuple[TransportReport, ...]
    received_by_rank: Mapping[int, int]
    old_way_network_bytes: int
    old_way_received_bytes: int
    whole: Mapping[str, tuple[str, ...]]
    skipped: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(
        cls,
        traffic: Mapping[str, Traffic],
        old_way: Traffic,
        routes: Sequence[Route],
        sizes: Mapping[str, int],
        skipped: Mapping[str, tuple[str, ...]],
    ) -> Self:
        """Sums the transports' traffic, which is by transport name; `sizes` are tensors' bytes on the wire."""
        whole: dict[str, list[str]] = defaultdict(list)
        received: dict[int, int] = defaultdict(int)
        for route in routes:
            if route.transport != RESHARD:
                whole[f"{route.transport}: {route.reason}"].append(route.tensor)
        for part in traffic.values():
            for by_rank in (part.network_received, part.local_received):
                for rank, nbytes in by_rank.items():
                    received[rank] += nbytes
        carried = {name: [sizes[route.tensor] for route in routes if route.transport == name] for name in traffic}
        return cls(
            tuple(TransportReport.of(name, carried[name], part) for name, part in traffic.items()),
            dict(sorted(received.items())),
            old_way.network,
            old_way.network + old_way.local,
            {reason: tuple(names) for reason, names in whole.items()},
            skipped,
        )

    @property
    def shard_to_shard(self) -> float:
        """The share of the model's bytes that goes from shard to shard, 0 to 1."""
        everything = sum(part.model_bytes for part in self.transports)
        return sum(part.model_bytes for part in self.transports if part.name == RESHARD) / max(1, everything)

    @property
    def network_bytes(self) -> int:
        return sum(part.network_bytes for part in self.transports)

    @property
    def received_bytes(self) -> int:
        return sum(self.received_by_rank.values())


@dataclass(frozen=True, slots=True)
class RefitReport:
    """One refit. Seconds of a phase are the slowest rank's; `total_seconds` is rank 0's, from start to last report.

    `refused`: connections that the session's rendezvous has dropped so far, by what was wrong with them.
    """

    version: int
    total_seconds: float
    summary: PlanSummary
    ranks: tuple[RankReport, ...]
    refused: Mapping[str, int] = field(default_factory=dict)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase, the slowest rank's."""
        return {phase: max(rank.seconds.get(phase, 0.0) for rank in self.ranks) for phase in PHASES}

    @property
    def private_layers(self) -> dict[str, str]:
        """Staged layers of any rank and why."""
        return {layer: reason for rank in self.ranks for layer, reason in rank.private_layers.items()}

    def to_json(self) -> dict[str, Any]:
        """A plain value, for logs and programs."""
        return {**asdict(self), "seconds": self.seconds}


def render_ranks(report: RefitReport) -> Table:
    """What each rank really sent and received in one refit, as a table for people."""
    table = Table(title="Bytes by rank")
    for column in ("rank", "role", "sent", "received"):
        table.add_column(column, justify="right")
    for rank in report.ranks:
        table.add_row(str(rank.rank), rank.role, sized(rank.sent_bytes), sized(rank.received_bytes))
    return table


def render_notes(report: RefitReport) -> list[str]:
    """What was verified, and which layers have a private layout and why, in a line each."""
    notes = []
    if verified := sum(rank.verified for rank in report.ranks):
        notes.append(f"verified: {verified} boxes on the targets equal the sources")
    by_reason: dict[str, list[str]] = defaultdict(list)
    for layer, reason in report.private_layers.items():
        by_reason[reason].append(layer)
    if report.refused:
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(report.refused.items()))
        notes.append(f"refused at the rendezvous: {sum(report.refused.values())} connections ({kinds})")
    return notes + [f"private layout, {reason}: {_names(layers)}" for reason, layers in by_reason.items()]


def render_summary(summary: PlanSummary) -> Group:
    """The planned bytes as a table, and the reasons for what isn't sent shard-to-shard."""
    table = Table(title="Bytes of one refit by transport")
    for column in ("transport", "tensors", "model", "network", "inside domains", "copied"):
        table.add_column(column, justify="left" if column == "transport" else "right")
    for part in summary.transports:
        sizes = (part.model_bytes, part.network_bytes, part.local_bytes, part.copied_bytes)
        table.add_row(part.name, str(part.tensors), *(sized(size) for size in sizes))
    table.add_section()
    local = summary.old_way_received_bytes - summary.old_way_network_bytes
    table.add_row("gather_broadcast, all", "", "", sized(summary.old_way_network_bytes), sized(local), "")
    lines = [f"whole, {reason}: {_names(names)}" for reason, names in summary.whole.items()]
    lines += [f"skipped, {reason}: {_names(names)}" for reason, names in summary.skipped.items()]
    return Group(table, *lines)


def sized(nbytes: int) -> str:
    """A size for people, in units of 10^6 or 10^9 bytes.

    >>> sized(1_500), sized(61_064_245_248)
    ('0.002 MB', '61.064 GB')
    """
    return f"{nbytes / 1e6:.3f} MB" if nbytes < 10**9 else f"{nbytes / 1e9:.3f} GB"


def _names(names: Sequence[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
