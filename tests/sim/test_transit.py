"""What travels: gradient slots, layers that change, errors in hooks of autograd, and the stash on the host."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.device.slots import GradientSlots
from hf_l2l.engine.relay import Relay
from hf_l2l.eps.gradients import Gradients
from hf_l2l.rows.host_rows import host_of
from hf_l2l.runtime import stream, wait_reasons
from hf_l2l.testing import Costs, copies_under_way, page_locked_bytes, virtual_clock
from memory_switches import copies_at_unlocks
from models import Toy, assert_same_bits, attached, batch_for, gradients, llama, train_once
from runs import OPTIMIZERS, attach, config_for
from scenarios import Case, failing_hook
from tiers import more, nightly
from training import settled_memory, tiny_bert


def relay_of(model: nn.Module) -> Relay:
    relay = model.blocks[0]._hf_hook.runner
    assert isinstance(relay, Relay)
    return relay


def toy_on_sim(layers: int = 4, **options: Any) -> nn.Module:
    """A `Toy`, layer to layer."""
    model = Toy(layers, dropout=0.0, tied=False)
    attach_l2l(model, config_for(model, device="sim", **options))
    return model


def train_as_plain(model: nn.Module, plain: nn.Module, *, seed: int = 1) -> None:
    """Gradients of both are the same, to the bit."""
    for each in (model, plain):
        each.zero_grad()
        train_once(each, batch_for(each, masked=False, seed=seed))
    assert_same_bits(gradients(model), gradients(plain))


def pair(**options: Any) -> tuple[nn.Module, nn.Module]:
    """A model under L2L and the same in plain torch."""
    return toy_on_sim(**options), Toy(4, dropout=0.0, tied=False)


# ---- gradient slots


def test_memory_that_had_other_rows_before_is_waited_for():
    """Rows of a chunk of tokens follow rows of a micro-batch there, and are read as those. So does the host before it
    reads rows that are not contiguous."""
    stash = relay_of(toy_on_sim(stash="host", boundary="host", ubatch_size=2)).stash
    rows = torch.ones(2, 8, device="sim")
    first = stash.rows_like(rows, 4)
    stash.send(rows, host_of(first)[:2])
    address = host_of(first).data_ptr()
    del first
    torch.accelerator.synchronize()
    chunk = torch.full((4, 8), 7.0, device="sim")
    taken = [stash.rows_like(chunk, 4) for _ in range(4)]  # all free memory
    again = next(each for each in taken if host_of(each).data_ptr() == address)
    stash.send(chunk, host_of(again))
    assert (stash.fetch(host_of(again)[:2]).cpu() == 7).all()
    whole = stash.rows_like(chunk, 4)
    stash.send(chunk, host_of(whole))
    assert (stash.fetch(host_of(whole)[:, ::2]).cpu() == 7).all()
    stash.settle()


@nightly
@pytest.mark.parametrize("options", [{"cmp": "bf16", "grad_dtype": "16bit"}, {}], ids=str)
def test_a_layer_travels_in_one_copy_each_way(options):
    layers = 4
    model, eps, optimizer, batch = attach(Toy(layers, tied=False), OPTIMIZERS["SGD"], **options)
    for _ in range(2):
        train_once(model, batch)
        optimizer.step()
    eps.synchronize()
    with virtual_clock(Costs(link_bytes_per_s=1e9, flop_per_s=1e9, host_bytes_per_s=1e9)) as clock:
        train_once(model, batch)
    copies = Counter((task.lane, task.stream == "the default stream") for task in clock.tasks)
    non_layer = sum(not master.layer_number for master in eps.masters.all())
    assert copies["upload", False] == non_layer + layers + layers - 2  # two stay in their slots between the sweeps
    assert copies["download", False] == 2 * (non_layer + layers)  # sums and norms


class Scaled(nn.Module):
    """A layer with a weight in bfloat16 and one in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter((torch.rand(width) + 0.5).bfloat16())
        self.norm = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh((x.float() * self.norm).to(x.dtype) * self.scale)


@pytest.mark.filterwarnings("ignore:the master weights are torch.bfloat16")
@pytest.mark.parametrize("width", [1000, *more(64)])  # without padding that hides the difference of the dtypes
def test_gradients_of_a_layer_in_two_dtypes_are_rounded_each_by_itself(width):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(9, width).bfloat16(), *(Scaled(width) for _ in range(3)))
    model = copy.deepcopy(plain)
    eps = attach_l2l(model, L2LConfig(device="sim", layer_classes=("Scaled",), grad_dtype="16bit"))
    _optimizer = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    for each in (plain, model):
        each(torch.tensor([1, 2, 3, 1])).float().square().sum().backward()
    expected = {name: gradient.to(torch.bfloat16) for name, gradient in gradients(plain).items()}
    assert_same_bits(gradients(model), expected)


def test_a_gradient_that_stays_in_the_leaf_is_downloaded_beside_those_in_the_slot(monkeypatch):
    """As a sparse one does, which the simulated accelerator does not have."""
    add = GradientSlots.add
    monkeypatch.setattr(GradientSlots, "add", lambda slots, n, leaf: add(slots, n, leaf) if leaf.dim() == 2 else None)
    model, plain = pair()
    for seed in (1, 2):
        train_as_plain(model, plain, seed=seed)


def test_a_layer_without_elements_to_train_travels():
    model = nn.Sequential(nn.Embedding(9, 4), *(Scaled(4).float() for _ in range(3)))
    for layer in model[1:]:
        layer.requires_grad_(False)
        layer.empty = nn.Parameter(torch.zeros(0, 4))
        layer.forward = lambda x, layer=layer: torch.cat([Scaled.forward(layer, x), layer.empty])
    attach_l2l(model, L2LConfig(device="sim", layer_classes=("Scaled",)))
    for _ in range(2):
        model(torch.tensor([1, 2])).sum().backward()
    assert model[1].empty.grad.shape == (0, 4)


@pytest.mark.parametrize("options", [{"cmp": "bf16"}, *more({})], ids=str)
def test_a_layer_travels_in_one_copy_again_after_it_has_changed(options):
    model = toy_on_sim(layers=2, **options)
    eps = relay_of(model).eps

    def whole() -> bool:
        model.zero_grad()
        train_once(model, batch_for(model, masked=False))
        units = eps.masters.layer_units
        return all(eps.copies.of_unit(unit).flat is not None and unit.gradient_block is not None for unit in units)

    assert whole()
    settled_memory()  # memory of earlier tests goes
    locked = page_locked_bytes()
    weight = model.blocks[0].down.weight
    weight.data = weight.data.clone()
    assert whole() and page_locked_bytes() == locked
    for layer in model.blocks:
        layer.adapter = nn.Linear(2, 2)
    assert whole()


def test_a_layer_that_grows_after_attach_trains():
    model, plain = pair(prefetch=True)
    train_as_plain(model, plain)
    torch.manual_seed(2)
    adapted = nn.Sequential(plain.blocks[2].down, nn.Linear(8, 300), nn.Linear(300, 8))
    for each, adapter in ((model, copy.deepcopy(adapted)), (plain, adapted)):
        each.blocks[2].down = adapter
        each.requires_grad_(False)
        adapter[1].requires_grad_(True)
    for seed in (3, 4):
        train_as_plain(model, plain, seed=seed)
    assert adapted[1].weight.grad is not None and adapted[0].weight.grad is None


@pytest.mark.parametrize("stash", ["host", *more("device")])
def test_nothing_is_on_its_way_when_a_backward_to_an_intermediate_is_over(stash):
    """The model may go then, and its memory be handed out again."""
    torch.sim.synchronize()  # the last gradients of an earlier test may still be on their way
    model = attached(tiny_bert(dropout=0.0), device="sim", stash=stash)
    outputs = model(**batch_for(model), output_hidden_states=True)
    torch.autograd.grad(outputs.loss, outputs.hidden_states[2])
    del model, outputs
    settled_memory()
    assert not copies_under_way()


def test_memory_of_a_model_that_goes_is_unlocked_when_its_last_gradients_have_arrived(monkeypatch):
    """Its backward has not waited for them."""
    under_way = copies_at_unlocks(monkeypatch)
    model = attached(tiny_bert(dropout=0.0), device="sim")
    model(**batch_for(model)).loss.backward()
    assert copies_under_way()
    del model
    settled_memory()
    assert under_way and not any(under_way)


@pytest.mark.parametrize("made", ["before", "after"])
def test_a_loss_of_a_master_adds_to_a_gradient_that_is_still_on_its_way(made):
    """Autograd adds to it without asking, in a graph that was made before its backward or is made after it."""
    model = tiny_bert(dropout=0.0)
    plain, batch = copy.deepcopy(model), batch_for(model)
    attached(model, device="sim")
    for each in (model, plain):
        weight = each.get_input_embeddings().weight
        of_weight = (weight**2).sum() if made == "before" else None
        each(**batch).loss.backward()
        if each is model:
            assert copies_under_way()
        (of_weight if of_weight is not None else (weight**2).sum()).backward()
    torch.testing.assert_close(gradients(model), gradients(plain))


# ---- errors in hooks of autograd, which run in a thread of torch's own


class Interrupted(Exception):
    pass


@pytest.mark.parametrize(
    ("name", "raised_by"), [("head.weight", "backward"), ("embed.weight", "forward"), ("embed.weight", "optimizer")]
)
def test_an_error_in_a_hook_is_raised_by_what_comes_next(name, raised_by, monkeypatch):
    """Of the first hook, by the next layer's backward; of the last, by the next forward, or by the optimizer before it
    changes a weight."""
    model, plain = pair()
    optimizer = attach_l2l(model, config_for(model)).wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    receive, failing = Gradients.receive, [dict(model.named_parameters())[name]]

    def fail(held: Gradients, sums: Any, *rest: Any) -> None:
        if failing and any(master.parameter is failing[0] for master, _ in sums):
            failing.clear()
            raise Interrupted
        receive(held, sums, *rest)

    monkeypatch.setattr(Gradients, "receive", fail)
    batch = batch_for(model, masked=False)
    if raised_by != "backward":
        train_once(model, batch)
    acts = {
        "backward": train_once,
        "forward": lambda model, batch: model(**batch),
        "optimizer": lambda *_: optimizer.step(),
    }
    with pytest.raises(Interrupted):
        acts[raised_by](model, batch)
    assert_same_bits(dict(model.named_parameters()), dict(plain.named_parameters()))
    train_as_plain(model, plain)
    optimizer.step(), torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_same_bits(dict(model.named_parameters()), dict(plain.named_parameters()))


def test_an_error_in_a_layers_own_hook_is_raised_by_that_backward(monkeypatch):
    model, plain = pair()
    wait, left = stream.wait, [2]

    def fail(event: Any, why: str, **options: Any) -> None:
        if why == wait_reasons.GRADIENT_SLOT_FREE:
            left[0] -= 1
            if left[0] == 0:
                raise Interrupted
        wait(event, why, **options)

    monkeypatch.setattr(stream, "wait", fail)
    with pytest.raises(Interrupted):
        train_once(model, batch_for(model, masked=False))
    train_as_plain(model, plain)


# ---- the stash on the host


@nightly
def test_batches_of_changing_length_take_no_more_rooms():
    """What is too small is given back when the next forward begins; sizes are rounded up."""
    lengths, most = [9, 2, 15, 3], 0
    for first in ([15], []):
        model = toy_on_sim(layers=2, stash="host")
        tiers, batch = relay_of(model).stash.tiers, batch_for(model, masked=False)
        for tokens in (*first, *lengths):
            train_once(model, {name: value.repeat(1, 3)[:, :tokens] for name, value in batch.items()})
            most = most or tiers.host_bytes()
            assert tiers.host_bytes() <= (most if first else 2 * most)
            relay_of(model).stash.start_forward()
            assert tiers.host_bytes() < 1.2 * most


@nightly
def test_hooks_that_fail_leave_nothing():
    options = {"ubatch_size": 4, "stash": "host", "gradient_slots": 1}
    made = attach(Toy(2), **options)
    case = Case(*made, config_for(made[0], device="sim", **options))
    seen = []
    for _ in range(4):
        failing_hook(case)
        case.optimizer.zero_grad()
        seen.append((settled_memory(), page_locked_bytes()))
    # What one turn leaves to the next one's forward, it may have left or not when the memory is read.
    for earlier, later in zip(zip(*seen[1:3], strict=True), zip(*seen[3:], strict=True), strict=True):
        assert min(later) <= max(earlier)


# ---- what a forward and a backward do not wait for


@pytest.mark.parametrize("number", [0, 2, 5], ids=["first", "middle", "last"])
@pytest.mark.parametrize("adds", [True, *more(False)])
@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
def test_gradients_beside_one_that_is_added_on_the_host_arrive_whole(number, adds):
    """`p.grad` of one parameter of a layer has other strides, so that its gradient is not added on the device."""
    model = Toy(dropout=0.0)
    plain, batch = copy.deepcopy(model), batch_for(model, masked=False)
    attach_l2l(model, config_for(model, device="sim"))
    for each in (model, plain):
        if adds:
            each(**batch).loss.backward()
        parameter = [*each.blocks[0].parameters()][number]
        parameter.grad = torch.ones(*parameter.shape, 2)[..., 0]
        each(**batch).loss.backward()
    torch.testing.assert_close(gradients(model), gradients(plain))


@pytest.mark.parametrize("options", [{}, {"cmp": "bf16", "grad_dtype": "16bit"}], ids=str)
def test_a_backward_leaves_its_last_gradients_to_those_who_use_them(options):
    """Of a first batch, and of one that is added to it."""
    torch.sim.synchronize()
    model = tiny_bert(dropout=0.0)
    optimizer = attach_l2l(model, L2LConfig(device="sim", **options)).wrap(torch.optim.AdamW(model.parameters()))
    for _ in range(2):
        model(**batch_for(model)).loss.backward()
        assert copies_under_way()
    assert optimizer.param_groups[0]["params"][0].grad is not None


def test_a_write_to_a_weight_of_two_layers_waits_for_both_uploads(monkeypatch):
    model = Toy(dropout=0.0)
    model.blocks[2] = model.blocks[1].__class__(8, 0.0, buffers=False)
    model.blocks[2].up.weight = model.blocks[1].up.weight
    attach_l2l(model, config_for(model, device="sim"))
    with monkeypatch.context() as patch:
        patch.setattr(stream, "is_reached", lambda point: False)  # the device is behind
        loss = model(**batch_for(model, masked=False)).loss
    with torch.no_grad():
        model.blocks[1].up.weight.add_(1.0)
    torch.sim.synchronize()  # which would tell of a race
    assert loss.isfinite()


def test_weights_that_a_call_was_given_are_freed_after_it():
    model = Toy(dropout=0.0)
    attach_l2l(model, config_for(model, device="sim"))
    given = {name: p.detach().clone() for name, p in model.named_parameters()}
    left = [weakref.ref(each) for each in given.values()]
    with torch.no_grad():
        torch.func.functional_call(model, given, kwargs=batch_for(model, masked=False))
    given.clear()
    gc.collect()
    assert not any(each() is not None for each in left)


def test_hooks_of_saved_tensors_may_read_what_waits_in_host_memory():
    """Gradients of hidden states, which the forward of a chunked loss has computed."""
    model = attached(llama(), stash="host", boundary="host", ubatch_size=1, chunked_loss=16)
    ids = torch.randint(5, 50, (4, 12), device="sim")
    found = []

    def read(tensor: torch.Tensor) -> torch.Tensor:
        tensor.sum().item()
        return tensor

    for unpack in (lambda tensor: tensor, read):
        logits = model(input_ids=ids).logits
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            loss = functional.cross_entropy(logits.view(-1, logits.shape[-1]), ids.view(-1)) * 3
        loss.backward()
        found.append(gradients(model))
        model.zero_grad()
    assert_same_bits(*found)
