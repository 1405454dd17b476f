"""NeMo RL's keys beside ours: known, so that a misspelt key is found, and left as they are.

Collected from NeMo RL's typed configuration and example YAML files of August 2026. A key that is newer goes into one of
these lists.
"""

from __future__ import annotations

from collections.abc import Mapping


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


FOREIGN_KEYS: Mapping[str, frozenset[str]] = {
    "": _names(
        "async_rl checkpointing data data_plane distillation dpo env eval fault_tolerance generation grpo "
        "logger loss_fn metadata on_policy_distillation ppo quantize reward_penalties rm sft teacher "
        "teachers tokenizer value value_loss_fn"
    ),
    "policy": _names(
        "activation_checkpointing_enabled dequantize_base_checkpoint disable_modelopt_layer_spec draft "
        "dtensor_cfg dynamic_batching generation_batch_size hf_config_overrides is_vlm logprob_batch_size "
        "logprob_chunk_size make_sequence_length_divisible_by max_grad_norm max_total_sequence_length "
        "offload_optimizer_for_logprob optimizer pretrained_checkpoint quant_batch_size quant_calib_data "
        "quant_calib_size quant_cfg quant_sequence_length refit_buffer_size_gb reward_model_cfg "
        "router_replay scheduler sequence_packing tokenizer train_global_batch_size train_micro_batch_size"
    ),
    "policy.megatron_cfg": _names(
        "activation_checkpointing apply_rope_fusion attention_backend bias_activation_fusion "
        "calculate_per_token_loss checkpoint clear_memory_caches_before_refit converter_type cp_normalize "
        "cuda_graph_impl cuda_graph_modules cuda_graph_warmup_steps defer_fp32_logits "
        "distributed_data_parallel_config do_not_average_loss empty_unused_memory_level env_vars "
        "fine_grained_activation_offloading first_last_layers_bf16 force_reconvert_from_hf fp8_cfg "
        "freeze_config freeze_moe_router freeze_sound_encoder freeze_sound_projection freeze_vision_model "
        "freeze_vision_projection fused_linear_logprobs_chunk_size gradient_accumulation_fusion "
        "hybridep_num_ranks_per_nvlink_domain hybridep_use_mnnvl inference_grouped_gemm_backend "
        "inference_moe_token_dispatcher_type model_overrides moe_aux_loss_coeff moe_enable_deepep "
        "moe_flex_dispatcher_backend moe_grouped_gemm moe_hybridep_num_sms "
        "moe_pad_experts_for_cuda_graph_inference moe_per_layer_logging moe_permute_fusion "
        "moe_router_bias_update_rate moe_router_dtype moe_router_enable_expert_bias moe_router_group_topk "
        "moe_router_load_balancing_type moe_router_num_groups moe_shared_expert_overlap "
        "moe_token_dispatcher_type mtp_detach_heads mtp_loss_scaling_factor mtp_num_layers "
        "mtp_use_repeated_layer num_layers_at_end_in_bf16 num_layers_at_start_in_bf16 offload_modules peft "
        "pipeline_dtype radio_force_cpe_eval_mode recompute_granularity recompute_modules "
        "scale_loss_by_dp_cp_size scheduler track_moe_metrics train_iters transformer_impl "
        "use_fused_linear_logprobs use_fused_weighted_squared_relu use_gloo_process_groups"
    ),
    "policy.megatron_cfg.optimizer": _names(
        "adam_beta1 adam_beta2 adam_eps bf16 clip_grad fp16 min_lr optimizer optimizer_cpu_offload "
        "optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d params_dtype sgd_momentum "
        "use_distributed_optimizer use_precision_aware_optimizer weight_decay"
    ),
    "policy.generation": _names(
        "bad_words dynamo_cfg max_new_tokens mcore_generation_config model_name port_range_high "
        "port_range_low quant_cfg real_quant real_quant_export_cpu_offload real_quant_ignore sglang_cfg "
        "stop_strings stop_token_ids temperature top_k top_p trtllm_cfg trtllm_kwargs use_async_rollouts "
        "val_temperature val_top_k val_top_p vllm_kwargs"
    ),
    "policy.generation.vllm_cfg": _names(
        "cap_max_tokens_to_context distributed_executor_backend enable_expert_parallel enable_prefix_caching "
        "enable_return_routed_experts enable_thinking enable_vllm_metrics_logger enforce_monotonicity "
        "env_vars expose_http_server http_refit_api_key_env_var http_refit_server_port "
        "http_server_serving_chat_kwargs is_mx kv_cache_dtype limit_mm_per_prompt logprobs_mode max_num_seqs "
        "num_first_layers_in_bf16 num_last_layers_in_bf16 quantization_ignored_layer_kws "
        "reasoning_parser_plugin reset_encoder_cache_after_weight_update skip_tokenizer_init "
        "tool_parser_plugin use_deep_gemm use_tqdm video vllm_metrics_logger_interval zmq_refit_server_port"
    ),
    "policy.generation.refit_cfg": frozenset({"nixl", "sparse"}),
    "cluster": frozenset({"segment_size"}),
}
