"""What `refit-transport validate` and `transports` show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from refit_transport.config.schema import RefitConfig
from refit_transport.errors import ConfigError
from refit_transport.transports.registry import DEFAULT_TRANSPORT, known_transports


def show_valid(config: RefitConfig, title: str) -> None:
    """What the configuration asks for, as a table."""
    print_table(title, ("", ""), [(key, _text(value)) for key, value in _summary(config).items()])


def valid_json(config: RefitConfig, source: str) -> dict[str, Any]:
    """The same, with every key."""
    return {"ok": True, "source": source, "summary": _summary(config), "config": config.model_dump(mode="json")}


def invalid_json(error: ConfigError) -> dict[str, Any]:
    """Everything that is wrong with a configuration."""
    fields = ("path", "value", "reason", "remedy")
    violations = [{key: getattr(violation, key) for key in fields} for violation in error.violations]
    return {"ok": False, "source": error.source, "violations": violations}


def show_transports() -> None:
    """Every transport and what it does."""
    rows = [(entry.name, entry.description) for entry in known_transports().values()]
    print_table("Transports", ("name", "what it does"), rows)


def transports_json() -> dict[str, Any]:
    """The same, with where each comes from."""
    keys = ("name", "target", "description", "extra", "provider")
    listed = [{key: getattr(entry, key) for key in keys} for entry in known_transports().values()]
    return {"default": DEFAULT_TRANSPORT, "transports": listed}


def print_table(title: str, headers: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """A table for people on stdout; a table without header texts is a list of keys and values."""
    table = Table(title=title, title_justify="left", show_header=any(headers), box=None, padding=(0, 2, 0, 0))
    for header in headers:
        table.add_column(header, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(soft_wrap=False, markup=False, highlight=False).print(table)


def _summary(config: RefitConfig) -> dict[str, object]:
    megatron, vllm, settings = config.policy.megatron_cfg, config.policy.generation.vllm_cfg, config.settings
    return {
        "model": config.policy.model_name,
        "training ranks": config.training_ranks,
        "training layout": {
            "tensor": megatron.tensor_model_parallel_size,
            "pipeline": megatron.pipeline_model_parallel_size,
            "virtual pipeline": megatron.virtual_pipeline_model_parallel_size or 1,
            "context": megatron.context_parallel_size,
            "data": config.data_parallel_size,
            "expert": megatron.expert_model_parallel_size,
            "expert tensor": megatron.expert_tensor_ranks,
        },
        **({"critic ranks": config.critic_ranks} if config.critic_ranks else {}),
        "generation ranks": config.generation_ranks,
        "generation layout": {
            "tensor": vllm.tensor_parallel_size,
            "pipeline": vllm.pipeline_parallel_size,
            "expert": vllm.expert_parallel_size,
            "engines": config.engines,
        },
        "precision": {"training": config.policy.precision, "generation": config.vllm_precision},
        "transport": config.transport,
        "fabric": settings.fabric,
        "domains": [list(ranks) for ranks in domains] if (domains := config.domains()) is not None else "one per host",
        "bytes": {"staging": settings.staging_bytes, "bucket": settings.bucket_bytes},
        "verify": settings.verify,
    }


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {inner}" for key, inner in value.items())
    return str(value)
