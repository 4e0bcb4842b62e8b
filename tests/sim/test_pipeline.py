"""Layers on several devices in turn have the bits of one device. Every wait is needed, copies may land whenever they
like, and a fault on one device ends the step on all."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import logging
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

import models
import pipelined
from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from hf_l2l.device.layer_device import LayerDevice
from hf_l2l.hf.attach import attachment_of
from hf_l2l.runtime import stream, wait_reasons
from hf_l2l.stash.stash import Stash
from hf_l2l.testing import enable_simulated_accelerator
from hf_l2l.testing.sim_stream import random_landing
from models import Toy, batch_for
from pipelined import Trained, trained
from runs import config_for
from tiers import ALL, combinations, more, nightly, times

OF_DEVICES = (wait_reasons.ROWS_ARRIVED, wait_reasons.GIVEN_COMPUTED)
WAITS = (
    *(*OF_DEVICES, wait_reasons.ROWS_MEMORY_FREE),
    *more(
        wait_reasons.OUTPUT_COMPUTED,
        wait_reasons.OUTPUT_DOWNLOADED,
        wait_reasons.WEIGHTS_UPLOADED,
        wait_reasons.WEIGHT_SLOT_FREE,
        wait_reasons.GRADIENTS_COMPUTED,
        wait_reasons.GRADIENT_SLOT_FREE,
    ),
)
"""The other ones are those of one device, too."""


MODES: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"stash": "host", "boundary": "host"},
    "host stash": {"stash": "host", "boundary": "device", "eps_update": "serial"},
    "bf16": {"cmp": "bf16", "eps_update": "eager", "clips": False},
    "bf16 host": {"cmp": "bf16", "stash": "host", "boundary": "host", "grad_dtype": "16bit", "moment_dtype": "bf16"},
    "fp16": {"cmp": "fp16", "host_copies": "per_sweep"},
    "no prefetch": {"prefetch": False, "gradient_slots": 1},
    "whole batch": {"ubatch_size": 8},
    "kept": {"kept_weights": 2, "kept_graphs": 1},
    "kept inputs": {"stash": "host", "device_stash": 2, "gradient_slots": 1},
    "resident layers": {"resident_layers": 3},
    "resident layers host": {"resident_layers": 2, "resident_update": "host"},
    "all resident": {"resident": "all"},
    "host, one slot": {"stash": "host", "boundary": "host", "gradient_slots": 1},
}
OF_SEVERAL = ("kept", "kept inputs", "resident layers", "resident layers host")
"""Modes for which a model has to have more than one layer."""


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


def is_possible(mode: str, family: str) -> bool:
    return family != "albert" or mode not in OF_SEVERAL


@pytest.mark.parametrize(
    ("mode", "family", "count", "steps"),
    [
        *(("fp16", "gpt2", 2, 1), ("whole batch", "albert", 2, 1)),
        *more(
            *combinations(
                MODES, pipelined.FAMILIES, (2, 3, 4), (3,), where=lambda mode, family, *_: is_possible(mode, family)
            )[::24],
            ("bf16 host", "t5", 3, 20),
            ("kept", "bert", 2, 2),
        ),
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


@pytest.mark.parametrize("seed", range(times(1, 12)))
@pytest.mark.parametrize("mode", ["host, one slot", *more("host", "device", "host stash")])
def test_when_copies_land_changes_no_bit(seed, mode):
    family = ("toy", "t5", "bert", "albert")[seed % 4]
    with random_landing(seed):
        found = on(3, family, mode)
    assert not found.differences(on_one(family, mode))


# ---- from device to device


WAYS = {
    "no peer access": "rows pass between them through memory of the host, since",
    "direct": "layers run on sim:0, sim:1, sim:2 in turn; rows pass between them directly",
    "one reads wrongly": "since sim:2 cannot read that of sim:0, or reads it wrongly",
}


@pytest.mark.parametrize("way", ["no peer access", *more("direct", "one reads wrongly")])
@pytest.mark.parametrize(("family", "mode"), [("toy", "device"), *more(("t5", "device"), ("bert", "bf16 host"))])
def test_devices_without_peer_access_pass_rows_through_the_host(family, mode, way, caplog, monkeypatch):
    """And those that read the memory of another one wrongly."""
    caplog.set_level(logging.DEBUG, "hf_l2l")
    wanted = on_one(family, mode)
    enable_simulated_accelerator(devices=3, peer_access=way != "no peer access")
    if way == "one reads wrongly":
        sends_wrongly = (torch.device("sim:0"), torch.device("sim:2"))
        monkeypatch.setattr(stream, "arrives_as_sent", lambda *pair: pair != sends_wrongly)
    assert not on(3, family, mode).differences(wanted)
    assert WAYS[way] in caplog.text


# ---- faults


class Broken(Exception):
    pass


@pytest.mark.parametrize(
    ("sweep", "number", "stash"),
    [
        ("backward", 1, "device"),
        *more(("forward", 1, "host")),
        *more(*((sweep, number, "host") for sweep in ("forward", "backward") for number in (0, 4))),
    ],
)
def test_a_fault_on_one_device_ends_the_step_and_the_next_one_is_right(sweep, number, stash):
    """The error names the layer; what is left trains on, with the bits of a run without the fault."""
    model, sound = model_of("toy"), model_of("toy")
    for each in (model, sound):
        attach_l2l(each, config_of(each, 3, stash=stash))
    batch = batch_for(model, masked=False)
    calls: list[bool] = []

    def breaks(module: Any, args: Any) -> None:
        calls.append(torch.is_grad_enabled() and not torch.is_inference_mode_enabled())
        if len(calls) == (3 if sweep == "forward" else 4 + 3):
            raise Broken

    state = torch.sim.get_rng_state(0)
    handle = model.blocks[number].down.register_forward_pre_hook(breaks)
    with pytest.raises(Broken) as error:
        for each in range(2):
            loss = model(**batch).loss
            if sweep == "backward" or each:
                loss.backward()
    handle.remove()
    assert f"blocks.{number}" in "".join(error.value.__notes__)
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


@nightly
def test_a_fault_of_a_copy_between_devices_leaves_a_usable_model(monkeypatch):
    model = model_of("bert")
    attach_l2l(model, L2LConfig(device=pipelined.devices(3), ubatch_size=2))
    model(**batch_for(model)).loss.backward()
    for place, name in ((Stash, "send"), (LayerDevice, "given"), (Stash, "fetch")):
        original, left = getattr(place, name), [7]

        def fail(self: Any, *args: Any, original: Any = original, left: list[int] = left) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise Broken
            return original(self, *args)

        monkeypatch.setattr(place, name, fail)
        with pytest.raises(Broken):
            model(**batch_for(model)).loss.backward()
        monkeypatch.setattr(place, name, original)
    model.zero_grad()
    model.eval()
    other = copy.deepcopy(model_of("bert")).eval()
    attach_l2l(other, L2LConfig(device="sim:0", ubatch_size=2))
    for each in (model, other):
        each(**batch_for(each)).loss.backward()
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


# ---- other uses


@pytest.mark.parametrize("family", ["t5", *more("gpt2", "llama")])
def test_evaluation_and_generation_are_those_of_one_device(family):
    found = []
    for count in (1, 3):
        torch.manual_seed(1)
        model = (models.t5() if family == "t5" else pipelined.FAMILIES[family]()).eval()
        attach_l2l(model, L2LConfig(device=pipelined.devices(count), ubatch_size=2))
        batch = batch_for(model, rows=5)
        with torch.no_grad():
            found.append((count, model(**batch).logits.cpu()))
        with torch.inference_mode():
            found.append((count, model(**batch).logits.cpu()))
        ids = {k: v for k, v in batch.items() if k != "labels"}
        for beams in (1, *more(2)):
            tokens = model.generate(**ids, max_new_tokens=3, num_beams=beams, do_sample=False)
            found.append((count, tokens.cpu()))
        detach_l2l(model)
    one, three = ([t for n, t in found if n == count] for count in (1, 3))
    assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))


@nightly
@pytest.mark.parametrize(("family", "places"), [("bert", {"stash": "host", "boundary": "host"}), ("t5", {})])
def test_micro_batches_of_two_sizes_have_the_gradients_of_one(family, places):
    """Of 9 rows, 3 devices get 6 micro-batches: three of two rows, and three of one."""
    found = []
    for count in (1, 3):
        model = model_of(family).eval()
        eps = attach_l2l(model, L2LConfig(device=pipelined.devices(count), **places))
        sizes = [stop - start for start, stop in attachment_of(model).cuts.of(9)]
        assert sizes == ([2, 2, 2, 1, 1, 1] if count == 3 else [9])
        model(**batch_for(model, rows=9)).loss.backward()
        eps.synchronize()
        found.append([p.grad.cpu() for p in model.parameters() if p.grad is not None])
        detach_l2l(model)
    for three, one in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(three, one, rtol=1e-4, atol=1e-6)


CHANGES: dict[str, Any] = {
    "scaled": lambda eps, parameters: [p.grad.mul_(0.5) for p in parameters],
    "clipped twice": lambda eps, parameters: [eps.clip_grad_norm_(most) for most in (0.1, 0.05)],
    # The norms of a device come together, and torch adds up in this order.
    "clipped by torch": lambda eps, parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.1),
}


@pytest.mark.parametrize(
    ("resident", "change"),
    [
        ({"resident": "all"}, "clipped twice"),
        *more(*((of, change) for of in ({"resident_layers": 3}, {"resident": "all"}) for change in CHANGES)),
    ],
)
def test_gradients_that_stay_on_their_devices_can_change_before_the_step(resident, change):
    """No norm is known of them any more."""
    found = []
    for count in (1, 3):
        model = model_of("toy").eval()
        eps = attach_l2l(model, config_of(model, count, **resident))
        optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))
        model(**batch_for(model, masked=False)).loss.backward()
        CHANGES[change](eps, list(model.parameters()))
        norm = eps.grad_norm().cpu()
        optimizer.step()
        eps.synchronize()
        found.append([norm, *(p.detach().cpu() for p in model.parameters())])
        detach_l2l(model)
    nearly = 1e-6 if change == "clipped by torch" else 0
    for three, one in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(three, one, rtol=nearly, atol=nearly)


def test_devices_without_a_layer_are_named_once(caplog):
    """Two layers on three devices have the bits of one."""
    options: dict[str, Any] = {"steps": 2, "layer_classes": ("Block",), "batches": few_rows}
    found = trained(Toy(2), 3, **options)
    told = [r.message for r in caplog.records if "in turn: none" in r.message]
    assert told == ["2 layers run on 3 devices in turn: none on sim:2"]
    assert not found.differences(trained(Toy(2), 1, **options))


@nightly
@pytest.mark.parametrize("devices", [["sim:1"], ["sim:0"], ["sim:0", "sim:2"]], ids=str)
def test_a_trace_beside_that_of_a_model_on_several_devices(devices, tmp_path):
    """It is told of copies and waits of that model, which are those of a device that it has no clock for."""
    files = tmp_path / "several.json", tmp_path / "other.json"
    configs = [
        L2LConfig(device=on, ubatch_size=2, trace=str(file))
        for on, file in zip([["sim:0", "sim:1"], devices], files, strict=True)
    ]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the trace .* ends here")
        both = [attach_l2l(model_of("bert"), config) for config in configs]
    for eps in both:
        eps.model(**batch_for(eps.model)).loss.backward()
    for eps in both:
        detach_l2l(eps.model)
    events = json.loads(files[1].read_text())["traceEvents"]
    assert any(event["name"].startswith("backward") for event in events)
    other_names = {f"sim:{n}" for n in range(3)} - set(devices)
    rows = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert not any(row.startswith(name) for row in rows for name in other_names)
