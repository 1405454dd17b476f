"""Which jobs are struck, how often by what, and the part of it that CI does."""

from __future__ import annotations

from collections.abc import Iterator

from faults.fault import Fault, World, drawn

from refit_transport.bench.workload import Side

SEED = 20260

TWO, FOUR, EIGHT = (
    (Side(tp=2), Side(tp=1, dp=2)),
    (Side(tp=2, dp=2), Side(tp=2, dp=2)),
    (Side(tp=4, dp=2), Side(tp=2, dp=4)),
)

# How many blows of each kind a job gets. A stopped process costs a timeout each time, a killed one hardly anything.
MANY = {
    "kill": 48, "stop": 14, "wake": 4, "reset peers": 12, "reset store": 4, "slow": 3, "too slow": 2, "loader": 4,
    "flip": 12, "wall clock": 4, "monotonic clock": 4, "settings": 2, "schema": 2, "plan": 2, "repeated version": 2,
    "older version": 2, "another version": 3, "another model": 3, "port": 1, "two jobs": 2, "zombie": 2,
    "driver killed": 4, "driver stopped": 2,
}  # fmt: skip
SOME = {
    "kill": 14, "stop": 4, "wake": 1, "reset peers": 4, "reset store": 1, "slow": 1, "too slow": 1, "loader": 2,
    "flip": 4, "another model": 1, "another version": 1, "two jobs": 1, "zombie": 1, "driver killed": 1,
}  # fmt: skip
FEW = {
    "kill": 5, "stop": 1, "wake": 1, "reset peers": 2, "reset store": 1, "slow": 1, "too slow": 1, "loader": 1,
    "flip": 2, "wall clock": 1, "monotonic clock": 1, "settings": 1, "schema": 1, "plan": 1, "repeated version": 1,
    "older version": 1, "another version": 1, "another model": 1, "port": 1, "two jobs": 1, "zombie": 1,
    "driver killed": 1, "driver stopped": 1,
}  # fmt: skip


def whole() -> Iterator[tuple[World, list[Fault]]]:
    """The whole campaign: every job with the faults that it gets, in order."""
    for number, (world, kinds) in enumerate(
        (
            (World("2+2", *TWO, 2, "in_place"), MANY),
            (World("2+2", *TWO, 1, "staged"), MANY),
            (World("4+4", *FOUR, 2, "in_place"), MANY),
            (World("4+4", *FOUR, 2, "staged", shared_memory="off"), MANY),
            (World("8+8", *EIGHT, 4, "in_place"), SOME),
            (World("8+8", *EIGHT, 4, "staged"), SOME),
        )
    ):
        yield world, list(drawn(kinds, world.commit, SEED + number))


def short() -> Iterator[tuple[World, list[Fault]]]:
    """Some of every kind."""
    for number, world in enumerate((World("2+2", *TWO, 2, "in_place"), World("4+4", *FOUR, 2, "staged"))):
        yield world, list(drawn(FEW, world.commit, SEED + 100 + number))
