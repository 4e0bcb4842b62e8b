"""Key-value caches in a forward that trains: none is made, and one with content is read, as in the plain model."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf
from torch import nn

from devices import DEVICE
from models import EXACT, TOLERANCE, attached, batch_for, gpt2, gradients, llama, relative_error, t5
from tiers import cpu_suffices

PREFIX = 3


class Prefixed(nn.Module):
    """Trains a prefix of keys and values before every row, as PEFT's prefix tuning does."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        config = model.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = config.hidden_size // config.num_attention_heads
        self.shape = (config.num_hidden_layers, 2, 1, heads, PREFIX, width)
        self.prefix = nn.Parameter(torch.randn(self.shape, dtype=next(model.parameters()).dtype))

    def forward(self, input_ids, labels):
        cache = hf.DynamicCache()
        for number, (keys, values) in enumerate(self.prefix.expand(-1, -1, len(input_ids), -1, -1, -1)):
            cache.update(keys, values, number)
        return self.model(input_ids=input_ids, labels=labels, past_key_values=cache)


@cpu_suffices
@pytest.mark.parametrize(("make", "ubatch_size"), [(llama, None), (gpt2, 3)])
def test_a_prefix_trains(make, ubatch_size):
    model = Prefixed(make().double())
    batch = batch_for(model.model, masked=False)
    plain = copy.deepcopy(model)
    expected = plain(**batch).loss
    expected.backward()
    attached(model, device=DEVICE, ubatch_size=ubatch_size)
    found = model(**batch).loss
    found.backward()
    assert found.item() == pytest.approx(expected.item(), rel=EXACT)
    assert model.prefix.grad.abs().max() > 0
    assert relative_error(gradients(model), gradients(plain)) < TOLERANCE[torch.float64]


def test_a_layer_is_given_its_own_entry_alone():
    model = attached(Prefixed(llama()), device=DEVICE)
    given = []
    for layer in model.model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, kwargs: given.append(kwargs["past_key_values"].layers), with_kwargs=True
        )
    model(**batch_for(model.model, masked=False))
    assert [[entry.keys.is_meta for entry in layers] for layers in given] == [[False, True], [True, False]]


def test_a_cache_of_an_earlier_call_is_read_and_not_changed():
    model = gpt2().double()
    ids = batch_for(model, masked=False)["input_ids"]
    plain = copy.deepcopy(model)

    def loss(each):
        with torch.no_grad():
            cache = each(input_ids=ids, use_cache=True).past_key_values
        found = each(input_ids=ids, past_key_values=cache, labels=ids).loss
        found.backward()
        return found, cache

    expected, _ = loss(plain)
    with pytest.warns(UserWarning, match="adds nothing to a key-value cache in a forward that trains .*GPT2LMHead"):
        found, cache = loss(attached(model, device=DEVICE, ubatch_size=2))
    assert found.item() == pytest.approx(expected.item(), rel=EXACT)
    assert relative_error(gradients(model), gradients(plain)) < TOLERANCE[torch.float64]
    assert cache.get_seq_length() == ids.shape[1]


@pytest.mark.parametrize("make", [llama, t5])
def test_a_model_that_makes_a_cache_by_default_makes_none_and_tells_who_asks_for_one(make):
    model = make()
    model.config.use_cache = True
    attached(model, device=DEVICE)
    batch = batch_for(model)
    assert model(**batch).past_key_values is None
    with torch.no_grad():
        assert model(**batch).past_key_values is not None
    with pytest.warns(UserWarning, match=f"makes no key-value cache .*{type(model).__name__}"):
        assert model(**batch, use_cache=True).past_key_values is None


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = []
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, hidden, use_cache=None):
        self.seen.append(use_cache)
        return self.scale * hidden


class Wrapped(nn.Module):
    """Passes `use_cache` on by position, or not at all."""

    def __init__(self):
        super().__init__()
        self.blocks, self.inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), Inner()

    def forward(self, hidden):
        hidden = self.blocks(hidden)
        return self.inner(hidden, True).sum() + self.inner(hidden).sum()


@cpu_suffices
def test_the_option_is_found_by_position_too():
    model = attached(Wrapped(), device=DEVICE, layer_classes=("Linear",))
    with pytest.warns(UserWarning, match="makes no key-value cache"):
        model(torch.ones(2, 4)).backward()
    assert model.inner.seen == [False, False]
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert model.inner.seen[2:] == [True, None]
