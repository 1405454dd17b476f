"""The driver's side of a policy: one actor for each training rank."""

from nemo_rl.distributed.worker_groups import RayWorkerGroup


class Policy:
    def __init__(self, cluster, config):
        self.cfg = config
        name = "MegatronPolicyWorker" if config["megatron_cfg"]["enabled"] else "DTensorPolicyWorker"
        self.worker_group = RayWorkerGroup(cluster, name, config)

    def init_collective(self, ip, port, world_size, *, train_world_size, nccl_peer="nemo"):
        return []

    def prepare_refit_info(self):
        return {}

    def shutdown(self):
        return self.worker_group.shutdown(cleanup_method="shutdown")
