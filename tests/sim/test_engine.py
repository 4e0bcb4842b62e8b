"""The engine on a device that is not the host: memory, placement, the Trainer."""

from __future__ import annotations

import copy
import gc
from collections import UserDict
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from hf_l2l import EagerParamServer, L2LConfig, attach_l2l, detach_l2l, estimate
from hf_l2l.testing import enable_simulated_accelerator, sim_stream
from memory_switches import poisoned_releases
from models import (
    TOLERANCE,
    Toy,
    assert_same_bits,
    attached,
    batch_for,
    bert,
    gradients,
    reference,
    relative_error,
    train_once,
)
from plain import Streamed
from runs import assert_same_run, assert_same_tensors, attach, config_for, run_of, run_of_trainer, seed_all
from tiers import ALL, more
from training import inner_optimizer, l2l_trainer, rows, settled_memory, tiny_bert

SIM = torch.device("sim", 0)


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """What is read after it was given back is NaN, in every test here; afterwards there is no limit."""
    with poisoned_releases():
        yield
    enable_simulated_accelerator()


def slots_of(model: nn.Module) -> int:
    """Bytes of the weight slots and gradient slots."""
    return estimate(model, config_for(model)).slots


def test_the_slots_alone_stay_on_the_device_between_steps():
    before = settled_memory()
    model = tiny_bert(layers=2)
    eps = attach_l2l(model, L2LConfig(device="sim", ubatch_size=4))
    for _ in range(2):
        train_once(model, batch_for(model))
        torch.sim.synchronize()  # the last gradients have left
        assert torch.sim.memory_allocated() == before + slots_of(model)
    assert all(t.device.type == "cpu" for t in [*model.parameters(), *model.buffers()])
    gc.disable()
    try:
        detach_l2l(model)
        assert torch.sim.memory_allocated() == before  # at once, and not when garbage is collected
        assert eps.model is model  # a reference to the EPS keeps nothing on the device
    finally:
        gc.enable()


def test_a_model_larger_than_the_device_trains():
    """With room for the shell, two layers and their activations, a model of sixteen layers; plain torch cannot."""
    model = Toy(16, 16, dropout=0.0)
    plain, batch = copy.deepcopy(model), batch_for(model, masked=False)
    _, expected = reference(model, batch)
    shallow, _, _, _ = attach(Toy(2, 16), stash="host", ubatch_size=2)
    settled_memory()
    torch.sim.reset_peak_memory_stats()
    train_once(shallow, batch)
    enable_simulated_accelerator(torch.sim.max_memory_allocated() + slots_of(model) + 4096)
    del shallow
    torch.sim.synchronize()  # its last gradients have left
    with pytest.raises(torch.OutOfMemoryError):
        train_once(plain.to("sim"), {k: v.to("sim") for k, v in batch.items()})
    del plain
    attach(model, stash="host", ubatch_size=2)
    train_once(model, batch)
    assert relative_error(gradients(model), expected) <= TOLERANCE[torch.float32]


def test_a_first_step_after_running_out_of_memory_equals_a_fresh_one():
    model = tiny_bert(dropout=0.0, layers=2)
    batch = batch_for(model)
    _, expected = reference(model, batch)
    attached(model, device="sim")
    before = settled_memory()
    shell = estimate(model).shell // 2  # its weights: gradients come later
    for room in (shell // 2, shell + slots_of(model) * 3 // 8):  # in the shell, between the two weight slots
        enable_simulated_accelerator(before + room)
        with pytest.raises(torch.OutOfMemoryError):
            train_once(model, batch)
        assert settled_memory() == before
    enable_simulated_accelerator(None)
    train_once(model, batch)
    assert relative_error(gradients(model), expected) <= TOLERANCE[torch.float32]


def test_moves_of_an_attached_model():
    model = attached(tiny_bert(), device="sim")
    assert model.to("sim") is model.to(SIM) is model.cpu() is model
    assert all(p.device.type == "cpu" for p in model.parameters())
    with pytest.raises(ValueError, match="keeps the dtype"):
        model.to("sim", torch.bfloat16)


def test_a_model_that_arrives_on_the_device_moves_to_the_host():
    model = tiny_bert(dropout=0.0)
    batch = batch_for(model)
    _, expected = reference(model, batch)
    model.to("sim")
    there = {name: value.to("sim") for name, value in batch.items()}
    with pytest.warns(UserWarning, match="the model was on sim:0; it moves to the host"):
        attach_l2l(model, L2LConfig(device="sim"))
    assert all(t.device.type == "cpu" for t in [*model.parameters(), *model.buffers()])
    train_once(model, batch)
    assert relative_error(gradients(model), expected) <= TOLERANCE[torch.float32]
    here, other = model(**batch).loss, model(**there).loss
    assert here.device == other.device == SIM and torch.equal(here.detach().cpu(), other.detach().cpu())


def test_autocast_is_entered_again_in_the_device_thread():
    """Gradients equal those of the same model with its graph kept, under the same autocast."""
    model = bert()
    batch, on_device = batch_for(model), copy.deepcopy(model).to("sim")
    losses = []
    for each in (on_device, attached(model, device="sim")):
        with torch.autocast("sim", dtype=torch.bfloat16):
            losses.append(each(**{k: v.to("sim") for k, v in batch.items()}).loss)
        losses[-1].backward()
    assert torch.equal(*(loss.detach().cpu() for loss in losses))
    assert_same_bits(gradients(model), gradients(on_device.cpu()))


@pytest.mark.parametrize("streamed", [True, *more(False)])
def test_the_trainer_picks_the_device_and_its_loaders_place_batches_there_and_nothing_else(tmp_path, streamed):
    options = {"ubatch_size": 3, "stash": "host", "accelerator_config": {"dispatch_batches": streamed}}
    made = l2l_trainer(tmp_path, model=tiny_bert(layers=2), max_steps=1, **options)
    assert made.args.device == SIM
    assert "Device = sim:0" in made.l2l_summary()
    others = Streamed(rows(20)) if streamed else None
    if streamed:
        made.train_dataset = others
    for loader in (made.get_train_dataloader(), made.get_eval_dataloader(others)):
        batches = list(loader)
        assert batches and {t.device for batch in batches for t in batch.values()} == {SIM}
    made.train()
    assert made.evaluate()["eval_loss"] > 0 and made.predict(made.eval_dataset).predictions.shape == (16, 2)
    assert all(p.device.type == "cpu" for p in made.model.parameters())
    state = inner_optimizer(made).state.values()
    assert all(t.device.type == "cpu" for s in state for t in s.values() if isinstance(t, torch.Tensor))
    assert not made.optimizer.device_placement
    for is_run_by_layers in (False, True):
        other = made.accelerator.prepare_model(tiny_bert(layers=2), evaluation_mode=is_run_by_layers)
        assert {p.device.type for p in other.parameters()} == {"cpu" if is_run_by_layers else "sim"}
    detach_l2l(made.model)


def test_the_first_step_takes_no_more_device_memory_than_later_ones():
    """Finding out how to split a batch must not need the memory that splitting it saves."""
    model = attached(tiny_bert(dropout=0.0, layers=2), device="sim", ubatch_size=2, stash="host")
    batch = batch_for(model)
    peaks = []
    with sim_stream.late_copies(False):  # what leaves is freed when it has landed, in either step
        for _ in range(2):
            torch.sim.reset_peak_memory_stats()
            train_once(model, batch)
            peaks.append(torch.sim.max_memory_allocated())
    # The first step compares its recomputes: two numbers for each of two outputs of a layer, and whether they differ.
    assert peaks[0] <= peaks[1] + len(model.bert.encoder.layer) * 2 * (2 * 4 + 2)


class Features(nn.Module):
    """Takes one mapping, as the modules of sentence-transformers do, and writes into what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = bert()

    def forward(self, features, /, extra):
        output = self.bert(**{k: v for k, v in features.items() if k != "scale"})
        features["logits"] = output.logits * features["scale"] + extra["bias"]
        return features


@pytest.mark.parametrize("kind", [hf.BatchEncoding, *more(UserDict)])
def test_inputs_in_a_mapping_get_to_the_device(kind):
    """With the model's own writes into one, and where they are read-only."""
    model = Features().double()
    plain = copy.deepcopy(model)
    batch = {k: v for k, v in batch_for(model.bert).items() if k != "labels"}
    batch["scale"] = torch.arange(1.0, 9.0, dtype=torch.float64)[:, None]
    given, bias = kind(batch), MappingProxyType({"bias": torch.ones(2, dtype=torch.float64)})
    attach_l2l(model, L2LConfig(device="sim", ubatch_size=2))
    found = model(given, extra=bias)
    assert found is given, "which the model writes into and returns, as without L2L"
    assert found["logits"].device == SIM and bias["bias"].device.type == "cpu"
    assert {name: t.device.type for name, t in given.items() if name != "logits"} == dict.fromkeys(batch, "cpu")
    expected = plain(dict(batch), extra=bias)["logits"]
    assert torch.allclose(found["logits"].cpu(), expected, rtol=1e-12)
    found["logits"].sum().backward()
    expected.sum().backward()
    assert relative_error(gradients(model), gradients(plain)) < TOLERANCE[torch.float64]


@pytest.mark.parametrize("streams", [("default", "side", "default"), *more(("side", "default", "side"))])
def test_memory_of_weights_outlives_calls_in_other_streams(streams):
    """Slots are replaced when a layer has grown, though a call in another stream may still compute with them."""
    model = tiny_bert(layers=3).eval()
    attach_l2l(model, L2LConfig(device="sim"))
    batch, used = batch_for(model), {"default": torch.sim.default_stream(), "side": torch.sim.Stream(name="side")}
    for number, name in enumerate(streams):
        if number == len(streams) - 1:
            for layer in model.bert.encoder.layer:
                layer.extra = nn.Linear(64, 64)
        with torch.sim.stream(used[name]), torch.no_grad():
            model(**batch)
    gc.collect()
    for each in used.values():
        with torch.sim.stream(each):  # it would be given memory that the other one still uses
            torch.ones(5, device="sim")


# ---- too little memory: what was taken is given back, and a smaller batch trains as if nothing was


@pytest.mark.parametrize(("stash", "mode"), [("host", "deferred"), *more(("host", "serial"), ("device", "eager"))])
def test_a_step_that_has_no_memory_can_be_made_again(stash, mode):
    """Wherever in the step it is missing: memory is given back at once, and the step is that of a training without any
    error."""
    runs = [attach(Toy(width=32), stash=stash, eps_update=mode) for _ in range(2)]
    model, eps, optimizer, _ = runs[0]
    batch = batch_for(model, masked=False, rows=24)

    def step(model: nn.Module, eps: EagerParamServer, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        seed_all()
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        eps.synchronize()

    for _ in range(2):
        step(*runs[0])
    before = settled_memory()
    torch.accelerator.reset_peak_memory_stats()
    step(*runs[0])
    peak, saved = torch.accelerator.max_memory_allocated(), copy.deepcopy(run_of(model, optimizer, []))
    places: set[str] = set()
    for part in range(0, 12, 1 if ALL else 3):
        enable_simulated_accelerator(before + part * (peak - before) // 12 + 1)
        with pytest.raises(torch.OutOfMemoryError) as told:
            step(*runs[0])
        places |= {frame.name for frame in told.traceback}
        del told
        optimizer.zero_grad()
        assert settled_memory() == before, part
    assert {"forward_sweep", "backward"} <= places, places
    enable_simulated_accelerator()
    eps.synchronize()
    assert_same_tensors(run_of(model, optimizer, []).weights, saved.weights)
    step(*runs[0])
    for _ in range(4):
        step(*runs[1])
    assert_same_run(run_of(model, optimizer, []), run_of(runs[1][0], runs[1][2], []))


def test_a_smaller_batch_trains_as_if_it_had_been_given(tmp_path):
    """One that is found, and one that the user gives, whom the error has told the layer."""

    def of_batch(rows: int, **options: Any) -> Any:
        given = {"max_steps": 2, "per_device_train_batch_size": rows, "stash": "host", **options}
        return l2l_trainer(tmp_path, model=tiny_bert(layers=2, dropout=0.0), **given)

    given = of_batch(2)
    before = settled_memory()
    torch.accelerator.reset_peak_memory_stats()
    given.train()
    capacity, expected = int(1.02 * (torch.accelerator.max_memory_allocated() - before)), run_of_trainer(given)
    del given
    enable_simulated_accelerator(settled_memory() + capacity)
    made = of_batch(8)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory") as told:
        made.train()
    assert "layer" in " ".join(told.value.__notes__)
    del told, made
    for count, options in ((8, {"auto_find_batch_size": True}), (2, {})):
        settled_memory()
        found = of_batch(count, **options)
        found.train()
        assert found._train_batch_size == 2
        assert_same_run(found, expected)
        del found
    enable_simulated_accelerator("1KiB")
    with pytest.raises(RuntimeError, match="No executable batch size found, reached zero"):
        of_batch(8, auto_find_batch_size=True).train()
