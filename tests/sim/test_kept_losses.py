"""A program that keeps losses and outputs keeps no weights on the device, as in plain torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from models import batch_for, bert, llama, t5
from training import settled_memory

STEPS = 6
OPTIONS: list[dict[str, Any]] = [
    {"stash": "host"},
    {"ubatch_size": 3},
    {"stash": "host", "boundary": "host", "ubatch_size": 3},
    {"cmp": "bf16"},
    {"eps_update": "eager"},
    {"resident": "shell"},
    {"kept_graphs": 1, "kept_weights": 2},
]


def bytes_after_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, losses: list[Any], logits: list[Any]
) -> list[int]:
    """Bytes on the device after each step, of which the loss and the logits are kept."""
    found, total = [], 0
    for _ in range(STEPS):
        out = model(**batch)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = out.loss + total
        losses.append(out.loss)
        logits.append(out.logits)
        del out
        settled_memory()
        found.append(torch.accelerator.memory_allocated())
    losses.append(total)
    return found


def growth(found: list[int]) -> int:
    """Bytes per step; the first ones make the optimizer's state, and what else is made once."""
    return (found[-1] - found[1]) // (STEPS - 2)


@pytest.mark.parametrize("family", [llama, bert, t5], ids=lambda each: each.__name__)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_kept_losses_and_outputs_keep_no_weights(family, options):
    settled_memory()
    start, losses, logits = torch.accelerator.memory_allocated(), list[Any](), list[Any]()
    plain = family().train().to("sim")
    batch = batch_for(plain)
    on_device = {name: value.to("sim") for name, value in batch.items()}
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = growth(bytes_after_steps(plain, sgd, on_device, losses, logits))
    model, losses, logits = family().train(), [], []
    eps = attach_l2l(model, L2LConfig(device="sim", **options))
    optimizer = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    found = bytes_after_steps(model, optimizer, batch, losses, logits)
    # Numbers without which no node is there: an element for each weight outside the layers.
    assert growth(found) <= expected + 4 * 16
    detach_l2l(model)
    logits.clear()  # the last of them may be not yet computed, and need a weight for that
    del plain, on_device, sgd, model, optimizer, eps
    if "resident" not in options:  # whose graph refers to the parameters that were on the device, as in plain torch
        assert settled_memory() - start <= STEPS * (4 + 4 * 16) + 4


def test_a_graph_that_was_freed_is_told_as_torch_tells_it():
    """Also that of a layer that keeps its graph, and of an embedding by rows, for which torch has nothing to free."""
    for options in ({}, {"kept_graphs": 2}, {"stash": "host", "boundary": "host", "ubatch_size": 3}):
        model = llama().train()
        attach_l2l(model, L2LConfig(device="sim", **options))
        loss = model(**batch_for(model)).loss
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="through the graph a second time"):
            loss.backward()


class TwoHeads(nn.Module):
    """A second head, of two layers, on features that it does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(8, 3)
        self.probe = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean(), self.probe(x.detach()).square().mean()


@pytest.mark.parametrize("options", [{}, {"ubatch_size": 2}], ids=str)
def test_another_part_of_the_graph_may_run_backward_later(options):
    """What the first backward frees is what it has used up."""
    torch.manual_seed(0)
    plain = TwoHeads()
    model = copy.deepcopy(plain)
    attach_l2l(model, L2LConfig(device="sim", **options))
    ids = torch.arange(24).view(4, 6) % 20
    for each in (plain, model):
        main, of_probe = each(ids)
        main.backward()
        of_probe.backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)
