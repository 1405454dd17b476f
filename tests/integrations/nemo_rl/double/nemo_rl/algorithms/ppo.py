"""The parts of PPO around a refit."""

from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration
from nemo_rl.models.policy.lm_policy import Policy


def setup(master_config, tokenizer, dataset, val_dataset, processor=None):
    generation_config = master_config.policy["generation"]
    refit_transport = generation_config.get("refit_transport")
    if refit_transport is not None:
        raise ValueError(f"policy.generation.refit_transport={refit_transport!r} is not yet supported by PPO")
    train_cluster, inference_cluster = master_config.clusters
    policy_generation = VllmGeneration(cluster=inference_cluster, config=generation_config)
    policy = Policy(cluster=train_cluster, config=master_config.policy)
    ip, port = train_cluster.get_master_address_and_port()
    world_size = train_cluster.world_size() + inference_cluster.world_size()
    policy.init_collective(ip, port, world_size, train_world_size=train_cluster.world_size())
    policy_generation.init_collective(ip, port, world_size, train_world_size=train_cluster.world_size())
    policy_generation.prepare_refit_info(policy.prepare_refit_info())
    value_model = object()
    clusters = (train_cluster, inference_cluster)
    rest = (None,) * 7  # data loaders, losses, logger, checkpointer, state
    return policy, policy_generation, value_model, clusters, *rest, master_config
