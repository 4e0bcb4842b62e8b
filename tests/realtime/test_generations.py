"""`l2l_realtime_checkpoint`: generations that are whole checkpoints of their step, and what a training does about
them."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers as hf

from hf_l2l.checkpoint import manifest, staging
from hf_l2l.checkpoint.finding import check_whole, checkpoints_in, newest_of
from hf_l2l.checkpoint.reserved import Region
from hf_l2l.checkpoint.staging import CheckpointSaveError
from hf_l2l.realtime import trainer_part
from slow_disk import SlowDisk, assert_same_checkpoints
from tiers import combined
from training import SAVING, assert_same_run, l2l_trainer, plain_trainer

PLAIN = {**SAVING, "save_strategy": "no"}

MODES: dict[str, dict[str, Any]] = {
    "deferred": {"eps_update": "deferred"},
    "serial": {"eps_update": "serial"},
    "eager": {"eps_update": "eager", "max_grad_norm": 0.0},
    "bf16 copies": {"eps_update": "deferred", "cmp": "bf16", "bf16": False},
    "state on disk": {"eps_update": "deferred", "l2l_state_tier": "disk", "l2l_state_window": 3},
    "bf16 moments": {"eps_update": "deferred", "l2l_moment_dtype": "bf16"},
}


def realtime(folder: Path, **options: Any) -> Any:
    """A trainer that writes generations after each step, into "now" beside its output folder."""
    given = {"l2l_realtime_checkpoint": str(folder.parent / "now"), "l2l_realtime_every": 1}
    return l2l_trainer(folder, **{**PLAIN, **given, **options})


class _Interrupted(Exception):
    pass


class _At(hf.TrainerCallback):
    """Calls something at the beginning of a step."""

    def __init__(self, step: int, call: Any) -> None:
        self.step, self.call = step, call

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.call()


def _interrupt() -> None:
    raise _Interrupted


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", combined(MODES, one_in=2))
def test_generations_have_the_values_of_their_step(tmp_path, monkeypatch, name):
    """On a slow disk, while later updates are made."""
    l2l_trainer(tmp_path / "saved", **{**SAVING, "save_steps": 1, "save_total_limit": None}, **MODES[name]).train()
    SlowDisk(monkeypatch)
    kept: list[Path] = []

    def keep() -> None:
        for each in checkpoints_in(tmp_path / "now"):
            kept.append(Path(shutil.copytree(each, tmp_path / "kept" / each.name, dirs_exist_ok=True)))

    made = realtime(tmp_path / "run", **MODES[name], callbacks=[_At(step, keep) for step in range(2, 5)])
    made.train()
    keep()
    assert len(set(kept)) > 1
    for each in tmp_path.glob("saved/checkpoint-*"):
        if not (tmp_path / "kept" / each.name).exists():
            shutil.rmtree(each)
    assert_same_checkpoints(tmp_path / "kept", tmp_path / "saved")
    assert [each.name for each in checkpoints_in(tmp_path / "now")] == [f"checkpoint-{made.state.max_steps}"]
    assert not checkpoints_in(tmp_path / "run")


@pytest.mark.parametrize("kind", [l2l_trainer, pytest.param(plain_trainer, marks=pytest.mark.slow)])
def test_an_interrupted_training_goes_on_from_the_last_one(tmp_path, kind):
    whole = l2l_trainer(tmp_path / "whole", **PLAIN)
    whole.train()
    begun = realtime(tmp_path / "run", callbacks=[_At(3, _interrupt)])
    with pytest.raises(_Interrupted):
        begun.train()
    found = newest_of([tmp_path / "now"])[0]
    assert found is not None
    assert check_whole(found).step == 3
    resumed = kind(tmp_path / "run", **PLAIN)
    resumed.train(resume_from_checkpoint=str(found))
    assert_same_run(resumed, whole)


def test_true_is_the_newest_of_both_folders(tmp_path):
    whole = l2l_trainer(tmp_path / "whole", **PLAIN)
    whole.train()
    for stops, saves in ((3, 2), (2, 2)):  # the generation is newer; the other checkpoint is
        shutil.rmtree(tmp_path / "now", ignore_errors=True)
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        saving = {"save_strategy": "steps", "save_steps": saves}
        with pytest.raises(_Interrupted):
            realtime(tmp_path / "run", **saving, callbacks=[_At(stops, _interrupt)]).train()
        resumed = realtime(tmp_path / "run", **saving)
        steps: list[int] = []
        resumed.add_callback(_At(stops, lambda steps=steps, of=resumed: steps.append(of.state.global_step)))
        resumed.train(resume_from_checkpoint=True)
        assert steps == [stops]
        assert_same_run(resumed, whole)


def test_the_folder_of_the_generations_may_be_named(tmp_path):
    with pytest.raises(_Interrupted):
        realtime(tmp_path / "run", callbacks=[_At(3, _interrupt)]).train()
    resumed = l2l_trainer(tmp_path / "other", **PLAIN)
    resumed.train(resume_from_checkpoint=str(tmp_path / "now"))
    assert resumed.state.global_step == resumed.state.max_steps


def test_callbacks_and_the_best_model_know_nothing_of_them(tmp_path):
    saved: list[int] = []

    class Sees(hf.TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            saved.append(state.global_step)

    saving = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1, "logging_steps": 1}
    best = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"}
    made = realtime(tmp_path / "run", **saving, **best, callbacks=[Sees()])
    made.train()
    assert saved == [2, 4]
    assert [each.name for each in checkpoints_in(tmp_path / "now")]
    of = made.state.best_model_checkpoint
    assert of is None or Path(of).parent == tmp_path / "run"


def test_auto_begins_when_the_one_before_is_there(tmp_path, monkeypatch):
    """With a disk that is never ready while the training runs, there is one."""
    disk = SlowDisk(monkeypatch)
    made = realtime(tmp_path / "run", l2l_realtime_every="auto", eps_update="deferred")
    begun: list[int] = []
    begin = made._begin_generation

    def noted(*given: Any) -> None:
        begun.append(made.state.global_step)
        begin(*given)

    monkeypatch.setattr(made, "_begin_generation", noted)
    made.train()
    assert begun[0] == 2
    assert disk is not None
    assert len(checkpoints_in(tmp_path / "now")) == 1


def _fails(monkeypatch: pytest.MonkeyPatch, made: Any, *at: int) -> None:
    """The generations that are begun after steps `at` cannot be written."""
    get_ready = made._get_ready

    def no_room(target: Path) -> None:
        if made._l2l_is_generation and made.state.global_step in at:
            raise OSError(28, "No space left on device", str(target))
        get_ready(target)

    monkeypatch.setattr(made, "_get_ready", no_room)


def test_a_full_disk_stops_the_training_with_one_sentence(tmp_path, monkeypatch):
    made = realtime(tmp_path / "run")
    _fails(monkeypatch, made, 3)
    with pytest.raises(CheckpointSaveError, match="No space left on device"):
        made.train()
    (left,) = checkpoints_in(tmp_path / "now")
    assert check_whole(left).step == 2


def test_a_training_goes_on_without_one_where_that_is_asked(tmp_path, monkeypatch, caplog):
    whole = l2l_trainer(tmp_path / "whole", **PLAIN)
    whole.train()
    made = realtime(tmp_path / "run", l2l_realtime_errors="warn")
    _fails(monkeypatch, made, 2, 3)
    hf.utils.logging.enable_propagation()
    made.train()
    told = {each for each in caplog.messages if "training goes on without a real-time checkpoint" in each}
    assert len(told) == 1  # of the first of two in a row
    assert "No space left on device" in told.pop()
    (left,) = checkpoints_in(tmp_path / "now")
    assert check_whole(left).step == made.state.max_steps
    assert_same_run(made, whole)


def test_what_they_cost_is_logged_before_the_first_is_there_and_then(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(trainer_part, "write_rate", lambda folder: 1000.0)
    hf.utils.logging.set_verbosity_info()
    hf.utils.logging.enable_propagation()
    realtime(tmp_path / "run").train()
    before, after = dict.fromkeys(each for each in caplog.messages if "a crash loses at most" in each)
    assert "takes 1000 bytes/s" in before and "TB are written per day" in before
    assert "bytes/s" not in after and "TB are written per day" in after


def test_those_of_another_training_are_refused(tmp_path):
    """Nothing of them is deleted, whatever the clock says."""
    realtime(tmp_path / "run").train()
    (before,) = checkpoints_in(tmp_path / "now")
    with pytest.raises(ValueError, match=f"where {before.name} is of another one"):
        realtime(tmp_path / "again").train()
    assert checkpoints_in(tmp_path / "now") == [before]
    check_whole(before)


def test_a_damaged_one_stays_for_somebody_to_look_at(tmp_path):
    realtime(tmp_path / "run").train()
    (before,) = checkpoints_in(tmp_path / "now")
    (before / manifest.MANIFEST).write_text("damaged")
    damaged = before.rename(before.with_name("checkpoint-99"))
    made = realtime(tmp_path / "again")
    made.train()
    assert [each.name for each in checkpoints_in(tmp_path / "now")] == ["checkpoint-4", damaged.name]


def test_the_newest_one_stays_though_the_clock_goes_back(tmp_path, monkeypatch):
    times = iter(range(10_000, 0, -1))
    monkeypatch.setattr(manifest.time, "time", lambda: float(next(times)))
    made = realtime(tmp_path / "run")
    made.train()
    assert [each.name for each in checkpoints_in(tmp_path / "now")] == [f"checkpoint-{made.state.max_steps}"]


def test_a_step_that_has_a_checkpoint_needs_no_generation(tmp_path):
    made = realtime(tmp_path / "run", l2l_realtime_every=2, save_strategy="steps", save_steps=2)
    made.train()
    assert len(checkpoints_in(tmp_path / "run")) == 2
    assert not checkpoints_in(tmp_path / "now")


@pytest.mark.parametrize("at", ["the folder", "a value", "an older one"])
def test_any_error_of_the_system_is_one_of_the_disk(tmp_path, monkeypatch, at):
    """Without the name of a file, or of an error that few disks have."""
    whole = l2l_trainer(tmp_path / "whole", **PLAIN)
    whole.train()

    def stale(*_: Any, **options: Any) -> None:
        raise OSError(116, "Stale file handle")

    made = realtime(tmp_path / "run", l2l_realtime_errors="warn")
    if at == "the folder":
        made.args.l2l_realtime_checkpoint = "/proc/nowhere/now"
    elif at == "a value":
        monkeypatch.setattr(Region, "write", stale)
    else:
        monkeypatch.setattr(trainer_part, "remove", stale)
    made.train()
    assert_same_run(made, whole)
    if at == "a value":
        assert not checkpoints_in(tmp_path / "now")
        stopping = realtime(tmp_path / "other")
        with pytest.raises(CheckpointSaveError, match="Stale file handle"):
            stopping.train()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no number": ({"l2l_realtime_every": 0}, "l2l_realtime_every must be 'auto' or a number of steps"),
    "no policy": ({"l2l_realtime_errors": "ignore"}, "l2l_realtime_errors must be 'stop' or 'warn'"),
    "no folder": ({"l2l_realtime_checkpoint": None}, "l2l_realtime_every needs l2l_realtime_checkpoint"),
    "no path": ({"l2l_realtime_checkpoint": 3}, "must be the path of a folder"),
    "begins again": ({"auto_find_batch_size": True}, "from which auto_find_batch_size=True would begin again"),
    "nothing to resume from": ({"save_only_model": True}, "which save_only_model=True cannot be"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_cannot_be_honoured_are_refused(tmp_path, name):
    options, text = REFUSED[name]
    with pytest.raises(ValueError, match=text):
        realtime(tmp_path / "run", **options)


def test_a_folder_that_is_uploaded_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must not have real-time checkpoints"):
        realtime(tmp_path / "run", push_to_hub=True, l2l_realtime_checkpoint=str(tmp_path / "run" / "now"))
    realtime(tmp_path / "run", l2l_realtime_checkpoint=str(tmp_path / "run" / "now"))


def test_the_folder_of_the_training_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must be another folder than output_dir"):
        realtime(tmp_path / "now")


def test_what_to_do_about_a_full_disk_is_of_a_generation(tmp_path, monkeypatch):
    """No other checkpoints are there to be fewer, and it cannot be the model alone."""
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda path: SimpleNamespace(free=1024))
    with pytest.raises(CheckpointSaveError, match="free some, or name a folder on another disk"):
        realtime(tmp_path / "run").train()
