"""Ray, and the ranks that a part of the job has."""

import os

import ray


def init_ray(log_dir=None):
    """NeMo RL attaches to a cluster or starts one; its variables go to every worker."""
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": dict(os.environ)})


class RayVirtualCluster:
    def __init__(self, bundle_ct_per_node_list):
        self._bundles = bundle_ct_per_node_list

    def world_size(self):
        return sum(self._bundles)

    def get_master_address_and_port(self):
        return "127.0.0.1", 0
