"""A training rank's part in refits, whoever trains: it sends what its source holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from refit_transport.cluster.generation import RefitAddress
from refit_transport.config.settings import RefitSettings
from refit_transport.errors import TransferError
from refit_transport.fabrics.rendezvous import ControlChannel, Meeting
from refit_transport.report import RefitReport
from refit_transport.session import RefitSession
from refit_transport.sources.base import Source
from refit_transport.verification import Comparison


class SendingRank(ABC):
    """What `RefitSynchronizer` calls on a policy's ranks. Whoever derives from it sets `rank` and `node`."""

    rank: int
    node: str = ""
    _channel: ControlChannel | None = None
    _session: RefitSession | None = None
    _version = -1

    @abstractmethod
    def source(self) -> Source:
        """This rank's refit source. Not collective."""

    def open_refit(self, address: RefitAddress, incarnations: Mapping[int, int]) -> int:
        """Rank 0 only: listens for the refit's other ranks; returns the port (`address.port` 0: any free one).

        `incarnations`: of the workers that belong to the refit, by refit rank.
        """
        self._channel = ControlChannel.listen(
            host=address.host,
            port=address.port,
            world_size=address.world_size,
            timeout_s=address.timeout_s,
            secret=address.secret,
            incarnations=incarnations,
        )
        return self._channel.meeting.port

    def join_refit(self, address: RefitAddress, settings: RefitSettings) -> None:
        """Joins and plans the refit; collective over all its ranks. Rank 0's settings are those of all."""
        self.leave_refit()
        channel = self._channel
        if self.rank != 0 or channel is None:
            channel = ControlChannel.join(
                Meeting(address.host, address.port, address.secret),
                rank=self.rank,
                world_size=address.world_size,
                timeout_s=address.timeout_s,
                incarnation=address.incarnation,
            )
        self._session = RefitSession.prepare(
            channel,
            settings=settings if self.rank == 0 else None,
            source=self.source(),
            version=self._version,
            node=self.node,
        )

    def send(self, version: int) -> None:
        """Sends the present weights as `version`; collective over the whole refit."""
        session = self._joined("send")
        session.begin()
        session.transfer(version)

    def finish_refit(self) -> RefitReport | None:
        """Closes the refit; where it is staged, when every engine has taken over. Rank 0 returns the report."""
        session = self._joined("finish_refit")
        report = session.finish()
        self._version = session.version
        return report

    def compare(self) -> Comparison:
        """Compares what both sides hold now, between refits; collective over the whole refit."""
        return self._joined("compare").compare()

    def leave_refit(self) -> None:
        """Leaves the refit's group, if in one."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def _joined(self, call: str) -> RefitSession:
        if self._session is None:
            raise TransferError(self.rank, -1, call, "", f"{call} needs join_refit first")
        return self._session
