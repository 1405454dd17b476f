"""The gloo fabric on real sockets and shared memory, a thread per rank, under the suite that every fabric must pass."""

import pytest

from refit_transport.config.settings import RefitSettings
from refit_transport.connect import connect_fabric
from refit_transport.errors import TransferError
from refit_transport.fabrics.rendezvous import ControlChannel
from refit_transport.testing.contracts import FabricContract


class TestOverTcp(FabricContract):
    shared_memory = "off"

    def connect(self, channel, topology, *, slot_bytes, deadline):
        settings = RefitSettings(shared_memory=self.shared_memory, timeout_s=20.0)
        return connect_fabric(channel, topology, settings, slot_bytes=slot_bytes, deadline=deadline)


class TestThroughSharedMemory(TestOverTcp):
    shared_memory = "auto"


def test_a_taken_port_is_one_clear_error():
    holder = ControlChannel.listen(host="127.0.0.1", port=0, world_size=1, timeout_s=5.0)
    with pytest.raises(TransferError, match=r"can't listen on 127.0.0.1:\d+:"):
        ControlChannel.listen(host="127.0.0.1", port=holder.meeting.port, world_size=1, timeout_s=5.0)
