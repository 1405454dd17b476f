"""A Megatron training rank with its side of the refit."""

from __future__ import annotations

from typing import Any

from refit_transport.cluster.rl_training import RLPolicyWorker
from refit_transport.cluster.sending import SendingRank


class PolicyWorker(RLPolicyWorker, SendingRank):
    """A policy whose weights can be sent; refit ranks of the policy are its training ranks."""

    def __init__(self, *, node: str = "", **arguments: Any) -> None:
        super().__init__(**arguments)
        self.node = node
