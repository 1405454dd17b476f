"""What the lab's tests run inside namespaces: a child process imports this module by its name."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

from refit_transport.bench.cases import Case, wired
from refit_transport.bench.crew import Crew
from refit_transport.bench.figures import BOUND, Limit, Ratio
from refit_transport.bench.lab import Lab, Wiring
from refit_transport.bench.measure import measure_case
from refit_transport.bench.rank import LabRank
from refit_transport.bench.variants import GATHER_BROADCAST, OURS
from refit_transport.bench.workload import Side, transformer

# 3 MB at 200 Mbit/s: the bound is far above what a busy machine needs to start 16 ranks.
MODEL = transformer(layers=2, hidden=256)
SOURCE, TARGET = Side(tp=4, dp=2), Side(tp=2, dp=4)
NO_FASTER_THAN_THE_BOUND = Limit(Ratio(("ours",), (BOUND,)), least=0.9)


def small_case(nics="domain"):
    wiring = wired(SOURCE, TARGET, nics=nics, mbit=200.0 if nics == "domain" else 50.0)
    variants = (OURS, GATHER_BROADCAST)
    return Case(f"small-{nics}", "small", MODEL, SOURCE, TARGET, wiring, variants, (NO_FASTER_THAN_THE_BOUND,))


class FlippingRank(LabRank):
    """One element of one target changes after each refit."""

    def run(self, name, start):
        ran = super().run(name, start)
        if self.rank == 11:
            self._held[name].binding.view(3)[5, 7] += 1
        return ran


class ForgetfulRank(LabRank):
    """One source keeps the values of the first refit."""

    def fill(self, name, version):
        if self.rank != 2 or version <= len(self.case.variants):
            super().fill(name, version)


def with_rank_class(request, announce):
    """A case whose ranks are of another class."""
    case, rank_class = request
    import refit_transport.bench.measure as measure

    measure.LabRank = rank_class
    return measure_case(case, repetitions=1, announce=announce)


def network():
    """The links of this process's namespace, and which namespace that is."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    return sorted(line.split(":")[0].strip() for line in lines), str(Path("/proc/self/ns/net").readlink())


class Odd:
    """A rank that does as it is told, in every way that can go wrong."""

    def __init__(self, rank):
        self.rank = rank

    def pid(self):
        return os.getpid()

    def network(self):
        return network()

    def fail(self, rank):
        if self.rank == rank:
            raise ValueError("it is broken")

    def leave(self, rank):
        if self.rank == rank:
            os._exit(7)

    def hang(self, rank):
        if self.rank == rank:
            time.sleep(60)

    def close(self):
        pass


def odd_crew(request, announce):
    """Calls one method of odd ranks; announces their process ids first."""
    method, arguments, timeout_s = request
    wiring = replace(small_case().wiring, mbit=None)
    namespaces = [wiring.namespace_of(rank) for rank in range(4)]
    with Lab(wiring), Crew(namespaces, Odd) as crew:
        announce(str(crew.call("pid", timeout_s=20.0)))
        return crew.call(method, *arguments, timeout_s=timeout_s)


def end_abruptly(request, announce):
    """Leaves ranks behind that nobody ends but the kernel."""
    wiring = Wiring(((0, 1),), "domain", None)
    crew = Crew.__new__(Crew)
    with Lab(wiring):
        Crew.__init__(crew, ["nic0", "nic0"], Odd)
        announce(str(crew.call("pid", timeout_s=20.0)))
        os._exit(9)
