"""`reshard`: tensors from one layout to another, across any ranks, without engines or configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self, TypeVar

import torch
import torch.distributed as dist

from refit_transport.config.settings import RefitSettings
from refit_transport.errors import LayoutError, TransferError
from refit_transport.fabrics.group_rendezvous import join_group
from refit_transport.fabrics.rendezvous import ControlChannel, telling_others
from refit_transport.layout.manifest import Manifest
from refit_transport.memory import check_apart
from refit_transport.planning.routing import RESHARD
from refit_transport.report import RefitReport
from refit_transport.scheduling.topology import Topology
from refit_transport.session import RefitSession
from refit_transport.sources.tensors import Holding, Local, TensorSource, TensorTarget

Tensors = Holding | Mapping[str, Holding]
D = TypeVar("D", bound=Tensors | None)

# The name of a tensor that is given without one.
_ALONE = "tensor"


def reshard(
    src: Tensors | None,
    dst: D,
    *,
    group: dist.ProcessGroup | ControlChannel | None = None,
    topology: Topology | None = None,
    settings: RefitSettings | None = None,
) -> D:
    """Fills `dst` with what `src` holds, each on ranks and in a layout of its own; returns `dst`.

    Collective over all ranks of `group`, in the same order on each, like any collective of torch. A rank gives what it
    holds of either side, and None where that is nothing; it may hold both. Every byte goes from a rank that holds it to
    one that needs it, or through one that needs it too; no rank ever has more than its own parts and a few buffers.

    Args:
        src: a DTensor, a `Local` (local tensor and layout), a plain tensor (whole on this rank), or a mapping of names
            to these. Left as it is.
        dst: the same; filled in place. A lone tensor matches a lone tensor, a mapping matches by name; names that only
            the source has stay where they are. Every rank of a `dst` layout's mesh must give its part.
        group: torch's process group (the default one when None), whose store the ranks meet in; nothing is sent over
            the group itself. Or a control channel not used before, whose ranks are then the meshes'.
        topology: which ranks share fast links, by global rank, the same on every rank; one domain per host when None.
        settings: rank 0's count for all. Its transport, coverage and routes don't: all goes shard to shard.

    Raises:
        LayoutError: a layout contradicts itself, the tensor or another rank; the source lacks a tensor; dtypes can't be
            converted; `dst` lies in memory of `src`.
        PlanError: an element of `dst` lies on no rank of `src`; names tensor and box.
        TransferError, DeadlineError, AgreementError: a rank failed or didn't come within `settings.timeout_s`. `dst`
            may hold a part of the new values. The group can go on being used.

    On one rank, to halves of the type from floats; see the README for four:

    >>> channel = ControlChannel.listen(host="127.0.0.1", port=0, world_size=1, timeout_s=10.0)
    >>> reshard(torch.tensor([1.0, 2.5]), torch.zeros(2, dtype=torch.bfloat16), group=channel)
    tensor([1.0000, 2.5000], dtype=torch.bfloat16)
    """
    with Resharder.prepare(src, dst, group=group, topology=topology, settings=settings) as resharder:
        resharder.run()
    return dst


@dataclass(frozen=True, slots=True)
class _Ranks:
    """Where the ranks meet, and their global ranks in the channel's order."""

    channel: ControlChannel
    global_ranks: tuple[int, ...]

    @classmethod
    def of(cls, group: dist.ProcessGroup | ControlChannel | None, timeout_s: float) -> Self:
        if isinstance(group, ControlChannel):
            return cls(group, tuple(range(group.world_size)))
        found = (dist.group.WORLD if dist.is_initialized() else None) if group is None else group
        if found is None:
            reason = "torch.distributed has no process group: initialize it, or give a control channel"
            raise TransferError(-1, -1, "rendezvous", "", reason)
        member = join_group(found, timeout_s=timeout_s)
        return cls(member.channel, member.global_ranks)

    @property
    def own(self) -> int:
        """This process's global rank."""
        return self.global_ranks[self.channel.rank]

    @property
    def numbers(self) -> dict[int, int]:
        """The channel's rank of each global rank."""
        return {found: rank for rank, found in enumerate(self.global_ranks)}


class Resharder:
    """`reshard`, prepared once and run many times: for tensors that keep their layouts while their values change.

    Its methods are collective, `close` excepted. After an error it is broken; prepare a new one.
    """

    def __init__(self, session: RefitSession, *, version: int = 0) -> None:
        self._session, self._version = session, version

    @classmethod
    def prepare(
        cls,
        src: Tensors | None,
        dst: Tensors | None,
        *,
        group: dist.ProcessGroup | ControlChannel | None = None,
        topology: Topology | None = None,
        settings: RefitSettings | None = None,
    ) -> Self:
        """Plans and connects; arguments and errors are those of `reshard`."""
        settings = replace(settings or RefitSettings(), transport=RESHARD, coverage="all", routes=())
        ranks = _Ranks.of(group, settings.timeout_s)
        channel = ranks.channel
        with telling_others(channel):
            source = None if src is None else TensorSource(_named(src), global_rank=ranks.own)
            target = None if dst is None else TensorTarget(_named(dst), global_rank=ranks.own)
            if source is not None and target is not None:
                check_apart(source.buffers(), target.buffers(), rank=channel.rank)
        session = RefitSession.prepare(
            channel,
            settings=settings if channel.rank == 0 else None,
            source=source,
            target=target,
            topology=None if topology is None else topology.renumbered(ranks.numbers),
            idle_ranks="allowed",
        )
        try:
            with telling_others(channel):
                if target is not None:
                    _check_everyone_gave(target, session.plan.job.target, ranks.numbers)
        except BaseException:
            session.close()
            raise
        return cls(session)

    def run(self) -> RefitReport | None:
        """Delivers what the sources hold now. The report, on rank 0; None on the others."""
        report = self._session.run(self._version)
        self._version += 1
        return report

    def close(self) -> None:
        """Ends the connections; a second call does nothing."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _named(tensors: Tensors) -> dict[str, Holding]:
    found = dict(tensors) if isinstance(tensors, Mapping) else {_ALONE: tensors}
    for name, holding in found.items():
        if not isinstance(holding, torch.Tensor | Local):
            raise LayoutError(str(name), -1, "a DTensor, a Local or a tensor", type(holding).__name__)
    return found


def _check_everyone_gave(target: TensorTarget, wanted: Manifest, numbers: Mapping[int, int]) -> None:
    """Proves that every rank of this rank's target layouts gave its part: what it kept back would stay stale."""
    given = {ranked.rank: {spec.name for spec in ranked.tensors} for ranked in wanted.ranks}
    for mesh, names in target.meshes().items():
        for rank in mesh:
            number = numbers.get(rank, -1)
            missing = names - given.get(number, set())
            if missing:
                where = "is not in the group" if number < 0 else "gave nothing for it"
                raise LayoutError(
                    min(missing),
                    number,
                    f"a dst on every rank of its mesh, {list(mesh)}",
                    f"rank {rank}, which {where}",
                )
