"""The parts of GRPO around a refit."""

from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.weight_sync.factory import create_weight_synchronizer


def setup(master_config, tokenizer, dataset, val_dataset, processor=None, policy_factory=None):
    generation_config = master_config.policy["generation"]
    train_cluster, inference_cluster = master_config.clusters
    policy_generation = VllmGeneration(cluster=inference_cluster, config=generation_config)
    policy = (policy_factory or Policy)(cluster=train_cluster, config=master_config.policy)
    if generation_config.get("refit_transport") == "nccl_reshard":
        from nemo_rl.weight_sync.nccl_reshard_utils import check_nccl_reshard_refit_support

        check_nccl_reshard_refit_support(master_config)
        policy_generation.weight_synchronizer = create_weight_synchronizer(
            policy=policy,
            generation=policy_generation,
            generation_backend=generation_config["backend"],
            colocated=False,
            train_cluster=train_cluster,
            inference_cluster=inference_cluster,
        )
        policy_generation.weight_synchronizer.init_communicator()
    return policy, policy_generation


def refit_policy_generation(
    policy, policy_generation, colocated_inference, _refit_buffer_size_gb=None, timer=None, kv_scales=None
):
    synchronizer = getattr(policy_generation, "weight_synchronizer", None)
    if synchronizer is not None:
        return synchronizer.sync_weights(timer=timer, kv_scales=kv_scales) or {}
    raise RuntimeError("the double has no refit of its own")
