"""What passes between layers, on the host: bits and gradients, and transfers that fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from devices import DEVICE
from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.eps import masters
from hf_l2l.logits import chunks
from memory_switches import forced_copies, poisoned_releases
from models import attached, gradients, llama, relative_error
from runs import assert_close_tensors, train
from tiers import combinations, cpu_suffices, more

WIDTH, TOKENS = 16, 8
ON_HOST: dict[str, Any] = {"stash": "host", "boundary": "host", "ubatch_size": 3}


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """What is read after it was given back is NaN, in every test here; where memory is shared, copies are made."""
    with poisoned_releases(), forced_copies():
        yield


class Stack(nn.Module):
    """The layers of a BERT alone: no sum of theirs has another order."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        config = hf.BertConfig(
            hidden_size=WIDTH, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=2 * WIDTH
        )
        config._attn_implementation = "sdpa"
        self.encoder = hf.models.bert.modeling_bert.BertEncoder(config)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.encoder(rows, attention_mask=None).last_hidden_state


@pytest.mark.parametrize("options", [{"cmp": "bf16"}, {"gradient_slots": 1, "prefetch": False}], ids=str)
def test_gradients_have_the_bits_of_a_boundary_on_the_device(options):
    found, rows = [], torch.randn(8, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    for boundary in ("device", "host"):
        torch.manual_seed(0)
        model = attached(Stack(), device=DEVICE, **{**ON_HOST, "boundary": boundary, **options}).eval()
        for _ in range(2):  # the second adds to the first
            model(rows).square().sum().backward()
        found.append(gradients(model))
    for name, gradient in found[0].items():
        assert torch.equal(found[1][name], gradient), name


@cpu_suffices
@pytest.mark.parametrize(
    ("mode", "options"),
    [("deferred", {"cmp": "bf16", "resident": "shell"}), ("eager", {}), *more(("serial", {"grad_dtype": "16bit"}))],
)
def test_a_final_norm_and_a_tied_head_by_micro_batches_are_trained(mode, options, monkeypatch):
    """As by a loss of whole logits."""
    monkeypatch.setattr(chunks, "FEWEST_ROWS", 8)
    found = []
    for boundary in ("device", "host"):
        torch.manual_seed(0)
        same = {"eps_update": mode, "steps": 2, "accumulation": 2, **ON_HOST, **options}
        chunked = {"chunked_loss": "off"} if boundary == "device" else {}
        found.append(train(llama(tie_word_embeddings=True), **{**same, **chunked, "boundary": boundary}).weights)
    # AdamW makes much of rounding where a gradient is nearly 0.
    assert_close_tensors(found[1], found[0], 2e-2 if {"cmp", "grad_dtype"} & {*options} else 1e-4)


class Projected(nn.Module):
    """Uses a weight that is in no module that is called, beside what its layers return."""

    def __init__(self, use: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.stack, self.box, self.use = Stack(2), nn.Linear(WIDTH, WIDTH, bias=False), use
        self.scale = nn.Linear(1, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.scale(self.use(self.stack(rows), self.box.weight).square().mean()[None])[0]


USES: dict[str, Callable[..., torch.Tensor]] = {
    "matrix": lambda hidden, weight: hidden @ weight,
    "linear": lambda hidden, weight: nn.functional.linear(hidden, weight),
    "scale": lambda hidden, weight: hidden * weight[0],
    "as many tokens as rows": lambda hidden, weight: hidden + hidden.select(1, 0),
}


@pytest.mark.parametrize(("name", "trains"), combinations(USES, [True, False], together=1))
def test_a_large_weight_beside_rows_on_the_host_is_uploaded_first(name, trains, monkeypatch):
    monkeypatch.setattr(masters, "LARGE", WIDTH)
    found = []
    for boundary in ("device", "host"):
        torch.manual_seed(0)
        model = Projected(USES[name]).eval()
        model.box.requires_grad_(trains)
        attach_l2l(model, L2LConfig(device=DEVICE, **{**ON_HOST, "boundary": boundary}))
        inputs = torch.randn(TOKENS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
        for _ in range(2):
            model.zero_grad()
            model(inputs).backward()
        found.append(gradients(model))
    assert relative_error(*reversed(found)) < 1e-5
