"""A model run without values: what its layers and the parts between them keep, allocate and compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn import functional

from hf_l2l import estimate
from hf_l2l.compat import FakeTensorMode
from hf_l2l.model.precision import Precision
from hf_l2l.shapes.fake_memory import counted
from hf_l2l.shapes.inputs import example_inputs
from hf_l2l.shapes.pieces import Traced
from hf_l2l.shapes.traced import Tracer
from models import SMALL, bert, llama, t5

ROWS, TOKENS = 4, 6
A = ROWS * TOKENS * SMALL["hidden_size"] * 4
"""Bytes of one layer output."""


def deep_llama(layers: int) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**SMALL, "num_hidden_layers": layers}, num_key_value_heads=1))


def fused(*_: Any) -> bool:
    return True


def traced(model: nn.Module, dtype: torch.dtype | None = None, rows: int = ROWS, **options: Any) -> Traced:
    return Tracer(model.train(), Precision(model, dtype), fuses=fused).trace(
        example_inputs(model, rows, TOKENS), **options
    )


def test_memory_lives_as_long_as_its_tensors():
    with counted(FakeTensorMode(), fused) as memory:
        a = torch.empty(10, 10)
        b = a + 1
        assert (memory.live, memory.peak) == (800, 800)
        view = b.t()
        del a, b
        assert memory.live == 400, "a view keeps the memory"
        del view
        assert memory.live == 0 and memory.begin() == 0
        with memory.not_counting():
            kept = torch.empty(10)
        assert memory.live == 0 and kept.shape == (10,)


def test_operations_are_counted():
    with counted(FakeTensorMode(), fused) as memory:
        a = torch.empty(2, 3, requires_grad=True)
        found = a @ torch.empty(3, 5)
        assert memory.flops == 2 * 2 * 3 * 5
        query = torch.empty(1, 2, 4, 8)
        memory.begin()
        functional.scaled_dot_product_attention(query, query, query)
        assert memory.flops == 2 * (2 * 2 * 4 * 4 * 8) and found.shape == (2, 5)


def test_questions_for_values_are_answered():
    with counted(FakeTensorMode(), fused) as memory:
        assert bool(torch.empty(3).bool().all()) and torch.empty(()).item() == 1.0
        mask = functional.one_hot(torch.empty(6, dtype=torch.long), 3)
        assert len(mask.nonzero()) == 6, "one in each row"
        assert len(torch.empty(4).bool().nonzero()) == 4 and memory.live > 0


@pytest.mark.parametrize(("fuses", "scores"), [(True, 0), (False, 1)])
def test_attention_in_one_kernel_keeps_no_scores(fuses, scores):
    with counted(FakeTensorMode(), lambda *_: fuses) as memory:
        query = torch.empty(1, 1, 64, 8, requires_grad=True)
        memory.begin()
        out = functional.scaled_dot_product_attention(query, query, query)
        assert (memory.peak >= 64 * 64 * 4) == bool(scores) and out.requires_grad


def test_dropout_keeps_a_byte_per_element():
    with counted(FakeTensorMode(), fused) as memory:
        x = torch.empty(100, requires_grad=True)
        start = memory.begin()
        y = functional.dropout(x, 0.1)
        assert memory.live - start == 400 + 100
        z = functional.dropout(x, 0.0)
        assert memory.live - start == 500 and y.shape == z.shape


def test_layers_of_one_kind_are_measured_once():
    found = traced(deep_llama(5))
    assert len(found.calls) == 5 and len({id(call.layer) for call in found.calls}) == 1
    [layer] = {call.layer for call in found.calls}
    assert layer.backward_peak > layer.graph > layer.forward_peak > A
    assert layer.backward_flops == pytest.approx(3 * layer.forward_flops, rel=0.1)
    assert [call.outputs[0].num_bytes for call in found.calls] == [A] * 5


def test_bytes_grow_with_rows_and_shrink_with_the_dtype():
    one, two = (traced(llama(), rows=rows).calls[0].layer for rows in (ROWS, 2 * ROWS))
    assert 1.9 < two.graph / one.graph < 2.1
    short = traced(llama(), torch.bfloat16).calls[0].layer
    assert short.graph < 0.7 * one.graph


def test_arguments_that_layers_share_are_one_memory():
    found = traced(llama())
    first, second = (call.arguments for call in found.calls)
    assert first[0].memory != second[0].memory and first[0].needs_gradient
    assert {a.memory for a in first[1:]} == {a.memory for a in second[1:]}


def test_dense_masks_are_known():
    """Eager attention has a mask with an entry for each query and key."""
    model = deep_llama(2)
    model.set_attn_implementation("eager")
    for call in traced(model).calls:
        assert [a.shape[-2:] for a in call.arguments if a.is_mask] == [(TOKENS, TOKENS)]


def test_what_a_layer_passes_on_unchanged_is_no_new_memory():
    """T5's layers return the position bias that they were given."""
    found = traced(t5())
    encoder = found.calls[1]
    assert [out.is_new for out in encoder.outputs] == [True, False]
    assert encoder.outputs[1].memory == encoder.arguments[1].memory


def test_a_tied_head_makes_its_gradient_wait():
    config = hf.LlamaConfig(**SMALL, num_key_value_heads=1, tie_word_embeddings=True)
    table = SMALL["vocab_size"] * SMALL["hidden_size"] * 4
    assert traced(hf.LlamaForCausalLM(config)).late == table
    assert traced(llama(tie_word_embeddings=False)).late == 0


def test_below_what_trains_there_is_no_graph():
    model = deep_llama(3)
    for name, p in model.named_parameters():
        p.requires_grad_("layers.2" in name)
    assert [call.in_graph for call in traced(model).calls] == [False, False, True]


def test_rows_of_the_head_and_of_tables_are_apart():
    whole, apart = traced(llama()), traced(llama(), by_rows=True)
    assert whole.head == 0 and apart.head == A
    assert len(apart.pieces) == len(whole.pieces) + 1
    table = SMALL["vocab_size"] * SMALL["hidden_size"] * 4
    assert apart.pieces[0].backward_peak < table <= whole.pieces[0].backward_peak


def test_gradients_of_the_first_piece_are_told_in_their_order():
    tied = hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, num_key_value_heads=1, tie_word_embeddings=True))
    table = SMALL["vocab_size"] * SMALL["hidden_size"]
    assert traced(tied).first == [(table, 4 * table, True)]
    sizes = [each.numel for each in traced(bert()).first]
    assert sizes[-1] == table and max(sizes[:-1]) > table, "words are read first, and positions later"


@pytest.mark.parametrize("rows", [1, 3])
def test_inputs_of_models(rows):
    found = example_inputs(bert(), rows, 5)
    assert {name: tuple(t.shape) for name, t in found.items()} == {"input_ids": (rows, 5), "labels": (rows,)}
    assert {t.device.type for t in found.values()} == {"meta"}
    assert tuple(example_inputs(llama(), rows, 5)["labels"].shape) == (rows, 5)


@pytest.mark.parametrize("sizes", [{"rows": 0}, {"rows": 1, "tokens": 0}], ids=str)
def test_sizes_that_are_none_are_refused(sizes):
    with pytest.raises(ValueError, match="of an estimate must be at least 1 \\(got 0\\)"):
        estimate(llama(), **sizes)


def test_a_model_without_layers_is_refused():
    with pytest.raises(ValueError, match="none was found in a Linear"):
        estimate(nn.Linear(3, 2), inputs={"input": torch.empty(2, 3)})


def test_models_without_a_loss_or_with_other_inputs_are_refused():
    with pytest.raises(ValueError, match="takes no labels"):
        example_inputs(bert().bert, 1)
    model = llama()
    model.main_input_name = "something"
    with pytest.raises(ValueError, match="takes something"):
        example_inputs(model, 1)
