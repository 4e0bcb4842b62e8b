"""`l2l_realtime_checkpoint`: generations that are whole checkpoints of their step, and what a training does about
them."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from cli_models import ran, refused
from hf_l2l.checkpoint import manifest
from hf_l2l.checkpoint.finding import check_whole
from hf_l2l.checkpoint.manifest import MANIFEST
from hf_l2l.checkpoint.staging import CheckpointSaveError
from hf_l2l.optim import layer_optimizers
from hf_l2l.realtime import copying, lock, trainer_part
from hf_l2l.realtime.copying import copy_newest
from hf_l2l.realtime.lock import FolderLock
from hf_l2l.realtime.schedule import Schedule
from runs import assert_same_run
from saving import At, Stopped, Synced, disk_is_full, no_space, saving, steps_in, stop, trained, write_fails
from slow_disk import SlowDisk, assert_same_checkpoints
from tiers import more
from training import plain_trainer, tiny_bert

PLAIN: dict[str, Any] = {"save_strategy": "no"}


def realtime(folder: Path, **options: Any) -> Any:
    """A trainer that writes generations after each step, into "now" beside its output folder."""
    given = {"l2l_realtime_checkpoint": str(folder.parent / "now"), "l2l_realtime_every": 1}
    return saving(folder, **{**PLAIN, **given, **options})


def test_generations_have_the_values_of_their_step(tmp_path, monkeypatch, whole):
    """On a slow disk, while later updates are made. In other modes: `tests/trainer/test_background_saves.py`."""
    shutil.copytree(whole.args.output_dir, tmp_path / "saved")
    SlowDisk(monkeypatch)

    def keep() -> None:
        for each in (tmp_path / "now").glob("checkpoint-*"):
            shutil.copytree(each, tmp_path / "kept" / each.name, dirs_exist_ok=True)

    callbacks = [At("on_step_begin", None, keep)]
    realtime(tmp_path / "run", eps_update="deferred", callbacks=callbacks).train()
    keep()
    assert len(steps_in(tmp_path / "kept")) > 1
    for step in set(steps_in(tmp_path / "saved")) - set(steps_in(tmp_path / "kept")):
        shutil.rmtree(tmp_path / "saved" / f"checkpoint-{step}")
    assert_same_checkpoints(tmp_path / "kept", tmp_path / "saved")
    assert (steps_in(tmp_path / "now"), steps_in(tmp_path / "run")) == ([4], [])


def test_an_interrupted_training_goes_on_from_the_newest_of_both_folders(tmp_path, whole):
    options = {"save_strategy": "steps", "save_steps": 2, "callbacks": [At("on_step_begin", 3, stop)]}
    with pytest.raises(Stopped):
        realtime(tmp_path / "run", **options).train()
    shutil.copytree(tmp_path / "now", tmp_path / "named")
    begun: list[int] = []
    resumed = realtime(tmp_path / "run")
    resumed.add_callback(At("on_step_begin", None, lambda: begun.append(resumed.state.global_step)))
    resumed.train(resume_from_checkpoint=True)
    assert begun[0] == 3
    assert_same_run(resumed, whole)
    (generation,) = (tmp_path / "named").iterdir()  # by transformers' Trainer, too
    assert_same_run(trained(tmp_path / "plain", plain_trainer, **PLAIN, resumes=generation), whole)
    generation.rename(tmp_path / "elsewhere")
    generation.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="checkpoint"):
        trained(tmp_path / "linked", **PLAIN, resumes=tmp_path / "named")


def test_callbacks_and_the_best_model_know_nothing_of_them(tmp_path):
    """A step that has a checkpoint needs no generation."""
    saved: list[int] = []
    made = realtime(
        tmp_path / "run",
        **{"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1, "l2l_realtime_every": 1},
        **{"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss", "max_steps": 3},
    )
    made.add_callback(At("on_save", None, lambda: saved.append(made.state.global_step)))
    made.train()
    assert saved == [2, 3] and steps_in(tmp_path / "now") == [1]
    best = made.state.best_model_checkpoint
    assert best is None or Path(best).parent == tmp_path / "run"


def test_auto_begins_when_the_one_before_is_there(tmp_path, monkeypatch):
    """With a disk that is never ready while the training runs, there is one, of the second step."""
    SlowDisk(monkeypatch)
    realtime(tmp_path / "run", l2l_realtime_every="auto", eps_update="deferred").train()
    assert steps_in(tmp_path / "now") == [2]


STALE = OSError(116, "Stale file handle")


@pytest.mark.parametrize("at", ["some values", *more("all values", "the folder", "an older one")])
def test_a_training_goes_on_without_one_where_that_is_asked(tmp_path, monkeypatch, caplog, whole, at):
    """Whatever error of the system it is, without the name of a file; of several in a row, the first one is told."""
    made = realtime(tmp_path / "run", l2l_realtime_errors="warn", eps_update="deferred")
    if at == "the folder":
        made.args.l2l_realtime_checkpoint = "/proc/nowhere/now"
    elif at == "an older one":
        monkeypatch.setattr(trainer_part, "remove", Mock(side_effect=STALE))
    else:
        # Of the second step alone: an error that is told as a step ends puts the generation of that step off.
        name = "point-2-" if at == "some values" else "point-"
        write_fails(monkeypatch, STALE, lambda region: name in str(region.file))
    hf.utils.logging.enable_propagation()
    made.train()
    told = {each for each in caplog.messages if "training goes on without a real-time checkpoint" in each}
    assert len(told) == {"some values": 1, "all values": 1, "an older one": 0}.get(at, len(told))
    assert_same_run(made, whole)
    assert not at.endswith("values") or steps_in(tmp_path / "now") == ([4] if at == "some values" else [])


def test_else_it_stops_with_one_sentence(tmp_path, monkeypatch):
    made = realtime(tmp_path / "run", callbacks=[At("on_step_begin", 2, lambda: disk_is_full(monkeypatch))])
    with pytest.raises(CheckpointSaveError, match="name a folder on another disk"):
        made.train()
    assert steps_in(tmp_path / "now") == [2] and check_whole(tmp_path / "now" / "checkpoint-2") is not None
    monkeypatch.undo()
    write_fails(monkeypatch, STALE, lambda region: True)
    with pytest.raises(CheckpointSaveError, match="Stale file handle"):
        realtime(tmp_path / "again", l2l_realtime_checkpoint=str(tmp_path / "other")).train()


class Failing(torch.optim.SGD):
    """Its update fails as a disk with its state would."""

    def step(self, closure: Any = None) -> None:
        super().step()
        if threading.current_thread() is not threading.main_thread():  # else it is tried, or has no gradients
            time.sleep(0.2)  # the step has ended then
            raise OSError(5, "the update has failed")


@pytest.mark.parametrize("errors", ["warn", "stop"])
def test_an_error_of_an_update_is_no_error_of_a_generation(tmp_path, caplog, errors):
    model = tiny_bert(dropout=0.0, layers=2)
    options = {"optimizers": (Failing(model.parameters(), lr=0.1), None), "l2l_realtime_errors": errors}
    made = realtime(tmp_path / "run", model=model, eps_update="deferred", **options)
    hf.utils.logging.enable_propagation()
    with pytest.raises(OSError, match="the update has failed") as caught:
        made.train()
    assert not isinstance(caught.value, CheckpointSaveError)
    assert "without a real-time checkpoint" not in caplog.text


def test_what_they_cost_is_logged_before_the_first_is_there_and_then(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(trainer_part, "write_rate", lambda folder: 1000.0)
    hf.utils.logging.set_verbosity_info()
    hf.utils.logging.enable_propagation()
    realtime(tmp_path / "run", eps_update="deferred", max_steps=2).train()
    before, after = dict.fromkeys(each for each in caplog.messages if "a crash loses at most" in each)
    assert "takes 1000 bytes/s" in before and "bytes/s" not in after
    first, then = (float(re.search(r"has ([\d.]+) KiB", text)[1]) for text in (before, after))
    assert first == pytest.approx(then, rel=0.05), "with its manifest, when it is there"


def test_those_of_another_training_are_refused_and_damaged_ones_stay(tmp_path, monkeypatch):
    """Nothing of them is deleted, whatever the clock says."""
    times = itertools.count(10_000, -1)
    with monkeypatch.context() as patch:
        patch.setattr(manifest.time, "time", lambda: float(next(times)))
        realtime(tmp_path / "run", max_steps=2).train()
    assert steps_in(tmp_path / "now") == [2], "the newest one, though the clock goes back"
    with pytest.raises(ValueError, match="checkpoint-2 is of another one"):
        realtime(tmp_path / "again").train()
    assert check_whole(tmp_path / "now" / "checkpoint-2") is not None
    (tmp_path / "now" / "checkpoint-2" / manifest.MANIFEST).write_text("damaged")
    (tmp_path / "now" / "checkpoint-2").rename(tmp_path / "now" / "checkpoint-99")
    realtime(tmp_path / "again", max_steps=1).train()
    assert steps_in(tmp_path / "now") == [1, 99]


def test_what_is_left_there_leads_nowhere(tmp_path, caplog):
    """Links in the places of the lock and of what an interrupted save has left are not followed; the training goes on
    from the whole generation, without the lock, and says so."""
    realtime(tmp_path / "run", max_steps=1).train()
    theirs, now = tmp_path / "theirs", tmp_path / "now"
    theirs.mkdir()
    (theirs / "file").write_text("of somebody else")
    (now / "l2l_realtime.lock").symlink_to(theirs / "new")
    for kind, tail in (("saving", "abcdefgh"), ("removing", "0123abcd")):
        link, before, file, within = (now / f"_l2l-{kind}-checkpoint-{n}-{tail}" for n in (6, 7, 8, 9))
        for folder, name in ((before, "before"), (within, "checkpoint-9")):
            folder.mkdir()
            (folder / name).symlink_to(theirs)
        link.symlink_to(theirs)
        file.write_text("no folder")
    made = realtime(tmp_path / "run", max_steps=2)
    with caplog.at_level("WARNING", "hf_l2l"):
        made.train(resume_from_checkpoint=True)
    assert made.state.global_step == 2 and steps_in(now) == [2]
    assert [path.name for path in theirs.iterdir()] == ["file"]
    assert (theirs / "file").read_text() == "of somebody else"
    assert "no other training is kept from" in caplog.text


def test_a_second_training_is_refused_while_the_first_one_lives(tmp_path):
    """One that was killed holds nothing, though its workers live."""
    read, write = os.pipe()
    first = os.fork()
    if first == 0:
        held = FolderLock(tmp_path / "now")
        if os.fork() > 0:
            os.write(write, b"held" if held else b"")
        time.sleep(120)
        os._exit(0)
    os.close(write)
    assert os.read(read, 4) == b"held"
    os.close(read)
    workers = Path(f"/proc/{first}/task/{first}/children").read_text().split()
    try:
        with pytest.raises(ValueError, match="to which another process writes"):
            realtime(tmp_path / "run", max_steps=1).train()
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
        assert workers
        realtime(tmp_path / "run", max_steps=1).train()
        assert os.listdir(tmp_path / "now") == ["checkpoint-1"]
    finally:
        for worker in workers:
            os.kill(int(worker), signal.SIGKILL)


def test_two_trainings_of_one_process_are_not_one(tmp_path, monkeypatch):
    """Nor does one hold a lock whose file was removed between its opening and the lock. After an error, others may."""
    held = FolderLock(tmp_path / "now")
    (tmp_path / "same").symlink_to(tmp_path / "now")
    with pytest.raises(ValueError, match="to which this process writes"):
        FolderLock(tmp_path / "same")
    held.release()
    held.release()
    lockf, calls = lock.fcntl.lockf, []

    def late(file: Any, kind: int) -> None:
        if not calls:
            (tmp_path / "now" / "l2l_realtime.lock").unlink()
        calls.append(file)
        lockf(file, kind)

    with monkeypatch.context() as patch:
        patch.setattr(lock.fcntl, "lockf", late)
        held = FolderLock(tmp_path / "same")
    assert len(calls) == 2 and calls[0].closed and (tmp_path / "now" / "l2l_realtime.lock").exists()
    held.release()
    made = realtime(tmp_path / "run")
    made.training_step = lambda *args, **kwargs: 1 / 0
    with pytest.raises(ZeroDivisionError):
        made.train()
    assert list((tmp_path / "now").iterdir()) == []
    FolderLock(tmp_path / "now").release()


def test_options_that_cannot_be_honoured_are_refused(tmp_path, monkeypatch):
    """Others are in the table of all refusals (`tests/helpers/refusal_settings.py`)."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="auto_find_batch_size"):
        realtime(Path("run"), auto_find_batch_size=True)
    with pytest.raises(ValueError, match="must not have real-time checkpoints"):
        realtime(Path("run"), push_to_hub=True, l2l_realtime_checkpoint="run/now")
    realtime(tmp_path / "run", l2l_realtime_checkpoint="run/now")


def test_a_step_ends_while_its_updates_go_on(tmp_path, monkeypatch, whole):
    """They are made when the saving has been begun: a save that waited for them would wait for ever."""
    run, may_run, late = layer_optimizers.Part.run, threading.Event(), []
    made = saving(tmp_path / "later", eps_update="deferred", l2l_async_save=True)
    may_run.set()
    save, step = made._save_checkpoint, made.training_step

    def slow(part: Any, *args: Any) -> None:
        late.append(not may_run.wait(timeout=30))
        run(part, *args)

    with monkeypatch.context() as patch:
        patch.setattr(layer_optimizers.Part, "run", slow)
        made._save_checkpoint = lambda *args: (save(*args), may_run.set())
        made.training_step = lambda *args, **more: (step(*args, **more), may_run.clear())[0]  # updates wait
        made.train()
    assert late and not any(late)
    assert_same_checkpoints(tmp_path / "later", Path(whole.args.output_dir))


def test_buffers_and_state_are_those_of_the_step(tmp_path):
    """A forward has changed buffers before the files are made, and the program has loaded other state."""

    def run(folder: Path, **options: Any) -> Any:
        def load() -> None:
            optimizer = getattr(made.optimizer, "optimizer", made.optimizer)
            state = optimizer.state_dict()
            state["state"] = {n: {k: v * 0.5 for k, v in each.items()} for n, each in state["state"].items()}
            optimizer.load_state_dict(state)

        def count(module: torch.nn.Module, given: Any) -> None:
            module.calls.add_(1)

        model = tiny_bert(layers=2)
        model.bert.embeddings.register_buffer("calls", torch.zeros(3))
        model.bert.embeddings.register_forward_pre_hook(count)
        how = {"eps_update": "deferred", "max_steps": 3}
        made = saving(folder, model=model, callbacks=[At("on_step_begin", 2, load)], **how, **options)
        made.train()
        return made

    assert_same_run(run(tmp_path / "later", l2l_async_save=True), run(tmp_path / "at once"))
    assert_same_checkpoints(tmp_path / "later", tmp_path / "at once")
    saved = [load_file(each / "model.safetensors") for each in sorted((tmp_path / "later").glob("checkpoint-*"))]
    assert [each["bert.embeddings.calls"][0].item() for each in saved] == [1.0, 2.0, 3.0]


@given(every=st.one_of(st.just("auto"), st.integers(1, 9)), step_s=st.integers(1, 20), write_s=st.integers(1, 60))
def test_a_crash_loses_no_more_steps_than_were_said(every, step_s, write_s):
    """On a virtual clock: at the end of any step, once there is a generation. With a number of steps, a step waits for
    the generation before."""
    now, begun, lost = [0.0], list[int](), list[int]()
    schedule = Schedule(every, 0, lambda: now[0])
    ends, whole = None, None
    for step in range(1, 201):
        now[0] += step_s
        if ends is not None and now[0] >= ends:
            schedule.end(step)
            ends, whole = None, begun[-1]
        if whole is not None:
            lost.append(step - whole)
        schedule.made(step)
        if schedule.is_due(step):
            if ends is not None:
                now[0] = ends
                schedule.end(step)
                whole = begun[-1]
            schedule.begin(step)
            begun.append(step)
            ends = now[0] + write_s
    assert begun
    assert max(lost, default=0) <= schedule.most_lost(step_s, write_s)
    if every != "auto" and write_s <= step_s * every:
        assert all(b - a == every for a, b in pairwise(begun))


def test_what_is_said_and_when_the_next_one_begins_after_a_failure():
    """The first step is not like others; there may be a generation at the end of an epoch, too."""
    now = [0.0]
    schedule = Schedule("auto", 0, lambda: now[0])
    assert schedule.most_lost(2.0, 5.0) == 6  # three steps between two, and three until the next one is there
    assert schedule.bytes_per_day(10**9, 2.0, 5.0) == 10**9 * 86_400 / 6
    assert Schedule(10, 0).bytes_per_day(10**9, 2.0, 5.0) == 10**9 * 86_400 / 20
    for step, seconds in ((1, 5.0), (2, 0.25), (3, 0.75)):
        now[0] += seconds
        schedule.made(step)
        schedule.made(step)
    assert schedule.step_seconds() == 0.5
    schedule.begin(3)
    schedule.end(4, failed=True)
    assert (schedule.is_due(5), schedule.is_due(104)) == (False, True)


# ---- `hf-l2l checkpoint`: the newest whole one, copied whole or not at all


@pytest.fixture
def live(whole: Any, tmp_path: Path) -> Path:
    """The checkpoints of steps 2 and 4, to be changed."""
    for step in (2, 4):
        name = f"checkpoint-{step}"
        shutil.copytree(Path(whole.args.output_dir) / name, tmp_path / "run" / name)
    return tmp_path / "run"


def test_the_newest_is_copied_and_plain_trainer_resumes_from_it(whole, live, tmp_path, capsys, monkeypatch):
    """All files that it names are on the disk before it has its name."""
    (live / "checkpoint-4" / "optimizer.pt").write_bytes(b"other")
    with monkeypatch.context() as patch:
        synced = Synced(patch)
        found = ran(capsys, "checkpoint", str(live), str(tmp_path / "kept"))
    (missing,) = synced.missing
    assert missing <= {MANIFEST} and synced.names == [tmp_path.name]
    assert found.status == 0 and "step 2" in found.out
    assert_same_run(trained(tmp_path / "plain", plain_trainer, resumes=tmp_path / "kept"), whole)
    source, manifest = copy_newest(live / "checkpoint-2", tmp_path / "new" / "kept")  # named
    assert source == live / "checkpoint-2" and manifest == check_whole(tmp_path / "new" / "kept")


def test_what_is_replaced_or_deleted_meanwhile(whole, live, tmp_path, monkeypatch):
    """A training with l2l_realtime_every="auto" deletes a generation about as soon as it can be read: of one that is
    gone before it was opened, the next one is copied."""
    shutil.rmtree(live / "checkpoint-4")
    named, copy = copying.files_in, copying.shutil.copyfileobj

    def replaced(source: Path) -> Any:
        if source.name == "checkpoint-2":
            shutil.copytree(Path(whole.args.output_dir) / "checkpoint-4", live / "checkpoint-4")
            shutil.rmtree(live / "checkpoint-2")
        return named(source)

    def deleted(*given: Any) -> None:
        shutil.rmtree(live / "checkpoint-4", ignore_errors=True)
        copy(*given)

    monkeypatch.setattr(copying, "files_in", replaced)
    monkeypatch.setattr(copying.shutil, "copyfileobj", deleted)
    source, manifest = copy_newest(live, tmp_path / "kept")
    assert source.name == "checkpoint-4" and manifest is not None and manifest == check_whole(tmp_path / "kept")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "run"]
    with pytest.raises((FileNotFoundError, ValueError)):
        copy_newest(live, tmp_path / "again")


def test_bad_input_and_a_full_disk_are_one_sentence_and_leave_nothing(live, tmp_path, capsys, monkeypatch):
    (tmp_path / "empty").mkdir()
    kept, within = tmp_path / "kept", live / "checkpoint-2"
    monkeypatch.setattr(copying.shutil, "copyfileobj", no_space)
    for folder, target, says in (
        (tmp_path / "none", kept, "FOLDER must be"),
        (tmp_path / "empty", kept, "FOLDER must have"),
        (live, tmp_path, "TARGET must not exist"),
        (within, within / "part" / "kept", "TARGET must not be in"),
        (live, kept, "No space left"),
    ):
        assert says in refused(capsys, "checkpoint", str(folder), str(target))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "run"]


@pytest.mark.parametrize("name", ["optimizer.pt", "pytorch_model.bin"])
def test_one_that_somebody_has_made_up_is_not_copied(live, tmp_path, name):
    """With a link in the place of a file, or of one that would be loaded and is not of the checkpoint."""
    shutil.rmtree(live / "checkpoint-4")
    (live / "checkpoint-2" / name).unlink(missing_ok=True)
    (live / "checkpoint-2" / name).symlink_to("/etc/passwd")
    for folder in (live, live / "checkpoint-2"):
        with pytest.raises(ValueError, match="got"):
            copy_newest(folder, tmp_path / "kept")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
