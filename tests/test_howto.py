"""The scripts of docs/howto run as they are, and print what their pages say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rank_pool import free_port

FOLDER = Path(__file__).parents[1] / "docs/howto"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
# Pages whose scripts need more than the core are tested beside what they show.
PAGES = ("reshard_two_dtensors", "write_a_transport", "write_a_source", "write_a_target", "debug_a_plan")
SUITES = ("write_a_transport", "write_a_source", "write_a_target")


def printed(page: str) -> list[str]:
    """The output that a page shows."""
    (block,) = re.findall(r"^```text\n(.*?)^```", (FOLDER / f"{page}.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    return block.splitlines()


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], env=ENVIRONMENT, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("page", [page for page in PAGES if page != "reshard_two_dtensors"])
def test_a_script_prints_what_its_page_says(page):
    assert run(str(FOLDER / f"{page}.py")).splitlines() == printed(page)


def test_dtensors_are_resharded_under_torchrun():
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "4", "--master-port", str(free_port())]
    lines = run(*launcher, str(FOLDER / "reshard_two_dtensors.py")).splitlines()
    # Ranks 0 and 3 print, in no order.
    assert sorted(lines) == sorted(printed("reshard_two_dtensors"))


def test_the_suites_collect_and_pass_as_a_plugin_author_runs_them():
    scripts = [str(FOLDER / f"{page}.py") for page in SUITES]
    # Away from this project's settings of pytest.
    found = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(FOLDER), *scripts)
    passed = re.search(r"(\d+) passed", found)
    assert passed is not None, found
    assert int(passed[1]) >= 23, found
    assert "failed" not in found


@pytest.mark.parametrize("page", PAGES)
def test_a_page_links_its_script(page):
    assert f"({page}.py)" in (FOLDER / f"{page}.md").read_text()
