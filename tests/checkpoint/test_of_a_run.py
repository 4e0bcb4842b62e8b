"""Checkpoints in a folder with what is not of this training, and those that the program changes or asks for at an odd
moment."""

from __future__ import annotations

import itertools
import shutil
import time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from hf_l2l.checkpoint.background import BackgroundSave
from hf_l2l.checkpoint.finding import check_whole, newest_whole
from hf_l2l.checkpoint.manifest import MANIFEST, DamagedCheckpointError, read_manifest
from hf_l2l.hf import checkpoints
from new_tensors import NewTensors
from runs import assert_same_tensors
from saving import BEST, At, Stopped, assert_saved, saving, steps_in, stop, trained, with_methods
from tiers import more
from training import l2l_trainer, left_in, plain_trainer, tiny_bert

BACKGROUND = pytest.mark.parametrize("in_background", [True, *more(False)])


def best_of(scores: Any, **options: Any) -> dict[str, Any]:
    """The best one is that with the highest score, of these, one for each evaluation."""
    left = iter(scores)
    known = {**BEST, "metric_for_best_model": "score", "greater_is_better": True}
    return {**known, "compute_metrics": lambda predictions: {"score": next(left)}, **options}


def second_is_best() -> dict[str, Any]:
    return best_of([0.0, 2.0, *[1.0] * 100])


def falling(**options: Any) -> dict[str, Any]:
    return best_of(range(100, 0, -1), **options)


@BACKGROUND
def test_what_is_added_to_a_checkpoint_stays(tmp_path, in_background):
    """By a callback, when it is there; by a subclass, before and after it is saved, unless it is in the place of ours,
    or would be loaded. Weights may have names of the program."""

    def save(trainer: Any, *args: Any) -> None:
        folder = Path(trainer.args.output_dir) / f"checkpoint-{trainer.state.global_step}"
        folder.mkdir(parents=True)
        (folder / "before.txt").write_text("before")
        (folder / "config.json").write_text("not the model's")
        (folder / "scaler.pt").write_text("of an interrupted training")
        super(made.__class__, trainer)._save_checkpoint(*args)
        if not in_background:
            (folder / "after.txt").write_text("after")

    def add() -> None:
        folder = tmp_path / "checkpoint-1" / "merged"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights of two models")

    def write(trainer: Any, output_dir: str, state_dict: Any = None) -> None:
        super(made.__class__, trainer)._save(output_dir, state_dict)
        Path(output_dir, "model.safetensors").rename(Path(output_dir, "mine.safetensors"))

    made = saving(tmp_path, max_steps=2, l2l_async_save=in_background, callbacks=[At("on_save", 1, add)])
    own = {} if in_background else {"_save": write}
    with_methods(made, _save_checkpoint=save, **own).train()
    for step in (1, 2):
        folder = tmp_path / f"checkpoint-{step}"
        assert check_whole(folder) is not None and (folder / "before.txt").exists()
        assert "model_type" in (folder / "config.json").read_text() and not (folder / "scaler.pt").exists()
        assert (folder / "after.txt").exists() is not in_background
    assert (tmp_path / "checkpoint-1" / "merged" / "model.safetensors").exists()
    if in_background:
        trained(tmp_path, max_steps=3, resumes=True)


def test_transformers_uploads_nothing_that_is_not_a_checkpoint(tmp_path, monkeypatch):
    names, write = set[str](), checkpoints.write_manifest
    (tmp_path / "checkpoint-9").mkdir()
    trained(tmp_path, max_steps=1)
    noted = Mock(side_effect=lambda *args, **more: (names.update(left_in(tmp_path)), write(*args, **more))[1])
    monkeypatch.setattr(checkpoints, "write_manifest", noted)
    trained(tmp_path, max_steps=2, resumes=True)
    ignored = ["_*", "checkpoint-*"]  # of `Trainer._push_from_checkpoint`
    assert {name for name in names if not any(fnmatchcase(name, each) for each in ignored)} == set()
    assert "_interrupted-checkpoint-9" in names and any("saving" in name for name in names)


@BACKGROUND
def test_what_a_subclass_pushes_is_in_its_place(tmp_path, in_background):
    pushed: list[tuple[str, bool, int]] = []

    def push(trainer: Any, checkpoint_folder: str) -> None:
        folder = Path(checkpoint_folder)
        pushed.append((folder.name, check_whole(folder) is not None, trainer.state.global_step))

    made = saving(tmp_path, max_steps=2, l2l_async_save=in_background)
    with_methods(made, init_hf_repo=Mock(), _finish_current_push=Mock(), _push_from_checkpoint=push)
    made.args.push_to_hub, made.push_to_hub = True, Mock()
    made.train()
    assert pushed == [("checkpoint-1", True, 1), ("checkpoint-2", True, 2)]


def test_going_on_is_the_same_training_and_going_back_is_another_one(tmp_path):
    trained(tmp_path, max_steps=2, eps_update="serial", ubatch_size=4)
    found = read_manifest(tmp_path / "checkpoint-1").configuration
    assert {"trainer", "hf_l2l", "torch", "transformers", "accelerate"} < set(found)
    assert {"eps_update": "serial", "ubatch_size": 4}.items() <= found["options"].items()
    trained(tmp_path, max_steps=3, resumes=True)
    assert len({read_manifest(folder).run for folder in tmp_path.glob("checkpoint-*")}) == 1
    again = saving(tmp_path, save_steps=2, callbacks=[At("on_step_begin", 2, stop)])
    with pytest.raises(Stopped):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    # checkpoint-3 is of the training that was given up.
    assert newest_whole(tmp_path) == (tmp_path / "checkpoint-2", [])


def out_of_memory_at(step: int) -> hf.TrainerCallback:
    """The device is, once."""
    return At("on_step_end", step, Mock(side_effect=[torch.OutOfMemoryError("CUDA out of memory."), *[None] * 9]))


def test_each_attempt_to_find_a_batch_size_is_a_training(tmp_path):
    """The second attempt ends before the steps whose checkpoints the first one has left."""
    options = {"auto_find_batch_size": True, "l2l_async_save": True}
    made = saving(tmp_path, **options, callbacks=[out_of_memory_at(4)])
    made.add_callback(At("on_step_end", 2, lambda: stop() if made._train_batch_size < 8 else None))
    with pytest.raises(Stopped):
        made.train()
    assert newest_whole(tmp_path)[0] == tmp_path / "checkpoint-1"


def test_a_batch_size_that_is_found_late_begins_again_with_the_weights_of_the_checkpoint(whole, tmp_path, caplog):
    """Without one, with those that it has made, which is told."""
    checkpoint = Path(whole.args.output_dir) / "checkpoint-2"
    options = {"auto_find_batch_size": True, "save_strategy": "no"}
    trained(tmp_path / "first", max_steps=2, **options, callbacks=[out_of_memory_at(1)])
    assert "begins again after 1 steps" in caplog.text
    made = trained(tmp_path / "found", resumes=checkpoint, **options, callbacks=[out_of_memory_at(3)])
    size = made._train_batch_size
    assert size < 8
    given = trained(tmp_path / "given", resumes=checkpoint, save_strategy="no", per_device_train_batch_size=size)
    assert_same_tensors(made.model.state_dict(), given.model.state_dict())


def test_no_checkpoint_of_others_is_deleted_or_the_best_one(tmp_path):
    trained(tmp_path / "a", plain_trainer, max_steps=1)
    (tmp_path / "a" / "checkpoint-1").rename(tmp_path / "a" / "checkpoint-100")
    made = trained(tmp_path / "a", max_steps=2, save_total_limit=1, **falling())
    assert made.state.best_model_checkpoint == str(tmp_path / "a" / "checkpoint-1")
    assert steps_in(tmp_path / "a") == [1, 100] and made.args.save_total_limit == 1
    made = trained(tmp_path / "a", max_steps=2, save_steps=2, **falling(load_best_model_at_end=False))
    assert made.state.best_global_step == 1 and made.state.best_model_checkpoint is None


def test_what_is_deleted_at_the_end_is_in_the_folder_of_the_training(tmp_path):
    """The best one of a run that was moved is found again."""
    old = tmp_path / "old"
    trained(old, max_steps=3, **second_is_best())
    options = {"max_steps": 4, "save_total_limit": 1, **best_of(itertools.repeat(0.5))}
    kept = trained(tmp_path / "new", **options, resumes=old / "checkpoint-3")
    assert kept.state.best_model_checkpoint == str(old / "checkpoint-2")
    assert steps_in(old) == [1, 2, 3] and steps_in(tmp_path / "new") == []
    moved = old.rename(tmp_path / "moved")
    options |= best_of(itertools.repeat(0.5))
    made = trained(moved, **options, resumes=True)
    assert made.state.best_model_checkpoint == str(moved / "checkpoint-2") and steps_in(moved) == [2]


def test_the_weights_of_the_best_one_are_loaded_whatever_became_of_the_rest(tmp_path):
    best = tmp_path / "checkpoint-2"

    def thin() -> None:
        (best / "optimizer.pt").unlink()
        (best / "adapter_model").mkdir()
        save_file({"a": torch.ones(2)}, best / "adapter_model" / "adapter_model.safetensors")

    assert_saved(trained(tmp_path, max_steps=3, **second_is_best(), callbacks=[At("on_save", 2, thin)]), best)
    with pytest.raises(DamagedCheckpointError, match=MANIFEST) as told:
        trained(tmp_path, resumes=best)
    assert told.value.file == "optimizer.pt"
    (best / MANIFEST).unlink()
    trained(tmp_path, max_steps=3, resumes=best)


def test_nothing_is_deleted_if_the_best_one_is_gone(tmp_path):
    made = saving(tmp_path, max_steps=2, save_total_limit=1, **falling())
    with_methods(made, _load_best_model=lambda trainer: shutil.rmtree(trainer.state.best_model_checkpoint)).train()
    assert steps_in(tmp_path) == [2]


def test_a_save_that_is_asked_for_while_another_one_ends_is_made(tmp_path, monkeypatch):
    def at_its_end(saving: BackgroundSave) -> bool:
        while not saving.is_done:  # the disk is fast
            time.sleep(0.001)
        return True

    ask = At("on_step_begin", 2, lambda: setattr(made.control, "should_save", True))
    made = saving(tmp_path, save_steps=2, l2l_async_save=True, callbacks=[ask])
    monkeypatch.setattr(BackgroundSave, "poll", at_its_end)
    made.train()
    assert steps_in(tmp_path) == [2, 3, 4]


def test_a_save_that_the_program_asks_for_is_in_its_place_at_once(tmp_path):
    """Within an evaluation, too, where it swallows no callback; it knows where in the data it is."""
    seen: list[Any] = []

    def save() -> None:
        made._save_checkpoint(made.model, None)
        assert made.state.global_step != 2 or check_whole(tmp_path / "checkpoint-2") is not None

    options = {"eval_strategy": "steps", "eval_steps": 3, "save_steps": 3}
    moments = [At("on_step_end", 2, save), At("on_evaluate", 3, save), At("on_save", None, lambda: seen.append(1))]
    made = saving(tmp_path, **options, l2l_async_save=True, callbacks=moments)
    made.train()
    assert len(seen) == 3, "one of each save of step 3, and that of the end; the program's own tells nobody"
    assert (tmp_path / "checkpoint-2" / "rng_state_data.pth").exists()
    resumed = trained(tmp_path / "again", **options, resumes=tmp_path / "checkpoint-2")
    assert_same_tensors(resumed.model.state_dict(), made.model.state_dict())


@pytest.mark.parametrize("mode", ["eager", "deferred"])
def test_a_save_within_a_step_is_of_whole_steps_or_refused(tmp_path, mode):
    whole: dict[str, torch.Tensor] = {}

    def save() -> None:
        whole.update({name: value.clone() for name, value in made.model.state_dict().items()})
        made._save_checkpoint(made.model, None)

    made = saving(tmp_path, max_steps=3, save_strategy="no", eps_update=mode, max_grad_norm=0.0)
    made.add_callback(At("on_pre_optimizer_step", 2, save))
    made.add_callback(At("on_optimizer_step", 1, lambda: made._save_checkpoint(made.model, None)))
    if mode == "eager":
        with pytest.raises(RuntimeError, match="between backward and optimizer.step"):
            made.train()
        assert steps_in(tmp_path) == [1]
        return
    made.train()
    assert_same_tensors(load_file(tmp_path / "checkpoint-2" / "model.safetensors"), whole)
    assert steps_in(tmp_path) == [1, 2]


def test_hooks_of_a_step_may_read_the_model(tmp_path):
    """With "serial" updates, a hook within `step()` reads the weights while the engine does not know how it ends."""
    averages: list[torch.Tensor] = []

    def read(*_: Any) -> None:
        averages.append(made.model.state_dict()["classifier.weight"].clone())
        made.eps.synchronize()

    def create(trainer: Any, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        found = super(made.__class__, trainer).create_optimizer(*args, **kwargs)
        inner = getattr(found, "optimizer", found)
        inner.register_step_post_hook(read)
        inner.register_step_pre_hook(read)
        return found

    options = {"eps_update": "serial", "save_strategy": "no", "max_steps": 2}
    made = with_methods(saving(tmp_path, **options), create_optimizer=create)
    made.train()
    assert len(averages) == 4 and not averages[0].equal(averages[-1])
    assert_same_tensors(made.model.state_dict(), trained(tmp_path, **options).model.state_dict())


def test_a_save_takes_no_copy_of_the_weights(tmp_path):
    """All tensors that are made while a checkpoint is saved are smaller than a layer."""
    made = l2l_trainer(tmp_path, max_steps=1, model=tiny_bert(width=64))
    made.train()
    with NewTensors() as new:
        made._save_checkpoint(made.model, None)
    assert new.num_bytes < sum(p.nbytes for p in made.model.bert.encoder.layer[0].parameters())
