"""Generation with a key-value cache, before and after training: the tokens are those of torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from models import batch_for, gpt2, llama, t5, train_once
from tiers import cpu_suffices


def generated(model: nn.Module, device: str, **options: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 60, (1, 5), generator=generator)
    ids = torch.cat([ids, ids], dim=1)  # so that a lookup in the prompt finds something
    found: torch.Tensor = model.generate(ids.to(device), do_sample=False, max_new_tokens=6, pad_token_id=0, **options)
    return found.cpu()


WAYS: list[Any] = [(gpt2, {}), (llama, {"prompt_lookup_num_tokens": 2}), (t5, {"num_beams": 2})]


@cpu_suffices
@pytest.mark.parametrize(("make", "options"), WAYS, ids=str)
def test_ways_of_decoding(device, make, options):
    torch.manual_seed(0)
    model = make().eval()
    expected = generated(model, "cpu", **options)
    attach_l2l(model, L2LConfig(ubatch_size=1))
    assert torch.equal(generated(model, device, **options), expected)
    train_once(model, batch_for(model))  # without an update
    assert torch.equal(generated(model.eval(), device, **options), expected)


@cpu_suffices
@pytest.mark.parametrize("assistant_is", ["attached", "on the device"])
def test_assisted_decoding(device, assistant_is):
    torch.manual_seed(0)
    model, assistant = llama().eval(), llama().eval()
    expected = generated(model, "cpu", assistant_model=copy.deepcopy(assistant))
    attach_l2l(model, L2LConfig(ubatch_size=1))
    if assistant_is == "attached":
        attach_l2l(assistant)
    else:
        assistant.to(device)
    assert torch.equal(generated(model, device, assistant_model=assistant), expected)
    detach_l2l(model)
    detach_l2l(assistant)
