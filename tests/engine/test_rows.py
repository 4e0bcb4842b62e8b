"""What passes between layers in host memory: gradients are those of the plain model, whoever reads the rows."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from devices import DEVICE
from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.rows.host_rows import HostRows
from memory_switches import forced_copies
from models import EXACT, TOLERANCE, batch_for, bert, gradients, llama, relative_error
from tiers import cpu_suffices

ON_HOST = {"stash": "host", "boundary": "host", "device": DEVICE}


@pytest.fixture(autouse=True)
def _apart() -> Iterator[None]:
    """The device has memory of its own."""
    with forced_copies() if DEVICE == "cpu" else nullcontext():
        yield


def pair(model: nn.Module, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A model in float64 under L2L, and the same in plain torch."""
    plain = copy.deepcopy(model.double())
    attach_l2l(model, L2LConfig(**{"ubatch_size": 3, **ON_HOST, **options}))
    return model, plain


def is_as_plain(model: nn.Module, plain: nn.Module) -> bool:
    return relative_error(gradients(model), gradients(plain)) < TOLERANCE[torch.float64]


def hidden_states(model: nn.Module, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return list(model(**batch, output_hidden_states=True).hidden_states)


@cpu_suffices
def test_hidden_states_are_read_by_the_program():
    torch.manual_seed(0)
    model, plain = pair(bert(num_hidden_layers=4))
    batch = batch_for(model)

    def loss(each: nn.Module) -> torch.Tensor:
        return sum(state[:, 0].square().mean() * (i + 1) for i, state in enumerate(hidden_states(each, batch)))

    expected = loss(plain)
    expected.backward()
    for turn in range(2):
        model.zero_grad()
        states = hidden_states(model, batch)
        # From the second turn on, the last one is on the device: it is what programs read.
        assert [isinstance(state, HostRows) for state in states] == [True, True, True, True, turn == 0]
        assert all(state.is_waiting for state in states if isinstance(state, HostRows))
        found = loss(model)
        found.backward()
        assert found.item() == pytest.approx(expected.item(), rel=EXACT)
        assert is_as_plain(model, plain)


class _Between(nn.Module):
    """Computes with the outputs of its layers before the next one gets them."""

    def __init__(self, model: nn.Module, in_place: bool) -> None:
        super().__init__()
        self.model, self.in_place = model, in_place

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        inner = self.model.model
        hidden = inner.embed_tokens(input_ids)
        places = inner.rotary_emb(hidden, torch.arange(input_ids.shape[1], device=hidden.device)[None])
        for layer in inner.layers:
            hidden = layer(hidden, position_embeddings=places)
            hidden = hidden.mul_(1.5) if self.in_place else hidden * 1.5
        return nn.functional.cross_entropy(self.model.lm_head(hidden).flatten(0, 1), labels.flatten())


@cpu_suffices
@pytest.mark.parametrize("in_place", [False, True])
def test_a_model_that_computes_between_layers(in_place):
    torch.manual_seed(0)
    model, plain = pair(_Between(llama(), in_place), layer_classes=("LlamaDecoderLayer",))
    for each in (model, plain):
        each.model.model.norm.requires_grad_(False)  # it is not used
    ids = batch_for(model.model, masked=False)["input_ids"]
    plain(ids, ids).backward()
    for _ in range(2):
        model.zero_grad()
        model(ids, ids).backward()
        assert is_as_plain(model, plain)


def test_what_is_not_cut_stays_on_the_device():
    model = bert(num_hidden_layers=3)
    attach_l2l(model, L2LConfig(**ON_HOST))
    assert not any(isinstance(state, HostRows) for state in hidden_states(model, batch_for(model)))
    with torch.no_grad():
        assert not any(isinstance(state, HostRows) for state in hidden_states(model, batch_for(model)))
