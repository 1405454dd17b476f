"""The driver's side of vLLM engines: one actor with an engine for each data-parallel shard, the first of its ranks."""

import ray

from nemo_rl.distributed.worker_groups import RayWorkerGroup


class VllmGeneration:
    def __init__(self, cluster, config):
        self.cfg = config
        self.weight_synchronizer = None
        self.tp_size = config["vllm_cfg"]["tensor_parallel_size"]
        self.pp_size = config["vllm_cfg"]["pipeline_parallel_size"]
        self.model_parallel_size = self.tp_size * self.pp_size
        self.dp_size = cluster.world_size() // self.model_parallel_size
        is_async = config["vllm_cfg"]["async_engine"]
        name = "VllmAsyncGenerationWorker" if is_async else "VllmGenerationWorker"
        self.worker_group = RayWorkerGroup(
            cluster, name, config, env_vars=config["vllm_cfg"].get("env_vars", {}), tied=self.model_parallel_size
        )
        # NeMo RL hands nobody an engine that is still starting.
        ray.get([worker.__ray_ready__.remote() for worker in self.worker_group.workers])

    def init_collective(self, ip, port, world_size, *, train_world_size):
        return []

    def prepare_refit_info(self, state_dict_info):
        pass

    def generate(self, prompts, max_tokens):
        leaders = [self.worker_group.workers[index] for index in self.worker_group.dp_leader_worker_indices]
        return ray.get([leader.generate.remote(prompts, max_tokens) for leader in leaders])

    def shutdown(self):
        if self.weight_synchronizer is not None:
            self.weight_synchronizer.shutdown()
        return self.worker_group.shutdown(cleanup_method="shutdown")
