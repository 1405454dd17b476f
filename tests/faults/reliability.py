"""Runs the campaign and writes docs/reliability.md from its record.

python -m faults.reliability run RECORD.json [PART/PARTS [SECONDS]]    strikes, at most so long, what it doesn't have
python -m faults.reliability render RECORD.json DOC.md                 the page
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from faults.campaign import Campaign, Injection, strike_all
from faults.case_tests import ALL
from faults.fault import MODEL, World
from faults.network import strike_systems
from faults.worlds import MANY, TWO, whole

SOAK = 500

HEAD = """# Reliability

A refit is delivered to every target or to none. This page is what was done to it to find out, and what came of it.
It is generated (`make faults`, as root), and a test compares it with the record.

## What is promised

- Nothing moves before all ranks have agreed on version, plan and settings, and nobody returns from `transfer` before
  every target has everything, verified if the settings ask for it.
- Every survivor of a fault raises within `timeout_s` and 5 s. A process that ends is noticed at once, since its
  connection closes; one that hangs, after `timeout_s`.
- A target in whose weights something may have been written is fenced until a complete refit. `commit: staged` writes
  beside them: after an error of `transfer` the old version is served, whole.
- Who is cut off after its vote can't know what the others decided: it stays fenced, and they may have committed.
- After a fault, the ranks that are left and those that replace the others open a new session, whose first refit is
  exact.

Errors name rank, phase, round and the first tensor of the payload, as far as the rank that finds the fault can know
them, and the host of the rank that reports it or has ended. Whoever waits in vain may wait for a rank that itself waits
for one that hangs: so before a rank is told who is at fault, rank 0's store hears the others for half a second, and the
error adds of which ranks, on which hosts, nothing is heard.

## Fault campaign

Jobs of 2 + 2, 4 + 4 and 8 + 8 processes refit {tensors} tensors in payloads of 8 KiB at most with `timeout_s: 2` and
`verify: full`, in place and staged, through shared memory and over TCP. A rank is struck at an exact point: while a
session is opened, before and after the agreement, in four rounds, while it verifies, loads or takes over, before and
after each vote. After every blow: each survivor said what it had to, in time; each target serves one whole version or
is fenced, and all that serve serve the same (every element is compared); a new session's refit is exact; no process,
socket, segment or namespace is left. When a job has had all its blows, no process that lives holds more descriptors or
threads than after its first session. Seconds are from the blow to the last survivor's error.

"""

KINDS = {
    "kill": "SIGKILL", "stop": "SIGSTOP", "wake": "SIGSTOP, then SIGCONT when the others have given up",
    "reset peers": "its connections to the other ranks are reset", "reset store": "its connection to rank 0 is reset",
    "slow": "20 times slower, within the timeout", "too slow": "slower than the timeout", "loader": "its loader raises",
    "flip": "one bit flips on the way", "wall clock": "the wall clock jumps by an hour",
    "monotonic clock": "the monotonic clock jumps by an hour", "settings": "other settings",
    "schema": "another schema of messages", "plan": "another plan", "repeated version": "a version again",
    "older version": "an older version", "another version": "one rank means another version",
    "another model": "one rank has another model", "port": "the port is taken", "two jobs": "another job beside it",
    "zombie": "an old incarnation comes back", "driver killed": "SIGKILL of the process that drives the ranks",
    "driver stopped": "SIGSTOP of it", "cut": "the network between two domains is cut, and heals",
    "full disk": "no space for temporary files", "full memory": "/dev/shm full, temporary files there",
}  # fmt: skip


def tables(record: Mapping[str, Any]) -> str:
    """The record as Markdown."""
    injections = [Injection(**each) for each in record["injections"]]
    head = ("fault", "struck", "noticed or harmless", "named by all", "recovered", "median s", "most s")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for kind, words in KINDS.items():
        found = [each for each in injections if each.kind == kind]
        if found:
            lines.append(_row(words, found))
    lines.append(_row("**all**", injections))
    worlds = sorted({(each.world, each.commit) for each in injections})
    struck = (f"{w} {c}: {sum((e.world, e.commit) == (w, c) for e in injections)}" for w, c in worlds)
    again, soak = sum(each.sessions > 1 for each in injections), record["soak"]
    more = f"{soak['descriptors']} descriptors, {soak['threads']} threads, {soak['values']} values in the store and "
    lines += [
        "",
        f"Blows by job: {', '.join(struck)}.",
        f"Recoveries whose first session didn't come about within the timeout, and took another: {again}.",
        "",
        f"{soak['refits']} refits in a row: {more}{soak['memory'] / 2**20:.1f} MiB more at the end than after the",
        "first tenth, of the rank that grew most.",
    ]
    return "\n".join(lines) + "\n"


def _row(words: str, found: Sequence[Injection]) -> str:
    seconds = [each.seconds for each in found]
    detected, recovered = sum(each.detected for each in found), sum(each.recovered for each in found)
    # Where a rank was struck and anybody said anything.
    blamed = [
        each for each in found if each.said and each.victim not in ("nobody", "a domain") and each.kind != "zombie"
    ]
    named = f"{sum(each.named for each in blamed)} of {len(blamed)}" if blamed else "-"
    figures = (len(found), detected, named, recovered, f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}")
    return f"| {words} | {' | '.join(map(str, figures))} |"


def cases() -> str:
    """The cases and their tests as Markdown."""
    lines = ["| case | what happens | right result | tests |", "|---|---|---|---|"]
    for case in ALL:
        tests = ", ".join(f"`{test.removeprefix('tests/')}`" for test in case.tests)
        lines.append(f"| F{case.number} | {case.what} | {case.right} | {tests} |")
    return "\n".join(lines) + "\n"


def page(record: Mapping[str, Any]) -> str:
    """The whole page."""
    text = HEAD.replace("{tensors}", str(len(MODEL.weights))) + tables(record)
    return f"{text}\n## Cases\n\nWhat has gone wrong elsewhere, each a test.\n\n{cases()}"


def soak(refits: int) -> dict[str, Any]:
    """Many refits in a row; what the rank that grew most has more at the end than after the first tenth."""
    with Campaign(World("2+2", *TWO, 1)) as campaign:
        crew, version = campaign.crew, campaign._version
        _well(crew, version, refits // 10)
        crew.call("settle")
        before, values = crew.call("footprint", None, 0.0), crew.call("kept", ranks=[0])[0]
        _well(crew, version + refits // 10, refits - refits // 10)
        crew.call("settle")
        after, more = crew.call("footprint", None, 0.0), crew.call("kept", ranks=[0])[0]
    return {
        "refits": refits,
        "values": more - values,
        **{
            name: max(getattr(after[rank], name) - getattr(before[rank], name) for rank in before)
            for name in ("descriptors", "threads", "memory")
        },
    }


def _well(crew: Any, version: int, refits: int) -> None:
    for rank, end in crew.call("refits", version + 1, refits, timeout_s=200.0).items():
        if end.error:
            raise RuntimeError(f"rank {rank}: {end.error}")


def main() -> None:
    """See the module."""
    command, path = sys.argv[1], Path(sys.argv[2])
    if command == "render":
        Path(sys.argv[3]).write_text(page(_read(path)))
        return
    part, parts = map(int, (sys.argv[3] if len(sys.argv) > 3 else "0/1").split("/"))
    until = time.monotonic() + float(sys.argv[4] if len(sys.argv) > 4 else "inf")
    for number, (world, faults) in enumerate(whole()):
        if number % parts == part:
            _add(path, strike_all(world, faults[_there(path, world) :], until=until))
    if part == parts - 1:
        _add(path, strike_systems("in_place", "staged"), soak=soak(SOAK))
    problems = [each for each in _read(path)["injections"] if each["problems"]]
    for each in problems:
        print(each)  # noqa: T201
    sys.exit(bool(problems))


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.exists() else {"injections": [], "soak": None}


def _there(path: Path, world: World) -> int:
    """How many blows of a job the record has already."""
    injections = (Injection(**each) for each in _read(path)["injections"])
    return sum((each.world, each.commit) == (world.name, world.commit) and each.kind in MANY for each in injections)


def _add(path: Path, injections: Sequence[Injection], **more: Any) -> None:
    """Another part may have written meanwhile. Of what the survivors said, one stands for all."""
    record = _read(path)
    record["injections"] += [asdict(replace(each, said=each.said[:1])) for each in injections]
    path.write_text(json.dumps(record | more, indent=1) + "\n")


if __name__ == "__main__":
    main()
