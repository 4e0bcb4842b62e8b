"""Gradients that are not finite: said with step and layer, or skipped and counted."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn

from hf_l2l import L2LConfig, NonFiniteError, attach_l2l
from hf_l2l.compat import without_interception
from models import batch_for
from training import l2l_trainer, tiny_bert

LAYER = "bert.encoder.layer"


def model_and_step(mode: str = "deferred", **options: Any) -> Any:
    model = tiny_bert(dropout=0.1)
    eps = attach_l2l(model, L2LConfig(device="cpu", eps_update=mode, ubatch_size=4, **options))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))

    def step(seed: int = 1) -> None:
        model(**batch_for(model, seed=seed)).loss.backward()
        if mode != "eager":
            eps.clip_grad_norm_(1.0)
        optimizer.step()

    return model, eps, optimizer, step


def spoil(module: nn.Module, value: float) -> Any:
    """Make what a module returns not finite."""
    return module.register_forward_hook(lambda m, args, out: out * torch.tensor(value))


@pytest.mark.one_in(8)
@pytest.mark.parametrize("cmp", [None, "bf16"])
@pytest.mark.parametrize("mode", ["serial", "deferred"])
@pytest.mark.parametrize("index", range(4))
def test_the_first_layer_that_is_not_finite_is_named_and_nothing_is_updated(index, mode, cmp):
    model, eps, optimizer, step = model_and_step(mode, cmp=cmp)
    step()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    handle = spoil(model.bert.encoder.layer[index].output.dense, float("inf"))
    generator = torch.get_rng_state()
    with pytest.raises(NonFiniteError, match=rf"step 2: .*the forward of {LAYER}.{index}\).*nonfinite='skip'") as told:
        step(2)
    assert told.value.step == 2
    assert not torch.equal(torch.get_rng_state(), generator)  # dropout was drawn once; the second look took nothing
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])
    handle.remove()
    optimizer.zero_grad()
    step(3)  # the engine goes on
    eps.synchronize()
    assert not torch.equal(model.classifier.weight, before["classifier.weight"])


@pytest.mark.parametrize(
    ("module", "where"),
    [
        ("bert.embeddings.LayerNorm", "the modules before the layers"),
        ("classifier", "the loss or its gradient, after the layers"),
    ],
)
def test_what_is_no_layer_is_named_too(module, where):
    model, _, _, step = model_and_step()
    spoil(model.get_submodule(module), float("nan"))
    with pytest.raises(NonFiniteError, match=where):
        step()


def test_a_backward_that_overflows_is_named():
    torch.manual_seed(0)
    model = tiny_bert(dropout=0.0)
    eps = attach_l2l(model, L2LConfig(device="cpu"))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters()))
    middle = model.bert.encoder.layer[1].output.dense
    middle.register_forward_hook(
        lambda m, args, out: out.register_hook(lambda g: g * float("inf")) and None if out.requires_grad else None
    )
    model(**batch_for(model)).loss.backward()
    with pytest.raises(NonFiniteError, match=rf"the backward of {LAYER}.1"):
        optimizer.step()


def test_eager_stops_before_it_updates():
    model, _, _, step = model_and_step("eager")
    step()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    spoil(model.bert.encoder.layer[1].output.dense, float("nan"))
    with pytest.raises(NonFiniteError, match=r"step 2: gradients are not finite \(in the update of"):
        step(2)
        step(3)
    with without_interception():  # others are told that the engine has stopped
        assert all(torch.equal(p.detach(), before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("mode", ["serial", "deferred"])
def test_steps_are_skipped_and_counted(mode):
    model, eps, optimizer, step = model_and_step(mode, nonfinite="skip")
    step()
    eps.synchronize()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    states = optimizer.state_dict()["state"]
    steps = {index: state["step"].clone() for index, state in states.items()}
    handle = spoil(model.bert.encoder.layer[2].output.dense, float("nan"))
    step(2)
    eps.synchronize()
    assert eps.loss_scale.skipped == 1
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])
    assert all(torch.equal(state["step"], steps[i]) for i, state in optimizer.state_dict()["state"].items())
    handle.remove()
    step(3)
    assert (eps.loss_scale.skipped, eps.loss_scale.value) == (1, 1.0)
    assert not torch.equal(model.classifier.weight, before["classifier.weight"])


def test_norms_that_overflow_are_no_reason():
    model, eps, optimizer, _ = model_and_step("serial")
    model(**batch_for(model)).loss.backward()
    for p in model.parameters():
        p.grad.fill_(2.0**100)
    assert eps.grad_norm().isinf()
    optimizer.step()


def test_masters_that_are_not_finite_are_named():
    model, _, _, step = model_and_step("serial")
    with torch.no_grad():
        model.bert.encoder.layer[2].attention.output.dense.weight[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match=rf"the forward of {LAYER}.2"):
        step()


def test_the_error_can_be_sent_to_another_process():
    error = pickle.loads(pickle.dumps(NonFiniteError(3, "the forward of layer.1")))  # noqa: S301
    assert (error.step, error.where, str(error)) == (3, "the forward of layer.1", str(NonFiniteError(3, error.where)))


def test_nothing_of_a_batch_is_held_after_the_step():
    _, eps, _, step = model_and_step()
    step()
    assert eps.vote.last_forward._again is None


def test_skipping_eager_steps_is_refused():
    with pytest.raises(ValueError, match="nonfinite='skip'"):
        L2LConfig(nonfinite="skip", eps_update="eager")


# ---- under the Trainer


def broken_at(step: int) -> Any:
    """A BERT whose second layer is not finite in one training step."""
    model = tiny_bert(dropout=0.0)
    calls = {"forwards": 0}

    def count(module: nn.Module, args: Any) -> None:
        calls["forwards"] += module.training and torch.is_grad_enabled()

    model.register_forward_pre_hook(count)
    model.bert.encoder.layer[1].output.dense.register_forward_hook(
        lambda m, args, out: out * float("nan") if calls["forwards"] == step else out
    )
    return model


def test_the_trainer_stops_with_step_and_layer(tmp_path):
    trainer = l2l_trainer(tmp_path, model=broken_at(3))
    with pytest.raises(NonFiniteError, match=rf"step 3: .*{LAYER}.1"):
        trainer.train()


@pytest.mark.parametrize("mode", ["serial", "deferred"])
def test_the_trainer_skips_and_the_scheduler_waits(tmp_path, mode):
    trainer = l2l_trainer(tmp_path, model=broken_at(2), l2l_nonfinite="skip", eps_update=mode)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["skipped_steps"] for entry in logs] == [0, 1, 1, 1]
    assert all("loss_scale" not in entry for entry in logs)
    rates = [entry["learning_rate"] for entry in logs]
    assert rates[0] > rates[1] == rates[2] > rates[3]
    assert all(p.isfinite().all() for p in trainer.model.parameters())


# ---- whose gradients are looked at


def test_parameters_that_no_optimizer_has_are_no_reason():
    model = tiny_bert(dropout=0.0)
    eps = attach_l2l(model, L2LConfig(device="cpu", nonfinite="skip"))
    optimizer = eps.wrap(torch.optim.AdamW(model.classifier.parameters(), lr=1e-2))
    weight = model.classifier.weight.detach().clone()
    for _ in range(2):
        model(**batch_for(model)).loss.backward()
        model.bert.embeddings.word_embeddings.weight.grad.fill_(float("inf"))  # and it is not cleared
        optimizer.step()
    assert eps.loss_scale.skipped == 0
    assert not torch.equal(model.classifier.weight, weight)


def test_one_vote_for_two_optimizers():
    model = tiny_bert(dropout=0.0)
    eps = attach_l2l(model, L2LConfig(device="cpu", nonfinite="skip"))
    first = eps.wrap(torch.optim.AdamW(model.classifier.parameters()))
    second = eps.wrap(torch.optim.AdamW(model.bert.parameters()))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for spoilt in (True, False):
        model(**batch_for(model)).loss.backward()
        if spoilt:
            model.classifier.bias.grad.fill_(float("nan"))
        first.step()
        second.step()
        assert (eps.loss_scale.skipped, eps.updates.steps) == (1, 1 if spoilt else 2)
        same = [torch.equal(p, before[name]) for name, p in model.named_parameters()]
        assert all(same) if spoilt else not any(same)


@pytest.mark.parametrize("others", [["model"], ["bert"]])
def test_a_skipped_step_is_one_step_although_other_optimizers_do_not_step(others):
    """One that a new optimizer has replaced, or one that steps less often."""
    model = tiny_bert(dropout=0.0)
    eps = attach_l2l(model, L2LConfig(device="cpu", nonfinite="skip"))
    modules = {"model": model, "bert": model.bert}
    alive = [eps.wrap(torch.optim.AdamW(modules[name].parameters())) for name in others]
    own = model.parameters() if others == ["model"] else model.classifier.parameters()
    optimizer = eps.wrap(torch.optim.AdamW(own))
    for step in range(3):
        model.zero_grad()
        model(**batch_for(model)).loss.backward()
        if step == 0:
            eps.vote.veto()
        before = model.classifier.weight.detach().clone()
        optimizer.step()
        assert torch.equal(model.classifier.weight, before) == (step == 0)
    assert eps.loss_scale.skipped == 1
    assert all(not each.state for each in alive)


def test_a_second_trainer_of_a_model_goes_on_after_a_loss_that_is_no_number(tmp_path):
    model = tiny_bert(dropout=0.0)
    first = l2l_trainer(tmp_path / "first", model=model, l2l_nonfinite="skip", max_steps=1)
    first.train()
    second = l2l_trainer(tmp_path / "second", model=model, l2l_nonfinite="skip", max_steps=3)
    compute_loss, losses = second.compute_loss, iter([float("nan"), 1.0, 1.0])
    second.compute_loss = lambda *args, **kwargs: compute_loss(*args, **kwargs) + 0.0 * next(losses)
    second.train()
    assert [entry["skipped_steps"] for entry in second.state.log_history if "loss" in entry] == [1, 1, 1]


def test_a_step_without_a_backward_of_the_model_has_a_vote_of_its_own():
    model = tiny_bert(dropout=0.0)
    eps = attach_l2l(model, L2LConfig(device="cpu", nonfinite="skip"))
    optimizer = eps.wrap(torch.optim.SGD(model.parameters(), lr=1.0))
    model(**batch_for(model)).loss.backward()
    model.classifier.bias.grad.fill_(float("nan"))
    optimizer.step()
    model.classifier.weight.square().sum().backward()  # a penalty on a master
    before = model.classifier.weight.detach().clone()
    optimizer.step()
    assert torch.equal(model.classifier.weight, before - 2 * before)


@pytest.mark.parametrize("skip", [True, False])
def test_a_loss_that_is_not_finite_although_its_gradients_are(tmp_path, skip):
    model = broken_at(0)
    trainer = l2l_trainer(tmp_path, model=model, l2l_nonfinite="skip" if skip else "raise")
    computed = trainer.compute_loss
    trainer.compute_loss = lambda *args, **kwargs: computed(*args, **kwargs) + float("inf")
    if skip:
        trainer.train()
        assert trainer.eps.loss_scale.skipped == 4
    else:
        with pytest.raises(NonFiniteError, match=r"step 1: .*the loss or its gradient, after the layers"):
            trainer.train()


@pytest.mark.parametrize("mode", ["serial", "deferred", "eager"])
def test_nothing_of_a_batch_is_held_whatever_the_mode(mode):
    _, eps, _, step = model_and_step(mode)
    step()
    assert eps.vote.last_forward._again is None
