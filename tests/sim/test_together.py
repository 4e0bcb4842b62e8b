"""Batches that run together: each has its own call, a layer is uploaded once for all, and the bits are those of one
backward after the other."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hf_l2l.engine import shell
from hf_l2l.testing import engine_on_clock, virtual_clock
from models import assert_same_bits, gradients, llama, t5
from runs import OPTIMIZERS, attach
from tiers import more, times
from timed_machine import Machine

Batch = dict[str, torch.Tensor]
LENGTHS = (5, 9, 7, 12)
OPTIONS: dict[str, Any] = {"ubatch_size": None, "chunked_loss": "off"}


def batches_of(lengths: tuple[int, ...] = LENGTHS, rows: int = 2) -> list[Batch]:
    draws = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 50, (rows, length), generator=draws) for length in lengths]
    return [{"input_ids": each, "labels": each} for each in ids]


def pair(model: nn.Module, **options: Any) -> tuple[nn.Module, Any, Any, nn.Module, Any]:
    """A model with its EPS and optimizer, and the same one in plain torch with its optimizer."""
    plain = copy.deepcopy(model).train()
    model, eps, optimizer, _ = attach(model, **{**OPTIONS, **options})
    return model, eps, optimizer, plain, OPTIMIZERS["AdamW"](plain.parameters())


def plain_step(plain: nn.Module, loss: Callable[[nn.Module, Batch], Any], batches: list[Batch]) -> list[float]:
    found = []
    for batch in batches:
        value = loss(plain, batch)
        (value / len(batches)).backward()
        found.append(value.item())
    return found


def mean_loss(model: nn.Module, batch: Batch) -> Any:
    return model(**batch).loss


@pytest.mark.parametrize(
    "options", [{}, {"eps_update": "eager"}, *more({"stash": "host", "resident_layers": 1})], ids=str
)
def test_losses_gradients_and_weights_have_the_bits_of_one_after_the_other(options):
    model, eps, optimizer, plain, of_plain = pair(llama(), **options)
    for _ in range(2):
        losses = eps.together(lambda batch: mean_loss(model, batch), batches_of())
        (sum(losses[1:], losses[0]) / len(losses)).backward()
        assert [loss.item() for loss in losses] == plain_step(plain, mean_loss, batches_of())
        if not options:
            assert_same_bits(gradients(model), gradients(plain))
        for each in (optimizer, of_plain):
            each.step()
            each.zero_grad()
    eps.synchronize()
    assert_same_bits(dict(model.named_parameters()), dict(plain.named_parameters()))


def copies_of_a_step(count: int, **options: Any) -> tuple[int, int]:
    """How many uploads and downloads a step of so many batches has, without those of inputs."""
    model, eps, optimizer, *_ = pair(llama(), **options)
    batches = [{name: t.to("sim") for name, t in batch.items()} for batch in batches_of((7,) * count)]

    def step() -> None:
        sum(eps.together(lambda batch: mean_loss(model, batch), batches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # learns the order of the layers
    eps.synchronize()
    with virtual_clock(Machine(2, 1, 1.0, 1.0, 1.0).costs()) as clock, engine_on_clock(clock, eps):
        step()
        eps.synchronize()
    return tuple(sum(task.lane == lane for task in clock.tasks) for lane in ("upload", "download"))


@pytest.mark.parametrize("options", [{}, *more({"cmp": "bf16"})], ids=str)
def test_a_step_of_many_batches_moves_what_one_batch_does(options):
    assert copies_of_a_step(5, **options) == copies_of_a_step(1, **options)


def of_two_calls(model: nn.Module, batch: Batch) -> Any:
    return mean_loss(model, batch) + 2 * mean_loss(model, {name: t[:, 1:] for name, t in batch.items()})


def of_a_reference(model: nn.Module, batch: Batch) -> Any:
    """As those of DPO and GRPO: log-probabilities without gradients first."""
    with torch.no_grad():
        reference = model(input_ids=batch["input_ids"]).logits.logsumexp(-1).mean()
    return mean_loss(model, batch) - reference


def of_some(model: nn.Module, batch: Batch) -> Any:
    """Some batches make no call, or one more."""
    length = batch["input_ids"].shape[1]
    embedded = model.get_input_embeddings()(batch["input_ids"]).square().mean()
    return embedded if length == 9 else of_two_calls(model, batch) if length == 12 else mean_loss(model, batch)


LOSSES = {"two calls": of_two_calls, "reference": of_a_reference, "some": of_some}


@pytest.mark.parametrize("name", LOSSES)
def test_calls_may_differ(name):
    model, eps, _, plain, _ = pair(llama())
    losses = eps.together(lambda batch: LOSSES[name](model, batch), batches_of())
    (sum(losses) / len(losses)).backward()
    expected = plain_step(plain, LOSSES[name], batches_of())
    assert [loss.item() for loss in losses] == pytest.approx(expected, rel=1e-6)
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-5, atol=1e-7)


def test_micro_batches_and_an_encoder_with_a_decoder():
    model, eps, _, plain, _ = pair(t5(), ubatch_size=1)
    losses = eps.together(lambda batch: mean_loss(model, batch), batches_of())
    (sum(losses) / len(losses)).backward()
    assert [loss.item() for loss in losses] == pytest.approx(plain_step(plain, mean_loss, batches_of()), rel=1e-6)
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-5, atol=1e-7)


def test_each_has_its_own_autocast_and_grad_mode():
    model, eps, _, plain, _ = pair(llama())

    def loss(model: nn.Module, batch: Batch) -> Any:
        device = next(iter(batch.values())).device.type if model is plain else "sim"
        with torch.autocast(device, torch.bfloat16, enabled=batch["input_ids"].shape[1] > 7):
            return mean_loss(model, batch)

    losses = eps.together(lambda batch: loss(model, batch), batches_of())
    (sum(losses) / len(losses)).backward()
    expected = plain_step(plain, loss, batches_of())
    assert [loss.item() for loss in losses] == pytest.approx(expected, rel=1e-2)
    assert losses[0].item() == expected[0] and losses[2].item() == expected[2], "without autocast"


@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt, torch.OutOfMemoryError])
def test_an_error_of_one_ends_all_and_the_model_trains_on(kind):
    model, eps, _, plain, _ = pair(llama())
    left: list[int] = []

    def fails(batch: Batch) -> Any:
        try:
            found = mean_loss(model, batch)
            if batch["input_ids"].shape[1] == 7:
                raise kind("now")
            return found
        finally:
            left.append(batch["input_ids"].shape[1])

    with pytest.raises(kind, match="now"):
        eps.together(fails, batches_of())
    assert sorted(left) == sorted(LENGTHS)
    losses = eps.together(lambda batch: mean_loss(model, batch), batches_of())
    (sum(losses) / len(losses)).backward()
    plain_step(plain, mean_loss, batches_of())
    assert_same_bits(gradients(model), gradients(plain))


def test_where_nothing_is_shared_batches_run_one_after_the_other():
    model, eps, *_ = pair(llama())
    with torch.no_grad():
        losses = eps.together(lambda batch: mean_loss(model, batch), batches_of())
        assert [loss.item() for loss in losses] == [mean_loss(model, batch).item() for batch in batches_of()]
    assert eps.together(lambda batch: mean_loss(model, batch), []) == []
    with pytest.raises(RuntimeError, match="batches run together in calls of their own"):
        model.model.layers[0].register_forward_pre_hook(lambda *_: eps.together(len, [[1]]))
        mean_loss(model, batches_of()[0])


def test_without_greenlet_they_do_so_with_the_same_bits(monkeypatch):
    monkeypatch.setattr(shell, "Coroutines", None)
    model, eps, _, plain, _ = pair(llama())
    losses = eps.together(lambda batch: mean_loss(model, batch), batches_of())
    (sum(losses[1:], losses[0]) / len(losses)).backward()
    plain_step(plain, mean_loss, batches_of())
    assert_same_bits(gradients(model), gradients(plain))


@pytest.mark.parametrize("seed", range(times(4, 200)))
def test_random_programs(seed):
    """Numbers of batches, lengths, losses, frozen parts, and failures of one batch."""
    draws = torch.Generator().manual_seed(seed)

    def draw(count: int) -> int:
        return int(torch.randint(count, (), generator=draws))

    model = llama(num_hidden_layers=1 + draw(3))
    for parameter in list(model.parameters())[: draw(8)]:
        parameter.requires_grad_(False)
    modes = ({}, {"eps_update": "eager"}, {"ubatch_size": 1}, {"stash": "host", "boundary": "host", "ubatch_size": 1})
    model, eps, optimizer, plain, _ = pair(model, **modes[draw(len(modes)) if draw(2) else 0])
    batches = batches_of(tuple(3 + draw(10) for _ in range(1 + draw(5))))
    chosen = [[mean_loss, *LOSSES.values()][draw(4)] for _ in batches]
    failing = draw(len(batches)) if draw(3) == 0 else None

    def loss(model: nn.Module, number: int) -> Any:
        found = chosen[number](model, batches[number])
        if number == failing:
            raise ZeroDivisionError
        return found

    if failing is not None:
        with pytest.raises(ZeroDivisionError):
            eps.together(lambda number: loss(model, number), range(len(batches)))
        failing = None
    losses = eps.together(lambda number: loss(model, number), range(len(batches)))
    expected = [loss(plain, number) for number in range(len(batches))]
    assert [each.item() for each in losses] == pytest.approx([each.item() for each in expected], rel=1e-5)
    for each in (losses, expected):
        total = sum(each)
        if total.requires_grad:
            total.backward()
    if eps.updates.mode == "eager":
        optimizer.step()
        eps.synchronize()
    else:
        for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert (parameter.grad is None) == (other.grad is None)
            if other.grad is not None:
                torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-6)
