"""A session's rendezvous, of which rank 0 is here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from store_sessions import HOST, SECRET, SIZE, SOON_S

from refit_transport.fabrics.rendezvous import ControlChannel


@pytest.fixture
def session() -> Iterator[ControlChannel]:
    channel = ControlChannel.listen(
        host=HOST, port=0, world_size=SIZE, timeout_s=SOON_S, secret=SECRET, incarnations={1: 4}
    )
    yield channel
    channel.close()
