"""Checkpoints that the program or its user has changed, moved or asked for at an odd moment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from hf_l2l import L2LTrainer, L2LTrainerMixin
from hf_l2l.checkpoint.data_position import position_file
from hf_l2l.checkpoint.finding import PassedOver, check_whole, checkpoints_in, newest_whole
from hf_l2l.checkpoint.manifest import MANIFEST, DamagedCheckpointError
from hf_l2l.checkpoint.staging import CheckpointSaveError
from training import SAVING, l2l_trainer, left_in, rows

EACH_STEP = {**SAVING, "save_steps": 1, "save_total_limit": None}
BEST: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}


class _At(hf.TrainerCallback):
    """Calls a function of the trainer's control at an event of a step."""

    def __init__(self, event: str, step: int, call: Any) -> None:
        def at_event(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == step:
                call(control)

        setattr(self, event, at_event)


def _ask(control: hf.TrainerControl) -> None:
    control.should_save = True


def names(run: Path) -> list[str]:
    return [path.name for path in checkpoints_in(run)]


# ---- the best one


def _second_is_best() -> Any:
    scores = iter([0.0, 2.0, *[1.0] * 100])
    return lambda predictions: {"score": next(scores)}


def best_of(**options: Any) -> dict[str, Any]:
    known = {**BEST, "metric_for_best_model": "score", "greater_is_better": True}
    return {**known, **options, "compute_metrics": _second_is_best()}


def test_what_is_deleted_at_the_end_is_in_the_folder_of_the_training(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    l2l_trainer(old, **EACH_STEP, **best_of()).train()
    options = {**EACH_STEP, "max_steps": 6, "save_total_limit": 1, **best_of()}
    options["compute_metrics"] = lambda predictions: {"score": 0.5}
    made = l2l_trainer(new, **options)
    made.train(resume_from_checkpoint=str(old / "checkpoint-4"))
    assert made.state.best_model_checkpoint == str(old / "checkpoint-2")
    assert names(old) == [f"checkpoint-{step}" for step in range(1, 5)] and names(new) == []


def test_nothing_is_deleted_if_the_best_one_is_gone(tmp_path):
    class Mine(L2LTrainer):
        def _load_best_model(self) -> None:
            shutil.rmtree(self.state.best_model_checkpoint)

    made = l2l_trainer(tmp_path, **{**EACH_STEP, "save_total_limit": 1}, **best_of())
    made.__class__ = Mine
    made.train()
    assert names(tmp_path) == ["checkpoint-4"]


def test_callbacks_see_the_limit_at_the_end(tmp_path):
    class Sees(hf.TrainerCallback):
        limit: Any = None

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.limit, self.left = args.save_total_limit, names(tmp_path)

    sees = Sees()
    l2l_trainer(tmp_path, **{**EACH_STEP, "save_total_limit": 1}, **best_of(), callbacks=[sees]).train()
    assert sees.limit == 1 and sees.left == ["checkpoint-2"]


def test_the_weights_of_the_best_one_are_loaded_whatever_became_of_the_rest(tmp_path):
    def thin(control: Any) -> None:
        (tmp_path / "checkpoint-2" / "optimizer.pt").unlink()
        (tmp_path / "checkpoint-2" / "adapter_model").mkdir()
        save_file({"a": torch.ones(2)}, tmp_path / "checkpoint-2" / "adapter_model" / "adapter_model.safetensors")

    made = l2l_trainer(tmp_path, **EACH_STEP, **best_of(), callbacks=[_At("on_save", 2, thin)])
    made.train()
    saved = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert all(value.equal(saved[name]) for name, value in made.model.state_dict().items())
    with pytest.raises(
        DamagedCheckpointError, match=f"optimizer.pt is missing.*without {MANIFEST}, its files are not"
    ):
        l2l_trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    (tmp_path / "checkpoint-2" / MANIFEST).unlink()
    l2l_trainer(tmp_path, max_steps=3).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_a_run_that_was_moved_keeps_its_best_checkpoint(tmp_path):
    l2l_trainer(tmp_path / "before", **EACH_STEP, **best_of()).train()
    moved = (tmp_path / "before").rename(tmp_path / "after")
    (moved / "checkpoint-4" / "model.safetensors").write_bytes(b"damaged")
    options = {**EACH_STEP, "max_steps": 6, "save_total_limit": 2, **best_of()}
    options["compute_metrics"] = lambda predictions: {"score": 0.5}
    made = l2l_trainer(moved, **options)
    made.train(resume_from_checkpoint=True)
    assert made.state.best_model_checkpoint == str(moved / "checkpoint-2")
    assert names(moved) == ["checkpoint-2", "checkpoint-6"]


# ---- moments


@pytest.mark.parametrize("in_background", [False, True])
def test_a_save_that_is_asked_for_while_another_one_ends_is_made(tmp_path, in_background):
    options = {**EACH_STEP, "save_steps": 2, "max_steps": 5, "l2l_async_save": in_background}
    made = l2l_trainer(tmp_path, **options, callbacks=[_At("on_step_begin", 2, _ask)])
    finish = made._finish_if_saved

    def finished() -> None:
        if made._l2l_saving is not None:
            made._l2l_saving[0]._future.result()
        finish()

    made._finish_if_saved = finished  # type: ignore[method-assign]  # the disk is fast
    made.train()
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-3", "checkpoint-4", "checkpoint-5"]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("event", ["on_pre_optimizer_step", "on_optimizer_step"])
@pytest.mark.parametrize("mode", ["eager", "deferred", "serial"])
def test_a_save_within_a_step_is_of_whole_steps_or_refused(tmp_path, mode, event):
    same = {**EACH_STEP, "save_steps": 100, "lr_scheduler_type": "constant"}
    options = {**same, "eps_update": mode, "max_grad_norm": 0.0}
    made = l2l_trainer(tmp_path, **options)
    made.add_callback(_At(event, 2, lambda control: made._save_checkpoint(made.model, None)))
    if (mode, event) == ("eager", "on_pre_optimizer_step"):
        with pytest.raises(RuntimeError, match="between backward and optimizer.step.*got a save there"):
            made.train()
        assert names(tmp_path) == []
        return
    made.train()
    if event == "on_pre_optimizer_step":
        whole = l2l_trainer(tmp_path / "whole", **{**options, "max_steps": 2})
        whole.train()
        saved = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
        assert all(value.equal(saved[name]) for name, value in whole.model.state_dict().items())


def test_a_save_at_the_end_of_a_step_knows_where_in_the_data_it_is(tmp_path):
    made = l2l_trainer(tmp_path, **{**EACH_STEP, "save_steps": 100})
    made.add_callback(_At("on_step_end", 2, lambda control: made._save_checkpoint(made.model, None)))
    made.train()
    assert (tmp_path / "checkpoint-2" / position_file(None)).exists()
    resumed = l2l_trainer(tmp_path, **{**EACH_STEP, "save_steps": 100})
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for found, value in zip(resumed.model.parameters(), made.model.parameters(), strict=True):
        assert found.equal(value)


class _OutOfMemoryAt(hf.TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step: int | None = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.step = None
            raise torch.OutOfMemoryError("CUDA out of memory.")


def test_a_batch_size_that_is_found_late_begins_again_with_the_weights_of_the_checkpoint(tmp_path):
    l2l_trainer(tmp_path, **{**EACH_STEP, "max_steps": 2}).train()
    options = {**EACH_STEP, "auto_find_batch_size": True}
    made = l2l_trainer(tmp_path / "found", **options, callbacks=[_OutOfMemoryAt(3)])
    made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert made._train_batch_size < 8
    expected = l2l_trainer(tmp_path / "given", **EACH_STEP, per_device_train_batch_size=made._train_batch_size)
    expected.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for found, value in zip(made.model.parameters(), expected.model.parameters(), strict=True):
        assert found.equal(value)


def test_one_that_begins_again_with_trained_weights_says_so(tmp_path, caplog):
    l2l_trainer(tmp_path, auto_find_batch_size=True, callbacks=[_OutOfMemoryAt(2)]).train()
    assert "begins again after 2 steps, with the weights that they have made" in caplog.text


# ---- what is resumed from


def test_links_are_named_and_never_followed(tmp_path):
    l2l_trainer(tmp_path / "disk", **EACH_STEP).train()
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoint-4").symlink_to(tmp_path / "disk" / "checkpoint-4")
    assert newest_whole(run) == (None, [PassedOver(run / "checkpoint-4", "it is a link", is_interrupted=False)])
    with pytest.raises(ValueError, match="in checkpoint-4 it is a link.*name the one to resume from"):
        l2l_trainer(run).train(resume_from_checkpoint=True)
    l2l_trainer(run, max_steps=5).train(resume_from_checkpoint=str(run / "checkpoint-4"))


def test_a_file_that_is_a_link_is_told_as_one(tmp_path):
    l2l_trainer(tmp_path, **{**EACH_STEP, "max_steps": 1}).train()
    for name in ("config.json", MANIFEST):
        file = tmp_path / "checkpoint-1" / name
        file.rename(tmp_path / name).chmod(0o600)
        file.symlink_to(tmp_path / name)
        with pytest.raises(DamagedCheckpointError, match=f"{name} is (a link|no file)"):
            check_whole(tmp_path / "checkpoint-1")


@pytest.mark.parametrize("name", ["nowhere", "file"])
def test_a_folder_that_is_none_is_told(tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=f"Can't find a valid checkpoint at .*{name}, which is no folder"):
        l2l_trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / name))


def test_weights_in_a_folder_are_for_a_trainer_that_looks_there(tmp_path):
    l2l_trainer(tmp_path, **{**EACH_STEP, "max_steps": 1}).train()
    checkpoint = tmp_path / "checkpoint-1"
    (checkpoint / MANIFEST).unlink()
    (checkpoint / "0_Transformer").mkdir()
    (checkpoint / "model.safetensors").rename(checkpoint / "0_Transformer" / "model.safetensors")
    assert check_whole(checkpoint) is None


def test_what_the_user_has_saved_earlier_is_not_renamed(tmp_path):
    made = l2l_trainer(tmp_path, **{**EACH_STEP, "save_steps": 4})
    made.train()
    for step in (2, 9):
        made.save_model(str(tmp_path / f"checkpoint-{step}"))
    l2l_trainer(tmp_path, max_steps=5).train(resume_from_checkpoint=True)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4"] and (tmp_path / "_interrupted-checkpoint-9").is_dir()


def test_a_data_set_of_another_length_is_told(tmp_path, caplog):
    l2l_trainer(tmp_path, **{**EACH_STEP, "max_steps": 3}).train()
    longer = l2l_trainer(tmp_path, **{**EACH_STEP, "max_steps": 5})
    longer.train_dataset = rows(96)
    longer.train(resume_from_checkpoint=True)
    assert "rows of train_dataset (got 96, and the checkpoint has 48)" in caplog.text
    assert longer.state.global_step == 5


# ---- the program's own code


@pytest.mark.parametrize("in_background", [False, True])
def test_what_a_subclass_pushes_is_in_its_place(tmp_path, in_background):
    pushed: list[tuple[str, bool, int]] = []

    class Mine(L2LTrainer):
        def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
            pass

        def _finish_current_push(self) -> None:
            pass

        def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
            folder = Path(checkpoint_folder)
            pushed.append((folder.name, check_whole(folder) is not None, self.state.global_step))

    made = l2l_trainer(tmp_path, **{**EACH_STEP, "save_steps": 2}, l2l_async_save=in_background)
    made.__class__ = Mine
    made.args.push_to_hub = True
    made.push_to_hub = lambda *args, **kwargs: None  # type: ignore[method-assign]
    made.train()
    assert pushed == [("checkpoint-2", True, 2), ("checkpoint-4", True, 4)]


@pytest.mark.parametrize(
    "error", [ConnectionError("the server is away"), TimeoutError(110, "timed out"), OSError("mine")]
)
def test_errors_of_the_program_in_a_save_are_its_own(tmp_path, error):
    class Mine(L2LTrainer):
        def _save(self, *args: Any, **kwargs: Any) -> None:
            raise error

    made = l2l_trainer(tmp_path, **EACH_STEP)
    made.__class__ = Mine
    with pytest.raises(OSError) as caught:
        made.train()
    assert caught.value is error and left_in(tmp_path) == []


def test_a_folder_that_vanishes_is_an_error_of_the_disk(tmp_path):
    class Mine(L2LTrainer):
        def _save_scaler(self, output_dir: str) -> None:
            shutil.rmtree(output_dir)
            open(os.path.join(output_dir, "scaler.pt"), "wb").close()

    made = l2l_trainer(tmp_path, **EACH_STEP)
    made.__class__ = Mine
    with pytest.raises(CheckpointSaveError, match="No such file"):
        made.train()


ENDS = """
import os, sys, threading
from pathlib import Path
import torch
from hf_l2l.checkpoint.background import BackgroundSave
from hf_l2l.checkpoint.reserved import Region
from training import l2l_trainer

torch.set_num_threads(1)
go = threading.Event()
write = Region.write
Region.write = lambda *args: (go.wait(60), write(*args))[1]
made = l2l_trainer(Path(sys.argv[1]), max_steps=2, save_strategy="steps", save_steps=2, l2l_async_save=True)

def interrupted(saving):
    raise KeyboardInterrupt

BackgroundSave.result = interrupted
threading._register_atexit(go.set)
made.train()
"""


@pytest.mark.slow  # smaller: `test_async_interrupts.py`, and SIGINT in `test_signals.py`
def test_a_second_ctrl_c_does_not_throw_the_checkpoint_away(tmp_path):
    """Waits for the disk are interrupted, and the interpreter ends while the thread still writes."""
    root = Path(__file__).parents[2]
    path = os.pathsep.join((str(root), str(root / "tests" / "helpers")))
    ended = subprocess.run(
        [sys.executable, "-c", ENDS, str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "KeyboardInterrupt" in ended.stderr, ended.stderr
    assert check_whole(tmp_path / "run" / "checkpoint-2") is not None, ended.stderr


class _TakesFolders(hf.Trainer):
    """As those of sentence-transformers, whose function to load takes a folder alone."""

    def _load_from_checkpoint(self, checkpoint_path: str) -> None:
        super()._load_from_checkpoint(checkpoint_path)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)


class _Layered(L2LTrainerMixin, _TakesFolders):
    pass


def test_another_trainer_may_load_in_its_own_way(tmp_path):
    made = l2l_trainer(tmp_path, **EACH_STEP, **best_of())
    made.__class__ = _Layered
    made.train()
    saved = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert all(value.equal(saved[name]) for name, value in made.model.state_dict().items())
