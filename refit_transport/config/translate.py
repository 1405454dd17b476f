"""pydantic's errors as violations in this package's words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from refit_transport.config.keys import KeyPath, dotted, nearest, shown
from refit_transport.errors import Violation

# What stands in for a required key, so that the rules about the other keys can run: it is never used otherwise.
PLACEHOLDERS: Mapping[str, Callable[[], object]] = {
    "policy": dict,
    "policy.model_name": lambda: "missing",
    "policy.precision": lambda: "float32",
    "policy.megatron_cfg": dict,
    "policy.megatron_cfg.enabled": lambda: True,
    "policy.generation": dict,
    "policy.generation.colocated": dict,
    "policy.generation.colocated.enabled": lambda: False,
    "cluster": dict,
    "cluster.gpus_per_node": lambda: 1,
    "refit_run.tiny_model.kind": lambda: "dense",
    "data": dict,
    "data.train": dict,
    "data.train.dataset_name": lambda: "first_digit_echo",
    "data.validation.dataset_name": lambda: "first_digit_echo",
    "policy.max_total_sequence_length": lambda: 1,
}

_EXAMPLES: Mapping[str, str] = {
    "policy": "the section with model_name, precision, megatron_cfg and generation",
    "policy.model_name": "a checkpoint folder",
    "policy.precision": "float32 or bfloat16",
    "policy.megatron_cfg": "the section with enabled: true and the parallel sizes",
    "policy.megatron_cfg.enabled": "true",
    "policy.generation": "the section with backend, colocated and vllm_cfg",
    "policy.generation.colocated": "enabled: false, and resources for the generation side",
    "policy.generation.colocated.enabled": "false",
    "cluster": "gpus_per_node and num_nodes",
    "cluster.gpus_per_node": "ranks of one node, for training and generation together",
    "refit_run.tiny_model.kind": "dense, moe, llama or another kind",
    "data": "train, with a dataset_name",
    "data.train": "dataset_name, and kwargs where the task takes some",
    "data.train.dataset_name": "first_digit_echo, or 'package.module:Class'",
    "policy.max_total_sequence_length": "tokens of prompt and response together at most",
}


def translated(error: ValidationError) -> list[Violation]:
    """One violation for each value that a model refuses."""
    return [
        _violation(details["type"], details["loc"], details["input"], details.get("ctx", {}), details["msg"])
        for details in error.errors(include_url=False)
        if details["type"] != "default_factory_not_called" and not _only_refused_items_are_missing(details)
    ]


def _only_refused_items_are_missing(details: ErrorDetails) -> bool:
    """pydantic counts only the good items of a list; that others are bad is told already."""
    return details["type"] == "too_short" and len(details["input"]) >= details["ctx"]["min_length"]


def _violation(kind: str, where: KeyPath, value: object, limits: Mapping[str, Any], message: str) -> Violation:
    path = dotted(where)
    if kind == "missing":
        return Violation(path, "nothing", "must be set", f"set it to: {_EXAMPLES[path]}" if path in _EXAMPLES else "")
    got = shown(value)
    if kind in ("literal_error", "enum"):
        choices = tuple(part.strip("' ") for part in str(limits["expected"]).replace(" or ", ", ").split(", "))
        near = nearest(str(value), choices)
        return Violation(path, got, f"must be {' or '.join(choices)}", f"did you mean {near!r}?" if near else "")
    if kind in ("greater_than_equal", "greater_than", "less_than_equal", "less_than"):
        word = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
        (name, bound), *_ = limits.items()
        return Violation(path, got, f"must be {word[name]} {bound}", "")
    if kind == "too_short":
        least, items = limits["min_length"], "item" if limits["min_length"] == 1 else "items"
        return Violation(path, got, f"is too short: it must have at least {least} {items}", "")
    if kind == "value_error":
        return Violation(path, got, str(limits["error"]), "")
    return Violation(path, got, _REASONS.get(kind, message), _REMEDIES.get(kind, ""))


_REASONS: Mapping[str, str] = {
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "string_too_short": "must not be empty",
    "tuple_type": "must be a list",
    "model_type": "must be a section of keys",
    "model_attributes_type": "must be a section of keys",
    "byte_size": "must be a size in bytes",
    "byte_size_unit": "must be a size in bytes",
}
_REMEDIES: Mapping[str, str] = {
    "byte_size": "for example 67108864 or 64MiB",
    "byte_size_unit": "for example 67108864 or 64MiB",
    "string_type": "put it in quotes",
}
