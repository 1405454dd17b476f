"""Actors of one kind, each in an environment of its own kind; of tied ones the first leads."""

import os
from importlib import import_module

import ray

WORKERS = os.environ.get("NEMO_RL_DOUBLE_WORKERS", "nemo_rl.workers")


class RayWorkerGroup:
    def __init__(self, cluster, name, config, *, env_vars=None, tied=1):
        worker_class = ray.remote(getattr(import_module(WORKERS), name))
        world_size = cluster.world_size()
        self._leaders = list(range(0, world_size, tied))
        self._workers = []
        for rank in range(world_size):
            variables = {**os.environ, **(env_vars or {}), "RANK": str(rank), "WORLD_SIZE": str(world_size)}
            options = worker_class.options(num_cpus=0.1, runtime_env={"env_vars": variables})
            self._workers.append(options.remote(config, rank, world_size, is_model_owner=rank in self._leaders))

    @property
    def workers(self):
        return self._workers

    @property
    def dp_leader_worker_indices(self):
        return self._leaders

    @property
    def dp_size(self):
        return len(self._leaders)

    def get_dp_leader_worker_idx(self, dp_shard_idx):
        return self._leaders[dp_shard_idx]

    def run_all_workers_single_data(self, method_name, *args, **kwargs):
        return [getattr(worker, method_name).remote(*args, **kwargs) for worker in self._workers]

    def shutdown(self, cleanup_method=None):
        if cleanup_method is not None:
            ray.get(self.run_all_workers_single_data(cleanup_method))
        for worker in self._workers:
            ray.kill(worker)
        return True
