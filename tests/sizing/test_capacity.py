"""The largest model that a host holds, against the memory of models of that size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from hf_l2l import L2LConfig, estimate
from hf_l2l.sizing.capacity import LORA, RANK, SETTINGS
from models import SMALL
from tiers import combined

SIZES: dict[str, Any] = {**SMALL, "num_key_value_heads": 1}
BATCH: dict[str, Any] = {"rows": 2, "tokens": 8}
HOST = L2LConfig(stash="host", boundary="host", ubatch_size=1)


@pytest.fixture(autouse=True)
def _nothing_else_in_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Python and libraries take is more than all of these models."""
    monkeypatch.setattr("hf_l2l.plan.estimate.process_bytes", lambda: (0, 0))


def of_layers(layers: int, width: int = SMALL["hidden_size"]) -> nn.Module:
    with torch.device("meta"):
        return hf.LlamaForCausalLM(hf.LlamaConfig(**{**SIZES, "num_hidden_layers": layers, "hidden_size": width}))


def host_peak(layers: int, options: dict[str, Any]) -> int:
    config = L2LConfig(stash="host", boundary="host", ubatch_size=1, **options)
    report = estimate(of_layers(layers), config, **BATCH).report
    assert report is not None
    peak: int = report["host"]["total"]["peak"]
    return peak


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", combined(SETTINGS, one_in=3))
def test_the_largest_fits_and_one_layer_more_does_not(name):
    room = host_peak(11, SETTINGS[name])
    found = estimate(of_layers(3), HOST, **BATCH, host_memory=room).largest[name]
    assert found.layers == 11
    assert found.parameters == sum(p.numel() for p in of_layers(11).parameters())
    # Norms of gradients, 8 bytes per tensor, are taken to be those of the given model.
    assert estimate(of_layers(3), HOST, **BATCH, host_memory=room - 2000).largest[name].layers == 10


def test_settings_need_less_and_less():
    found = estimate(of_layers(3, width=512), HOST, **BATCH, host_memory=10**9).largest
    assert list(found) == [*SETTINGS, LORA]
    layers = [found[name].layers for name in SETTINGS if name != "fp32"]
    assert layers == sorted(layers) and layers[0] < found["fp32"].layers < layers[-1] < found[LORA].layers


def test_adapters_are_counted_by_rank():
    """Of a matrix with m rows and n columns they have 16 (m + n) parameters."""
    found = estimate(of_layers(3), HOST, **BATCH, host_memory=10**8).largest[LORA]
    width, inner = SMALL["hidden_size"], SMALL["intermediate_size"]
    key = width // SMALL["num_attention_heads"]
    adapters = RANK * (2 * (width + width) + 2 * (width + key) + 3 * (width + inner))
    per_layer = 2 * sum(p.numel() for p in of_layers(1).model.layers.parameters()) + 18 * adapters + 2 * 8 * width * 2
    assert found.layers == pytest.approx(10**8 / per_layer, rel=0.01)


def test_a_host_that_holds_no_layer():
    found = estimate(of_layers(3), HOST, **BATCH, host_memory=1000).largest
    assert {(each.layers, each.parameters) for each in found.values()} == {(0, 0)}


def test_it_depends_on_the_optimizer_and_the_stash():
    model = of_layers(3)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    adam = estimate(model, HOST, **BATCH, host_memory=10**7).largest["fp32"].layers
    assert estimate(model, HOST, sgd, **BATCH, host_memory=10**7).largest["fp32"].layers > 1.8 * adam
    longer = estimate(model, HOST, rows=2, tokens=400, host_memory=10**7).largest["fp32"].layers
    on_device = estimate(model, L2LConfig(), rows=2, tokens=400, host_memory=10**7).largest["fp32"].layers
    assert longer < adam and on_device >= adam


def test_without_a_batch_it_is_refused():
    with pytest.raises(ValueError, match="the largest model depends on a batch"):
        estimate(of_layers(3), HOST, host_memory=10**7)
