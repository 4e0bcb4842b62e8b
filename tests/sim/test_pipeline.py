"""Layers on several devices in turn have the bits of one device. Every wait is needed, copies may land whenever they
like, and a fault on one device ends the step on all."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import models
import pipelined
from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from hf_l2l.device.layer_device import LayerDevice
from hf_l2l.hf.attach import attachment_of
from hf_l2l.runtime import stream, wait_reasons
from hf_l2l.stash.stash import Stash
from hf_l2l.testing import enable_simulated_accelerator
from hf_l2l.testing.sim_stream import random_landing
from models import Toy, batch_for, bert
from pipelined import Trained, trained
from runs import config_for
from tiers import ALL, combinations, more, nightly

OF_DEVICES = (wait_reasons.ROWS_ARRIVED, wait_reasons.GIVEN_COMPUTED)
WAITS = (
    *OF_DEVICES,
    wait_reasons.ROWS_MEMORY_FREE,
    *more(wait_reasons.OUTPUT_COMPUTED, wait_reasons.GRADIENT_SLOT_FREE),
)
"""The other ones are those of one device, too."""


MODES: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"stash": "host", "boundary": "host"},
    "host stash": {"stash": "host", "boundary": "device", "eps_update": "serial"},
    "bf16": {"cmp": "bf16", "eps_update": "eager", "clips": False},
    "bf16 host": {"cmp": "bf16", "stash": "host", "boundary": "host", "grad_dtype": "16bit", "moment_dtype": "bf16"},
    "fp16": {"cmp": "fp16", "host_copies": "per_sweep"},
    "whole batch": {"ubatch_size": 8},
    "kept": {"kept_weights": 2, "kept_graphs": 1},
    "kept inputs": {"stash": "host", "device_stash": 2, "gradient_slots": 1},
    "resident layers host": {"resident_layers": 2, "resident_update": "host"},
    "all resident": {"resident": "all"},
    "host, one slot": {"stash": "host", "boundary": "host", "gradient_slots": 1},
}


@pytest.fixture(autouse=True)
def _four() -> Iterator[None]:
    enable_simulated_accelerator(devices=4)
    yield
    for _ in range(200):  # copies whose memory a test has freed too early raise one by one
        with contextlib.suppress(RuntimeError):
            for index in range(torch.sim.device_count()):
                torch.sim.synchronize(index)
            break
    enable_simulated_accelerator()


def model_of(family: str) -> Any:
    torch.manual_seed(1)
    return Toy(5, 16) if family == "toy" else pipelined.FAMILIES[family]()


def config_of(model: Any, count: int, **options: Any) -> L2LConfig:
    return config_for(model, device=pipelined.devices(count), ubatch_size=2, **options)


def few_rows(model: Any, step: int) -> Any:
    return batch_for(model, masked=False, rows=8 - (step % 3 == 2), seed=step)


def on(count: int, family: str, mode: str, steps: int = 2) -> Trained:
    options = dict(MODES[mode])
    if family == "toy":
        options |= {"layer_classes": ("Block",), "batches": few_rows}
    return trained(model_of(family), count, steps=steps, **options)


@cache
def on_one(family: str, mode: str, steps: int = 2) -> Trained:
    return on(1, family, mode, steps)


@pytest.mark.parametrize(
    ("mode", "family", "count", "steps"),
    [
        *(("fp16", "gpt2", 2, 1), ("whole batch", "albert", 2, 1)),
        *more(("device", "deberta", 3, 3), ("host", "bert", 4, 3), ("host stash", "gpt2", 3, 3)),
        *more(("bf16", "llama", 4, 3), ("bf16 host", "t5", 3, 8), ("kept", "bert", 2, 3)),
        *more(("kept inputs", "mixtral", 3, 3), ("resident layers host", "t5", 3, 3), ("all resident", "llama", 2, 3)),
    ],
)
def test_layers_in_turn_have_the_bits_of_one_device(mode, family, count, steps):
    """Losses, norms, weights, moments, random numbers."""
    assert not on(count, family, mode, steps).differences(on_one(family, mode, steps))


@pytest.mark.parametrize("why", WAITS)
def test_every_wait_is_needed(why, monkeypatch):
    modes = ["device"] if why in OF_DEVICES else ["host, one slot", *more("device")]
    family = "t5" if why == wait_reasons.GIVEN_COMPUTED or ALL else "toy"
    steps = 1 if why == wait_reasons.GIVEN_COMPUTED else 2
    wanted = [on_one(family, mode, steps) for mode in modes]
    wait, found = stream.wait, set()

    def without(event: Any, reason: str, **options: Any) -> None:
        found.add(reason)
        if reason != why:
            wait(event, reason, **options)

    monkeypatch.setattr(stream, "wait", without)
    with pytest.raises((RuntimeError, AssertionError), match="sim|not finite|weight|differs"):
        for mode, expected in zip(modes, wanted, strict=True):
            assert not on(3, family, mode, steps).differences(expected), "differs"
    assert why in found


@nightly
@pytest.mark.parametrize(
    ("seed", "mode"), [(0, "host, one slot"), *more((1, "host"), (2, "device"), (3, "host stash"), (5, "host"))]
)
def test_when_copies_land_changes_no_bit(seed, mode):
    family = ("toy", "t5", "bert", "albert")[seed % 4]
    with random_landing(seed):
        found = on(3, family, mode)
    assert not found.differences(on_one(family, mode))


# ---- from device to device


WAYS = {
    "no peer access": "rows pass between them through memory of the host, since",
    "one reads wrongly": "since sim:2 cannot read that of sim:0, or reads it wrongly",
}


@nightly
@pytest.mark.parametrize("way", WAYS)
def test_devices_without_peer_access_pass_rows_through_the_host(way, caplog, monkeypatch):
    """And those that read the memory of another one wrongly."""
    caplog.set_level(logging.DEBUG, "hf_l2l")
    wanted = on_one("toy", "device")
    enable_simulated_accelerator(devices=3, peer_access=way != "no peer access")
    if way == "one reads wrongly":
        sends_wrongly = (torch.device("sim:0"), torch.device("sim:2"))
        monkeypatch.setattr(stream, "arrives_as_sent", lambda *pair: pair != sends_wrongly)
    assert not on(3, "toy", "device").differences(wanted)
    assert WAYS[way] in caplog.text


# ---- faults


class Broken(Exception):
    pass


PLACES = {"send": Stash, "fetch": Stash, "given": LayerDevice}
"""Where copies from device to device are made."""


@pytest.mark.parametrize(
    ("fault", "number", "stash"),
    [("backward", 1, "device"), ("send", 5, "host"), *more(("fetch", 5, "host"), ("given", 5, "device"))]
    + [*more(*((sweep, number, "host") for sweep in ("forward", "backward") for number in (0, 4)))],
)
def test_a_fault_on_one_device_ends_the_step_and_the_next_one_is_right(fault, number, stash, monkeypatch):
    """The error of a layer names it; what is left trains on, with the bits of a run without the fault."""
    model, sound = model_of("toy"), model_of("toy")
    for each in (model, sound):
        attach_l2l(each, config_of(each, 3, stash=stash))
    batch = batch_for(model, masked=False)
    calls: list[bool] = []
    last = {"forward": 3, "backward": 4 + 3}.get(fault, number)

    def breaks(*_: Any) -> None:
        calls.append(True)
        if len(calls) == last:
            raise Broken

    state = torch.sim.get_rng_state(0)
    with monkeypatch.context() as patch, pytest.raises(Broken) as error:
        if fault in PLACES:
            original = getattr(PLACES[fault], fault)
            patch.setattr(PLACES[fault], fault, lambda *args: (breaks(), original(*args))[1])
        else:
            down = model.blocks[number].down
            patch.setattr(down, "forward", lambda x, forward=down.forward: (breaks(), forward(x))[1])
        model(**batch).loss.backward()
        model(**batch).loss.backward()
    assert fault in PLACES or f"blocks.{number}" in "".join(error.value.__notes__)
    model.zero_grad()
    found = []
    for each in (model, sound):
        torch.sim.set_rng_state(state, 0)
        each(**batch).loss.backward()
        found.append({name: p.grad for name, p in each.named_parameters()})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_device_without_memory_is_named():
    """The second device is nearly full."""
    gc.collect()  # what earlier tests have left there is not freed within the step
    enable_simulated_accelerator("1MB", devices=3)
    taken = torch.empty(995_000 - torch.sim.memory_allocated(1), dtype=torch.uint8, device="sim:1")
    model = model_of("bert")
    attach_l2l(model, L2LConfig(device=pipelined.devices(3), ubatch_size=2))
    with pytest.raises(torch.OutOfMemoryError, match="sim:1"):
        model(**batch_for(model)).loss.backward()
    del taken
    model.zero_grad()
    model(**batch_for(model)).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


# ---- other uses


@pytest.mark.parametrize("family", ["t5", *more("gpt2", "llama")])
def test_evaluation_and_generation_are_those_of_one_device(family):
    found: dict[int, list[torch.Tensor]] = {1: [], 3: []}
    for count, results in found.items():
        torch.manual_seed(1)
        model = (models.t5() if family == "t5" else pipelined.FAMILIES[family]()).eval()
        attach_l2l(model, L2LConfig(device=pipelined.devices(count), ubatch_size=2))
        batch = batch_for(model, rows=5)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                results.append(model(**batch).logits.cpu())
        ids = {k: v for k, v in batch.items() if k != "labels"}
        for beams in (1, *more(2)):
            results.append(model.generate(**ids, max_new_tokens=3, num_beams=beams, do_sample=False).cpu())
        detach_l2l(model)
    assert all(torch.equal(a, b) for a, b in zip(found[1], found[3], strict=True))


def test_micro_batches_of_two_sizes_have_the_gradients_of_one():
    """Of 9 rows, 3 devices get 6 micro-batches: three of two rows, and three of one."""
    found = []
    for count in (1, 3):
        model = Toy(5, 16, dropout=0.0)
        eps = attach_l2l(model, config_for(model, device=pipelined.devices(count), stash="host", boundary="host"))
        sizes = [stop - start for start, stop in attachment_of(model).cuts.of(9)]
        assert sizes == ([2, 2, 2, 1, 1, 1] if count == 3 else [9])
        model(**batch_for(model, masked=False, rows=9)).loss.backward()
        eps.synchronize()
        found.append([p.grad.cpu() for p in model.parameters()])
        detach_l2l(model)
    for three, one in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(three, one, rtol=1e-4, atol=1e-6)


def test_devices_without_a_layer_are_named_once(caplog):
    """Two layers on three devices have the bits of one."""
    options: dict[str, Any] = {"steps": 2, "layer_classes": ("Block",), "batches": few_rows}
    found = trained(Toy(2), 3, **options)
    told = [r.message for r in caplog.records if "in turn: none" in r.message]
    assert told == ["2 layers run on 3 devices in turn: none on sim:2"]
    assert not found.differences(trained(Toy(2), 1, **options))


@pytest.mark.parametrize("devices", [["sim:0", "sim:2"], *more(["sim:1"], ["sim:0"])], ids=str)
def test_a_trace_beside_that_of_a_model_on_several_devices(devices, tmp_path):
    """It is told of copies and waits of that model, which are those of a device that it has no clock for."""
    files = tmp_path / "several.json", tmp_path / "other.json"
    all_eps = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the trace .* ends here")
        for on_devices, file in zip([["sim:0", "sim:1"], devices], files, strict=True):
            model = model_of("toy")
            all_eps.append(attach_l2l(model, config_for(model, device=on_devices, ubatch_size=2, trace=str(file))))
    for eps in all_eps:
        eps.model(**batch_for(eps.model, masked=False)).loss.backward()
    for eps in all_eps:
        detach_l2l(eps.model)
    events = json.loads(files[1].read_text())["traceEvents"]
    assert any(event["name"].startswith("backward") for event in events)
    other_names = {f"sim:{n}" for n in range(3)} - set(devices)
    rows = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert not any(row.startswith(name) for row in rows for name in other_names)


# ---- several calls, stacks and models, and what layers are given and return


def gradients_of(model: nn.Module, count: int, loss: Callable[[nn.Module], torch.Tensor], **options: Any) -> Any:
    """The loss, and the gradient of every parameter, on so many devices."""
    model = copy.deepcopy(model)
    attach_l2l(model, L2LConfig(device=pipelined.devices(count), ubatch_size=4, **options))
    torch.manual_seed(2)
    found = loss(model)
    found.backward()
    detach_l2l(model)
    return [found.detach().cpu(), *(p.grad.cpu() for p in model.parameters() if p.grad is not None)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def clip() -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": 60, "max_position_embeddings": 16, "eos_token_id": 2, "bos_token_id": 1}
    image = {**sizes, "image_size": 8, "patch_size": 4}
    config = hf.CLIPConfig(text_config=text, vision_config=image, projection_dim=8)
    torch.manual_seed(1)
    return hf.CLIPModel(config)


@nightly
@pytest.mark.parametrize("layers", [3, *more(4)])
def test_several_calls_in_one_loss(layers):
    """While one layer's backward waits for its device, no other layer's begins inside of it."""

    def loss(model: nn.Module) -> torch.Tensor:
        return torch.stack([model(**batch_for(model, seed=seed)).loss for seed in range(2)]).sum()

    torch.manual_seed(1)
    model = bert(0.1, num_hidden_layers=layers)
    assert same(gradients_of(model, 3, loss), gradients_of(model, 1, loss))


@pytest.mark.parametrize("options", [{"stash": "host", "boundary": "host"}, *more({})], ids=str)
def test_two_stacks_beside_each_other(options):
    """As in CLIP, whose loss is across rows."""

    def loss(model: nn.Module) -> torch.Tensor:
        ids, pixels = torch.randint(3, 60, (8, 6)), torch.randn(8, 3, 8, 8)
        return model(input_ids=ids, pixel_values=pixels, return_loss=True).loss

    model = clip()
    assert same(gradients_of(model, 2, loss, **options), gradients_of(model, 1, loss, **options))


def test_two_models_in_one_loss():
    found = []
    for count in (1, 3):
        torch.manual_seed(1)
        both = [bert(0.1, num_hidden_layers=layers) for layers in (2, 3)]
        for model in both:
            attach_l2l(model, L2LConfig(device=pipelined.devices(count), ubatch_size=4))
        torch.manual_seed(2)
        sum(model(**batch_for(model, seed=0)).loss for model in both).backward()
        for model in both:
            detach_l2l(model)
        found.append([p.grad.cpu() for model in both for p in model.parameters()])
    assert same(*found)


@nightly
def test_a_part_in_inference_mode_and_then_a_training():
    """Memory that is reserved for what a device will be sent is not of inference mode."""
    model = pipelined.FAMILIES["t5"]()
    attach_l2l(model, L2LConfig(device=pipelined.devices(3), ubatch_size=4))
    with torch.inference_mode():
        model.encoder(input_ids=torch.ones(8, 6, dtype=torch.long, device="sim:0"))
        model(**batch_for(model))
    model(**batch_for(model)).loss.backward()
    transit = model.encoder.block[0]._hf_hook.runner.stash.transit
    assert not transit.reserved_memory()
    detach_l2l(model)


class Part(nn.Module):
    """A layer that does what its model asks for."""

    kind = ""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, state: torch.Tensor, box: Any = None) -> Any:
        if self.kind == "writes":
            state.add_(x.mean())
        out = x + self.linear(x) + (0 if box is None else box.value)
        return (out, torch.tensor(3), x.new_empty(0)) if self.kind == "returns" else out


class Box:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Parts(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers, self.kind = nn.ModuleList(Part() for _ in range(4)), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, box = torch.zeros(1, device=x.device), Box(torch.ones(8, device=x.device))
        for layer in self.layers:
            layer.kind = self.kind
            x = layer(x, state, box if self.kind == "box" else None)
            if self.kind == "returns":
                x, number, empty = x
                assert (number.device.type, int(number), empty.numel()) == ("cpu", 3, 0)
        return (x.sum() + state).sum()


def parts(kind: str, count: int, *, trains: bool, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Parts(kind)
    attach_l2l(model, L2LConfig(device=pipelined.devices(count), ubatch_size=2, layer_classes=("Part",), **options))
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    try:
        with torch.set_grad_enabled(trains):
            loss = model(x.to("sim:0"))
        if trains:
            loss.backward()
    finally:
        detach_l2l(model)
    return [loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters() if p.grad is not None)]


@pytest.mark.filterwarnings("ignore:ubatch_size=2 has no effect")
@pytest.mark.parametrize(("kind", "trains"), combinations(["returns", "box"], [True, False]))
def test_what_layers_are_given_and_return(kind, trains):
    """A number of the host, an empty tensor, and an object that holds a tensor of the first device."""
    assert same(parts(kind, 3, trains=trains), parts(kind, 1, trains=trains))


@pytest.mark.filterwarnings("ignore:ubatch_size=2 has no effect")
def test_an_object_with_tensors_and_weights_that_stay_elsewhere():
    with pytest.raises(ValueError, match="must not be given an object that holds tensors of sim:0"):
        parts("box", 3, trains=True, resident_layers=2)


@pytest.mark.parametrize("trains", [True, False], ids=["training", "evaluation"])
def test_a_layer_that_writes_into_what_it_shares_is_refused(trains):
    with pytest.raises(RuntimeError, match="change its arguments in place"):
        parts("writes", 3, trains=trains)
