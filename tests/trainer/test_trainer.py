"""`L2LTrainer` trains as `Trainer` does, to the bit, through the Trainer's own code."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import transformers as hf
from torch import nn
from transformers.optimization import AdafactorSchedule

from devices import DEVICE
from hf_l2l import L2LConfig, L2LTrainer, attach_l2l, detach_l2l
from plain import Streamed, assert_as_plain, assert_close_run, both, is_attached, small_bert, trained
from runs import assert_same_run
from tiers import cpu_suffices
from training import (
    CHECKPOINTING,
    arguments,
    check_average,
    inner_optimizer,
    l2l_trainer,
    logs,
    plain_trainer,
    rows,
    trainer,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:no stack of layers was found:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*moves the weights:UserWarning"),  # tested beside accumulation
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
def test_micro_batches_train_as_the_whole_batch_but_for_rounding(tmp_path):
    ours = {"stash": "host", "l2l_boundary": "host", "ubatch_size": 3}
    found, expected = both(tmp_path, model_init=lambda: small_bert(dropout=0.0), ours=ours)
    assert_close_run(found, expected, rel=1e-4, weights=1e-3)


@cpu_suffices
def test_noise_in_the_embeddings_is_that_of_trainer(tmp_path):
    def losses(make, **options) -> list[float]:
        made = trained(make, tmp_path / f"{make.__name__} {len(options)}", model=small_bert(dropout=0.0), **options)
        assert not hasattr(made.model.get_input_embeddings(), "neftune_noise_alpha")  # it ends with the training
        return [entry["loss"] for entry in logs(made) if "loss" in entry] + [made.evaluate()["eval_loss"]]

    noisy = {"neftune_noise_alpha": 5.0}
    found, expected, without = (
        losses(l2l_trainer, **noisy, stash="host", l2l_boundary="host", ubatch_size=3),
        losses(plain_trainer, **noisy),
        losses(l2l_trainer),
    )
    assert found == pytest.approx(expected, rel=1e-5)
    assert found != pytest.approx(without, rel=1e-5)


# ---- evaluation, and other data


@pytest.mark.parametrize(("layers", "dispatched"), [(2, None), (0, True)])
def test_evaluation_and_prediction_without_training(tmp_path, layers, dispatched):
    """Of rows whose number is known, and of a stream with a short last batch."""

    def evaluated(kind):
        options = {"accelerator_config": {"dispatch_batches": dispatched}}
        made = trainer(kind, tmp_path / kind.__name__, model=small_bert(layers=layers), **options)
        found = [made.evaluate()["eval_loss"], made.evaluate(Streamed(rows(66)))["eval_loss"]]
        for data in (rows(11), Streamed(rows(66))):
            predicted = made.predict(data)
            found += [predicted.metrics["test_loss"], predicted.predictions.tolist()]
        return found

    found, expected = evaluated(L2LTrainer), evaluated(hf.Trainer)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-5, atol=1e-6)
    assert len(found[-1]) == 66


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
    class Other(hf.TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            same.evaluate()
            for run in (other.evaluate, other.train):
                with pytest.raises(ValueError, match=r"while a trainer trains .*ubatch_size=2"):
                    run()

    model = small_bert(dropout=0.0)  # each evaluation draws a number
    made = l2l_trainer(tmp_path / "trained", model=model, max_steps=2, callbacks=[Other()])
    same, other = (l2l_trainer(tmp_path / str(size), model=model, ubatch_size=size) for size in (None, 2))
    made.train()
    expected = trained(plain_trainer, tmp_path / "plain", model=small_bert(dropout=0.0), max_steps=2)
    assert_as_plain(made, expected)
    assert other.evaluate()["eval_loss"] == pytest.approx(expected.evaluate()["eval_loss"])


def test_a_model_that_the_program_has_attached_keeps_its_options(tmp_path):
    model = small_bert()
    attach_l2l(model, L2LConfig(ubatch_size=2))
    with pytest.raises(ValueError, match=r"one config at a time .*ubatch_size=3"):
        l2l_trainer(tmp_path, model=model, ubatch_size=3).train()


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


# ---- optimizers and schedules of the program


@cpu_suffices
def test_adafactors_own_learning_rates_are_reported(tmp_path, device):
    def made(make, **options):
        model = small_bert().to("cpu" if make is l2l_trainer else device)
        optimizer = hf.Adafactor(model.parameters(), scale_parameter=True, relative_step=True, warmup_init=True)
        scheduler = AdafactorSchedule(optimizer, initial_lr=1e-3)
        found = trained(make, tmp_path / make.__name__, model=model, optimizers=(optimizer, scheduler), **options)
        assert scheduler is found.lr_scheduler
        return found

    expected, found = made(plain_trainer), made(l2l_trainer, eps_update="deferred")
    rates = [entry["learning_rate"] for entry in logs(found)[:-1]]
    assert len(set(rates)) == 4 and all(rates)
    assert_as_plain(found, expected)
    assert set(found.lr_scheduler.state_dict()) == set(expected.lr_scheduler.state_dict())


class Mine(L2LTrainer):
    """Makes its optimizer itself, and does not ask its base class."""

    def create_optimizer(self, *args, **kwargs):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        return self.optimizer


def test_the_optimizer_of_a_subclass_is_updated_in_the_background_too(tmp_path):
    made = trainer(Mine, tmp_path, model=small_bert(), eps_update="deferred", max_steps=2)
    made.train()
    assert made.eps.updates.optimizers == [inner_optimizer(made)]
    assert made.eps.updates.worker.lives


# ---- callbacks


def test_with_eager_updates_a_callback_cannot_read_gradients(tmp_path):
    refused = []

    class Look(hf.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            for p in model.parameters():
                with pytest.raises(RuntimeError, match="during backward"):
                    _ = p.grad
                refused.append(p)

    options = {"eps_update": "eager", "max_grad_norm": 0.0, "max_steps": 2}
    made = trained(l2l_trainer, tmp_path, callbacks=[Look()], **options)
    assert len(refused) == 2 * len(list(made.model.parameters()))


@cpu_suffices
def test_an_average_of_weights_is_that_of_trainer(tmp_path):
    check_average(tmp_path, "deferred", "synchronized")


# ---- what is said, and what is changed


def checkpointing(model: nn.Module) -> list[nn.Module]:
    """The modules in which it is on."""
    return [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]


@cpu_suffices
def test_activation_checkpointing_is_off_while_a_model_is_attached(tmp_path):
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


# ---- models without layers


class Flat(nn.Module):
    """A model without layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(64, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, input_ids, attention_mask=None, labels=None):
        logits = self.head(self.embedding(input_ids).mean(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@cpu_suffices
def test_a_model_without_layers_trains_as_with_trainer(tmp_path):
    """With options that are refused for a model with layers."""
    options = {"gradient_accumulation_steps": 2, "bf16_full_eval": True, "use_cpu": True}

    def evaluated(kind):
        made = trainer(kind, tmp_path / kind.__name__, model=Flat(), max_steps=2, **options)
        made.train()
        made.evaluate()
        return made

    expected = evaluated(hf.Trainer)
    with pytest.warns(UserWarning, match="no stack of layers was found in a Flat") as said:
        found = evaluated(L2LTrainer)
    assert len([w for w in said if "no stack" in str(w.message)]) == 1
    assert "no stack of layers" in found.l2l_summary() and not is_attached(found.model)
    assert {p.dtype for p in found.model.parameters()} == {p.dtype for p in expected.model.parameters()}
    assert_as_plain(found, expected)
