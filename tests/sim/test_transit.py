"""What travels: gradient slots, layers that change, errors in hooks of autograd, and the stash on the host."""

from __future__ import annotations

import copy
import gc
import time
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.device.slots import GradientSlots
from hf_l2l.engine.relay import Relay
from hf_l2l.eps.gradients import Gradients
from hf_l2l.eps.weight_copies import Copies
from hf_l2l.rows.host_rows import host_of
from hf_l2l.runtime import stream, wait_reasons
from hf_l2l.testing import Costs, copies_under_way, page_locked_bytes, virtual_clock
from models import assert_same_bits, attached, batch_for, gradients, train_once
from runs import attach, config_for
from scenarios import SCENARIOS, Case
from tiers import combinations, more
from training import settled_memory, tiny_bert


def relay_of(model: nn.Module) -> Relay:
    relay = model.bert.encoder.layer[0]._hf_hook.runner
    assert isinstance(relay, Relay)
    return relay


def bert_on_sim(layers: int = 4, **options: Any) -> nn.Module:
    return attached(tiny_bert(dropout=0.0, layers=layers), device="sim", **options)


def train_as_plain(model: nn.Module, plain: nn.Module, *, seed: int = 1) -> None:
    """Gradients of both are the same, to the bit."""
    for each in (model, plain):
        each.zero_grad()
        train_once(each, batch_for(each, seed=seed))
    assert_same_bits(gradients(model), gradients(plain))


def pair(layers: int = 4, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A model under L2L and the same in plain torch."""
    plain = tiny_bert(dropout=0.0, layers=layers)
    return attached(copy.deepcopy(plain), device="sim", **options), plain


# ---- gradient slots


def test_memory_that_had_other_rows_before_is_waited_for():
    """Rows of a chunk of tokens follow rows of a micro-batch there, and are read as those."""
    stash = relay_of(bert_on_sim(stash="host", boundary="host", ubatch_size=2)).stash
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
    stash.settle()


def test_the_host_waits_before_it_reads_rows_that_are_not_contiguous():
    stash = relay_of(bert_on_sim(stash="host", boundary="host", ubatch_size=2)).stash
    rows = torch.ones(4, 8, device="sim")
    whole = stash.rows_like(rows, 4)
    stash.send(rows, host_of(whole))
    assert (stash.fetch(host_of(whole)[:, ::2]).cpu() == 1).all()
    stash.settle()


def slot_bytes(model: nn.Module) -> tuple[list[int], list[int]]:
    relay = relay_of(model)
    kinds = relay.devices[0].weight_slots.slots, relay.devices[0].gradient_slots.slots
    weights, sums = ([slot.memory.numel() for slot in slots] for slots in kinds)
    return weights, sums


COPIES: list[dict[str, Any]] = [
    {},
    {"cmp": "bf16"},
    {"cmp": "bf16", "host_copies": "per_sweep"},
    {"cmp": "bf16", "grad_dtype": "16bit"},
]


@pytest.mark.parametrize("options", COPIES, ids=str)
def test_a_layer_travels_in_one_copy_each_way(options):
    layers = 4
    model = tiny_bert(dropout=0.0, layers=layers)
    eps = attach_l2l(model, L2LConfig(device="sim", **options))
    optimizer = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        train_once(model, batch_for(model))
        optimizer.step()
    eps.synchronize()
    with virtual_clock(Costs(link_bytes_per_s=1e9, flop_per_s=1e9, host_bytes_per_s=1e9)) as clock:
        train_once(model, batch_for(model))
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
@pytest.mark.parametrize("width", [64, 1000])  # with padding that hides the difference of the dtypes, and without
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
    monkeypatch.setattr(
        GradientSlots, "add", lambda slots, number, leaf: add(slots, number, leaf) if leaf.dim() == 2 else None
    )
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


@pytest.mark.parametrize("options", [{}, {"cmp": "bf16"}], ids=str)
def test_a_layer_travels_in_one_copy_again_after_it_has_changed(options):
    model = bert_on_sim(layers=2, **options)
    layers, eps = list(model.bert.encoder.layer), relay_of(model).eps

    def whole() -> bool:
        train_once(model, batch_for(model))
        units = eps.masters.layer_units
        return all(eps.copies.of_unit(unit).flat is not None and unit.gradient_block is not None for unit in units)

    assert whole()
    settled_memory()  # memory of earlier tests goes
    locked = page_locked_bytes()
    weight = layers[0].output.dense.weight
    weight.data = weight.data.clone()
    model.zero_grad()
    assert whole() and page_locked_bytes() == locked
    for layer in layers:
        layer.adapter = nn.Linear(2, 2)
    model.zero_grad()
    assert whole()


@pytest.mark.parametrize("count", [1, 2])
def test_slots_are_of_the_largest_layer_and_stay(count):
    model = bert_on_sim(layers=3, gradient_slots=count)
    layer = model.bert.encoder.layer[1]
    layer.bert_extra = nn.Parameter(torch.zeros(1000))  # never used: it has room in a slot and no gradient
    padded = [sum(-(-p.nbytes // 256) * 256 for p in each.parameters()) for each in model.bert.encoder.layer]
    for step in range(5):
        model.zero_grad()
        train_once(model, batch_for(model))
        weights, sums = slot_bytes(model)
        if step == 1:  # by then the largest layer has been in every slot for gradients
            held = settled_memory()
        if step > 1:
            assert torch.sim.memory_allocated() == held
            assert weights == [max(padded)] * 2 and sums == [max(padded)] * count
    assert layer.bert_extra.grad is None


class Adapter(nn.Module):
    """A linear layer with a second, longer way beside it."""

    def __init__(self, base: nn.Linear, width: int):
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, width), nn.Linear(width, base.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize(("which", "frozen"), combinations([0, 2, 3], [False, True], together=1))
def test_a_layer_that_grows_after_attach_trains(which, frozen):
    model, plain = pair(prefetch=True)
    train_as_plain(model, plain)
    torch.manual_seed(2)
    output = plain.bert.encoder.layer[which].output
    adapted = Adapter(output.dense, 300)
    for each, adapter in ((model, copy.deepcopy(adapted)), (plain, adapted)):
        each.bert.encoder.layer[which].output.dense = adapter
        each.requires_grad_(not frozen)
        adapter.down.requires_grad_(True)
    for seed in (3, 4):
        train_as_plain(model, plain, seed=seed)
    assert adapted.down.weight.grad is not None and (adapted.base.weight.grad is None) == frozen


def test_parameters_that_are_unfrozen_later_get_their_gradients():
    model, plain = pair()
    parts = [lambda m: m.bert.encoder.layer[2], lambda m: m.bert.embeddings, lambda m: m]
    for each in (model, plain):
        each.bert.requires_grad_(False)
    train_as_plain(model, plain)
    for part in parts:
        for each in (model, plain):
            part(each).requires_grad_(True)
        train_as_plain(model, plain)
    assert all(p.grad.is_pinned() for p in model.parameters())


@pytest.mark.parametrize(
    ("frozen", "options"),
    combinations([[1], [0, 2], [3], [0, 1, 2, 3]], [{}, {"gradient_slots": 1}, {"stash": "host"}], together=1),
)
def test_frozen_layers_in_between_get_none(frozen, options):
    model, plain = pair(**options)
    for each in (model, plain):
        for i in frozen:
            each.bert.encoder.layer[i].requires_grad_(False)
    for seed in (1, 2):
        train_as_plain(model, plain, seed=seed)


@pytest.mark.parametrize("stash", ["device", "host"])
def test_a_backward_that_ends_above_frozen_layers_leaves_nothing_on_its_way(stash, monkeypatch):
    model = bert_on_sim(stash=stash)
    model.bert.embeddings.requires_grad_(False)
    model.bert.encoder.layer[:2].requires_grad_(False)
    loss = model(**batch_for(model)).loss
    filled, fill = [], Copies.of_unit
    monkeypatch.setattr(Copies, "of_unit", lambda held, unit, *rest: filled.append(unit) or fill(held, unit, *rest))
    loss.backward()
    assert filled == [] and not copies_under_way()


@pytest.mark.parametrize("stash", ["device", "host"])
def test_nothing_is_on_its_way_when_a_backward_to_an_intermediate_is_over(stash):
    """The model may go then, and its memory be handed out again."""
    model = bert_on_sim(stash=stash)
    outputs = model(**batch_for(model), output_hidden_states=True)
    torch.autograd.grad(outputs.loss, outputs.hidden_states[2])
    assert not copies_under_way()
    del model, outputs
    settled_memory()
    torch.sim.synchronize()
    assert not copies_under_way()


# ---- errors in hooks of autograd, which run in a thread of torch's own


class Interrupted(Exception):
    pass


def fail_once_at(name: str, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the EPS fail once, when it receives the gradient of the parameter `name`."""
    receive, failing = Gradients.receive, [dict(model.named_parameters())[name]]

    def fail(held: Gradients, sums: Any, *rest: Any) -> None:
        if failing and any(master.parameter is failing[0] for master, _ in sums):
            failing.clear()
            raise Interrupted
        receive(held, sums, *rest)

    monkeypatch.setattr(Gradients, "receive", fail)


LAST, FIRST = "bert.embeddings.word_embeddings.weight", "classifier.weight"  # in the order of a backward


def test_an_error_in_a_hook_is_raised_by_the_next_layers_backward(monkeypatch):
    model, plain = pair()
    fail_once_at(FIRST, model, monkeypatch)
    with pytest.raises(Interrupted):
        train_once(model, batch_for(model))
    train_as_plain(model, plain)


def test_an_error_in_the_last_hook_is_raised_by_the_next_forward(monkeypatch):
    model, plain = pair()
    fail_once_at(LAST, model, monkeypatch)
    train_once(model, batch_for(model))
    with pytest.raises(Interrupted):
        model(**batch_for(model))
    train_as_plain(model, plain)


def test_an_error_in_the_last_hook_is_raised_by_the_optimizer_before_it_changes_a_weight(monkeypatch):
    model, plain = pair()
    optimizer = attach_l2l(model, L2LConfig(device="sim")).wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    fail_once_at(LAST, model, monkeypatch)
    train_once(model, batch_for(model))
    with pytest.raises(Interrupted):
        optimizer.step()
    assert_same_bits(dict(model.named_parameters()), dict(plain.named_parameters()))
    train_as_plain(model, plain)
    others = torch.optim.SGD(plain.parameters(), lr=0.1)
    optimizer.step(), others.step()
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
        train_once(model, batch_for(model))
    train_as_plain(model, plain)


# ---- the stash on the host


def of_length(model: nn.Module, tokens: int) -> dict[str, torch.Tensor]:
    batch = batch_for(model, masked=False)
    return {**batch, "input_ids": batch["input_ids"].repeat(1, 3)[:, :tokens]}


def room_bytes(model: nn.Module) -> int:
    found: int = relay_of(model).stash.tiers.host_bytes()
    return found


def test_equal_batches_use_the_same_rooms_again():
    model = bert_on_sim(stash="host", ubatch_size=3)
    found = set()
    for _ in range(4):
        train_once(model, batch_for(model))
        found.add(room_bytes(model))
    assert len(found) == 1


@pytest.mark.parametrize("lengths", [[2, 5, 9, 15], [9, 2, 15, 3, 9], *more([15, 9, 5, 2], [2, 15, 2, 15])], ids=str)
def test_batches_of_changing_length_take_no_more_rooms(lengths):
    model = bert_on_sim(layers=2, stash="host")
    train_once(model, of_length(model, 15))
    most, locked = room_bytes(model), page_locked_bytes()
    for tokens in lengths:
        train_once(model, of_length(model, tokens))
        assert room_bytes(model) <= most and page_locked_bytes() <= locked
    fresh = bert_on_sim(layers=2, stash="host")
    for tokens in lengths:  # what is too small is given back when the next forward begins
        train_once(fresh, of_length(fresh, tokens))
        assert room_bytes(fresh) <= 2 * most
        relay_of(fresh).stash.start_forward()
        assert room_bytes(fresh) < 1.2 * most  # sizes are rounded up


def settled() -> tuple[int, int]:
    """Bytes of the device, and of page-locked memory, once neither changes any more: a backward that has failed lives
    as long as the device's thread and its traceback do."""
    readings: list[tuple[int, int]] = []
    for _ in range(20):
        gc.collect()
        readings.append((torch.sim.memory_allocated(), page_locked_bytes()))
        if readings[-3:].count(readings[-1]) == 3:
            break
        time.sleep(0.02)
    return readings[-1]


@pytest.mark.parametrize("held", [False, True])
def test_forwards_without_a_backward_take_nothing(held):
    """Neither if the loss is thrown away at once nor if it lives until the next one is there."""
    model = bert_on_sim(layers=2, stash="host")
    seen, loss = set(), None
    settled_memory()  # of models of other tests
    for turn in range(20):
        new = model(**batch_for(model)).loss
        loss = new if held else None
        del new
        if turn > 1:
            seen.add((torch.sim.memory_allocated(), page_locked_bytes(), room_bytes(model)))
    assert len(seen) == 1
    assert (loss is not None) == held


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_program_takes_more_and_more(name):
    made = attach(stash="host", gradient_slots=1)
    case = Case(*made, config_for(made[0], device="sim", ubatch_size=3, stash="host", gradient_slots=1))
    seen = []
    for _ in range(5):
        case.model.requires_grad_(True)
        case.optimizer.zero_grad()
        SCENARIOS[name](case)
        case.optimizer.zero_grad()
        seen.append(settled())
    # What one turn leaves to the next one's forward, it may have left or not when the memory is read.
    for earlier, later in zip(zip(*seen[1:3], strict=True), zip(*seen[3:], strict=True), strict=True):
        assert min(later) <= max(earlier)
