"""A refit of plain tensors on both sides, four ranks each, over real sockets."""

from refit_transport.config.settings import RefitSettings
from refit_transport.fabrics.deadline import Deadline
from refit_transport.layout.layout import Layout, manifest_from_layouts
from refit_transport.layout.mesh import Mesh
from refit_transport.layout.placement import Replicate, Shard
from refit_transport.session import RefitSession
from refit_transport.testing.oracle import HeldSide, coordinate_tensor
from refit_transport.testing.sides import HeldSource, HeldTarget
from refit_transport.testing.threads import run_ranks

SHAPES = {
    "model.embed_tokens.weight": (30, 8),
    "model.layers.0.mlp.experts.up_proj.weight": (4, 12, 8),
    "model.layers.0.mlp.experts.down_proj.weight": (4, 8, 12),
    "model.layers.0.self_attn.q_proj.weight": (16, 8),
    "model.norm.weight": (8,),
}
EXPERTS = [name for name in SHAPES if ".experts." in name]
SOURCES, WORLD = 4, 8
DOMAINS = (tuple(range(4)), tuple(range(4, 8)))


def sides(dtypes=("float32", "bfloat16")):
    train, serve = Mesh.of(dp=2, tp=2), Mesh.of(first_rank=4, dp=2, tp=2)
    there = {n: Layout(s, train, (Replicate(), Shard(0))) for n, s in SHAPES.items()}
    here = {n: Layout(s, serve, (Replicate(), Shard(len(s) - 1))) for n, s in SHAPES.items()}
    return (
        manifest_from_layouts("source", there, dtype=dtypes[0]),
        manifest_from_layouts("target", here, dtype=dtypes[1]),
    )


def weights(version):
    return {name: coordinate_tensor(name, shape, "float32", version=version) for name, shape in SHAPES.items()}


class Cluster:
    """Both sides' buffers, and what every rank does with its session."""

    def __init__(self, settings, *, opaque=None, dtypes=("float32", "bfloat16")):
        self.settings = settings
        source, target = sides(dtypes)
        self.held, self.wanted = HeldSide.of(source, weights(1)), HeldSide.of(target)
        self.targets = {r: HeldTarget(b, opaque=opaque) for r, b in self.wanted.bindings.items()}

    def set_version(self, version):
        source = HeldSide.of(sides()[0], weights(version))
        for rank, binding in self.held.bindings.items():
            for name, buffer in binding.buffers.items():
                buffer.copy_(source.bindings[rank].buffers[name])

    def prepare(self, channel, **arguments):
        r = channel.rank
        return RefitSession.prepare(
            channel,
            settings=self.settings if r == 0 else None,
            source=HeldSource(self.held.bindings[r]) if r < SOURCES else None,
            target=self.targets.get(r),
            **arguments,
        )


def settings(**changes):
    small = {"coverage": "all", "domains": DOMAINS, "bucket_bytes": 64, "staging_bytes": 1024, "timeout_s": 20.0}
    return RefitSettings(**{**small, **changes})


def refit_versions(cluster, versions):
    def rank_main(channel):
        session = cluster.prepare(channel)
        reports = []
        for number, content in enumerate(versions, start=1):
            if channel.rank == 0:
                cluster.set_version(content)
            channel.agree(f"ready/{number}", "", deadline=Deadline(20.0))
            reports.append(session.run(number))
            channel.agree(f"checked/{number}", "", deadline=Deadline(20.0))
            if channel.rank == 0:
                assert cluster.wanted.differences(weights(content)) == []
            channel.agree(f"next/{number}", "", deadline=Deadline(20.0))
        session.close()
        return reports

    return run_ranks(WORLD, rank_main)[0]
