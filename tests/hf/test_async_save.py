"""`l2l_async_save`: checkpoints that are written in the background are those of their step."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

from hf_l2l import estimate
from hf_l2l.checkpoint.finding import newest_whole
from hf_l2l.checkpoint.reserved import Region
from models import llama
from slow_disk import SlowDisk, assert_same_checkpoints
from tiers import combined
from training import SAVING, assert_same_run, l2l_trainer, left_in, plain_trainer, rows, tiny_bert

EACH_STEP = {**SAVING, "save_steps": 1, "save_total_limit": None}


OPTIONS: dict[str, dict[str, Any]] = {
    "deferred": {"eps_update": "deferred"},
    "serial": {"eps_update": "serial"},
    "eager": {"eps_update": "eager", "max_grad_norm": 0.0},
    "bf16 copies": {"eps_update": "deferred", "cmp": "bf16", "bf16": False},
    "bf16 moments": {"eps_update": "deferred", "l2l_moment_dtype": "bf16"},
    "all at once": {"eps_update": "deferred", "optim": "adamw_torch_fused"},
    "momentum": {"eps_update": "deferred", "optim": "sgd", "optim_args": "momentum=0.9"},
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", combined(OPTIONS, one_in=2))
def test_checkpoints_have_the_values_of_their_step(tmp_path, monkeypatch, name):
    options = OPTIONS[name]
    l2l_trainer(tmp_path / "at once", **EACH_STEP, **options).train()
    SlowDisk(monkeypatch)
    made = l2l_trainer(tmp_path / "later", **EACH_STEP, **options, l2l_async_save=True)
    made.train()
    assert_same_checkpoints(tmp_path / "later", tmp_path / "at once")


def test_weights_that_are_tied_are_saved_once(tmp_path, monkeypatch):
    def run(folder: Path, **options: Any) -> None:
        torch.manual_seed(0)
        model = llama(tie_word_embeddings=True)
        made = l2l_trainer(folder, model=model, **EACH_STEP, eps_update="deferred", **options)
        made.train_dataset = [{**row, "labels": row["input_ids"]} for row in rows()]
        made.train()

    run(tmp_path / "at once")
    SlowDisk(monkeypatch)
    run(tmp_path / "later", l2l_async_save=True)
    assert_same_checkpoints(tmp_path / "later", tmp_path / "at once")
    assert "lm_head.weight" not in load_file(tmp_path / "later" / "checkpoint-1" / "model.safetensors")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", [l2l_trainer, plain_trainer])
def test_they_are_resumed_from(tmp_path, kind):
    whole = l2l_trainer(tmp_path / "whole", **EACH_STEP)
    whole.train()
    l2l_trainer(tmp_path / "parts", **EACH_STEP, l2l_async_save=True).train()
    resumed = kind(tmp_path / "parts", **EACH_STEP)
    resumed.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-2"))
    assert_same_run(resumed, whole)


class Changes(hf.TrainerCallback):
    """A program that changes weights and moments itself, right after a checkpoint was begun."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
        self.trainer.eps.synchronize()  # type: ignore[attr-defined]
        for moments in getattr(optimizer, "optimizer", optimizer).state.values():
            moments["exp_avg"].zero_()


def test_what_the_program_changes_is_saved_first(tmp_path, monkeypatch):
    def run(folder: Path, **options: Any) -> None:
        changes = Changes()
        made = l2l_trainer(folder, **EACH_STEP, eps_update="deferred", callbacks=[changes], **options)
        changes.trainer = made  # type: ignore[attr-defined]
        made.train()

    run(tmp_path / "at once")
    SlowDisk(monkeypatch)
    run(tmp_path / "later", l2l_async_save=True)
    assert_same_checkpoints(tmp_path / "later", tmp_path / "at once")


class Sees(hf.TrainerCallback):
    """What there is when a checkpoint is said to be saved."""

    def __init__(self) -> None:
        self.saved: list[tuple[int, list[str], str | None]] = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir)
        best = None if state.best_model_checkpoint is None else Path(state.best_model_checkpoint).name
        names = left_in(folder)
        self.saved.append((state.global_step, names, best))
        assert (folder / f"checkpoint-{state.global_step}").is_dir()
        assert state.log_history[-1]["step"] == state.global_step


@pytest.mark.parametrize("later", [False, True])
def test_callbacks_rotation_and_the_best_model_come_after_the_checkpoint(tmp_path, monkeypatch, later):
    sees = Sees()
    if later:
        SlowDisk(monkeypatch)
    options = {**EACH_STEP, "save_total_limit": 2, "eval_strategy": "steps", "eval_steps": 1, "learning_rate": 1e-9}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "step", "greater_is_better": False}
    first: list[int] = []

    def metric(found: Any) -> dict[str, float]:
        first.append(1)
        return {"step": abs(len(first) - 2.0)}  # the second one is the best

    made = l2l_trainer(tmp_path, **options, **best, callbacks=[sees], compute_metrics=metric, l2l_async_save=later)
    made.train()
    assert sees.saved == [
        (1, ["checkpoint-1"], "checkpoint-1"),
        (2, ["checkpoint-1", "checkpoint-2"], "checkpoint-2"),
        (3, ["checkpoint-2", "checkpoint-3"], "checkpoint-2"),
        (4, ["checkpoint-2", "checkpoint-4"], "checkpoint-2"),
    ]
    assert made.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    weights = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert all(torch.equal(value, weights[name]) for name, value in made.model.state_dict().items())


class _FullDisk:
    """A disk that is full when values are written for the checkpoint of one step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
        write = Region.write

        def fail(region: Region, descriptor: int) -> None:
            if f"checkpoint-{step}-" in str(region.file) and "optimizer" in region.file.name:
                raise OSError(28, "No space left on device")
            write(region, descriptor)

        monkeypatch.setattr(Region, "write", fail)


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("step", [2, 4])
def test_an_error_ends_the_training_at_the_next_step_or_at_its_end(tmp_path, monkeypatch, step):
    before = threads()
    _FullDisk(monkeypatch, step)
    made = l2l_trainer(tmp_path, **EACH_STEP, l2l_async_save=True, eps_update="deferred")
    with pytest.raises(OSError, match="No space left on device"):
        made.train()
    assert made.state.global_step in (step, min(step + 1, 4))
    assert left_in(tmp_path) == [f"checkpoint-{n}" for n in range(1, step)]
    assert newest_whole(tmp_path)[0] == tmp_path / f"checkpoint-{step - 1}"
    assert {name for name in threads() if name.startswith("hf_l2l save")} <= before
    monkeypatch.undo()
    resumed = l2l_trainer(tmp_path, **EACH_STEP, l2l_async_save=True)
    resumed.train(resume_from_checkpoint=True)
    whole = l2l_trainer(tmp_path / "whole", **EACH_STEP)
    whole.train()
    assert_same_run(resumed, whole)


class _Stops(hf.TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            raise KeyboardInterrupt


def test_a_checkpoint_that_was_begun_is_finished_when_the_training_is_interrupted(tmp_path, monkeypatch):
    SlowDisk(monkeypatch)
    made = l2l_trainer(tmp_path, **EACH_STEP, callbacks=[_Stops()], l2l_async_save=True)
    with pytest.raises(KeyboardInterrupt):
        made.train()
    assert newest_whole(tmp_path) == (tmp_path / "checkpoint-2", [])
    assert "on_save" not in vars(made.callback_handler)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("has_started", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("can't start new thread")], ids=type)
def test_nobody_waits_for_a_thread_that_did_not_start(tmp_path, monkeypatch, error, has_started):
    """Ctrl-C while it starts; or the system has no more threads."""
    before, start, errors = threads(), threading.Thread.start, [error]

    def interrupted(thread: threading.Thread) -> None:
        fails = thread.name == "hf_l2l save" and errors
        if not fails or has_started:
            start(thread)
        if fails:
            raise errors.pop()

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    made = l2l_trainer(tmp_path, **EACH_STEP, l2l_async_save=True, eps_update="deferred")
    with pytest.raises(type(error)):
        made.train()
    assert left_in(tmp_path) == []
    for thread in threading.enumerate():
        if thread.name == "hf_l2l save":
            thread.join(60)
    assert {name for name in threads() if name.startswith("hf_l2l save")} <= before
    again = l2l_trainer(tmp_path, model=made.model, **EACH_STEP, l2l_async_save=True, eps_update="deferred")
    again.train()
    assert newest_whole(tmp_path) == (tmp_path / "checkpoint-4", [])


def test_copies_take_two_layers_at_most(tmp_path, monkeypatch):
    disk = SlowDisk(monkeypatch)
    model = tiny_bert(layers=8)
    layer = sum(p.nbytes for p in model.bert.encoder.layer[0].parameters())
    steps = 2 * 4 * len(list(model.bert.encoder.layer[0].parameters()))
    made = l2l_trainer(tmp_path, model=model, **EACH_STEP, l2l_async_save=True, eps_update="deferred")
    made.train()
    assert 0 < disk.copied_bytes <= 2 * 3 * layer + steps
    assert disk.copied_bytes <= estimate(model).layers_being_saved


def test_a_save_takes_no_copy_of_the_weights(tmp_path):
    """The largest tensor that exists while a checkpoint is saved, but not before, is smaller than a layer."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        num_bytes = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            inputs = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in inputs:
                self.num_bytes += out.untyped_storage().nbytes()
            return out

    made = l2l_trainer(tmp_path, max_steps=1, model=tiny_bert(width=64))
    made.train()
    with Largest() as found:
        made._save_checkpoint(made.model, None)
    assert found.num_bytes < sum(p.nbytes for p in made.model.bert.encoder.layer[0].parameters())


def test_it_must_be_true_or_false(tmp_path):
    with pytest.raises(ValueError, match=r"l2l_async_save must be True or False \(got 'yes'\)"):
        l2l_trainer(tmp_path, l2l_async_save="yes")
