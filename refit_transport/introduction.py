"""What ranks tell each other before they plan: settings, roles, manifests and places."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields

from refit_transport.config.settings import RefitSettings
from refit_transport.errors import AgreementError, TransferError
from refit_transport.fabrics.deadline import Deadline
from refit_transport.fabrics.rendezvous import ControlChannel
from refit_transport.layout.manifest import Manifest, RankManifest
from refit_transport.layout.wire import ManifestReader, part_digests, shared_parts
from refit_transport.places import Place, place_here, topology_of
from refit_transport.scheduling.topology import Topology
from refit_transport.sources.base import Source
from refit_transport.staging import StagedTarget
from refit_transport.targets.base import Target
from refit_transport.transports.base import Endpoint, Job


def introduce(
    channel: ControlChannel,
    settings: RefitSettings | None,
    source: Source | None,
    target: Target | None,
    topology: Topology | None,
    node: str,
) -> tuple[Job, Endpoint]:
    """Publishes this rank's manifests and reads all others'; an idle rank reads none, so its job is an empty one."""
    rank, everyone = channel.rank, range(channel.world_size)
    if settings is not None:
        channel.publish("settings", settings.to_json())
    deadline = Deadline(settings.timeout_s if settings is not None else channel.timeout_s)
    agreed = RefitSettings.from_json(channel.collect("settings", (0,), deadline=deadline)[0])
    if settings is not None:
        _check_settings(settings, agreed, rank)
    channel.publish("rank", {"source": source is not None, "target": target is not None})
    ranks = channel.collect("rank", everyone, deadline=deadline)
    sources = [number for number in everyone if ranks[number]["source"]]
    targets = [number for number in everyone if ranks[number]["target"]]
    if not sources or not targets:
        raise TransferError(rank, -1, "prepare", "", "a refit needs at least one source and one target rank")
    own_source = own_target = None
    held, wanted = Manifest("source", (), ()), Manifest("target", (), ())
    is_idle = source is None and target is None and rank != 0
    if source is not None:
        own_source = source.manifest(rank)
        _publish_manifest(channel, own_source)
    if not is_idle:
        held = Manifest.of(_manifests(channel, "manifest/source", sources, deadline))
    if target is not None:
        if agreed.commit == "staged":
            target = StagedTarget(target)
        own_target = target.manifest(rank, held.tensors)
        _publish_manifest(channel, own_target)
    if not is_idle:
        wanted = Manifest.of(_manifests(channel, "manifest/target", targets, deadline))
    # Only now, because a target has its buffers after its manifest.
    devices = {tensor.device for side in (source, target) if side is not None for tensor in side.buffers().values()}
    channel.publish("place", asdict(place_here(devices, node=node)))
    places = [Place(**value) for value in channel.collect("place", everyone, deadline=deadline)]
    found = topology_of(dict(enumerate(places)), agreed) if topology is None else topology
    # Ranks without a side don't relay for others.
    job = Job(held, wanted, found.renumbered({number: number for number in {*sources, *targets}}), agreed)
    return job, Endpoint(rank, source, own_source, target, own_target)


def _check_settings(own: RefitSettings, agreed: RefitSettings, rank: int) -> None:
    """Refuses settings of this rank's that aren't rank 0's, which count; names the first that differs."""
    for field in fields(RefitSettings):
        mine, theirs = getattr(own, field.name), getattr(agreed, field.name)
        if mine != theirs:
            values = ((repr(theirs), (0,)), (repr(mine), (rank,)))
            raise AgreementError(f"the setting {field.name}", values)


def _publish_manifest(channel: ControlChannel, manifest: RankManifest) -> None:
    """Parts that other ranks have too are in the store once, before the manifest that names them."""
    value, parts = shared_parts(manifest)
    channel.share(parts)
    channel.publish(f"manifest/{manifest.role}", value)


def _manifests(channel: ControlChannel, topic: str, ranks: Sequence[int], deadline: Deadline) -> Iterator[RankManifest]:
    """What is equal is read and decoded once, and is one object."""
    values = channel.collect(topic, ranks, deadline=deadline)
    reader = ManifestReader(channel.shared(digest for value in values for digest in part_digests(value)))
    return map(reader.manifest, values)
