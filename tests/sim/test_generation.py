"""Generation with a key-value cache: each layer is uploaded once per forward, and the tokens are those of torch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from hf_l2l.eps.weight_copies import Copies
from models import attached, gpt2, llama, t5

NEW_TOKENS = 6


@pytest.fixture
def uploads(monkeypatch):
    """The names of the units that are uploaded."""
    found: list[str] = []
    original = Copies.of_unit

    def counted(self, unit, *args):
        found.append(unit.name)
        return original(self, unit, *args)

    monkeypatch.setattr(Copies, "of_unit", counted)
    return found


def generated(model: nn.Module, **options) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 60, (1, 5), generator=generator)
    ids = torch.cat([ids, ids], dim=1)  # so that a lookup in the prompt finds something
    tokens = model.generate(ids.to("sim") if "sim" in options.pop("where", "") else ids, do_sample=False, **options)
    return tokens.cpu()


@pytest.mark.parametrize("make", [llama, gpt2], ids=lambda make: make.__name__)
def test_each_layer_is_uploaded_once_per_forward(make, uploads):
    torch.manual_seed(0)
    model = make().eval()
    calls: list[int] = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    expected = generated(model, max_new_tokens=NEW_TOKENS)
    calls.clear()
    attached(model, ubatch_size=1)
    assert torch.equal(generated(model, max_new_tokens=NEW_TOKENS, where="sim"), expected)
    layers = [name for name in uploads if ".layers." in name or ".h." in name]
    count = len(set(layers))
    assert len(calls) == NEW_TOKENS
    # The last two layers of a forward are still in their slots when the next one begins.
    assert (count - 2) * len(calls) <= len(layers) <= count * len(calls)


OPTIONS = {"prompt lookup": {"prompt_lookup_num_tokens": 2}, "beams": {"num_beams": 2}}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("make", [llama, t5], ids=lambda make: make.__name__)
def test_other_ways_of_decoding(make, options):
    torch.manual_seed(0)
    model = make().eval()
    expected = generated(model, max_new_tokens=NEW_TOKENS, **options)
    attached(model)
    assert torch.equal(generated(model, max_new_tokens=NEW_TOKENS, where="sim", **options), expected)


@pytest.mark.parametrize("assistant_is", ["attached", "on the device"])
def test_assisted_decoding(assistant_is):
    torch.manual_seed(0)
    model, assistant = llama().eval(), llama().eval()
    expected = generated(model, max_new_tokens=NEW_TOKENS, assistant_model=copy.deepcopy(assistant))
    attach_l2l(model, L2LConfig(ubatch_size=1))
    if assistant_is == "attached":
        attach_l2l(assistant)
    else:
        assistant.to("sim")
    found = generated(model, max_new_tokens=NEW_TOKENS, assistant_model=assistant, where="sim")
    assert torch.equal(found, expected)
    detach_l2l(model)
    detach_l2l(assistant)
