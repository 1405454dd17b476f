"""See the package."""

from nemo_rl.weight_sync.factory import create_weight_synchronizer
from nemo_rl.weight_sync.interfaces import WeightSynchronizer

__all__ = ["WeightSynchronizer", "create_weight_synchronizer"]
