"""The campaign's short form, its long row of refits, and that the page says what was recorded."""

import json
import os
import re
from pathlib import Path

import pytest
from faults.campaign import strike_all
from faults.case_tests import ALL
from faults.fault import faults_of
from faults.network import strike_systems
from faults.reliability import KINDS, page, soak
from faults.worlds import short, whole

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "tests/results/faults/campaign.json"


def wrong(done):
    """What went wrong, blow by blow."""
    bad = (each for each in done if each.problems or not (each.detected and each.recovered))
    return [(each.kind, each.detected, each.recovered, each.problems) for each in bad]


@pytest.mark.parametrize("number", [0, 1])
def test_every_kind_of_fault(number):
    world, faults = [*short()][number]
    assert {fault.kind for fault in faults} == set(faults_of(world.commit))
    done = strike_all(world, faults)
    assert len(done) == len(faults)
    assert wrong(done) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")
def test_cut_networks_and_full_file_systems(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT / "tests"), str(ROOT))))
    done = strike_systems("in_place")
    assert wrong(done) == []


@pytest.mark.nightly
def test_many_refits_in_a_row_grow_nothing():
    grown = soak(500)
    assert (grown["descriptors"], grown["threads"], grown["values"]) == (0, 0, 0)
    assert grown["memory"] < 2 << 20


def test_the_whole_campaign_strikes_often_enough_and_with_everything():
    jobs = [*whole()]
    assert sum(len(faults) for _, faults in jobs) >= 500
    struck = {(fault.kind, fault.victim, fault.point) for _, faults in jobs for fault in faults}
    for world, _ in jobs[:2]:
        known = faults_of(world.commit)
        assert {kind for kind, _, _ in struck} == set(known)
    assert set(known) <= set(KINDS)


def test_a_seed_strikes_the_same_way_each_time():
    assert [*whole()] == [*whole()]


def test_the_page_says_what_was_recorded():
    record = json.loads(RECORD.read_text())
    assert (ROOT / "docs/reliability.md").read_text() == page(record)
    assert len(record["injections"]) >= 500
    assert [each for each in record["injections"] if each["problems"]] == []


def test_every_case_has_tests_that_exist():
    assert [case.number for case in ALL] == list(range(1, 25))
    for case in ALL:
        for test in case.tests:
            path, name = test.split("::")
            assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE), test
