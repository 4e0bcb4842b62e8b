"""The engine on a device that is not the host: random numbers, memory, placement, the Trainer."""

from __future__ import annotations

import copy
import gc
import time
from collections import UserDict
from types import MappingProxyType
from typing import Any

import pytest
import torch
import transformers as hf
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F

from hf_l2l import L2LConfig, attach_l2l, detach_l2l, estimate
from hf_l2l.runtime import compute_state
from hf_l2l.testing import enable_simulated_accelerator, sim_stream
from models import TOLERANCE, attached, batch_for, bert, gpt2, gradients, reference, relative_error, train_once
from tiers import combinations
from training import assert_same_run, inner_optimizer, l2l_trainer, rows, settled_memory, tiny_bert

SIM = torch.device("sim", 0)


class NoisyBlock(nn.Module):
    """Draws from the host's generator and from the device's, as real layers may."""

    def __init__(self, width: int = 4):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scale = 1 + torch.rand(())  # the host's
        return hidden + scale.item() * F.dropout(torch.tanh(self.linear(hidden)), 0.5, training=True)


class NoisyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([NoisyBlock() for _ in range(3)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.pow(2).mean()


def noisy_gradients(ubatch_size: int | None, **options: Any) -> tuple[dict, dict]:
    """Gradients under L2L, and those of the same draws with the graph kept: ubatch by ubatch, layer by layer."""
    torch.manual_seed(1)
    model = NoisyModel()
    batch = torch.randn(6, 4)
    on_device = copy.deepcopy(model).to("sim")
    seeds = {"host": torch.get_rng_state(), "device": torch.sim.get_rng_state()}
    hidden = batch.to("sim")
    size = ubatch_size or 6
    for block in on_device.blocks:
        hidden = torch.cat([block(part) for part in hidden.split(size)])
    hidden.pow(2).mean().backward()
    expected = {n: p.grad.cpu() for n, p in on_device.named_parameters()}
    torch.set_rng_state(seeds["host"])
    torch.sim.set_rng_state(seeds["device"])
    config = L2LConfig(device="sim", ubatch_size=ubatch_size, layer_classes=("NoisyBlock",), **options)
    attach_l2l(model, config)
    model(batch).backward()
    return gradients(model), expected


def same(found: dict, expected: dict) -> bool:
    return all(torch.allclose(found[n], expected[n], rtol=1e-5, atol=1e-7) for n in expected)


@pytest.mark.parametrize("ubatch_size", [None, 4])
def test_recompute_draws_what_the_forward_drew(ubatch_size, monkeypatch):
    # The check of a split needs rows that do not depend on random numbers: here the forward always draws.
    monkeypatch.setattr("hf_l2l.engine.splitting.close_enough", lambda *_: True)
    assert same(*noisy_gradients(ubatch_size))


@pytest.mark.parametrize("forgotten", ["host", "device"])
def test_forgetting_a_restore_is_noticed(forgotten, monkeypatch):
    """The test above can fail: without either restore the gradients are others."""
    restore = compute_state.set_rng_state

    def partly(state: compute_state.RngState, device: torch.device) -> None:
        now = compute_state.get_rng_state(device)
        host = now.host if forgotten == "host" else state.host
        restore(compute_state.RngState(host, now.device if forgotten == "device" else state.device), device)

    monkeypatch.setattr(compute_state, "set_rng_state", partly)
    assert not same(*noisy_gradients(None, check_recompute="off"))
    with pytest.raises(RuntimeError, match="the recompute of a layer must give the outputs of its forward"):
        noisy_gradients(None)


def test_generators_stand_after_backward_where_forward_left_them():
    model = attached(tiny_bert(dropout=0.3), device="sim", ubatch_size=3)
    model.train()
    loss = model(**batch_for(model)).loss
    before = compute_state.get_rng_state(SIM)
    loss.backward()
    assert compute_state.get_rng_state(SIM) == before


def peak_of_step(layers: int, **options: object) -> int:
    model = attached(tiny_bert(layers=layers), device="sim", **options)
    batch = batch_for(model)
    train_once(model, batch)
    before = settled_memory()
    torch.sim.reset_peak_memory_stats()
    train_once(model, batch)
    assert torch.sim.memory_allocated() == before
    return torch.sim.max_memory_allocated() - before


def test_device_memory_grows_with_depth_by_the_stash_alone_if_that_is_there():
    shallow, deep = peak_of_step(3, ubatch_size=4), peak_of_step(6, ubatch_size=4)
    boundary = 8 * 6 * 16 * 4  # rows x tokens x width x bytes
    assert deep - shallow == pytest.approx(3 * boundary, rel=0.05)
    shallow, deep = peak_of_step(3, stash="host", ubatch_size=4), peak_of_step(6, stash="host", ubatch_size=4)
    assert deep <= shallow * 1.01


def slots_of(model: nn.Module) -> int:
    """Bytes of the weight slots and gradient slots."""
    return estimate(model).slots


def test_the_slots_alone_stay_on_the_device_between_steps():
    before = settled_memory()
    model = tiny_bert()
    eps = attach_l2l(model, L2LConfig(device="sim", ubatch_size=2))
    for _ in range(2):
        loss = model(**batch_for(model)).loss
        loss.backward()
        del loss
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
    """With room for the shell, two layers and their activations, a model of sixteen layers trains; plain torch "
    "cannot."""
    model = tiny_bert(layers=16, dropout=0.0)
    batch = batch_for(model)
    _, expected = reference(model, batch)
    peak = peak_of_step(2, stash="host", ubatch_size=2)
    room = settled_memory() + peak + slots_of(model) + 4096
    plain = copy.deepcopy(model)
    try:
        enable_simulated_accelerator(room)
        with pytest.raises(torch.OutOfMemoryError):
            train_once(plain.to("sim"), {k: v.to("sim") for k, v in batch.items()})
        del plain
        attached(model, device="sim", stash="host", ubatch_size=2)
        train_once(model, batch)
    finally:
        enable_simulated_accelerator(None)
    assert relative_error(gradients(model), expected) <= TOLERANCE[torch.float32]


def memory_is_back_at(num_bytes: int) -> bool:
    """Whether the device holds `num_bytes`, once the frames of an error are gone and the device's thread let go."""
    for _ in range(100):
        gc.collect()
        if torch.sim.memory_allocated() == num_bytes:
            return True
        time.sleep(0.02)
    return False


def test_a_run_after_running_out_of_memory_equals_a_fresh_one():
    model = tiny_bert(dropout=0.0)
    batch = batch_for(model)
    _, expected = reference(model, batch)
    attached(model, device="sim")
    before = settled_memory()
    shell = estimate(model).shell // 2  # its weights: gradients come later
    for room in (shell // 2, shell + slots_of(model) * 3 // 8):  # in the shell, between the two weight slots
        try:
            enable_simulated_accelerator(before + room)
            with pytest.raises(torch.OutOfMemoryError):
                train_once(model, batch)
        finally:
            enable_simulated_accelerator(None)
        assert memory_is_back_at(before), f"{torch.sim.memory_allocated()} bytes and not {before}"
    train_once(model, batch)
    model.zero_grad()
    before = torch.sim.memory_allocated()
    torch.sim.reset_peak_memory_stats()
    train_once(model, batch)
    model.zero_grad()
    peak = torch.sim.max_memory_allocated() - before
    for share in (0.2, 0.5, 0.9):  # in the shell, in a forward, in a backward
        try:
            enable_simulated_accelerator(before + int(peak * share))
            with pytest.raises(torch.OutOfMemoryError):
                train_once(model, batch)
        finally:
            enable_simulated_accelerator(None)
        assert memory_is_back_at(before), f"{share}: {torch.sim.memory_allocated()} bytes and not {before}"
        model.zero_grad()
    train_once(model, batch)
    assert relative_error(gradients(model), expected) <= TOLERANCE[torch.float32]


def test_moves_of_an_attached_model():
    model = tiny_bert()
    attach_l2l(model, L2LConfig(device="sim"))
    assert model.to("sim") is model
    assert model.to(SIM) is model
    assert model.cpu() is model
    assert all(p.device.type == "cpu" for p in model.parameters())
    with pytest.raises(ValueError, match="move to meta"):
        model.to("meta")
    with pytest.raises(ValueError, match="keeps the dtype"):
        model.to("sim", torch.bfloat16)


def test_a_model_that_arrives_on_the_device_moves_to_the_host():
    model = tiny_bert(dropout=0.0)
    batch = batch_for(model)
    _, expected = reference(model, batch)
    model.to("sim")
    with pytest.warns(UserWarning, match="the model was on sim:0; it moves to the host"):
        attach_l2l(model, L2LConfig(device="sim"))
    assert all(t.device.type == "cpu" for t in [*model.parameters(), *model.buffers()])
    train_once(model, batch)
    assert relative_error(gradients(model), expected) <= TOLERANCE[torch.float32]


def test_results_are_on_the_device_and_inputs_may_be_anywhere():
    model = attached(tiny_bert(dropout=0.0), device="sim")
    batch = batch_for(model)
    here = model(**batch).loss
    there = model(**{k: v.to("sim") for k, v in batch.items()}).loss
    assert here.device == there.device == SIM
    assert torch.equal(here.detach().cpu(), there.detach().cpu())


def test_autocast_is_entered_again_in_the_device_thread():
    """Gradients equal those of the same model with its graph kept, under the same autocast."""
    model = bert()
    batch = batch_for(model)
    on_device = copy.deepcopy(model).to("sim")
    with torch.autocast("sim", dtype=torch.bfloat16):
        loss = on_device(**{k: v.to("sim") for k, v in batch.items()}).loss
    loss.backward()
    expected = {n: None if p.grad is None else p.grad.cpu() for n, p in on_device.named_parameters()}
    attached(model, device="sim")
    with torch.autocast("sim", dtype=torch.bfloat16):
        ours = model(**batch).loss
    ours.backward()
    assert torch.equal(ours.detach().cpu(), loss.detach().cpu())
    assert relative_error(gradients(model), expected) == 0.0


def test_trainer_picks_the_device_and_keeps_everything_else_on_the_host(tmp_path):
    made = l2l_trainer(tmp_path, ubatch_size=3, stash="host", eval_strategy="steps", eval_steps=2)
    assert made.args.device == SIM
    assert "Device = sim:0" in made.l2l_summary()
    made.train()
    assert all(p.device.type == "cpu" for p in made.model.parameters())
    state = inner_optimizer(made).state.values()
    assert all(t.device.type == "cpu" for s in state for t in s.values() if isinstance(t, torch.Tensor))
    assert made.predict(made.eval_dataset).predictions.shape == (16, 2)


def test_trainer_on_the_device_equals_trainer_on_the_host(tmp_path):
    def run(name, **options):
        made = l2l_trainer(tmp_path / name, model=tiny_bert(dropout=0.0), data_seed=1, **options)
        made.train()
        return made

    there, here = run("sim", ubatch_size=None), run("cpu", use_cpu=True)
    assert there.args.device == SIM and here.args.device.type == "cpu"
    assert_same_run(there, here)


def test_an_accelerate_loop_leaves_the_model_and_the_optimizer_on_the_host():
    model = tiny_bert(dropout=0.0)
    plain = copy.deepcopy(model)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    assert accelerator.device == SIM
    eps = attach_l2l(model, L2LConfig(device=accelerator.device, ubatch_size=3))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))
    model, optimizer = accelerator.prepare(model, optimizer)
    reference_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(4):
        batch = batch_for(plain, seed=step)
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        (plain(**batch).loss / 2).backward()
        if step % 2:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            reference_optimizer.step()
            reference_optimizer.zero_grad()
    assert all(p.device.type == "cpu" for p in model.parameters())
    state = optimizer.optimizer.state.values()
    assert all(t.device.type == "cpu" for s in state for t in s.values() if isinstance(t, torch.Tensor))
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("streamed", [False, True])
def test_the_trainers_loaders_place_batches_and_nothing_else(tmp_path, streamed):
    made = l2l_trainer(tmp_path, max_steps=2, accelerator_config={"dispatch_batches": streamed})
    if streamed:
        made.train_dataset = StreamedRows()
    loaders = [made.get_train_dataloader(), made.get_eval_dataloader(StreamedRows() if streamed else None)]
    for loader in loaders:
        batches = list(loader)
        assert batches and {t.device for batch in batches for t in batch.values()} == {SIM}
    made.train()
    assert made.evaluate()["eval_loss"] > 0
    assert all(p.device.type == "cpu" for p in made.model.parameters())
    state = inner_optimizer(made).state.values()
    assert all(t.device.type == "cpu" for s in state for t in s.values() if isinstance(t, torch.Tensor))
    assert not made.optimizer.device_placement
    other = made.accelerator.prepare_model(tiny_bert())
    assert {p.device for p in other.parameters()} == {SIM}  # which is not run layer to layer
    reference = made.accelerator.prepare_model(tiny_bert(), evaluation_mode=True)  # which is
    assert {p.device.type for p in reference.parameters()} == {"cpu"}
    detach_l2l(made.model)


def test_generation_with_inputs_on_the_device_warns_of_nothing():
    """Trainers generate from batches that are there; `model.device` is that of the masters."""
    model = gpt2()
    ids = torch.randint(5, 60, (2, 4))
    expected = model.generate(ids, max_new_tokens=3, do_sample=False)
    attach_l2l(model)
    assert torch.equal(model.generate(ids.to("sim"), max_new_tokens=3, do_sample=False).cpu(), expected)
    copy.deepcopy(model)
    detach_l2l(model)
    assert "generate" not in vars(model)


class StreamedRows(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(rows(20))


def test_the_first_step_takes_no_more_device_memory_than_later_ones():
    """Finding out how to split a batch must not need the memory that splitting it saves."""
    model = attached(tiny_bert(dropout=0.0), device="sim", ubatch_size=1, stash="host")
    batch = batch_for(model)
    peaks = []
    with sim_stream.late_copies(False):  # what leaves is freed when it has landed, in either step
        for _ in range(2):
            torch.sim.reset_peak_memory_stats()
            train_once(model, batch)
            peaks.append(torch.sim.max_memory_allocated())
    # The first step compares its recomputes: two numbers for each of two outputs of a layer, and whether they differ.
    assert peaks[0] <= peaks[1] + len(model.bert.encoder.layer) * 2 * (2 * 4 + 2)


def test_auto_find_batch_size_starts_again_with_fewer_rows(tmp_path):
    whole = peak_of_step(4)
    made = l2l_trainer(tmp_path, auto_find_batch_size=True, model=tiny_bert(dropout=0.0))
    try:
        enable_simulated_accelerator(torch.sim.memory_allocated() + int(whole * 0.85))
        made.train()
    finally:
        enable_simulated_accelerator(None)
    assert made.state.global_step == 4
    assert made._train_batch_size < 8


class Remembering(nn.Module):
    """Assigns to a buffer that starts empty, and normalizes over the batch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", None)
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mean = hidden.detach().mean()
        self.seen = mean if self.seen is None else self.seen + mean
        return self.norm(self.linear(hidden))


def test_buffers_written_on_the_device_come_back():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Remembering() for _ in range(2)])
            self.norm = nn.BatchNorm1d(4)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                hidden = block(hidden)
            return self.norm(hidden).pow(3).mean()

    model = Model().double()
    plain = copy.deepcopy(model)
    attach_l2l(model, L2LConfig(device="sim", layer_classes=("Remembering",)))
    for seed in range(2):
        batch = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        for each in (plain, model):
            each(batch).backward()
    expected = dict(plain.named_buffers())
    assert len(expected) == 11
    for name, buffer in model.named_buffers():
        assert buffer.device.type == "cpu", name
        assert torch.allclose(buffer, expected[name], rtol=1e-12), name


class Features(nn.Module):
    """Takes one mapping, as the modules of sentence-transformers do, and writes into what it was given."""

    def __init__(self):
        super().__init__()
        self.bert = bert()

    def forward(self, features, /, extra=None):
        output = self.bert(**{k: v for k, v in features.items() if k != "scale"})
        features["logits"] = output.logits * features["scale"] + (0 if extra is None else extra["bias"])
        return features


def as_dict(data):
    return dict(data)


@pytest.mark.parametrize(
    ("kind", "ubatch_size"), combinations([as_dict, hf.BatchEncoding, UserDict], [None, 2], together=1)
)
def test_inputs_in_a_mapping_get_to_the_device(kind, ubatch_size):
    model = Features().double()
    plain = copy.deepcopy(model)
    batch = {k: v for k, v in batch_for(model.bert).items() if k != "labels"}
    batch["scale"] = torch.arange(1.0, 1.0 + len(batch["input_ids"]), dtype=torch.float64)[:, None]
    bias = MappingProxyType({"bias": torch.ones(2, dtype=torch.float64)})
    attach_l2l(model, L2LConfig(device="sim", ubatch_size=ubatch_size))
    rows_seen = []
    layer = model.bert.bert.encoder.layer[0]
    layer.attention.register_forward_pre_hook(lambda module, args: rows_seen.append(len(args[0])))
    given = kind(batch)
    with torch.no_grad():
        model(kind(batch), extra=bias)  # finds out how to split
        rows_seen.clear()
        found = model(given, extra=bias)
    assert found is given, "which the model writes into and returns, as without L2L"
    assert found["logits"].device == SIM
    assert {name: t.device.type for name, t in given.items() if name != "logits"} == dict.fromkeys(batch, "cpu")
    assert bias["bias"].device.type == "cpu"
    rows_in_all = len(batch["input_ids"])
    assert rows_seen == ([rows_in_all] if ubatch_size is None else [2] * (rows_in_all // 2) + [1] * (rows_in_all % 2))
    expected = plain(dict(batch), extra=bias)["logits"]
    assert torch.allclose(found["logits"].cpu(), expected, rtol=1e-12)
    out = model(given, extra=bias)
    out["logits"].sum().backward()
    expected.sum().backward()
    assert relative_error(gradients(model), gradients(plain)) < TOLERANCE[torch.float64]


def test_the_loss_scale_reaches_outputs_in_a_mapping():
    model = Features()
    plain = copy.deepcopy(model)
    batch = {k: v for k, v in batch_for(model.bert).items() if k != "labels"}
    batch["scale"] = torch.ones(1)
    eps = attach_l2l(model, L2LConfig(device="sim", cmp="fp16", loss_scale_init=256.0))
    optimizer = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    model(hf.BatchEncoding(batch))["logits"].sum().backward()
    plain(dict(batch))["logits"].sum().backward()
    assert optimizer.param_groups
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=0.1, atol=0.05)


@pytest.mark.parametrize("streams", [("default", "side", "default"), ("side", "default", "side"), ("default", "side")])
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
