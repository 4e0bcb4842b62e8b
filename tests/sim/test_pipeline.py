"""Layers and chunks of logits on several devices in turn have the bits of one device. Every wait is needed, copies may
land whenever they like, and a fault on one device ends the step on all."""

from __future__ import annotations

import gc
import json
import logging
import types
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn import functional

import models
from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from hf_l2l.device.layer_device import LayerDevice
from hf_l2l.hf.attach import attachment_of
from hf_l2l.logits import chunks
from hf_l2l.runtime import stream, wait_reasons
from hf_l2l.stash.stash import Stash
from hf_l2l.testing import enable_simulated_accelerator
from hf_l2l.testing.sim_stream import random_landing
from memory_switches import land_the_rest
from models import Toy, assert_same_bits, attached, batch_for, bert, gradients, train_once
from pipelined import FAMILIES, Trained, devices, trained
from runs import config_for
from tiers import ALL, combinations, more, nightly

OF_DEVICES = (wait_reasons.ROWS_ARRIVED, wait_reasons.GIVEN_COMPUTED)
WAITS = (wait_reasons.ROWS_MEMORY_FREE, *more(wait_reasons.OUTPUT_COMPUTED, wait_reasons.GRADIENT_SLOT_FREE))
"""Some of those of one device, too."""


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
    for index in range(torch.sim.device_count()):
        with torch.sim.device(index):
            land_the_rest()  # copies whose memory a test has freed too early raise one by one
    enable_simulated_accelerator()


def model_of(family: str) -> Any:
    torch.manual_seed(1)
    return Toy(5, 16) if family == "toy" else FAMILIES[family]()


def on(count: int, family: str, mode: str, steps: int = 2) -> Trained:
    return trained(model_of(family), count, steps=steps, **MODES[mode])


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


@pytest.mark.parametrize("why", (*OF_DEVICES, *WAITS))
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
    ("seed", "mode"), [(0, "host, one slot"), (1, "host"), (2, "device"), (3, "host stash"), (5, "host")]
)
def test_when_copies_land_changes_no_bit(seed, mode):
    family = ("toy", "t5", "bert", "albert")[seed % 4]
    with random_landing(seed):
        found = on(3, family, mode)
    assert not found.differences(on_one(family, mode))


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
        attach_l2l(each, config_for(each, device=devices(3), ubatch_size=2, stash=stash))
    batch = batch_for(model, masked=False)
    calls: list[bool] = []
    last = {"forward": 3, "backward": 4 + 3}.get(fault, number)
    broken, name = (PLACES[fault], fault) if fault in PLACES else (model.blocks[number].down, "forward")
    original = getattr(broken, name)

    def breaks(*args: Any) -> Any:
        calls.append(True)
        if len(calls) == last:
            raise Broken
        return original(*args)

    state = torch.sim.get_rng_state(0)
    with monkeypatch.context() as patch, pytest.raises(Broken) as error:
        patch.setattr(broken, name, breaks)
        model(**batch).loss.backward()
        model(**batch).loss.backward()
    assert fault in PLACES or f"blocks.{number}" in "".join(error.value.__notes__)
    model.zero_grad()
    for each in (model, sound):
        torch.sim.set_rng_state(state, 0)
        each(**batch).loss.backward()
    assert_same_bits(gradients(model), gradients(sound))


def test_a_device_without_memory_is_named():
    """The second device is nearly full."""
    gc.collect()  # what earlier tests have left there is not freed within the step
    enable_simulated_accelerator("1MB", devices=3)
    taken = torch.empty(995_000 - torch.sim.memory_allocated(1), dtype=torch.uint8, device="sim:1")
    model = model_of("bert")
    attach_l2l(model, L2LConfig(device=devices(3), ubatch_size=2))
    with pytest.raises(torch.OutOfMemoryError, match="sim:1"):
        train_once(model, batch_for(model))
    del taken
    model.zero_grad()
    train_once(model, batch_for(model))
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("family", ["t5", *more("gpt2", "llama")])
def test_evaluation_and_generation_are_those_of_one_device(family):
    found: dict[int, list[torch.Tensor]] = {1: [], 3: []}
    for count, results in found.items():
        torch.manual_seed(1)
        model = (models.t5() if family == "t5" else FAMILIES[family]()).eval()
        attach_l2l(model, L2LConfig(device=devices(count), ubatch_size=2))
        batch = batch_for(model, rows=5)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                results.append(model(**batch).logits.cpu())
        del batch["labels"]
        for beams in (1, *more(2)):
            results.append(model.generate(**batch, max_new_tokens=3, num_beams=beams, do_sample=False).cpu())
        detach_l2l(model)
    assert same(*found.values())


def test_micro_batches_of_two_sizes_have_the_gradients_of_one():
    """Of 9 rows, 3 devices get 6 micro-batches: three of two rows, and three of one."""
    found = []
    for count in (1, 3):
        model = Toy(5, 16, dropout=0.0)
        eps = attach_l2l(model, config_for(model, device=devices(count), stash="host", boundary="host"))
        sizes = [stop - start for start, stop in attachment_of(model).cuts.of(9)]
        assert sizes == ([2, 2, 2, 1, 1, 1] if count == 3 else [9])
        train_once(model, batch_for(model, masked=False, rows=9))
        eps.synchronize()
        found.append(gradients(model))
        detach_l2l(model)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


def test_devices_without_a_layer_are_named_once(caplog):
    """Two layers on three devices have the bits of one."""
    found = trained(Toy(2), 3, steps=2)
    told = [r.message for r in caplog.records if "in turn: none" in r.message]
    assert told == ["2 layers run on 3 devices in turn: none on sim:2"]
    assert not found.differences(trained(Toy(2), 1, steps=2))


@pytest.mark.parametrize("other", [["sim:0", "sim:2"], *more(["sim:1"], ["sim:0"])], ids=str)
@pytest.mark.filterwarnings("ignore:the trace .* ends here")
def test_a_trace_beside_that_of_a_model_on_several_devices(other, tmp_path):
    """It is told of copies and waits of that model, which are those of a device that it has no clock for."""
    both, file = [model_of("toy"), model_of("toy")], tmp_path / "trace.json"
    for model, on_devices in zip(both, (devices(2), other), strict=True):
        trace = tmp_path / "several.json" if model is both[0] else file
        attach_l2l(model, config_for(model, device=on_devices, ubatch_size=2, trace=str(trace)))
    for model in both:
        train_once(model, batch_for(model, masked=False))
    for model in both:
        detach_l2l(model)
    events = json.loads(file.read_text())["traceEvents"]
    assert any(event["name"].startswith("backward") for event in events)
    rows = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert not any(row.startswith(name) for row in rows for name in {*devices(3)} - {*other})


# ---- several calls, stacks and models, and what layers are given and return


def clip() -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": 60, "max_position_embeddings": 16, "eos_token_id": 2, "bos_token_id": 1}
    image = {**sizes, "image_size": 8, "patch_size": 4}
    return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=image, projection_dim=8))


def loss_across_rows(model: nn.Module) -> torch.Tensor:
    ids, pixels = torch.randint(3, 60, (8, 6)), torch.randn(8, 3, 8, 8)
    return model(input_ids=ids, pixel_values=pixels, return_loss=True).loss


def loss_of(*models: nn.Module, calls: int = 1) -> torch.Tensor:
    return sum(model(**batch_for(model, seed=seed)).loss for model in models for seed in range(calls))


THREE = partial(bert, 0.1, num_hidden_layers=3)
LOSSES: dict[str, tuple[list[Callable[[], nn.Module]], Callable[..., torch.Tensor], dict[str, Any]]] = {
    "two stacks beside each other": ([clip], loss_across_rows, {"stash": "host", "boundary": "host"}),
    "two models": ([partial(bert, 0.1), THREE], loss_of, {}),
    # While one layer's backward waits for its device, no other layer's begins inside of it.
    "several calls": ([THREE], partial(loss_of, calls=2), {}),
}


@pytest.mark.parametrize("of", [*[*LOSSES][:2], *more("several calls")])
def test_a_loss_of_several_calls_or_stacks_has_the_gradients_of_one_device(of):
    makes, loss, options = LOSSES[of]
    found = []
    for count in (1, 3):
        torch.manual_seed(1)
        made = [make() for make in makes]
        for model in made:
            attach_l2l(model, L2LConfig(device=devices(count), ubatch_size=4, **options))
        torch.manual_seed(2)
        value = loss(*made)
        value.backward()
        for model in made:
            detach_l2l(model)
        found.append([value.detach().cpu(), *gradients_of(*made)])
    assert same(*found)


def gradients_of(*models: nn.Module) -> list[torch.Tensor]:
    return [p.grad.cpu() for model in models for p in model.parameters() if p.grad is not None]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@nightly
def test_a_part_in_inference_mode_and_then_a_training():
    """Memory that is reserved for what a device will be sent is not of inference mode."""
    model = FAMILIES["t5"]()
    attach_l2l(model, L2LConfig(device=devices(3), ubatch_size=4))
    with torch.inference_mode():
        model.encoder(input_ids=torch.ones(8, 6, dtype=torch.long, device="sim:0"))
        model(**batch_for(model))
    train_once(model, batch_for(model))
    assert not model.encoder.block[0]._hf_hook.runner.stash.transit.reserved_memory()
    detach_l2l(model)


class Part(nn.Module):
    """A layer that does what its model asks for."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(8, 8), kind

    def forward(self, x: torch.Tensor, state: torch.Tensor, box: Any) -> Any:
        if self.kind == "writes":
            state.add_(x.mean())
        out = x + self.linear(x) + (box.value if self.kind == "box" else 0)
        return (out, torch.tensor(3), x.new_empty(0)) if self.kind == "returns" else out


class Parts(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers, self.kind = nn.ModuleList(Part(kind) for _ in range(4)), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(1, device=x.device)
        box = types.SimpleNamespace(value=torch.ones(8, device=x.device)) if self.kind == "box" else None
        for layer in self.layers:
            x = layer(x, state, box)
            if self.kind == "returns":
                x, number, empty = x
                assert (number.device.type, int(number), empty.numel()) == ("cpu", 3, 0)
        return (x.sum() + state).sum()


def parts(kind: str, count: int, *, trains: bool, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Parts(kind)
    attach_l2l(model, L2LConfig(device=devices(count), ubatch_size=2, layer_classes=("Part",), **options))
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    try:
        with torch.set_grad_enabled(trains):
            loss = model(x.to("sim:0"))
        if trains:
            loss.backward()
    finally:
        detach_l2l(model)
    return [loss.detach().cpu(), *gradients_of(model)]


@pytest.mark.filterwarnings("ignore:ubatch_size=2 has no effect")
@pytest.mark.parametrize(("kind", "trains"), combinations(["returns", "box"], [True, False]))
def test_what_layers_are_given_and_return(kind, trains):
    """A number of the host, an empty tensor, and an object that holds a tensor of the first device."""
    assert same(parts(kind, 3, trains=trains), parts(kind, 1, trains=trains))


@pytest.mark.parametrize(
    ("kind", "trains", "options", "error", "match"),
    [
        ("writes", True, {}, RuntimeError, "change its arguments in place"),
        ("writes", False, {}, RuntimeError, "change its arguments in place"),
        ("box", True, {"resident_layers": 2}, ValueError, "must not be given an object that holds tensors of sim:0"),
    ],
    ids=["writes, training", "writes, evaluation", "an object with tensors, and weights that stay elsewhere"],
)
@pytest.mark.filterwarnings("ignore:ubatch_size=2 has no effect")
def test_layers_that_are_refused(kind, trains, options, error, match):
    with pytest.raises(error, match=match):
        parts(kind, 3, trains=trains, **options)


# ---- logits in chunks on several devices, which compute every n-th chunk each

LENGTH = 48
"""Of 8 rows: three chunks of 128 tokens."""
HEADS: dict[str, tuple[type[nn.Module], type[Any], dict[str, Any]]] = {
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig, {"num_key_value_heads": 1}),
    "bert": (hf.BertForMaskedLM, hf.BertConfig, {}),  # its head has a bias that is trained
}


def with_head(family: str = "llama") -> nn.Module:
    torch.manual_seed(1)
    kind, config, options = HEADS[family]
    return kind(config(**models.SMALL, **options, tie_word_embeddings=False))


def long_batch(model: nn.Module, step: int = 0) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(step)
    ids = torch.randint(2, models.VOCAB, (8 - step % 2, LENGTH), generator=drawn).to("sim:0")
    return {"input_ids": ids, "labels": ids.masked_fill(ids % 5 == 0, -100)}


def trained_head(family: str, count: int, mode: str, **options: Any) -> Trained:
    options = {"steps": 2, "ubatch_size": 4, **MODES[mode], **options}
    return trained(with_head(family), count, batches=long_batch, **options)


@nightly
@pytest.mark.parametrize(
    ("family", "mode", "count"),
    [("llama", "host", 3), ("bert", "bf16", 2), ("bert", "device", 2), ("llama", "all resident", 2)],
)
def test_chunks_on_several_devices_have_the_gradients_of_one(family, mode, count, monkeypatch):
    placed = []
    for kind in chunks.Place.__subclasses__():
        send = kind.send
        monkeypatch.setattr(kind, "send", lambda at, t, send=send: placed.append(at.device) or send(at, t))
    found, one = (trained_head(family, each, mode) for each in (count, 1))
    assert {str(device) for device in placed} == {*devices(count)[1:]}
    # The gradients of the head are added in another order.
    atol = 1e-2 if mode == "bf16" else 1e-5
    torch.testing.assert_close(found.weights, one.weights, rtol=0, atol=atol)
    torch.testing.assert_close(found.losses, one.losses)
    assert not found.differences(trained_head(family, count, mode)), "a training can be repeated"
    # Nothing has another order if the first device computes all of them.
    assert not trained_head(family, count, mode, head_device="first").differences(one)


@pytest.mark.parametrize("frozen", [False, True], ids=["weights of classes", "a frozen head has no sums"])
def test_what_each_device_needs_is_copied_to_it(frozen):
    found = []
    for count in (1, 3):
        model = attached(with_head().eval(), device=devices(count), ubatch_size=4)
        model.lm_head.requires_grad_(not frozen)
        given = long_batch(model)
        logits = model(input_ids=given["input_ids"]).logits.flatten(0, 1)
        weight = torch.linspace(0.5, 1.5, models.VOCAB).to("sim:0")
        loss = functional.cross_entropy(logits, given["labels"].flatten(), weight, label_smoothing=0.1)
        loss.backward()
        detach_l2l(model)
        assert (model.lm_head.weight.grad is None) == frozen
        found.append([loss.detach().cpu(), *gradients_of(model)])
    torch.testing.assert_close(*found)
    assert not frozen or same(found[0][1:], found[1][1:]), "no sums differ"


def test_the_devices_compute_chunks_at_the_same_time_and_one_chunk_is_not_sent(monkeypatch):
    """No wait of the first device lies between a chunk that it computes and the next one."""
    order: list[str] = []
    linear = chunks.Head.linear

    def recorded(head: chunks.Head, hidden: torch.Tensor) -> torch.Tensor:
        if len(hidden) > 1:
            order.append(str(hidden.device))
        return linear(head, hidden)

    monkeypatch.setattr(chunks.Head, "linear", recorded)
    model = attached(with_head().eval(), device=devices(2), ubatch_size=4)
    given = long_batch(model)
    model(**given).loss.backward()
    assert order == ["sim:0", "sim:1", "sim:0"], "and no chunk twice"
    order.clear()
    model(**{name: value[:2] for name, value in given.items()}).loss.backward()
    assert {*order} <= {"sim:0"}
    detach_l2l(model)


WAYS = {
    "no peer access": "rows pass between them through memory of the host, since",
    "one reads wrongly": "since sim:2 cannot read that of sim:0, or reads it wrongly",
}


@pytest.mark.parametrize("way", ["no peer access", *more("one reads wrongly")])
def test_devices_without_peer_access_pass_rows_through_the_host_and_have_the_bits_of_one(way, caplog, monkeypatch):
    caplog.set_level(logging.DEBUG, "hf_l2l")
    enable_simulated_accelerator(devices=3, peer_access=way != "no peer access")
    if way == "one reads wrongly":
        sends_wrongly = (torch.device("sim:0"), torch.device("sim:2"))
        monkeypatch.setattr(stream, "arrives_as_sent", lambda *pair: pair != sends_wrongly)
    found = trained_head("llama", 3, "device", head_device="first" if way == "one reads wrongly" else "auto")
    assert WAYS[way] in caplog.text
    assert ("logits are computed on sim:0 alone" in caplog.text) == (way == "no peer access")
    assert not found.differences(trained_head("llama", 1, "device"))
