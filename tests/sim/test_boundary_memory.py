"""The boundary on the host, on a device with memory of its own: bytes, and what travels when."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from hf_l2l.testing import enable_simulated_accelerator, sim_copies
from memory_switches import poisoned_releases
from models import Toy, attached, train_once
from placements import traffic, travelling_bytes
from runs import attach
from tiers import more, nightly
from training import settled_memory

WIDTH, TOKENS, UBATCH = 64, 16, 2
A = TOKENS * WIDTH * 4
"""Bytes of one layer output per row."""


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """What is read after it was given back is NaN, in every test here; afterwards there is no limit."""
    with poisoned_releases():
        yield
    enable_simulated_accelerator()


class Stack(nn.Module):
    """The layers of a BERT alone: what grows with the device batch is theirs."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        config = hf.BertConfig(
            hidden_size=WIDTH, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=2 * WIDTH
        )
        config._attn_implementation = "sdpa"
        self.encoder = hf.models.bert.modeling_bert.BertEncoder(config)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.encoder(rows, attention_mask=None).last_hidden_state


def peak(rows: int, *, layers: int = 3, **options: Any) -> int:
    """Bytes of the device at the peak of a forward and backward; the gradient of the output is one number."""
    torch.manual_seed(0)
    model = attached(Stack(layers).eval(), ubatch_size=UBATCH, stash="host", **options)
    inputs = torch.randn(rows, TOKENS, WIDTH)
    for _ in range(2):
        settled_memory()
        torch.accelerator.reset_peak_memory_stats()
        model(inputs).backward(torch.ones((), device="sim").expand(rows, TOKENS, WIDTH))
    return int(torch.accelerator.max_memory_allocated())


@nightly
def test_layers_need_memory_for_one_micro_batch():
    """What is left of the device batch are the inputs, and the output of the last layer; depth costs nothing."""
    few = {boundary: peak(4, boundary=boundary) for boundary in ("device", "host")}
    on_device, on_host = ((peak(8, boundary=b) - few[b]) / 4 / A for b in ("device", "host"))
    assert on_host <= 2.02 < on_device, f"{on_host:.2f} layer outputs per row, on the device {on_device:.2f}"
    assert peak(4, layers=4, boundary="host") == few["host"]


@nightly
def test_each_row_travels_once_in_each_direction():
    """Per layer: its output down, and up for the next layer; in the backward its input up once more, and gradients.
    Layer 0 gets a device tensor, which is stashed, and whose gradient stays there; layer 3 returns one."""
    model = attached(Stack(4).eval(), ubatch_size=UBATCH, stash="host", boundary="host", device="sim")
    inputs, weights = torch.randn(8, TOKENS, WIDTH), travelling_bytes(model.encoder.layer[0])

    def step() -> None:
        model.zero_grad()
        model(inputs).sum().backward()

    step()
    found = traffic(step)
    assert found["upload"] == (3 + 4 + 3) * 8 * A + 6 * weights
    assert (3 + 1 + 3) * 8 * A + 4 * weights <= found["download"] < (3 + 1 + 3) * 8 * A + 4 * weights + A


@nightly
@pytest.mark.parametrize("size", ["64MiB", None, *more("64GiB")])
def test_auto_is_the_host_where_the_device_is_small(size):
    """And the device where it does not say how much memory it has. The output of a layer has 3 MiB."""
    rows = 2**20 // A * 3
    enable_simulated_accelerator(size)
    model = attached(Stack(2).eval(), ubatch_size=rows // 4, stash="host", device="sim")
    kinds = []
    model.encoder.layer[0].register_forward_hook(lambda module, args, output: kinds.append(type(output)))
    model(torch.randn(rows, TOKENS, WIDTH))
    assert [kind is torch.Tensor for kind in kinds] == [size != "64MiB"]


@pytest.mark.parametrize("where", ["download", "upload"])
def test_a_transfer_that_fails_leaves_the_model_usable(where, monkeypatch):
    model, _, _, batch = attach(Toy(dropout=0.0), ubatch_size=2, stash="host", boundary="host")
    train_once(model, batch)
    expected = model.blocks[0].down.weight.grad.clone()
    copy_, seen = sim_copies.copy, []

    def failing(source: torch.Tensor, target: torch.Tensor, *rest: Any) -> None:
        down = target.device.type == "cpu"
        if source.dim() == 3 and source.shape[0] == 2 and down == (where == "download"):
            seen.append(1)
            if len(seen) == 3:
                raise RuntimeError("the link is gone")
        copy_(source, target, *rest)

    model.zero_grad()
    with monkeypatch.context() as patch:
        patch.setattr(sim_copies, "copy", failing)
        with pytest.raises(RuntimeError, match="the link is gone"):
            train_once(model, batch)
    model.zero_grad()
    train_once(model, batch)
    assert torch.equal(model.blocks[0].down.weight.grad, expected)
