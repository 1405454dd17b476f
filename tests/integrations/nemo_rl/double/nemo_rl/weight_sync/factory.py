"""Chooses a synchronizer."""

from nemo_rl.weight_sync.interfaces import WeightSynchronizer


class OwnSynchronizer(WeightSynchronizer):
    """Stands for all of NeMo RL's own."""

    def __init__(self, policy, generation):
        self.policy, self.generation = policy, generation

    def sync_weights(self, *, timer=None, kv_scales=None):
        return None

    @property
    def is_stale(self):
        return True

    def init_communicator(self):
        pass

    def shutdown(self):
        pass


def create_weight_synchronizer(
    policy,
    generation,
    generation_backend,
    colocated,
    train_cluster=None,
    inference_cluster=None,
    refit_buffer_size_gb=None,
):
    if generation_backend not in ("vllm", "sglang", "megatron", "dynamo"):
        raise ValueError(f"Unknown generation backend {generation_backend!r}")
    if not colocated and (train_cluster is None or inference_cluster is None):
        raise ValueError("train_cluster and inference_cluster are required")
    return OwnSynchronizer(policy, generation)
