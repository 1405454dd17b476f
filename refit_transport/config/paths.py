"""The dotted paths of the sections that the rules speak of."""

from __future__ import annotations

CLUSTER = "cluster"
MODEL = "policy.model_name"
MEGATRON = "policy.megatron_cfg"
GENERATION = "policy.generation"
COLOCATED = f"{GENERATION}.colocated"
RESOURCES = f"{COLOCATED}.resources"
VLLM = f"{GENERATION}.vllm_cfg"
REFIT_CFG = f"{GENERATION}.refit_cfg"
