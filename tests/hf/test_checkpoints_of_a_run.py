"""Checkpoints in a folder with what is not of this training: files of the program, other trainings, other attempts."""

from __future__ import annotations

import os
import threading
from collections import namedtuple
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers as hf
from torch import nn

from hf_l2l import L2LTrainer
from hf_l2l.checkpoint import staging
from hf_l2l.checkpoint.background import ReservedFiles
from hf_l2l.checkpoint.finding import check_whole, checkpoints_in, newest_whole
from hf_l2l.checkpoint.manifest import DamagedCheckpointError, read_manifest
from hf_l2l.hf import checkpoints
from training import SAVING, l2l_trainer, left_in, plain_trainer, rows, tiny_bert

EACH_STEP = {**SAVING, "save_steps": 1, "save_total_limit": None}


WORSE_EACH_STEP: dict[str, Any] = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "metric_for_best_model": "score",
    "greater_is_better": True,
}


def _falling() -> Any:
    scores = iter(range(100, 0, -1))
    return lambda predictions: {"score": next(scores)}


class _OnSave(hf.TrainerCallback):
    """Calls a function with the checkpoint that was saved."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._call(Path(args.output_dir) / f"checkpoint-{state.global_step}")


class _AtStep(hf.TrainerCallback):
    def __init__(self, step: int, call: Any) -> None:
        self._step, self._call = step, call

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            self._call()


def _stop() -> None:
    raise RuntimeError("stopped here")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("in_background", [False, True])
def test_what_a_callback_adds_to_a_checkpoint_stays(tmp_path, in_background):
    def add(checkpoint: Path) -> None:
        (checkpoint / "merged").mkdir()
        (checkpoint / "merged" / "model.safetensors").write_bytes(b"weights of two models")
        (checkpoint / "scores.json").write_text("{}")

    l2l_trainer(tmp_path, **EACH_STEP, l2l_async_save=in_background, callbacks=[_OnSave(add)]).train()
    assert check_whole(tmp_path / "checkpoint-4") is not None
    l2l_trainer(tmp_path, **{**EACH_STEP, "max_steps": 5}).train(resume_from_checkpoint=True)
    assert (tmp_path / "checkpoint-4" / "scores.json").exists()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors.index.json", "scaler.pt"])
def test_what_a_trainer_would_load_must_have_been_saved(tmp_path, name):
    l2l_trainer(tmp_path, **{**EACH_STEP, "max_steps": 1}).train()
    added = tmp_path / "checkpoint-1" / name
    added.parent.mkdir(exist_ok=True)
    added.write_bytes(b"something else")
    with pytest.raises(DamagedCheckpointError, match=f"{name} was not saved with it"):
        l2l_trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_what_a_subclass_writes_into_the_checkpoint_stays(tmp_path):
    class Mine(L2LTrainer):
        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            folder.mkdir(parents=True)
            (folder / "before.txt").write_text("before")
            (folder / "config.json").write_text("not the model's")
            (folder / "scaler.pt").write_text("of an interrupted training")
            super()._save_checkpoint(*args, **kwargs)
            (folder / "after.txt").write_text("after")

    made = l2l_trainer(tmp_path, **EACH_STEP)
    made.__class__ = Mine
    made.train()
    for step in range(1, 5):
        folder = tmp_path / f"checkpoint-{step}"
        assert check_whole(folder) is not None
        assert {"before.txt", "after.txt"} < {path.name for path in folder.iterdir()}
        assert "model_type" in (folder / "config.json").read_text() and not (folder / "scaler.pt").exists()


def test_weights_may_have_names_of_the_program(tmp_path):
    class Mine(L2LTrainer):
        def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
            super()._save(output_dir, state_dict)
            assert output_dir is not None
            os.rename(os.path.join(output_dir, "model.safetensors"), os.path.join(output_dir, "mine.safetensors"))

    made = l2l_trainer(tmp_path, **EACH_STEP)
    made.__class__ = Mine
    made.train()
    assert newest_whole(tmp_path) == (tmp_path / "checkpoint-4", [])


def test_transformers_uploads_nothing_that_is_not_a_checkpoint(tmp_path):
    names: set[str] = set()
    original = checkpoints.write_manifest

    def write(folder: Path, *args: Any, **kwargs: Any) -> Any:
        names.update(left_in(folder.parent.parent))
        return original(folder, *args, **kwargs)

    interrupted = tmp_path / "checkpoint-9"
    interrupted.mkdir()
    l2l_trainer(tmp_path, **{**EACH_STEP, "max_steps": 1}).train()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "write_manifest", write)
        l2l_trainer(tmp_path, **{**EACH_STEP, "max_steps": 2}).train(resume_from_checkpoint=True)
    ignored = ["_*", "checkpoint-*"]  # of `Trainer._push_from_checkpoint`
    assert {name for name in names if not any(fnmatchcase(name, each) for each in ignored)} == set()
    assert "_interrupted-checkpoint-9" in names and any("saving" in name for name in names)


def test_going_back_to_an_older_checkpoint_is_another_training(tmp_path):
    l2l_trainer(tmp_path, **{**EACH_STEP, "max_steps": 5}).train()
    again = {**EACH_STEP, "save_steps": 2, "max_steps": 6, "callbacks": [_AtStep(5, _stop)]}
    with pytest.raises(RuntimeError, match="stopped here"):
        l2l_trainer(tmp_path, **again).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    # checkpoint-5 is of the training that was given up.
    assert newest_whole(tmp_path) == (tmp_path / "checkpoint-4", [])


def test_going_on_is_the_same_training(tmp_path):
    l2l_trainer(tmp_path, **{**EACH_STEP, "max_steps": 2}).train()
    l2l_trainer(tmp_path, **{**EACH_STEP, "max_steps": 3}).train(resume_from_checkpoint=True)
    manifests = [read_manifest(folder) for folder in checkpoints_in(tmp_path)]
    assert len({manifest.run for manifest in manifests if manifest is not None}) == 1


@pytest.mark.one_in(2)
@pytest.mark.parametrize("in_background", [False, True])
def test_each_attempt_to_find_a_batch_size_is_a_training(tmp_path, in_background):
    class Mine(L2LTrainer):
        attempts = 0

        def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
            self.attempts += 1
            return super()._inner_training_loop(*args, **kwargs)

    def end() -> None:
        if made.attempts == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        _stop()

    options = {**EACH_STEP, "auto_find_batch_size": True, "l2l_async_save": in_background}
    # The second attempt ends before the steps whose checkpoints the first one has left.
    made = l2l_trainer(tmp_path, **options, callbacks=[_AtStep(4, end)])
    made.add_callback(_AtStep(2, lambda: end() if made.attempts == 2 else None))
    made.__class__ = Mine
    with pytest.raises(RuntimeError, match="stopped here"):
        made.train()
    assert made.attempts == 2
    assert newest_whole(tmp_path)[0] == tmp_path / "checkpoint-1"


def test_the_end_of_a_training_deletes_no_checkpoint_of_others(tmp_path):
    plain_trainer(tmp_path, **{**EACH_STEP, "max_steps": 1}).train()
    (tmp_path / "checkpoint-1").rename(tmp_path / "checkpoint-100")
    best = {**WORSE_EACH_STEP, "load_best_model_at_end": True}
    made = l2l_trainer(tmp_path, **{**EACH_STEP, "save_total_limit": 1}, **best, compute_metrics=_falling())
    made.train()
    assert made.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    assert [path.name for path in checkpoints_in(tmp_path)] == ["checkpoint-1", "checkpoint-100"]
    assert made.args.save_total_limit == 1


def test_the_best_checkpoint_is_one_of_this_training(tmp_path):
    l2l_trainer(tmp_path, **EACH_STEP).train()
    made = l2l_trainer(tmp_path, **{**EACH_STEP, "save_steps": 3}, **WORSE_EACH_STEP, compute_metrics=_falling())
    made.train()
    assert made.state.best_global_step == 1 and made.state.best_model_checkpoint is None


def test_an_error_after_a_save_does_not_replace_that_of_the_training(tmp_path, caplog):
    def refuse(checkpoint: Path) -> None:
        raise ValueError("a callback of ours failed")

    options = {**EACH_STEP, "save_steps": 4, "max_steps": 5, "l2l_async_save": True}
    made = l2l_trainer(tmp_path, **options, callbacks=[_OnSave(refuse)])
    made._finish_if_saved = lambda: None  # type: ignore[method-assign]  # the disk takes its time
    forward, steps = made.compute_loss, iter(range(5))

    def fails(*args: Any, **kwargs: Any) -> Any:
        return _stop() if next(steps) == 4 else forward(*args, **kwargs)

    made.compute_loss = fails
    with pytest.raises(RuntimeError, match="stopped here"):
        made.train()
    assert "a callback of ours failed" in caplog.messages
    assert [path.name for path in checkpoints_in(tmp_path)] == ["checkpoint-4"]


def test_a_save_that_the_program_asks_for_is_in_its_place_at_once(tmp_path):
    seen: list[Any] = []

    def save() -> None:
        made._save_checkpoint(made.model, None)
        assert check_whole(tmp_path / "checkpoint-2") is not None
        seen.append("asked")

    options = {**EACH_STEP, "save_steps": 4, "l2l_async_save": True}
    saved = _OnSave(lambda checkpoint: seen.append(checkpoint.name))
    made = l2l_trainer(tmp_path, **options, callbacks=[_AtStep(2, save), saved])
    made.train()
    assert seen == ["asked", "checkpoint-4"]


def test_a_save_within_an_evaluation_swallows_no_callback(tmp_path):
    seen: list[str] = []

    class Evaluated(hf.TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            made._save_checkpoint(made.model, None)

    options = {**EACH_STEP, "save_steps": 2, "l2l_async_save": True, "eval_strategy": "steps", "eval_steps": 2}
    saved = _OnSave(lambda checkpoint: seen.append(checkpoint.name))
    made = l2l_trainer(tmp_path, **options, callbacks=[Evaluated(), saved])
    made.train()
    assert seen == ["checkpoint-2", "checkpoint-2", "checkpoint-4", "checkpoint-4"]  # one of each save
    assert "on_save" not in vars(made.callback_handler)


def test_room_is_asked_for_what_is_saved(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    model = tiny_bert()
    for p in model.parameters():
        p.requires_grad_(False)
    model.classifier.weight.requires_grad_(True)
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda path: usage(10**9, 0, 1000))
    made = l2l_trainer(tmp_path, model=model, **{**EACH_STEP, "max_steps": 1})
    with pytest.raises(OSError, match="1000 bytes free"):
        made._get_ready(tmp_path / "checkpoint-1")
    model._hf_peft_config_loaded = True  # of the adapters that transformers adds
    made._get_ready(tmp_path / "checkpoint-1")


def test_the_manifest_tells_versions_and_options(tmp_path):
    l2l_trainer(tmp_path, **{**EACH_STEP, "max_steps": 1}, eps_update="serial", ubatch_size=4).train()
    manifest = read_manifest(tmp_path / "checkpoint-1")
    assert manifest is not None
    assert {"trainer", "hf_l2l", "torch", "transformers", "accelerate"} < set(manifest.configuration)
    assert {"eps_update": "serial", "ubatch_size": 4}.items() <= manifest.configuration["options"].items()


def test_what_cannot_be_removed_stays_and_does_not_stop_the_next_training(tmp_path, monkeypatch):
    left = [tmp_path / f"_l2l-saving-checkpoint-{step}-abcdefgh" for step in (1, 2)]
    for folder in left:
        folder.mkdir()
    own = staging.os.open

    def refuses(path: Any, *args: Any, **kwargs: Any) -> Any:
        if Path(path) == left[0]:
            raise PermissionError(13, "Permission denied")
        return own(path, *args, **kwargs)

    monkeypatch.setattr(staging.os, "open", refuses)
    staging.remove_interrupted(tmp_path)
    assert [folder.exists() for folder in left] == [True, False]


def test_a_function_that_another_thread_has_kept_writes_all(tmp_path):
    reserved = ReservedFiles()
    with reserved.weights():
        kept = safetensors.torch.save_file
    kept({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    assert reserved.regions == [] and threading.active_count() >= 1
    assert safetensors.torch.load_file(tmp_path / "a.safetensors")["a"].equal(torch.ones(3))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("order", ["before", "after"])
def test_hooks_of_a_step_may_read_the_model(tmp_path, order):
    """With "serial" updates, a hook within `step()` reads the weights while the engine does not know how it ends."""
    averages: list[torch.Tensor] = []

    def read(*_: Any) -> None:
        averages.append(made.model.state_dict()["classifier.weight"].clone())
        made.eps.synchronize()

    class Mine(L2LTrainer):
        def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
            found = super().create_optimizer(*args, **kwargs)
            inner = getattr(found, "optimizer", found)
            inner.register_step_post_hook(read)
            inner.register_step_pre_hook(read)
            return found

    options: dict[str, Any] = {"eps_update": "serial", "optim": "adafactor" if order == "before" else "adamw_torch"}
    made = l2l_trainer(tmp_path, **options)
    made.__class__ = Mine
    made.train()
    whole = l2l_trainer(tmp_path, **options)
    whole.train()
    assert len(averages) == 8 and not averages[0].equal(averages[-1])
    for found, expected in zip(made.model.parameters(), whole.model.parameters(), strict=True):
        assert found.equal(expected)


def test_a_step_that_did_not_finish_is_noticed_at_the_next_one():
    from hf_l2l import L2LConfig, attach_l2l

    class Raises(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            nn.init.zeros_(self.param_groups[0]["params"][0])
            raise RuntimeError("half a step")

    model = tiny_bert()
    eps = attach_l2l(model, L2LConfig(eps_update="serial"))
    optimizer = Raises(model.parameters(), lr=0.1)
    eps.wrap(optimizer)
    batch = {name: torch.tensor([row[name] for row in rows(4)]) for name in ("input_ids", "attention_mask", "labels")}
    model(**batch).loss.backward()
    with pytest.raises(RuntimeError, match="half a step"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="step\\(\\) of Raises did not finish"):
        optimizer.step()
