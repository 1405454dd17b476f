"""Both sides of a refit of a named model, from layouts as people write them."""

from __future__ import annotations

from refit_transport.layout.layout import Layout, manifest_from_layouts
from refit_transport.layout.manifest import Manifest
from refit_transport.layout.mesh import Mesh
from refit_transport.layout.placement import Shard
from refit_transport.layout.presets.megatron import balanced, source_manifest
from refit_transport.layout.presets.model import LogicalModel
from refit_transport.layout.presets.sizes import FullySharded, TrainingSizes, serving_sizes, training_sizes
from refit_transport.layout.presets.vllm import target_manifest
from refit_transport.simulation.catalog import find_model


def preset_manifests(
    model: str,
    *,
    source: str,
    target: str,
    sources: int | None = None,
    targets: int | None = None,
    dtype: str = "bfloat16",
) -> tuple[Manifest, Manifest]:
    """The manifests of both sides, source ranks first, target ranks behind them.

    Args:
        model: a name of the catalog, or the path of a `config.json`.
        source: the training layout, such as "pp16 ep16" or "fsdp8".
        target: the vLLM layout, such as "tp32 dp8".
        sources: the number of training ranks; as few as the layout needs when None.
        targets: the number of generation ranks; as few as the layout needs when None.
        dtype: of every tensor on both sides.

    Raises:
        ConfigError: an unknown model, a layout that can't be read, or one that the model can't be cut by.

    >>> source, target = preset_manifests("Qwen3-4B", source="tp4 dp2", target="tp2 dp4")
    >>> len(source.ranks), target.ranks[0].rank, source.ranks[0].pieces is source.ranks[4].pieces
    (8, 8, True)
    """
    logical = find_model(model).model
    training = training_sizes(source, ranks=sources)
    engines = serving_sizes(target, ranks=targets)
    return (
        _source(logical, training, dtype),
        target_manifest(logical, engines, first_rank=training.ranks, dtype=dtype),
    )


def _source(model: LogicalModel, training: TrainingSizes, dtype: str) -> Manifest:
    if isinstance(training.parallelism, FullySharded):
        mesh = Mesh.of(fsdp=training.ranks)
        layouts = {tensor.name: Layout(tensor.shape, mesh, (Shard(0),)) for tensor in model.main}
        return manifest_from_layouts("source", layouts, dtype=dtype)
    cut = balanced(model, training.parallelism)
    return source_manifest(model, cut, world_size=training.ranks, dtype=dtype)
