"""Uses of a model on several devices beside one call after the other: the bits of one device, or an error."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import pipelined
from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from hf_l2l.testing import enable_simulated_accelerator
from models import batch_for, bert
from pipelined import devices
from tiers import combinations, more


@pytest.fixture(autouse=True, scope="module")
def _three() -> Iterator[None]:
    enable_simulated_accelerator(devices=3)
    yield
    enable_simulated_accelerator()


def gradients(model: nn.Module, count: int, loss: Callable[[nn.Module], torch.Tensor], **options: Any) -> Any:
    """The loss, and the gradient of every parameter, on so many devices."""
    model = copy.deepcopy(model)
    attach_l2l(model, L2LConfig(device=devices(count), ubatch_size=4, **options))
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


@pytest.mark.parametrize("layers", [3, *more(4)])
def test_several_calls_in_one_loss(layers):
    """While one layer's backward waits for its device, no other layer's begins inside of it."""

    def loss(model: nn.Module) -> torch.Tensor:
        return torch.stack([model(**batch_for(model, seed=seed)).loss for seed in range(2)]).sum()

    torch.manual_seed(1)
    model = bert(0.1, num_hidden_layers=layers)
    assert same(gradients(model, 3, loss), gradients(model, 1, loss))


@pytest.mark.parametrize("options", [{"stash": "host", "boundary": "host"}, *more({})], ids=str)
def test_two_stacks_beside_each_other(options):
    """As in CLIP, whose loss is across rows."""

    def loss(model: nn.Module) -> torch.Tensor:
        ids, pixels = torch.randint(3, 60, (8, 6)), torch.randn(8, 3, 8, 8)
        return model(input_ids=ids, pixel_values=pixels, return_loss=True).loss

    model = clip()
    assert same(gradients(model, 2, loss, **options), gradients(model, 1, loss, **options))


def test_two_models_in_one_loss():
    found = []
    for count in (1, 3):
        torch.manual_seed(1)
        models = [bert(0.1, num_hidden_layers=layers) for layers in (2, 3)]
        for model in models:
            attach_l2l(model, L2LConfig(device=devices(count), ubatch_size=4))
        torch.manual_seed(2)
        sum(model(**batch_for(model, seed=0)).loss for model in models).backward()
        for model in models:
            detach_l2l(model)
        found.append([p.grad.cpu() for model in models for p in model.parameters()])
    assert same(*found)


def test_a_part_in_inference_mode_and_then_a_training():
    """Memory that is reserved for what a device will be sent is not of inference mode."""
    model = pipelined.FAMILIES["t5"]()
    attach_l2l(model, L2LConfig(device=devices(3), ubatch_size=4))
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
    attach_l2l(model, L2LConfig(device=devices(count), ubatch_size=2, layer_classes=("Part",), **options))
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
