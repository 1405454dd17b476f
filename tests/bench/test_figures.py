"""Bounds against hand-made sums, and what is said of figures that hold, miss or are missing."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from refit_transport.bench.bounds import LowerBound, lower_bound, wired_topology
from refit_transport.bench.cases import FULL, Case, chosen_cases, lab_cases, nodes_of
from refit_transport.bench.figures import BOUND, ExtraMemory, Limit, Overhead, Ratio, UplinkBytes
from refit_transport.bench.lab import Wiring
from refit_transport.bench.measure import _Rounds
from refit_transport.bench.results import CaseResult, LabResult, Repetition, Uplink, VariantResult, judge
from refit_transport.bench.variants import OURS, settings_of
from refit_transport.bench.workload import Side
from refit_transport.errors import ConfigError
from refit_transport.planning.planner import plan_transfer
from refit_transport.scheduling.makespan import simulate
from refit_transport.scheduling.scheduler import build_schedule

CASES = {case.name: case for case in lab_cases()}
# Payload of a full packet of 9000 bytes on a link of 1 Gbit/s, in bytes per second.
GIGABIT = 1e9 / 8 * 8948 / 9014
SIZE = 16 * 24 * 512**2


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [
        ("tp4dp2-tp2dp4", SIZE),
        ("nic-per-rank", SIZE),
        ("tp4-tp8", SIZE / 2),
        ("tp4dp2-tp8", SIZE / 2),
        ("tp4-tp1dp8", SIZE),
        ("one-to-four", SIZE / 2),
        ("spare-egress", SIZE),
        ("one-domain", 0),
        ("one-host", 0),
    ],
)
def test_bounds_of_all_cases(name, nbytes):
    assert lower_bound(CASES[name], OURS).seconds == pytest.approx(nbytes / GIGABIT)


def bound_of(source, target, wiring):
    return lower_bound(Case("", "", FULL, source, target, wiring, (OURS,), ()), OURS)


def test_a_slow_source_that_alone_holds_something_binds():
    source, target = Side(tp=8), Side(tp=2, dp=4)
    wiring = Wiring(nodes_of(((source, 2), (target, 2))), "domain", (1000.0, 250.0, 1000.0, 1000.0))
    found = bound_of(source, target, wiring)
    assert found.binds == "sending"
    assert found.seconds == pytest.approx(SIZE / 2 / (GIGABIT / 4))


def test_replicas_share_what_leaves_in_proportion_to_their_rates():
    source, target = Side(tp=4, dp=2), Side(tp=8)
    wiring = Wiring(nodes_of(((source, 2), (target, 2))), "domain", (500.0, 100.0, 1000.0, 1000.0))
    found = bound_of(source, target, wiring)
    assert found.binds == "sending"
    assert found.seconds == pytest.approx(SIZE / (0.6 * GIGABIT))


def test_what_a_target_node_holds_already_never_enters():
    # Both nodes hold half of the sources and half of the targets: each lacks the other half of its targets' rows.
    source, target = Side(tp=2), Side(tp=1, dp=2)
    wiring = Wiring(((0, 2), (1, 3)), "domain", (1000.0, 1000.0))
    assert bound_of(source, target, wiring).seconds == pytest.approx(SIZE / 2 / GIGABIT)


def test_every_tensor_of_the_usual_model_has_values_of_its_own():
    salts = [sum(weight.name.encode()) % 251 for weight in FULL.weights]
    assert len(set(salts)) > len(salts) / 2
    assert all(salts.count(salt) <= 2 for salt in salts)
    assert len(FULL.weights) == 64
    assert FULL.nbytes == SIZE


def repetition(seconds, overhead=0.0):
    return Repetition(seconds, {"network": seconds}, overhead, 1.0, 0.0)


def variant(name, *seconds, **changes):
    values = {
        "bound": LowerBound(1.0, "into node 1"),
        "prepare_seconds": 0.0,
        "repetitions": tuple(map(repetition, seconds)),
        "uplinks": (Uplink(0, "out", 10**7, 10**7, 0), Uplink(0, "in", 0, 10**5, 10**7)),
        "extra_memory": (2 << 20, 3 << 20),
    }
    return VariantResult(name, **{**values, **changes})


def verdict(limit, *variants):
    return judge((limit,), {v.name: v for v in variants})[0]


def test_ratios_are_of_medians_and_of_the_fastest_named():
    ours, slow, slower = variant("ours", 1.1, 9.0, 1.0), variant("slow", 2.2, 2.0, 2.4), variant("slower", 3.3)
    assert verdict(Limit(Ratio(("ours",), (BOUND,)), most=1.1), ours).holds
    assert not verdict(Limit(Ratio(("ours",), (BOUND,)), most=1.09), ours).holds
    assert verdict(Limit(Ratio(("slow",), ("ours",)), least=1.9), ours, slow).value == pytest.approx(2.0)
    assert not verdict(Limit(Ratio(("slow",), ("ours",)), least=2.1), ours, slow).holds
    both = Limit(Ratio(("ours",), ("slower", "slow")), most=0.51)
    assert verdict(both, ours, slow, slower).value == pytest.approx(0.5)


@pytest.mark.parametrize(
    "limit",
    [
        Limit(Ratio(("flat",), ("ours",)), least=0.0),
        Limit(Overhead("flat"), most=1.0),
        Limit(ExtraMemory("flat"), most=1e9),
        Limit(UplinkBytes("flat"), most=1e9),
    ],
)
def test_what_was_not_measured_is_missed(limit):
    found = verdict(limit, variant("ours", 1.0))
    assert (found.value, found.holds) == (None, False)
    result = CaseResult("case", "", 1, 1, verdicts=(found,))
    assert f"case: {limit.figure}: not measured, must be {limit.text}" in result.misses


def test_memory_is_of_the_largest_rank_and_overhead_a_median():
    ours = replace(variant("ours", 1.0), repetitions=tuple(repetition(1.0, o) for o in (0.9, 0.01, 0.03)))
    assert verdict(Limit(ExtraMemory("ours"), most=3.0), ours).value == 3.0
    assert not verdict(Limit(Overhead("ours"), most=0.02), ours).holds
    assert verdict(Limit(UplinkBytes("ours"), most=0), ours).value == 10**7 + 10**5


@pytest.mark.parametrize(
    ("uplink", "holds"),
    [
        (Uplink(0, "out", 10**8, 94 * 10**6, 0), False),
        (Uplink(0, "out", 10**8, 96 * 10**6, 0), True),
        (Uplink(0, "out", 10**8, 104 * 10**6, 0), True),
        (Uplink(0, "out", 10**8, 106 * 10**6, 0), False),
        (Uplink(0, "in", 0, 2 * 10**5, 0), True),
        (Uplink(0, "in", 0, 2 * 10**6, 10**8), False),
    ],
)
def test_uplinks_are_held_to_the_plan(uplink, holds):
    assert uplink.holds is holds
    ours = variant("ours", 1.0, uplinks=(uplink,))
    missed = [v for v in judge((), {"ours": ours}) if not v.holds]
    assert [v.figure for v in missed] == ([] if holds else ["ours: uplinks off the plan by over 5%"])


def test_a_wrong_piece_is_a_miss_and_so_is_a_case_that_failed():
    wrong = judge((), {"ours": variant("ours", 1.0, wrong=("rank 3: w[0:1]",))})
    cases = (CaseResult("a", "", 1, 1, verdicts=wrong), CaseResult("b", "", 1, 1, error="rank 2 died"))
    misses = LabResult(cases, 5, (0.0, 0.0)).misses
    assert misses == ["a: ours: pieces delivered wrongly: 1, must be <= 0", "b: rank 2 died"]


def test_cases_are_chosen_by_name():
    assert [case.name for case in chosen_cases(["tp4-tp8", "tp4dp2-tp2dp4"])] == ["tp4dp2-tp2dp4", "tp4-tp8"]
    assert chosen_cases([]) == lab_cases()
    with pytest.raises(ConfigError, match=r"tp4-tp9.*did you mean 'tp4-tp8'"):
        chosen_cases(["tp4-tp9"])


def test_every_figure_names_variants_of_its_case():
    for case in lab_cases():
        names = {v.name for v in case.variants} | {BOUND}
        for limit in case.limits:
            figure = limit.figure
            used = {*figure.over, *figure.under} if isinstance(figure, Ratio) else {figure.variant}
            assert used <= names, case.name


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(case.name, marks=[pytest.mark.nightly] if case.name == "small-tensors" else [])
        for case in lab_cases()
        if case.wiring.mbit is not None
    ],
)
def test_in_the_time_model_no_case_leaves_a_nic_idle(name):
    """What a lab run adds is latency and the machine; order and size of payloads alone cost next to nothing."""
    [case] = chosen_cases([name])
    plan = plan_transfer(case.source_manifest(OURS), case.target_manifest(OURS))
    topology = replace(wired_topology(case.wiring), local_rate=3e9)
    schedule = build_schedule(plan, topology, bucket_bytes=settings_of(OURS, case.wiring).bucket_bytes)
    schedule.check(plan)
    least = lower_bound(case, OURS).seconds
    assert simulate(schedule, topology).seconds <= max(1.015 * least, 0.05)


def test_a_repetition_from_which_processors_were_taken_is_measured_again_a_few_times(monkeypatch):
    stolen = iter([0.5, 0.2, 0.0, *[0.9] * 4, 0.1, 0.9, 0.9])
    monkeypatch.setattr(
        _Rounds, "_measured", lambda self, version: Repetition(version, {}, 0.0, 1.0, 0.0, next(stolen))
    )
    rounds, versions = _Rounds(lab_cases()[0], OURS, None, None), count(10)
    rounds.repeat(versions)
    rounds.repeat(versions)
    assert [(found.seconds, found.stolen) for found in rounds._repetitions] == [(12, 0.0), (17, 0.1)]
