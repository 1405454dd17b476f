"""python docs/howto/debug_a_plan.py"""

from refit_transport import (
    BlockShard,
    Layout,
    Mesh,
    PlanError,
    Replicate,
    Shard,
    Topology,
    bound,
    build_schedule,
    manifest_from_layouts,
    plan_transfer,
    simulate,
)

train, serve = Mesh.of(tp=2), Mesh.of(first_rank=2, dp=2, tp=2)
source = manifest_from_layouts("source", {"w": Layout((8, 6), train, (Shard(0),))}, dtype="float32")
target = manifest_from_layouts("target", {"w": Layout((8, 6), serve, (Replicate(), Shard(1)))}, dtype="float32")

print("Who needs what, and who has it:")
plan = plan_transfer(source, target)
for row in range(len(plan)):
    holders, wanters = plan.rank_sets[plan.holders[row]], plan.rank_sets[plan.wanters[row]]
    print(f"  {plan.name(row)}{plan.box(row)}: held by {holders}, wanted by {wanters}")

print("What goes over the network and inside a domain, pass by pass:")
topology = Topology.of([range(2), range(2, 6)], nics="rank", nic_rate=1e9)
for disabled in (("local", "deduplicate", "balance", "stripe", "relay", "forward"), ()):
    schedule = build_schedule(plan, topology, bucket_bytes=1 << 10, disabled=disabled)
    schedule.check(plan)
    traffic = schedule.traffic()
    factor = simulate(schedule, topology).seconds / bound(plan, topology).seconds
    passes = "without passes" if disabled else "with all"
    print(f"  {passes}: {traffic.network} and {traffic.local} bytes, {factor:.1f} x bound")

print("What a hole looks like:")
half = manifest_from_layouts("source", {"w": Layout((8, 6), Mesh.of(tp=2), (Shard(0),))}, dtype="float32")
lonely = type(half)(half.role, half.tensors, half.ranks[:1])  # rank 1 was forgotten
try:
    plan_transfer(lonely, target)
except PlanError as error:
    print(f"  {error}")

print("Which rank a block-sharded tensor gives what:")
blocks = Layout((6, 4), Mesh.of(tp=2), (BlockShard(0, (4, 2)),))
for rank in (0, 1):
    print(f"  rank {rank}: {', '.join(str(piece.box) for piece in blocks.pieces(rank, 'qkv', buffer='qkv'))}")
