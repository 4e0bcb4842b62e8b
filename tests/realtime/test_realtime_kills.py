"""A training that is killed, or whose disk fails, at whatever moment of a generation: the last one is whole, few steps
are lost, and the resumed training ends with the bits of one that was not interrupted."""

from __future__ import annotations

import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kill_points import SAVING, Ended, Fault, Training, cuts, end_of
from hf_l2l.checkpoint.finding import check_whole, checkpoints_in, newest_of
from hf_l2l.checkpoint.staging import CheckpointSaveError

STEPS: int = SAVING["max_steps"]
KILLED = (signal.SIGKILL, signal.SIGXFSZ, signal.SIGALRM)


def training(run: Path, **more: Any) -> Training:
    """With a generation after each step, and no other checkpoint."""
    options = {"save_strategy": "no", "l2l_realtime_checkpoint": str(run / "now"), "l2l_realtime_every": 1}
    return Training("L2LTrainer", str(run), options={**options, **more.pop("options", {})}, **more)


def ended(run: Path, **more: Any) -> Ended:
    found = end_of(training(run, **more))
    assert (found.killed_by, found.error) == (None, None), found
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A training that nothing happened to."""
    return ended(tmp_path_factory.mktemp("whole"))


def step_of_newest(run: Path) -> int:
    """That of the last generation, which is whole, as are all others; 0 if there is none."""
    for each in checkpoints_in(run / "now"):
        check_whole(each)
    found = newest_of([run / "now"])[0]
    manifest = None if found is None else check_whole(found)
    return 0 if manifest is None else manifest.step


def begun_before(calls: list[str], at: int) -> int:
    """How many generations were begun before a call."""
    return len({call.split("-")[3] for call in calls[: at - 1] if call.startswith("mkdir now/_l2l-saving-")})


def assert_resumed(run: Path, whole: Ended) -> None:
    assert ended(run).digest == whole.digest
    names = sorted(path.name for path in (run / "now").iterdir())
    # If it was killed before the older one was deleted, and has made all its steps, there are two.
    assert names[-1] == f"checkpoint-{STEPS}" and len(names) <= 2


def faults_of(whole: Ended, tmp_path: Path) -> list[Fault]:
    """Before each call that changes files, and within each file."""
    run = tmp_path / "sizes"
    ended(run)
    sizes = checkpoints_in(run / "now")[0]
    return [*(Fault(at) for at in range(1, len(whole.calls) + 1)), *cuts(whole.calls, sizes)]


@pytest.mark.parametrize(
    "every", [500, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(3600)])]
)
def test_it_is_killed_at_calls_that_change_files(whole, tmp_path, every):
    kills = faults_of(whole, tmp_path)
    assert len(kills) > 100
    renames = [fault for fault in kills if whole.calls[fault.at - 1].startswith("rename")]
    killed = 0
    for number, fault in enumerate([*kills[1::every], *renames[:: max(1, every // 12)]]):
        run = tmp_path / str(number)
        found = end_of(training(run, fault=fault))
        assert found.error is None and found.killed_by in (None, *KILLED), found
        killed += found.killed_by is not None
        # One is written at a time: those before it are in their places.
        assert step_of_newest(run) >= begun_before(whole.calls, fault.at) - 1
        assert_resumed(run, whole)
        shutil.rmtree(run)
    assert killed > 1


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 50), marks=pytest.mark.slow)])
def test_it_is_killed_at_any_time(whole, tmp_path, seeds):
    for seed in seeds:
        run = tmp_path / str(seed)
        options = {"eps_update": ("deferred", "serial")[seed % 2]}
        found = end_of(training(run, seconds=random.Random(seed).uniform(0.0, 0.6), options=options))
        assert found.error is None and found.killed_by in (None, *KILLED)
        step_of_newest(run)
        assert_resumed(run, whole)
        shutil.rmtree(run)


@pytest.mark.parametrize("every", [300, pytest.param(10, marks=pytest.mark.slow)])
def test_it_is_killed_where_files_are_put_off(whole, tmp_path, every):
    """As those of weights and state are with deferred updates, until these are done."""
    options = {"eps_update": "deferred"}
    unharmed = ended(tmp_path / "unharmed", options=options)
    assert unharmed.digest == whole.digest
    for number, at in enumerate(range(90, len(unharmed.calls), every)):
        run = tmp_path / str(number)
        found = end_of(training(run, fault=Fault(at), options=options))
        assert found.error is None and found.killed_by in (None, *KILLED), found
        assert step_of_newest(run) >= begun_before(unharmed.calls, at) - 2
        assert_resumed(run, whole)
        shutil.rmtree(run)


@pytest.mark.parametrize(
    ("every", "errors"),
    [
        (300, "warn"),
        *(pytest.param(every, of, marks=pytest.mark.slow) for every, of in [(140, "stop"), (9, "stop"), (9, "warn")]),
    ],
)
def test_an_error_of_calls(whole, tmp_path, every, errors):
    """No room, an input or output error, a read-only disk: the training goes on, or ends with one sentence."""
    for number, at in enumerate(range(30, len(whole.calls) + 1, every)):
        run = tmp_path / str(number)
        options = {"l2l_realtime_errors": errors}
        found = end_of(training(run, fault=Fault(at, error=(28, 5, 30)[number % 3]), options=options))
        assert found.killed_by is None
        if errors == "warn":
            assert found.error is None
            assert found.digest == whole.digest
        else:
            assert found.error is None or isinstance(found.error, CheckpointSaveError), found
        assert step_of_newest(run) >= begun_before(whole.calls, at) - 1
        assert_resumed(run, whole)
        shutil.rmtree(run)
