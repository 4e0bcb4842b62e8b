"""A training that is killed while it saves, at whatever call, is resumed by itself and ends as one that was not.

Each is a process, forked from one that has imported torch (`benchmarks/kill_points.py`), that is killed by SIGKILL
before a call that changes its folder, or by the system in the middle of a file.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
from pathlib import Path

import pytest

from benchmarks import kills
from benchmarks.kill_points import WRITERS, Ended, Fault, Training, cuts, end_of
from hf_l2l.checkpoint.finding import checkpoints_in
from hf_l2l.checkpoint.manifest import check_files, read_manifest
from training import left_in

KILLED = (signal.SIGKILL, signal.SIGXFSZ, signal.SIGALRM)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A training that nothing happened to."""
    return finished(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folder after four of six steps; that the last checkpoint will be saved is in the place of another one."""
    folder = tmp_path_factory.mktemp("before")
    end_of(Training("L2LTrainer", str(folder), seed=7, options={"save_steps": 6}))
    end_of(Training("L2LTrainer", str(folder), resumes=False, stop_at=4, options={"save_total_limit": None}))
    assert names(folder) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    return folder


def names(folder: Path) -> list[str]:
    """All that is in it, hidden files, too."""
    return left_in(folder)


def finished(folder: Path, **options: object) -> Ended:
    found = end_of(Training("L2LTrainer", str(folder), **options))
    assert (found.killed_by, found.error) == (None, None)
    return found


def assert_all_whole(run: Path) -> None:
    for folder in checkpoints_in(run):
        manifest = read_manifest(folder)
        assert manifest is not None, f"{folder} has no manifest"
        check_files(folder, manifest)


def killed_copy(before: Path, run: Path, fault: Fault, **options: object) -> bool:
    """Resume a copy of a folder, and kill that. Whether it was: a file may end before its cut."""
    shutil.copytree(before, run)
    found = end_of(Training("L2LTrainer", str(run), fault=fault, **options))
    assert found.error is None and found.killed_by in (None, *KILLED), found
    return found.killed_by is not None


def assert_resumed(run: Path, whole: Ended, **options: object) -> None:
    assert_all_whole(run)
    found = finished(run, **options)
    assert found.digest == whole.digest
    # The oldest one is deleted when another one is saved.
    has_saved = any(call.startswith("rename") for call in found.calls)
    assert set(names(run)) - (set() if has_saved else {"checkpoint-2"}) == {"checkpoint-4", "checkpoint-6"}
    assert_all_whole(run)


def changed_before(calls: list[str]) -> list[Fault]:
    """Each call, but for those that find the same files as the one before: fsync changes none."""
    return [Fault(at) for at in range(1, len(calls) + 1) if at == 1 or not calls[at - 2].startswith("fsync")]


@pytest.mark.parametrize(
    "every",
    [
        60,
        pytest.param(30, marks=pytest.mark.slow),
        pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
@pytest.mark.parametrize("background", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "background"])
def test_a_save_is_killed_at_calls_that_change_files(before, whole, tmp_path, every, background):
    """The save replaces a checkpoint of another training, and the oldest one is deleted after it."""
    shutil.copytree(before, tmp_path / "calls")
    how = {"options": {"l2l_async_save": background}}
    calls = finished(tmp_path / "calls", **how).calls
    writers = {"open", "save"} if background else set(WRITERS)  # its own, for weights
    assert {"rename", "fsync", "rmdir", "remove", "mkdir", *writers} == {call.split(" ")[0] for call in calls}
    kills = [*changed_before(calls), *cuts(calls, before / "checkpoint-4")]
    assert len(kills) >= 30
    renames = [fault for fault in kills if calls[fault.at - 1].startswith("rename")]
    killed, kills = 0, [*renames, *kills[::every]]
    for number, fault in enumerate(kills):
        run = tmp_path / str(number)
        killed += killed_copy(before, run, fault, **how)
        assert_resumed(run, whole, **how)
        shutil.rmtree(run)
    assert killed >= len(kills) - 2


@pytest.mark.parametrize("every", [pytest.param(4, marks=pytest.mark.slow), 30])
def test_the_resume_after_a_kill_is_killed(before, whole, tmp_path, every):
    """At calls by which it puts back what was about to be replaced, and removes the rest."""
    shutil.copytree(before, tmp_path / "calls")
    calls = finished(tmp_path / "calls").calls
    second = [at for at, call in enumerate(calls, 1) if call.startswith("rename")][1]
    interrupted = tmp_path / "interrupted"
    assert killed_copy(before, interrupted, Fault(second)) and len(names(interrupted)) == 3
    assert not (interrupted / "checkpoint-6").exists()
    shutil.copytree(interrupted, tmp_path / "again")
    calls = finished(tmp_path / "again").calls
    saved = [call.startswith("mkdir _l2l-saving-") for call in calls].index(True)
    assert saved >= 10
    faults = changed_before(calls[:saved])
    for number, fault in enumerate([*faults[:2], *faults[2:-1:every], faults[-1]]):
        run = tmp_path / str(number)
        assert killed_copy(interrupted, run, fault)
        is_back = (run / "checkpoint-6").exists()
        assert_resumed(run, whole)
    assert is_back  # before it was replaced again


@pytest.mark.parametrize(
    "which",
    [
        "put in place",
        pytest.param("commit", marks=pytest.mark.slow),
        pytest.param("all", marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
def test_a_training_in_the_folder_of_another_one_is_killed(tmp_path, which):
    """What is resumed then is one of the two, and no mixture of files or checkpoints."""
    before, new = tmp_path / "before", {"seed": 9}
    end_of(Training("L2LTrainer", str(before), stop_at=4))
    shutil.copytree(before, tmp_path / "old")
    old_digest = finished(tmp_path / "old", **new).digest
    shutil.copytree(before, tmp_path / "new")
    unbroken = finished(tmp_path / "new", **new, resumes=False)
    assert unbroken.digest != old_digest
    first = [call.startswith("mkdir _l2l-saving-checkpoint-4") for call in unbroken.calls].index(True)
    calls = unbroken.calls[:first]
    of_commit = [at for at, call in enumerate(calls, 1) if call.split(" ")[0] in ("rename", "rmdir")]
    faults = {
        "put in place": map(Fault, of_commit[1:3]),
        "commit": map(Fault, of_commit),
        "all": changed_before(calls),
    }
    ended = set()
    for fault in faults[which]:
        run = tmp_path / str(fault.at)
        shutil.copytree(before, run)
        killed = end_of(Training("L2LTrainer", str(run), **new, resumes=False, fault=fault))
        assert killed.killed_by == signal.SIGKILL
        assert_all_whole(run) if (run / "checkpoint-2").exists() else None
        found = finished(run, **new)
        is_old = fault.at <= of_commit[1]  # the second rename puts the new one in its place
        assert found.digest == (old_digest if is_old else unbroken.digest), calls[fault.at - 1]
        assert names(run) == ["checkpoint-4", "checkpoint-6"]
        ended.add(is_old)
    assert ended == {True, False}


def counted_only(training: Training) -> Ended:
    """In place of a training: it is killed if it is to be, else ends well, and leaves an empty checkpoint."""
    (Path(training.folder) / "checkpoint-6").mkdir(parents=True, exist_ok=True)
    killed_by = None if training.fault is None else signal.SIGKILL
    return Ended(killed_by, calls=["fsync ."] * 100, digest="the same")


@pytest.mark.parametrize("every", ["40", *(pytest.param(every, marks=pytest.mark.slow) for every in ("60", "45"))])
def test_the_benchmark_counts_what_is_resumed(capsys, tmp_path, monkeypatch, every):
    if every == "40":
        monkeypatch.setattr(kills, "end_of", counted_only)
    result = kills.main(["--scenes", "calls", "--every", every, "--out", str(tmp_path / "kills.md")])
    rows = result["scenes"]["calls"]
    theirs, *both = rows.values()
    assert len(both) == 2
    for ours in both:
        assert ours["kills"] == ours["resumed"] == ours["right"] >= 2 and ours["errors"] == {}
    assert 0 <= theirs["right"] <= theirs["resumed"] == theirs["kills"] - sum(theirs["errors"].values())
    printed, last = capsys.readouterr().out.rsplit("\n", 2)[:2]
    assert json.loads(last) == result and printed in (tmp_path / "kills.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_save_of_a_training_is_killed_at_every_call(whole, tmp_path):
    (tmp_path / "empty").mkdir()
    for fault in [
        *map(Fault, range(1, len(whole.calls) + 1)),
        *cuts(whole.calls, before_of(tmp_path) / "checkpoint-4"),
    ]:
        run = tmp_path / "run"
        assert killed_copy(tmp_path / "empty", run, fault) or fault.cut
        assert_resumed(run, whole)
        shutil.rmtree(run)


def before_of(folder: Path) -> Path:
    """The folder of a finished training, for the sizes of its files."""
    finished(folder / "sizes")
    return folder / "sizes"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_training_is_killed_at_random_times(whole, tmp_path):
    """200 of them, by the system's own clock, which the training does not see."""
    draw, killed = random.Random(5), 0
    for number in range(200):
        run = tmp_path / str(number)
        found = end_of(Training("L2LTrainer", str(run), seconds=draw.uniform(0.001, 0.2)))
        assert found.killed_by in (None, signal.SIGALRM)
        killed += found.killed_by is not None
        assert_resumed(run, whole)
        shutil.rmtree(run)
    assert killed
