"""What `refit-transport verify` shows people."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from refit_transport.cluster.run import VerifiedJob
from refit_transport.report import sized
from refit_transport.verification import Comparison

_MOST_NAMES = 4


def render_verified(found: VerifiedJob) -> Iterator[str]:
    """A line for each comparison, then what could not be compared."""
    before, report, after = found.before, found.report, found.after
    yield f"trained, before the refit: {_differing(before)}"
    if not before.differing:
        yield "  training changed nothing, so equality below proves little: raise refit_run.steps_per_refit"
    arrived = sum(rank.verified for rank in report.ranks)
    yield f"refit: version {report.version}, {report.total_seconds:.3f} s, {arrived} boxes verified on arrival"
    yield f"after it: {_differing(after)}"
    yield from (f"  {difference.error(after.version)}" for difference in after.first)
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, reason in after.unverified.items():
        by_reason[reason].append(name)
    for reason, names in by_reason.items():
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        yield f"not compared while served, because {reason}: {', '.join(names[:_MOST_NAMES])}{more}"


def _differing(found: Comparison) -> str:
    if not found.differing:
        return f"all {found.boxes} boxes that the engines serve ({sized(found.nbytes)}) equal the trainer's"
    return f"{found.differing} of {found.boxes} boxes ({sized(found.nbytes)}) differ from the trainer's"
