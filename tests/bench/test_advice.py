"""What is advised for given times, what is asked of the ranks, and how it is shown."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from refit_transport.bench.advice import Measured, StepTime, advise, is_slower
from refit_transport.bench.bounds import LowerBound
from refit_transport.bench.cluster_rank import ClusterRank, Prepared
from refit_transport.bench.ranks import RanksRequest, RanksResult, candidates, measure_ranks
from refit_transport.bench.render_ranks import render_ranks_result
from refit_transport.bench.results import Repetition, VariantResult
from refit_transport.bench.workload import Side, transformer
from refit_transport.cli_bench import step_time
from refit_transport.config.load import load_config
from refit_transport.config.settings import RefitSettings
from refit_transport.errors import ConfigError, WorkerError
from refit_transport.scheduling.topology import Topology
from refit_transport.transports.base import Job

GLOO = {variant.name: variant for variant in candidates("gloo")}
NCCL = {variant.name: variant for variant in candidates("nccl")}
ALL, FFN, FLAT, WHOLE = "nccl_reshard, all", "nccl_reshard, ffn", "nccl_reshard, flat", "gather_broadcast"


def measured(name, *times, memory=1 << 20, wrong=(), network=1000, local=200):
    variant = (GLOO | NCCL)[name]
    repetitions = tuple(Repetition(t, {"network": t}, 0.1, 0.5, 0.0) for t in times)
    result = VariantResult(name, LowerBound(0.0, "nothing"), 1.0, repetitions, (), (memory,), wrong)
    moved = (network + local,) * len(times)
    return Measured(variant, variant.applied_to(RefitSettings()), result, network, local, moved)


def times(*values):
    return measured(ALL, *values).result


@pytest.mark.parametrize(
    ("one", "other", "slower"),
    [
        ((2, 2, 2), (1, 1, 1), True),
        ((1, 1, 1), (2, 2, 2), False),
        # Once it was faster.
        ((2, 0.9, 2), (1, 1, 1), False),
        # Always slower, by less than anybody would notice.
        ((1.01, 1.01, 1.01), (1, 1, 1), False),
        ((1.03, 1.03, 1.03), (1, 1, 1), True),
        # A machine that slows down slows down both.
        ((1.1, 2.2, 4.4), (1, 2, 4), True),
    ],
)
def test_slower_is_slower_each_time_and_noticeably(one, other, slower):
    assert is_slower(times(*one), times(*other)) is slower


def test_the_fastest_is_advised_with_its_keys_and_what_it_costs():
    found = advise(
        [measured(ALL, 1.0, 1.1, 1.0), measured(FFN, 2.0, 2.0, 2.0), measured(WHOLE, 3.0, 3.0, 3.0, memory=8 << 20)],
        StepTime(9.0, "--step-seconds"),
    )
    assert found.variant == ALL
    assert found.ties == (ALL,)
    assert found.snippet == {
        "refit_transport": "nccl_reshard",
        "refit_cfg": {"nccl_reshard": {"fabric": "gloo", "coverage": "all"}},
    }
    assert found.share == pytest.approx(0.1)
    text = "\n".join(found.reasons)
    assert "fastest beyond noise; 3 repetitions are few" in text
    assert "slower: nccl_reshard, ffn 2.00 times; gather_broadcast 3.00 times" in text
    assert "1000.0 ms and moves 0.001 MB: 10.00% of a step, which takes 9 s without it (--step-seconds)" in text
    assert "fall back to gather_broadcast when a run reports private layers" in text
    assert "3.00 times the time here, 8.0 times the memory" in text


def test_of_those_that_tie_the_one_that_rests_on_least_is_advised():
    ties = [measured(ALL, 1, 2, 1, 2, 1), measured(FFN, 2, 1, 2, 1, 1), measured(WHOLE, 1.1, 1.9, 2, 2, 1.3)]
    found = advise(ties, None)
    assert (found.variant, found.share) == (WHOLE, None)
    assert set(found.ties) == {ALL, FFN, WHOLE}
    text = "\n".join(found.reasons)
    assert "gather_broadcast ties with nccl_reshard, all; nccl_reshard, ffn: they differ by no more than noise" in text
    assert "of these, gather_broadcast is the safer choice: whole tensors go through the engine's own loader" in text
    assert "give --step-seconds" in text
    assert "not measured: the engine's own loader" in text
    assert advise(ties[:2], None).variant == FFN


def test_what_wavers_is_no_tie_when_something_slower_is_faster_than_it():
    found = advise([measured(ALL, 1, 1, 1), measured(FFN, 1.1, 1.1, 1.1), measured(WHOLE, 3, 0.9, 3)], None)
    assert found.ties == (ALL,)


def test_defaults_are_safer_than_switched_off_passes_and_gloo_than_nccl():
    flat_off = [measured(FLAT, 1, 1, 1), measured(ALL, 1, 1, 1), measured(f"{ALL}, without shared memory", 1, 1, 1)]
    assert advise(flat_off, None).variant == ALL
    assert advise([measured(f"{ALL}, nccl", 1, 1, 1), measured(ALL, 1, 1, 1)], None).variant == ALL
    fast = advise([measured(f"{ALL}, nccl", 1, 1, 1), measured(ALL, 3, 3, 3)], None)
    assert fast.snippet["refit_cfg"]["nccl_reshard"]["fabric"] == "nccl"
    assert "fall back to fabric gloo when NCCL can't connect, 3.00 times the time" in fast.reasons


@pytest.mark.parametrize("name", GLOO)
def test_the_snippet_is_a_configuration_that_makes_the_variant(name, tmp_path):
    demo = Path(__file__).parents[2] / "configs/demo.yaml"
    snippet = advise([measured(name, 1, 1, 1)], None).snippet
    text = {"defaults": str(demo), "policy": {"generation": snippet}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(text))
    settings = load_config(tmp_path / "job.yaml", resolve_transport=lambda name: name).refit_settings()
    # Coverage has no meaning, and no key, where all goes by gather_broadcast.
    coverage = settings.coverage if settings.transport == "gather_broadcast" else GLOO[name].coverage
    assert replace(GLOO[name].applied_to(settings), coverage=coverage) == settings


def test_nothing_is_advised_that_delivered_wrongly():
    bad = measured(ALL, 1, 1, 1, wrong=("rank 3: w[0:2]",))
    assert advise([bad, measured(WHOLE, 2, 2, 2)], None).variant == WHOLE
    assert advise([bad], None).snippet == {}


def result_of(*parts):
    topology = Topology.of(((0, 1), (2,)))
    return RanksResult("job.yaml", 3, 10**6, 500, 3, topology, parts, {"fabric nccl": "no GPU"}, advise(parts, None))


def test_wrong_pieces_and_wrong_bytes_are_misses():
    assert result_of(measured(ALL, 1, 1, 1)).misses == []
    bad = measured(ALL, 1, 1, 1, wrong=("rank 3: w[0:2]", "rank 3: v[0:2]"))
    assert result_of(bad).misses == [f"{ALL}: 2 pieces delivered wrongly, first rank 3: w[0:2]"]
    off = replace(measured(WHOLE, 1, 1, 1), moved=(1200, 1300, 1200))
    assert result_of(off).misses == [f"{WHOLE}: moved [1200, 1300] bytes, planned 1200"]


def test_what_people_see(capsys):
    Console(width=160).print(render_ranks_result(result_of(measured(ALL, 1, 1, 1), measured(WHOLE, 2, 2, 2))))
    out = capsys.readouterr().out
    for words in (
        "job.yaml: 1.000 MB, 3 ranks",
        "1000 ms",
        "exactly",
        "not run: fabric nccl: no GPU",
        "2 domains of 2, 1 ranks, 2 NICs",
        "500 elements compared",
        f"Advice: {ALL}",
        "      nccl_reshard:\n        fabric: gloo\n        coverage: all\n",
    ):
        assert words in out


class Local:
    """The ranks of a job in this process, one thread for each call; `obstacles` are by fabric."""

    def __init__(self, job, obstacles):
        self.workers = [
            ClusterRank(rank=ranked.rank, world_size=len(job.ranks), manifest=ranked)
            for side in (job.source, job.target)
            for ranked in side.ranks
        ]
        self.obstacles = obstacles

    def address(self):
        return "127.0.0.1", 0

    def call(self, method, *arguments, timeout_s, ranks=None):
        chosen = self.workers if ranks is None else [self.workers[rank] for rank in ranks]
        if method == "prepare" and arguments[-1].fabric in self.obstacles:
            return [Prepared(0.0, self.obstacles[arguments[-1].fabric])] * len(chosen)
        with ThreadPoolExecutor(len(self.workers)) as pool:
            return list(pool.map(lambda worker: getattr(worker, method)(*arguments), chosen, timeout=timeout_s))

    def close(self):
        self.call("close", timeout_s=10.0)


def small_job():
    model, source, target = transformer(layers=1, hidden=16), Side(tp=2), Side(tp=2)
    settings = RefitSettings(domains=((0, 1), (2, 3)), timeout_s=20.0)
    sides = source.manifest("source", model, first_rank=0), target.manifest("target", model, first_rank=2)
    return Job(*sides, Topology.of(settings.domains), settings)


def test_all_variants_run_on_ranks_and_others_are_listed_with_the_reason():
    local = Local(small_job(), {"nccl": "no GPU", "nccl_m2n": "no package"})
    found = measure_ranks(RanksRequest("small", small_job(), 2), local, announce=lambda _: None)
    local.close()
    assert found.misses == []
    assert {each.variant.name for each in found.measured} == GLOO.keys() - {"gather_broadcast, single chain"}
    assert found.missing == {
        "gather_broadcast, single chain": "the same as gather_broadcast: every domain has one NIC, so one chain",
        "fabric nccl": "no GPU",
        "fabric nccl_m2n": "no package",
    }
    assert found.nbytes == found.elements * 2 == 24 * 16**2
    json.dumps(found.to_json())


def test_an_element_that_a_fabric_loses_shows():
    class Losing(ClusterRank):
        def refit(self, name):
            ran = super().refit(name)
            if self.rank == 3 and name == FLAT:
                self._binding.view(1)[0, 0] += 1
            return ran

    local = Local(small_job(), {"nccl": "no GPU", "nccl_m2n": "no package"})
    local.workers[3].__class__ = Losing
    found = measure_ranks(RanksRequest("small", small_job(), 1), local, announce=lambda _: None)
    local.close()
    assert [line.split(":")[0] for line in found.misses] == [FLAT]
    assert found.advice.variant != FLAT


def test_without_any_fabric_it_says_why():
    local = Local(small_job(), {"gloo": "weights on a GPU", "nccl": "no NCCL", "nccl_m2n": "no package"})
    with pytest.raises(WorkerError, match="fabric gloo: weights on a GPU; fabric nccl: no NCCL; fabric nccl_m2n"):
        measure_ranks(RanksRequest("small", small_job(), 1), local, announce=lambda _: None)


def test_a_step_is_as_long_as_somebody_says(tmp_path):
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"rounds": [{"step_seconds": s} for s in (9.0, 2.0, 3.0)]}))
    assert step_time(None, None) is None
    assert step_time(4.0, None) == StepTime(4.0, "--step-seconds")
    assert step_time(None, report) == StepTime(3.0, str(report))
    with pytest.raises(ConfigError, match="give one of them"):
        step_time(4.0, report)
    for text in ("{", "[]", '{"rounds": []}', '{"rounds": [{}]}'):
        report.write_text(text)
        with pytest.raises(ConfigError, match="no report of `run` with step times"):
            step_time(None, report)
