"""Gradients that are not finite: said with step and layer, or skipped and counted."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from devices import DEVICE
from hf_l2l import EagerParamServer, NonFiniteError, attach_l2l
from hf_l2l.compat import without_interception
from models import Toy, batch_for, train_once
from runs import assert_same_tensors, attach, config_for
from tiers import combinations, cpu_suffices, nightly
from training import l2l_trainer, tiny_bert

INF, NAN = float("inf"), float("nan")


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def spoil(module: nn.Module, value: float) -> Any:
    """Make what a module returns not finite."""
    return module.register_forward_hook(lambda _, args, out: out * torch.tensor(value))


def stepping(mode: str = "deferred", **options: Any) -> tuple[nn.Module, EagerParamServer, Any, Callable[..., None]]:
    """A model that draws dropout, its EPS, an optimizer, and a function that makes a step, clipped where it may be."""
    model, eps, optimizer, _ = attach(eps_update=mode, **options)

    def step(seed: int = 1) -> None:
        train_once(model, batch_for(model, masked=False, seed=seed))
        if mode != "eager":
            eps.clip_grad_norm_(1.0)
        optimizer.step()

    return model, eps, optimizer, step


# ---- named


@cpu_suffices
@pytest.mark.parametrize(
    ("index", "mode", "cmp"), combinations(range(3), ("serial", "deferred"), (None, "bf16"), together=1)
)
def test_the_first_layer_that_is_not_finite_is_named_and_nothing_is_updated(index, mode, cmp):
    model, eps, optimizer, step = stepping(mode, cmp=cmp)
    step()
    before = weights_of(model)
    handle = spoil(model.blocks[index].down, INF)
    with pytest.raises(NonFiniteError, match=rf"step 2: .*the forward of blocks.{index}\)") as told:
        step(2)
    assert told.value.step == 2
    assert_same_tensors(weights_of(model), before)
    handle.remove()
    optimizer.zero_grad()
    step(3)  # the engine goes on
    eps.synchronize()
    assert not torch.equal(model.head.bias, before["head.bias"])


def overflow_in_the_backward(module: nn.Module, args: Any, out: torch.Tensor) -> None:
    if out.requires_grad:
        out.register_hook(lambda gradient: gradient * INF)


@cpu_suffices
@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda model: spoil(model.embed, NAN), "the modules before the layers"),
        (lambda model: spoil(model.head, NAN), "the loss or its gradient, after"),
        (lambda m: m.blocks[1].down.register_forward_hook(overflow_in_the_backward), "the backward of blocks.1"),
        (lambda model: model.blocks[2].up.weight.data.fill_(NAN), "the forward of blocks.2"),
    ],
    ids=["before the layers", "after the layers", "backward", "masters"],
)
def test_what_is_not_finite_elsewhere_is_named(change, where):
    model, _, _, step = stepping()
    change(model)
    with pytest.raises(NonFiniteError, match=where):
        step()


@pytest.mark.parametrize("options", [{}, {"resident": "all"}], ids=str)
def test_eager_stops_before_it_updates(options):
    model, _, _, step = stepping("eager", **options)
    step()
    before = weights_of(model)
    spoil(model.blocks[1].down, NAN)
    with pytest.raises(NonFiniteError, match=r"step 2: gradients are not finite \(in the update of"):
        step(2)
        step(3)
    with without_interception():  # others are told that the engine has stopped
        assert all(torch.equal(p.detach(), before[name]) for name, p in model.named_parameters())


@cpu_suffices
def test_a_second_look_at_the_forward_draws_no_random_numbers_and_leaves_buffers():
    left = []
    for value in (1.0, INF):
        model, _, optimizer, batch = attach(Toy(buffers=True), eps_update="deferred")
        spoil(model.head, value)
        train_once(model, batch)
        with pytest.raises(NonFiniteError) if value == INF else nullcontext():
            optimizer.step()
        left.append({**dict(model.named_buffers()), "drawn": torch.rand(2, device=DEVICE)})
    assert_same_tensors(*left)
    assert left[0]["blocks.0.seen"] > 0


def test_norms_that_overflow_are_no_reason():
    model, eps, optimizer, batch = attach(eps_update="serial")
    train_once(model, batch)
    for p in model.parameters():
        p.grad.fill_(2.0**100)
    assert eps.grad_norm().isinf()
    optimizer.step()


def test_the_error_can_be_sent_to_another_process():
    error = pickle.loads(pickle.dumps(NonFiniteError(3, "the forward of layer.1")))  # noqa: S301
    assert (error.step, error.where, str(error)) == (3, "the forward of layer.1", str(NonFiniteError(3, error.where)))


@pytest.mark.parametrize("mode", ["deferred", "eager"])
def test_nothing_of_a_batch_is_held_after_the_step(mode):
    model, _, optimizer, batch = attach(eps_update=mode)
    train_once(model, batch)
    memory = [StorageWeakRef(tensor.untyped_storage()) for tensor in batch.values()]
    del batch
    optimizer.step()
    assert all(each.expired() for each in memory)


# ---- skipped


@cpu_suffices
def test_steps_are_skipped_and_counted():
    model, eps, optimizer, step = stepping(nonfinite="skip")
    step()
    before, handle = weights_of(model), spoil(model.blocks[2].down, NAN)
    step(2)
    assert eps.loss_scale.skipped == 1
    assert_same_tensors(weights_of(model), before)
    assert all(state["step"] == 1 for state in optimizer.state_dict()["state"].values())
    handle.remove()
    step(3)
    assert (eps.loss_scale.skipped, eps.loss_scale.value) == (1, 1.0)
    assert not torch.equal(model.head.bias, before["head.bias"])


@pytest.mark.parametrize("options", [{"resident": "shell"}, {"resident_layers": 1}], ids=str)
def test_one_gradient_on_the_host_or_the_device_vetoes_all(options):
    model, eps, optimizer, batch = attach(nonfinite="skip", **options)
    train_once(model, batch)
    before = weights_of(model)
    model.embed.weight.grad[3, 3] = NAN
    optimizer.step()
    eps.synchronize()
    assert eps.loss_scale.skipped == 1
    assert_same_tensors(weights_of(model), before)


def skipping(*parts: str) -> Any:
    """A model that skips steps, its EPS, an optimizer for each of some parts of it, and a batch."""
    model = Toy(tied=False, dropout=0.0)
    eps = attach_l2l(model, config_for(model, device=DEVICE, nonfinite="skip"))
    parameters = ([p for part in each.split(" ") for p in model.get_submodule(part).parameters()] for each in parts)
    return (
        model,
        eps,
        [eps.wrap(torch.optim.AdamW(each, lr=1e-2)) for each in parameters],
        batch_for(model, masked=False),
    )


def test_parameters_that_no_optimizer_has_are_no_reason():
    model, eps, [optimizer], batch = skipping("head")
    weight = model.head.weight.detach().clone()
    for _ in range(2):
        model(**batch).loss.backward()
        model.embed.weight.grad.fill_(INF)  # and it is not cleared
        optimizer.step()
    assert eps.loss_scale.skipped == 0
    assert not torch.equal(model.head.weight, weight)


def test_one_vote_for_two_optimizers():
    model, eps, optimizers, batch = skipping("head", "embed blocks")
    before = weights_of(model)
    for spoilt in (True, False):
        model(**batch).loss.backward()
        if spoilt:
            model.head.bias.grad.fill_(NAN)
        for optimizer in optimizers:
            optimizer.step()
        assert (eps.loss_scale.skipped, eps.updates.steps) == (1, 1 if spoilt else 2)
        same = [torch.equal(p, before[name]) for name, p in model.named_parameters()]
        assert all(same) if spoilt else not any(same)


@pytest.mark.parametrize("parts", [("", ""), ("blocks", "head")], ids=["replaced", "steps less often"])
def test_a_skipped_step_is_one_step_although_another_optimizer_does_not_step(parts):
    """One that a new optimizer has replaced, or one that steps less often."""
    model, eps, [other, optimizer], batch = skipping(*parts)
    for step in range(3):
        model.zero_grad()
        model(**batch).loss.backward()
        if step == 0:
            eps.vote.veto()
        before = model.head.weight.detach().clone()
        optimizer.step()
        assert torch.equal(model.head.weight, before) == (step == 0)
    assert eps.loss_scale.skipped == 1
    assert not other.state


def test_a_step_without_a_backward_of_the_model_has_a_vote_of_its_own():
    model, eps, _, batch = skipping()
    optimizer = eps.wrap(torch.optim.SGD(model.parameters(), lr=1.0))
    model(**batch).loss.backward()
    model.head.bias.grad.fill_(NAN)
    optimizer.step()
    model.head.weight.square().sum().backward()  # a penalty on a master
    before = model.head.weight.detach().clone()
    optimizer.step()
    assert torch.equal(model.head.weight, before - 2 * before)


# ---- under the Trainer


def broken_at(step: int) -> nn.Module:
    """A BERT whose second layer is not finite in one training step."""
    model, calls = tiny_bert(dropout=0.0, layers=2), []
    model.register_forward_pre_hook(lambda each, _: calls.append(each.training and torch.is_grad_enabled()))
    dense = model.bert.encoder.layer[1].output.dense
    dense.register_forward_hook(lambda _, args, out: out * NAN if sum(calls) == step else out)
    return model


def test_the_trainer_stops_with_step_and_layer(tmp_path):
    with pytest.raises(NonFiniteError, match=r"step 3: .*bert.encoder.layer.1"):
        l2l_trainer(tmp_path, model=broken_at(3)).train()


@cpu_suffices
def test_the_trainer_skips_and_the_scheduler_waits(tmp_path):
    trainer = l2l_trainer(tmp_path, model=broken_at(2), l2l_nonfinite="skip")
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["skipped_steps"] for entry in logs] == [0, 1, 1, 1]
    assert all("loss_scale" not in entry for entry in logs)
    rates = [entry["learning_rate"] for entry in logs]
    assert rates[0] > rates[1] == rates[2] > rates[3]
    assert all(p.isfinite().all() for p in trainer.model.parameters())


@nightly
@cpu_suffices
def test_a_loss_that_is_no_number_counts_although_its_gradients_are(tmp_path):
    """A second trainer of the model goes on after it."""
    model = tiny_bert(dropout=0.0, layers=2)
    l2l_trainer(tmp_path / "first", model=model, l2l_nonfinite="skip", max_steps=1).train()
    second = l2l_trainer(tmp_path / "second", model=model, l2l_nonfinite="skip", max_steps=3)
    compute_loss, losses = second.compute_loss, iter([NAN, 1.0, 1.0])
    second.compute_loss = lambda *args, **kwargs: compute_loss(*args, **kwargs) + 0.0 * next(losses)
    second.train()
    assert [entry["skipped_steps"] for entry in second.state.log_history if "loss" in entry] == [1, 1, 1]
    refused = l2l_trainer(tmp_path / "refused", model=tiny_bert(layers=2))
    computed = refused.compute_loss
    refused.compute_loss = lambda *args, **kwargs: computed(*args, **kwargs) + INF
    with pytest.raises(NonFiniteError, match=r"step 1: .*the loss or its gradient, after the layers"):
        refused.train()
