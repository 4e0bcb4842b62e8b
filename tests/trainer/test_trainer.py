"""`L2LTrainer` trains as `Trainer` does, to the bit, through the Trainer's own code; updates in the background, too,
which begin as late as the waits of the program allow."""

from __future__ import annotations

import gc
import itertools
import os
import socket
import threading
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from transformers.optimization import AdafactorSchedule

from devices import DEVICE
from hf_l2l import L2LTrainer, attach_l2l, detach_l2l
from hf_l2l.eps import updates
from late_updates import late_updates
from plain import Streamed, assert_as_plain, both, is_attached, small_bert, trained
from runs import assert_same_run, assert_same_tensors
from slow_disk import assert_same_checkpoints
from tiers import cpu_suffices, nightly, on_a_device
from training import (
    CHECKPOINTING,
    arguments,
    inner_optimizer,
    l2l_trainer,
    left_in,
    logs,
    on,
    plain_trainer,
    rows,
    trainer,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:no stack of layers was found:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*moves the weights:UserWarning"),  # tested beside accumulation
    # torch warns of the scheduler's order when the optimizer is loaded; plain Trainer does the same.
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning"),
]

OPTIONS = [
    ({"max_grad_norm": 0.01, "lr_scheduler_type": "cosine", "warmup_steps": 2, "weight_decay": 0.1}, {}),
    ({"optim": "adafactor", "label_smoothing_factor": 0.1}, {"eps_update": "deferred"}),
    ({"bf16": True, "use_cpu": DEVICE == "cpu"}, {}),
]


@pytest.mark.parametrize(("options", "ours"), OPTIONS, ids=", ".join)
def test_same_bits_as_trainer(tmp_path, options, ours):
    found, expected = both(tmp_path, max_steps=4, ours=ours, **options)
    assert len(logs(found)) == 5
    assert all(entry["grad_norm"] > 0 for entry in logs(found)[:-1])
    assert_as_plain(found, expected)


@cpu_suffices
def test_plain_training_arguments_are_accepted_and_left_as_they_are(tmp_path):
    args = arguments(hf.TrainingArguments, tmp_path / "l2l", max_steps=2)
    before = args.to_dict()
    found = L2LTrainer(small_bert(), args, train_dataset=rows())
    found.train()
    assert args.to_dict() == before
    assert_as_plain(found, trained(plain_trainer, tmp_path / "plain", max_steps=2))
    state = inner_optimizer(found).state
    assert len(state) == len(list(found.model.parameters()))
    assert all(t.device.type == "cpu" for s in state.values() for t in s.values() if isinstance(t, torch.Tensor))


@cpu_suffices
def test_noise_in_the_embeddings_is_that_of_trainer(tmp_path):
    """By micro-batches, too, but for rounding."""

    def losses(make, **options) -> list[float]:
        made = trained(make, tmp_path / f"{make.__name__} {len(options)}", model=small_bert(dropout=0.0), **options)
        assert not hasattr(made.model.get_input_embeddings(), "neftune_noise_alpha")  # it ends with the training
        return [entry["loss"] for entry in logs(made) if "loss" in entry] + [made.evaluate()["eval_loss"]]

    noisy = {"neftune_noise_alpha": 5.0}
    found = losses(l2l_trainer, **noisy, stash="host", l2l_boundary="host", ubatch_size=3)
    assert found == pytest.approx(losses(plain_trainer, **noisy), rel=1e-5)
    assert found != pytest.approx(losses(l2l_trainer), rel=1e-5)


# ---- evaluation, and other data


@pytest.mark.parametrize(("layers", "dispatched"), [(2, None), (0, True)])
def test_evaluation_and_prediction_without_training(tmp_path, layers, dispatched):
    """Of rows whose number is known, and of a stream with a short last batch."""
    runs = []
    for kind in (L2LTrainer, hf.Trainer):
        options = {"accelerator_config": {"dispatch_batches": dispatched}}
        made = trainer(kind, tmp_path / kind.__name__, model=small_bert(layers=layers), **options)
        found = [made.evaluate()["eval_loss"], made.evaluate(Streamed(rows(66)))["eval_loss"]]
        for data in (rows(11), Streamed(rows(66))):
            predicted = made.predict(data)
            found += [predicted.metrics["test_loss"], predicted.predictions.tolist()]
        runs.append([torch.tensor(each) for each in found])
    torch.testing.assert_close(*runs, rtol=1e-5, atol=1e-6)
    assert len(runs[0][-1]) == 66


# ---- several trainings of a model


@cpu_suffices
@pytest.mark.parametrize("anew", [False, True], ids=["the same model", "model_init"])
def test_a_second_train(tmp_path, anew):
    """It goes on from the first, unless `model_init` makes a new model for each training."""

    def twice(make):
        model = {"model_init": lambda: small_bert()} if anew else {"model": small_bert()}
        made = make(tmp_path / make.__name__, max_steps=2, **model)
        first = made.model
        made.train()
        made.train()
        assert (made.model is not first) == anew
        return made

    assert_as_plain(twice(l2l_trainer), twice(plain_trainer))


@cpu_suffices
def test_two_trainers_with_other_options_take_turns(tmp_path):
    def turns(other: str) -> tuple[hf.Trainer, list[float]]:
        model = small_bert()
        one = l2l_trainer(tmp_path / other / "one", model=model, max_steps=2, eps_update="serial")
        two = l2l_trainer(tmp_path / other / "two", model=model, max_steps=2, eps_update=other)
        losses = []
        for each in (one, two, one):
            each.train()
            losses += [one.evaluate()["eval_loss"], two.evaluate()["eval_loss"]]
        return one, losses

    (found, found_losses), (expected, losses) = turns("deferred"), turns("serial")
    assert_same_run(found, expected)
    assert found_losses == losses


@cpu_suffices
def test_while_a_model_is_trained_no_trainer_runs_it_with_other_options(tmp_path):
    def others(*_, **__):
        same.evaluate()
        for run in (other.evaluate, other.train):
            with pytest.raises(ValueError, match=r"while a trainer trains .*ubatch_size=2"):
                run()

    model = small_bert(dropout=0.0)  # each evaluation draws a number
    made = l2l_trainer(tmp_path / "trained", model=model, max_steps=2, callbacks=[on("on_step_end", others)])
    same, other = (l2l_trainer(tmp_path / str(size), model=model, ubatch_size=size) for size in (None, 2))
    made.train()
    expected = trained(plain_trainer, tmp_path / "plain", model=small_bert(dropout=0.0), max_steps=2)
    assert_as_plain(made, expected)
    assert other.evaluate()["eval_loss"] == pytest.approx(expected.evaluate()["eval_loss"])


def test_a_trainer_is_freed_with_its_last_reference(tmp_path):
    """Its data loaders' processes end then, too."""
    made = trained(l2l_trainer, tmp_path, max_steps=1)
    gc.collect()
    gc.disable()
    try:
        gone = weakref.ref(made)
        del made
        assert gone() is None
    finally:
        gc.enable()


@on_a_device
def test_resident_weights_stay_when_the_trainer_trains_again(tmp_path):
    made = l2l_trainer(tmp_path, max_steps=1, l2l_resident="shell")
    made.train()
    before = {name: p.device.type for name, p in made.model.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*loss_is_scaled.*")
        made.train()
        made.evaluate()
    assert {name: p.device.type for name, p in made.model.named_parameters()} == before
    assert before["bert.embeddings.word_embeddings.weight"] == DEVICE
    assert before["bert.encoder.layer.0.output.dense.weight"] == "cpu"
    assert "stays there" in made.l2l_summary()


# ---- optimizers and schedules of the program


@cpu_suffices
def test_a_skipped_step_is_logged_and_the_scheduler_waits(tmp_path):
    """The first three scales overflow, whatever the last bits of the gradients."""
    scaled = {"cmp": "fp16", "l2l_loss_scale_init": 2.0**30, "l2l_loss_scale_backoff": 2.0**-5}
    made = trained(l2l_trainer, tmp_path, lr_scheduler_type="cosine", max_steps=6, **scaled)
    entries = [entry for entry in made.state.log_history if "loss" in entry]
    skipped = [entry["skipped_steps"] for entry in entries]
    assert 0 < skipped[0] <= skipped[-1] < len(entries) == 6
    assert [entry["loss_scale"] for entry in entries] == [2.0 ** (30 - 5 * count) for count in skipped]
    steps = [1 - (count - before) for before, count in itertools.pairwise([0, *skipped])]
    # What a step logs is the rate that it was to be made with.
    rates = [entry["learning_rate"] for entry in entries]
    assert [a != b for a, b in itertools.pairwise(rates)] == [bool(each) for each in steps[:-1]]


@cpu_suffices
def test_adafactors_own_learning_rates_are_reported(tmp_path, device):
    runs = []
    for make, options in ((l2l_trainer, {"eps_update": "deferred"}), (plain_trainer, {})):
        model = small_bert().to("cpu" if make is l2l_trainer else device)
        optimizer = hf.Adafactor(model.parameters(), scale_parameter=True, relative_step=True, warmup_init=True)
        scheduler = AdafactorSchedule(optimizer, initial_lr=1e-3)
        runs.append(trained(make, tmp_path / make.__name__, model=model, optimizers=(optimizer, scheduler), **options))
        assert scheduler is runs[-1].lr_scheduler
    found, expected = runs
    rates = [entry["learning_rate"] for entry in logs(found)[:-1]]
    assert len(set(rates)) == 4 and all(rates)
    assert_as_plain(found, expected)
    assert set(found.lr_scheduler.state_dict()) == set(expected.lr_scheduler.state_dict())


def test_the_optimizer_of_a_subclass_is_updated_in_the_background_too(tmp_path):
    class Mine(L2LTrainer):
        """Makes its optimizer itself, and does not ask its base class."""

        def create_optimizer(self, *args, **kwargs):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            return self.optimizer

    made = trainer(Mine, tmp_path, model=small_bert(), eps_update="deferred", max_steps=2)
    made.train()
    assert made.eps.updates.optimizers == [inner_optimizer(made)]
    assert made.eps.updates.worker.lives


# ---- callbacks


def test_with_eager_updates_a_callback_cannot_read_gradients(tmp_path):
    refused = []

    def look(*_, model, **__):
        for p in model.parameters():
            with pytest.raises(RuntimeError, match="during backward"):
                _ = p.grad
            refused.append(p)

    options = {"eps_update": "eager", "max_grad_norm": 0.0, "max_steps": 2}
    made = trained(l2l_trainer, tmp_path, callbacks=[on("on_pre_optimizer_step", look)], **options)
    assert len(refused) == 2 * len(list(made.model.parameters()))


@cpu_suffices
def test_an_average_of_weights_is_that_of_trainer(tmp_path):
    """Of what `p.data` was when the training began, and of which the callback waits for updates."""

    class Average(hf.TrainerCallback):
        def on_train_begin(self, *args, model, **kwargs):
            self.kept = [p.data for p in model.parameters()]
            self.average = [each.clone() for each in self.kept]

        def on_step_end(self, *args, **kwargs):
            if isinstance(made, L2LTrainer):
                made.eps.synchronize()
            for average, each in zip(self.average, self.kept, strict=True):
                average.lerp_(each, 0.1)

    averages = []
    for kind, options in ((L2LTrainer, {"eps_update": "deferred"}), (hf.Trainer, {"use_cpu": True})):
        callback = Average()
        model, same = small_bert(dropout=0.0), {"max_grad_norm": 0.0, "callbacks": [callback]}
        made = trainer(kind, tmp_path / kind.__name__, model=model, **same, **options)
        made.train()
        averages.append(callback.average)
    torch.testing.assert_close(*averages, rtol=1e-4, atol=1e-6)


# ---- what is said, and what is changed


@cpu_suffices
def test_activation_checkpointing_is_off_while_a_model_is_attached(tmp_path):
    def checkpointing(model: nn.Module) -> list[nn.Module]:
        return [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]

    with pytest.warns(UserWarning, match="activation checkpointing is part of L2L"):
        found = trained(l2l_trainer, tmp_path / "l2l", max_steps=2, **{CHECKPOINTING: True})
    assert checkpointing(found.model) == []
    assert_as_plain(found, trained(plain_trainer, tmp_path / "plain", max_steps=2))
    model = small_bert()
    getattr(model, f"{CHECKPOINTING}_enable")()
    enabled = checkpointing(model)
    with pytest.warns(UserWarning, match="turned off until the model is detached") as warned:
        for size in (2, 4):  # attached anew by the second one
            trained(l2l_trainer, tmp_path / str(size), model=model, max_steps=1, ubatch_size=size)
    assert len(warned) == 1
    assert checkpointing(model) == [] != enabled
    assert checkpointing(detach_l2l(model)) == enabled
    getattr(model, f"{CHECKPOINTING}_disable")()
    attach_l2l(model)
    assert checkpointing(detach_l2l(model)) == []


@cpu_suffices
def test_a_model_without_layers_trains_as_with_trainer(tmp_path):
    """With options that are refused for a model with layers."""
    options = {"gradient_accumulation_steps": 2, "bf16_full_eval": True, "use_cpu": True, "max_steps": 2}

    def evaluated(kind):
        made = trainer(kind, tmp_path / kind.__name__, model=small_bert(layers=0), **options)
        made.train()
        made.evaluate()
        return made

    expected = evaluated(hf.Trainer)
    with pytest.warns(UserWarning, match="no stack of layers was found in a Bert") as said:
        found = evaluated(L2LTrainer)
    assert len([w for w in said if "no stack" in str(w.message)]) == 1
    assert "no stack of layers" in found.l2l_summary() and not is_attached(found.model)
    assert {p.dtype for p in found.model.parameters()} == {p.dtype for p in expected.model.parameters()}
    assert_as_plain(found, expected)


# ---- updates in the background


@pytest.fixture
def _late() -> Iterator[None]:
    """An update begins when somebody waits for it: code without a wait reads the weights before it."""
    with late_updates() as gate:
        yield
        gate.open_all()


SAVED = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "cosine"}


@nightly
@cpu_suffices
@pytest.mark.usefixtures("_late")
@pytest.mark.parametrize(("mode", "max_norm"), [("deferred", 1.0), ("eager", 0.0)])
def test_checkpoints_evaluations_and_callbacks_see_finished_weights(tmp_path, mode, max_norm):
    """Those of serial updates, at every step; and the best model is loaded at the end."""
    same = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "max_grad_norm": max_norm}
    runs, averages = [], []
    for each in (mode, "serial"):
        average: dict[str, torch.Tensor] = {}

        def read(*_, model, average=average, **__):  # while the update runs
            with torch.no_grad():
                for name, p in model.named_parameters():
                    average.setdefault(name, p.clone()).lerp_(p, 0.5)

        callbacks = [on("on_step_end", read)]
        runs.append(trained(l2l_trainer, tmp_path / each, eps_update=each, callbacks=callbacks, **same, **SAVED))
        averages.append(average)
    assert_same_checkpoints(tmp_path / mode, tmp_path / "serial")
    assert_same_run(*runs)
    assert_same_tensors(*averages)
    assert len(averages[0]) == len(list(small_bert().parameters()))
    assert len([entry for entry in logs(runs[0]) if "eval_loss" in entry]) == 3


@pytest.mark.usefixtures("_late")
def test_an_update_that_fails_leaves_no_folder_of_a_checkpoint(tmp_path, monkeypatch):
    made = l2l_trainer(tmp_path, model=small_bert(), eps_update="deferred", **SAVED)
    carry_out, save_checkpoint, saving = updates.carry_out, made._save_checkpoint, threading.Event()

    def save(*args):
        if made.state.global_step == 2:
            saving.set()
        save_checkpoint(*args)

    def failing(*args):
        if (tmp_path / "checkpoint-1" / "trainer_state.json").exists():
            assert saving.wait(60)
            raise KeyError("in an update")
        carry_out(*args)

    monkeypatch.setattr(made, "_save_checkpoint", save)
    monkeypatch.setattr(updates, "carry_out", failing)
    with pytest.raises(KeyError, match="in an update"):
        made.train()
    assert left_in(tmp_path) == ["checkpoint-1"]


@pytest.mark.usefixtures("_late")
def test_an_update_of_the_last_step_that_fails_is_raised_by_the_training(tmp_path, monkeypatch):
    monkeypatch.setattr(updates, "carry_out", lambda *_: {}["in an update"])
    with pytest.raises(KeyError, match="in an update"):
        trained(l2l_trainer, tmp_path, eps_update="deferred", max_steps=1)


@cpu_suffices
@pytest.mark.usefixtures("_late")
def test_forked_data_loaders_live_with_the_worker(tmp_path):
    """They are forked while an update is under way; the second epoch's, too."""
    options = {"dataloader_num_workers": 1, "per_device_train_batch_size": 16, "max_steps": 4, "l2l_num_threads": 2}
    modes = ("deferred", "serial")
    found, expected = (trained(l2l_trainer, tmp_path / mode, eps_update=mode, **options) for mode in modes)
    assert found.state.epoch > 1
    assert_same_run(found, expected)


# ---- what others can reach


def listening() -> set[str]:
    """Inodes of this process's TCP sockets that wait for connections, whoever has opened them."""
    own = {os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.exists()}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/self/net", name).read_text().splitlines()]
    return {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"} & own


@cpu_suffices
def test_nobody_can_connect_to_a_training(tmp_path):
    class Looks(hf.TrainerCallback):
        found: set[str] = set()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.found |= listening()

    with socket.create_server(("127.0.0.1", 0)):
        assert len(listening()) == 1, "it would be found"
    l2l_trainer(tmp_path, max_steps=2, eps_update="deferred", callbacks=[Looks()]).train()
    assert Looks.found == listening() == set()
