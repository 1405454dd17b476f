"""What NeMo RL's own nccl_reshard refuses."""


def check_nccl_reshard_refit_support(master_config):
    policy = master_config.policy
    generation = policy.get("generation") or {}
    megatron, vllm = policy.get("megatron_cfg") or {}, generation.get("vllm_cfg") or {}
    violations = [
        what
        for what, is_wrong in {
            "colocated.enabled must be False": generation.get("colocated", {}).get("enabled"),
            "backend must be 'vllm'": generation.get("backend") != "vllm",
            "megatron_cfg.enabled must be True": not megatron.get("enabled"),
            "dtensor_cfg.enabled must be False": (policy.get("dtensor_cfg") or {}).get("enabled"),
            "expert_tensor_parallel_size": megatron.get("expert_tensor_parallel_size", 1) not in (1, None),
            "pipeline_model_parallel_layout": megatron.get("pipeline_model_parallel_layout") is not None,
            "virtual_pipeline_model_parallel_size": megatron.get("virtual_pipeline_model_parallel_size")
            not in (None, 1),
            "account_for_embedding_in_pipeline_split": megatron.get("account_for_embedding_in_pipeline_split"),
            "account_for_loss_in_pipeline_split": megatron.get("account_for_loss_in_pipeline_split"),
            "precision": vllm.get("precision") not in (None, "auto", "bf16", "bfloat16", "fp8"),
            "pipeline_parallel_size must be 1": vllm.get("pipeline_parallel_size", 1) != 1,
        }.items()
        if is_wrong
    ]
    if violations:
        raise ValueError("nccl_reshard_refit cannot be enabled: " + "; ".join(violations))
