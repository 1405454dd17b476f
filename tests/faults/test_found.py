"""What the campaign has found, each once by itself."""

import pytest
import torch

from refit_transport.errors import TransferError
from refit_transport.fabrics.gloo import GlooFabric
from refit_transport.fabrics.rendezvous import ControlChannel
from refit_transport.fabrics.secret import Secret


def test_a_store_that_is_gone_while_a_group_connects_is_one_clear_error():
    channel = ControlChannel.listen(host="127.0.0.1", port=0, world_size=1, timeout_s=2.0)
    store = channel.group_store("gloo")
    channel.close()
    with pytest.raises(TransferError, match=r"rank 0, phase connect"):
        GlooFabric(
            store,
            rank=0,
            world_size=2,
            address="127.0.0.1",
            timeout_s=2.0,
            memory=torch.empty(8, dtype=torch.uint8),
            secret=Secret.new(),
        )
