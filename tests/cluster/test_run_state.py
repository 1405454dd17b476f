"""Checkpoints of a job: whole or absent, the right ones kept, and no version published twice."""

import pytest

from refit_transport.cluster.run_state import RunFolder, RunState
from refit_transport.errors import ConfigError


def save(folder, step, *, reward=0.0, version=None):
    state = RunState(step, version if version is not None else step, reward)
    return folder.save(state, lambda path: (path / "weights").write_text(str(step)))


def steps(path):
    return sorted(int(found.name.removeprefix("step_")) for found in path.glob("step_*"))


def test_the_latest_is_by_number_not_by_name(tmp_path):
    folder = RunFolder(tmp_path, "job", keep=None, best=False)
    assert folder.latest() is None
    for step in (2, 10, 9):
        save(folder, step, version=step + 5)
    path, state = folder.latest()
    assert (path.name, state) == ("step_10", RunState(10, 15, 0.0))
    assert (path / "weights").read_text() == "10"


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_latest_are_kept(tmp_path, keep):
    folder = RunFolder(tmp_path, "job", keep=keep, best=False)
    for step in range(1, 6):
        save(folder, step)
    assert steps(tmp_path) == list(range(6 - keep, 6))


@pytest.mark.parametrize(("higher_is_better", "kept"), [(True, [2, 3, 5]), (False, [1, 4, 5])])
def test_the_best_are_kept_and_the_last(tmp_path, higher_is_better, kept):
    folder = RunFolder(tmp_path, "job", keep=3, best=True, higher_is_better=higher_is_better)
    for step, reward in enumerate((0.1, 0.9, 0.8, 0.2, 0.5), start=1):
        save(folder, step, reward=reward)
    assert steps(tmp_path) == kept


def test_a_write_that_fails_leaves_the_last_checkpoint_and_no_half_one(tmp_path):
    folder = RunFolder(tmp_path, "job", keep=1, best=False)
    save(folder, 1)

    def fail(path):
        (path / "weights").write_text("half")
        raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="disk"):
        folder.save(RunState(2, 2, 0.0), fail)
    assert folder.latest()[1].step == 1
    assert steps(tmp_path / "nothing") == []
    save(folder, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step_2"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1]",
        '{"fingerprint": "job", "step": 3}',
        '{"fingerprint": "job", "step": 3, "version": 3, "reward": 0, "x": 1}',
    ],
)
def test_a_checkpoint_that_cannot_be_read_is_named(tmp_path, text):
    folder = RunFolder(tmp_path, "job", keep=None, best=False)
    save(folder, 3)
    (tmp_path / "step_3" / "run.json").write_text(text)
    with pytest.raises(ConfigError, match=r"(?s)checkpoint_dir: can't be read.*step_3"):
        folder.latest()


def test_a_version_is_noted_before_anybody_can_have_seen_it(tmp_path):
    folder = RunFolder(tmp_path / "new", "job", keep=None, best=False)
    assert folder.published() == -1
    for version in (0, 7):
        folder.publishing(version)
        assert RunFolder(tmp_path / "new", "job", keep=None, best=False).published() == version
    (tmp_path / "new" / "published.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"(?s)can't be read.*published.json"):
        folder.published()
