"""What the algorithms drive a refit by."""

from abc import ABC, abstractmethod


class WeightSynchronizer(ABC):
    @abstractmethod
    def sync_weights(self, *, timer=None, kv_scales=None):
        """Delivers the weights; RuntimeError when that fails."""

    @property
    @abstractmethod
    def is_stale(self):
        """True until a sync is complete."""

    @abstractmethod
    def init_communicator(self):
        """Once, after both sides' workers are up."""

    @abstractmethod
    def shutdown(self):
        """By the generation's own shutdown."""
