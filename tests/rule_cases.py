"""One wrong setting each, and what must be said of it: key, reason and remedy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

M = "policy.megatron_cfg"
G = "policy.generation"
V = f"{G}.vllm_cfg"
R = f"{G}.colocated.resources"
N = f"{G}.refit_cfg.nccl_reshard"
REMOVED = "<removed>"

DENSE = {"architectures": ["Qwen3ForCausalLM"]}
DENSE_RANKS = {f"{M}.expert_model_parallel_size": 1}


def case(name: str, changes: Mapping[str, Any], path: str, reason: str, remedy: str = "") -> Any:
    return pytest.param(changes, path, reason, remedy, id=name)


CASES = [
    # Required keys.
    case("no model", {"policy.model_name": REMOVED}, "policy.model_name", "must be set", "checkpoint folder"),
    case("no precision", {"policy.precision": REMOVED}, "policy.precision", "must be set", "float32 or bfloat16"),
    case("no cluster", {"cluster": REMOVED}, "cluster", "must be set", "gpus_per_node"),
    case("no ranks", {"cluster.gpus_per_node": REMOVED}, "cluster.gpus_per_node", "must be set", "ranks of one node"),
    case("no megatron", {M: REMOVED}, M, "must be set", "enabled: true"),
    case("null megatron", {M: None}, f"{M}.enabled", "must be set", "true"),
    case("no generation", {G: REMOVED}, G, "must be set", "backend"),
    case("no colocated", {f"{G}.colocated": REMOVED}, f"{G}.colocated", "must be set", "enabled: false"),
    # One key alone.
    case("precision", {"policy.precision": "float16"}, "policy.precision", "float32 or bfloat16", "'bfloat16'"),
    case("tp zero", {f"{M}.tensor_model_parallel_size": 0}, f"{M}.tensor_model_parallel_size", "at least 1"),
    case("tp flag", {f"{M}.tensor_model_parallel_size": True}, f"{M}.tensor_model_parallel_size", "not true or false"),
    case("tp half", {f"{M}.tensor_model_parallel_size": 1.5}, f"{M}.tensor_model_parallel_size", "whole number"),
    case("tp text", {f"{M}.tensor_model_parallel_size": "two"}, f"{M}.tensor_model_parallel_size", "whole number"),
    case("flag text", {f"{M}.sequence_parallel": "maybe"}, f"{M}.sequence_parallel", "true or false"),
    case("section text", {f"{G}.vllm_cfg": "fast"}, f"{G}.vllm_cfg", "section of keys"),
    case("number as model", {"policy.model_name": 3}, "policy.model_name", "must be text", "quotes"),
    case("lr", {f"{M}.optimizer.lr": 0}, f"{M}.optimizer.lr", "more than 0"),
    case("lr nan", {f"{M}.optimizer.lr": float("nan")}, f"{M}.optimizer.lr", "finite number"),
    case("memory", {f"{V}.gpu_memory_utilization": 1.5}, f"{V}.gpu_memory_utilization", "at most 1"),
    case("load format", {f"{V}.load_format": "dumy"}, f"{V}.load_format", "auto or dummy", "'dummy'"),
    case("fabric", {f"{N}.fabric": "glo"}, f"{N}.fabric", "auto or gloo", "'gloo'"),
    case("coverage", {f"{N}.coverage": "most"}, f"{N}.coverage", "ffn or all"),
    case("verify", {f"{N}.verify": "fully"}, f"{N}.verify", "off or sample or full", "'full'"),
    case("timeout", {f"{N}.timeout_s": 0}, f"{N}.timeout_s", "more than 0"),
    case("staging text", {f"{N}.staging_bytes": "lots"}, f"{N}.staging_bytes", "size in bytes", "64MiB"),
    case("staging unit", {f"{N}.staging_bytes": "3 parsecs"}, f"{N}.staging_bytes", "size in bytes", "64MiB"),
    case("staging small", {f"{N}.staging_bytes": 3}, f"{N}.staging_bytes", "at least 1024"),
    case("domains word", {f"{N}.topology.domains": "host"}, f"{N}.topology.domains", "auto, single, per_role"),
    case("domains flat", {f"{N}.topology.domains": [0, 1]}, f"{N}.topology.domains", "lists of refit ranks"),
    case(
        "route",
        {f"{N}.routes": [{"pattern": "re:(", "transport": "nccl_reshard"}]},
        f"{N}.routes[0].pattern",
        "regular",
    ),
    case(
        "route transport",
        {f"{N}.routes": [{"pattern": "*", "transport": "nixl"}]},
        f"{N}.routes[0].transport",
        "nccl_reshard or gather_broadcast",
    ),
    case("route key", {f"{N}.routes": [{"pattern": "*"}]}, f"{N}.routes[0].transport", "must be set"),
    case(
        "port",
        {"cluster.master_port_range_low": 0, "cluster.master_port_range_high": 9},
        "cluster.master_port_range_low",
        "at least 1",
    ),
    case("prompt short", {"refit_run.prompts": [[1, 2], [1]]}, "refit_run.prompts[1]", "at least 2 items"),
    case("no prompts", {"refit_run.prompts": []}, "refit_run.prompts", "at least 1 item"),
    case("negative token", {"refit_run.prompts": [[1, -2]]}, "refit_run.prompts[0][1]", "at least 0"),
    case("nothing to predict", {"refit_run.sequence_length": 1}, "refit_run.sequence_length", "at least 2"),
    case("report without a name", {"refit_run.report": ""}, "refit_run.report", "not be empty"),
    # What this version does not run.
    case("colocated", {f"{G}.colocated.enabled": True}, f"{G}.colocated.enabled", "must be false", "resources"),
    case("backend", {f"{G}.backend": "sglang"}, f"{G}.backend", "must be vllm", "set it to vllm"),
    case("dtensor", {f"{M}.enabled": False}, f"{M}.enabled", "Megatron is the only training backend", "set it to true"),
    case(
        "async stages",
        {f"{V}.async_engine": True, f"{V}.tensor_parallel_size": 1, f"{V}.pipeline_parallel_size": 2},
        f"{V}.pipeline_parallel_size",
        "not available yet",
        "async_engine to false",
    ),
    case(
        "transport", {f"{G}.refit_transport": "nccl_rshard"}, f"{G}.refit_transport", "unknown", "mean 'nccl_reshard'"
    ),
    case(
        "context",
        {f"{M}.context_parallel_size": 2},
        f"{M}.context_parallel_size",
        "context parallelism is not available yet",
        "set it to 1",
    ),
    case(
        "context that doesn't divide",
        {f"{M}.context_parallel_size": 4},
        f"{M}.context_parallel_size",
        "not available yet",
        "set it to 1",
    ),
    case(
        "vllm stages",
        {f"{V}.pipeline_parallel_size": 3},
        f"{V}.pipeline_parallel_size",
        "times tensor_parallel_size = 2 must divide the 4 generation ranks",
        "resources",
    ),
    case(
        "more vllm stages than layers",
        {f"{V}.pipeline_parallel_size": 5, f"{R}.gpus_per_node": 10, "cluster.gpus_per_node": 14},
        f"{V}.pipeline_parallel_size",
        "at most 4, the model's layers",
        "lower it",
    ),
    case(
        "vllm ep of two engines",
        {f"{V}.expert_parallel_size": 4},
        f"{V}.expert_parallel_size",
        "several engines together are not available yet",
        "set it to 2",
    ),
    case(
        "vllm ep odd",
        {f"{V}.expert_parallel_size": 3},
        f"{V}.expert_parallel_size",
        "must be 1 or tensor_parallel_size = 2",
        "set it to 2",
    ),
    case(
        "vllm ep large",
        {f"{V}.expert_parallel_size": 8},
        f"{V}.expert_parallel_size",
        "not available yet",
        "set it to 2",
    ),
    case("fp8", {f"{V}.precision": "fp8"}, f"{V}.precision", "not available yet", "${policy.precision}"),
    # The world outside.
    case("no folder", {"policy.model_name": "no/such/folder"}, "policy.model_name", "is no folder", "download"),
    # Buffers, topology, ports, the run.
    case(
        "bucket", {f"{N}.bucket_bytes": "32MiB"}, f"{N}.bucket_bytes", "a quarter of staging_bytes = 16777216", "lower"
    ),
    case(
        "chunk",
        {f"{G}.refit_cfg.gather_broadcast": {"bucket_bytes": "2MiB", "staging_bytes": "1MiB"}},
        f"{G}.refit_cfg.gather_broadcast.bucket_bytes",
        "a quarter of staging_bytes = 1048576",
        "lower",
    ),
    case(
        "twice",
        {f"{N}.topology.domains": [[0, 1, 2, 3, 4], [4, 5, 6, 7]]},
        f"{N}.topology.domains",
        "repeats 4",
        "0 to 3 train",
    ),
    case(
        "missing rank",
        {f"{N}.topology.domains": [[0, 1, 2, 3], [5, 6]]},
        f"{N}.topology.domains",
        "misses 4, 7",
        "4 to 7 gen",
    ),
    case(
        "no such rank",
        {f"{N}.topology.domains": [[0, 1, 2, 3], [4, 5, 6, 7, 8]]},
        f"{N}.topology.domains",
        "don't exist: 8",
        "0 to 3",
    ),
    case(
        "empty domain", {f"{N}.topology.domains": [[*range(8)], []]}, f"{N}.topology.domains", "empty domain", "remove"
    ),
    case("nics", {f"{N}.topology.nics": "node"}, f"{N}.topology.nics", "auto or domain or rank"),
    case("rate", {f"{N}.topology.nic_rates": "fast"}, f"{N}.topology.nic_rates[0]", "size in bytes", "64MiB"),
    case("no rate", {f"{N}.topology.nic_rates": [0]}, f"{N}.topology.nic_rates[0]", "at least 1024"),
    case(
        "rates of unknown domains",
        {f"{N}.topology.nic_rates": ["50GB", "25GB"]},
        f"{N}.topology.nic_rates",
        "shows only at the run",
        "list topology.domains",
    ),
    case(
        "too many rates",
        {f"{N}.topology": {"domains": "per_role", "nic_rates": ["1GB", "2GB", "3GB"]}},
        f"{N}.topology.nic_rates",
        "each of 2 domains",
        "as many rates",
    ),
    case(
        "half range", {"cluster.master_port_range_low": 4000}, "cluster.master_port_range_high", "must be set", "both"
    ),
    case(
        "ports",
        {"cluster.master_port_range_low": 9, "cluster.master_port_range_high": 8},
        "cluster.master_port_range_low",
        "at most",
        "swap",
    ),
    case("prompt token", {"refit_run.prompts": [[1, 256]]}, "refit_run.prompts[0]", "vocabulary of 256", "0 to 255"),
    case("prompt long", {"refit_run.prompts": [[1] * 64]}, "refit_run.prompts[0]", "shorter than", "shorten"),
    case("sequence", {"refit_run.sequence_length": 33}, "refit_run.sequence_length", "multiple of 2", "multiple of 2"),
    case(
        "tiny kv",
        {"refit_run.tiny_model": {"kind": "moe", "num_attention_heads": 6, "num_key_value_heads": 4}},
        "refit_run.tiny_model.num_key_value_heads",
        "divide",
        "divisor",
    ),
    case(
        "tiny topk",
        {"refit_run.tiny_model": {"kind": "moe", "num_experts_per_tok": 9}},
        "refit_run.tiny_model.num_experts_per_tok",
        "at most",
        "lower",
    ),
    case("tiny kind", {"refit_run.tiny_model": {"seed": 1}}, "refit_run.tiny_model.kind", "must be set", "dense, moe"),
    case(
        "tiny experts",
        {"refit_run.tiny_model": {"kind": "llama", "num_experts": 4}, **DENSE_RANKS},
        "refit_run.tiny_model.num_experts",
        "no key of the kind llama",
        "remove",
    ),
    case(
        "tiny key",
        {"refit_run.tiny_model": {"kind": "gpt_oss", "config": {"sliding_windows": 4}}},
        "refit_run.tiny_model.config.sliding_windows",
        "no key of the kind gpt_oss",
        "'sliding_window'",
    ),
    case(
        "tiny layers",
        {"refit_run.tiny_model": {"kind": "nemotron_h", "num_hidden_layers": 3}, **DENSE_RANKS},
        "refit_run.tiny_model.num_hidden_layers",
        "the 4 layers of hybrid_override_pattern 'M-M*'",
        "remove",
    ),
    # Ranks.
    case("no resources", {R: REMOVED}, f"{R}.gpus_per_node", "must be set", "generation ranks"),
    case(
        "all generate",
        {f"{R}.gpus_per_node": 8},
        f"{R}.gpus_per_node",
        "less than cluster.gpus_per_node = 8",
        "above 8",
    ),
    case("nodes", {f"{R}.num_nodes": 2}, f"{R}.num_nodes", "null or 1", "remove"),
    case(
        "nodes unset",
        {"cluster.num_nodes": 2, f"{R}.gpus_per_node": 8},
        f"{R}.num_nodes",
        "must be set",
        "generation nodes",
    ),
    case(
        "part of nodes",
        {"cluster.num_nodes": 2, f"{R}.num_nodes": 1},
        f"{R}.gpus_per_node",
        "must be cluster.gpus_per_node = 8",
        "8",
    ),
    case(
        "all nodes",
        {"cluster.num_nodes": 2, f"{R}.num_nodes": 2, f"{R}.gpus_per_node": 8},
        f"{R}.num_nodes",
        "less than cluster.num_nodes",
        "lower",
    ),
    case("training ranks", {f"{M}.tensor_model_parallel_size": 8}, M, "must divide the 4 training ranks", "change"),
    case(
        "training ranks of stages",
        {f"{M}.pipeline_model_parallel_size": 4, f"{M}.expert_model_parallel_size": 1},
        M,
        "must divide the 4 training ranks",
        "change",
    ),
    case(
        "expert ranks of stages",
        {f"{M}.pipeline_model_parallel_size": 2, f"{M}.expert_model_parallel_size": 4},
        f"{M}.expert_model_parallel_size",
        "divide the 4 training ranks",
        "change",
    ),
    case(
        "expert ranks",
        {f"{M}.expert_model_parallel_size": 8},
        f"{M}.expert_model_parallel_size",
        "divide the 4 training ranks",
        "change",
    ),
    case(
        "default etp",
        {f"{M}.expert_model_parallel_size": 4, f"{M}.expert_tensor_parallel_size": None},
        f"{M}.expert_model_parallel_size",
        "divide the 4",
        "change",
    ),
    case(
        "generation ranks",
        {f"{V}.tensor_parallel_size": 8},
        f"{V}.tensor_parallel_size",
        "must divide the 4 generation ranks",
        "resources",
    ),
    # Sizes of the model.
    case(
        "sp alone",
        {f"{M}.tensor_model_parallel_size": 1},
        f"{M}.sequence_parallel",
        "needs a tensor parallel size above 1",
        "false",
    ),
    case("moe without sp", {f"{M}.sequence_parallel": False}, f"{M}.sequence_parallel", "must be true", "true"),
    case(
        "etp",
        {f"{M}.expert_tensor_parallel_size": 5, "cluster.gpus_per_node": 14},
        f"{M}.expert_tensor_parallel_size",
        "experts' width 96",
        "divisor",
    ),
    case(
        "layers",
        {f"{M}.pipeline_model_parallel_size": 3, "cluster.gpus_per_node": 10},
        f"{M}.pipeline_model_parallel_size",
        "4 layers",
        "divisor",
    ),
    case(
        "vpp alone",
        {f"{M}.virtual_pipeline_model_parallel_size": 2},
        f"{M}.virtual_pipeline_model_parallel_size",
        "needs a pipeline parallel size above 1",
        "remove",
    ),
    case(
        "first alone",
        {f"{M}.num_layers_in_first_pipeline_stage": 2},
        f"{M}.num_layers_in_first_pipeline_stage",
        "needs a pipeline parallel size above 1",
        "remove",
    ),
    case(
        "vpp",
        {f"{M}.pipeline_model_parallel_size": 2, f"{M}.virtual_pipeline_model_parallel_size": 3},
        f"{M}.virtual_pipeline_model_parallel_size",
        "2 layers of a stage",
        "divisor",
    ),
    case(
        "chunks of a hybrid",
        {
            "refit_run.tiny_model": {"kind": "nemotron_h", "num_key_value_heads": 2},
            f"{M}.pipeline_model_parallel_size": 2,
            f"{M}.virtual_pipeline_model_parallel_size": 2,
            **DENSE_RANKS,
        },
        f"{M}.virtual_pipeline_model_parallel_size",
        "one chunk of a hybrid model",
        "set it to 1",
    ),
    case(
        "experts with biases",
        {
            "refit_run.tiny_model": {"kind": "gpt_oss"},
            f"{M}.expert_tensor_parallel_size": 2,
        },
        f"{M}.expert_tensor_parallel_size",
        "experts that have biases",
        "set it to 1",
    ),
    case(
        "first and last",
        {
            f"{M}.pipeline_model_parallel_size": 2,
            f"{M}.num_layers_in_first_pipeline_stage": 1,
            f"{M}.num_layers_in_last_pipeline_stage": 2,
        },
        f"{M}.pipeline_model_parallel_size",
        "layers without a stage",
        "num_layers_in_first",
    ),
    case(
        "first too large",
        {f"{M}.pipeline_model_parallel_size": 2, f"{M}.num_layers_in_first_pipeline_stage": 4},
        f"{M}.pipeline_model_parallel_size",
        "stages without layers",
        "num_layers_in_first",
    ),
]
