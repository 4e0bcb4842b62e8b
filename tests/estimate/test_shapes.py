"""A model run without values: what its parts keep, allocate and compute, and what autocast makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn import functional

from hf_l2l import L2LConfig
from hf_l2l.compat import FakeTensorMode
from hf_l2l.model.precision import Precision
from hf_l2l.plan.run_shapes import RunShapes
from hf_l2l.shapes.autocast import autocast_region
from hf_l2l.shapes.fake_memory import FakeMemory, counted
from hf_l2l.shapes.inputs import example_inputs
from hf_l2l.shapes.traced import Tracer
from models import SMALL, albert, bert, llama, t5
from tiers import nightly

BF16, FP32 = torch.bfloat16, torch.float32
ROWS, TOKENS = 4, 6
A = ROWS * TOKENS * SMALL["hidden_size"] * 4
"""Bytes of one layer output."""


def deep_llama(layers: int) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**SMALL, "num_hidden_layers": layers}, num_key_value_heads=1))


def fused(*_: Any) -> bool:
    return True


def traced(model: nn.Module, dtype: torch.dtype | None = None, rows: int = ROWS, **options: Any) -> Any:
    return Tracer(model.train(), Precision(model, dtype), fuses=fused).trace(
        example_inputs(model, rows, TOKENS), **options
    )


@pytest.fixture
def memory() -> Iterator[FakeMemory]:
    with counted(FakeTensorMode(), fused) as memory:
        yield memory


def test_memory_lives_as_long_as_its_tensors(memory):
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


def test_questions_for_values_are_answered(memory):
    assert bool(torch.empty(3).bool().all()) and torch.empty(()).item() == 1.0
    mask = functional.one_hot(torch.empty(6, dtype=torch.long), 3)
    assert len(mask.nonzero()) == 6, "one in each row"
    assert len(torch.empty(4).bool().nonzero()) == 4 and memory.live > 0


def test_attention_in_one_kernel_keeps_no_scores():
    for fuses in (True, False):
        with counted(FakeTensorMode(), lambda *_, fuses=fuses: fuses) as memory:
            query = torch.empty(1, 1, 64, 8, requires_grad=True)
            memory.begin()
            out = functional.scaled_dot_product_attention(query, query, query)
            assert (memory.peak < 64 * 64 * 4) == fuses and out.requires_grad


@nightly
def test_dense_masks_are_known():
    """Eager attention has a mask with an entry for each query and key."""
    model = deep_llama(2)
    model.set_attn_implementation("eager")
    for call in traced(model).calls:
        assert [a.shape[-2:] for a in call.arguments if a.is_mask] == [(TOKENS, TOKENS)]


@nightly
def test_what_a_layer_passes_on_unchanged_is_no_new_memory():
    """T5's layers return the position bias that they were given."""
    found = traced(t5())
    encoder = found.calls[1]
    assert [out.is_new for out in encoder.outputs] == [True, False]
    assert encoder.outputs[1].memory == encoder.arguments[1].memory


def test_below_what_trains_there_is_no_graph():
    model = deep_llama(3)
    for name, p in model.named_parameters():
        p.requires_grad_("layers.2" in name)
    assert [call.in_graph for call in traced(model).calls] == [False, False, True]


@nightly
def test_a_tied_head_makes_the_gradient_of_the_first_piece_wait():
    """Gradients of the first piece are told in their order: words are read first, and positions later."""
    tied = hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, num_key_value_heads=1, tie_word_embeddings=True))
    table = SMALL["vocab_size"] * SMALL["hidden_size"]
    found = traced(tied)
    assert found.late == 4 * table and found.first == [(table, 4 * table, True)]
    assert traced(llama(tie_word_embeddings=False)).late == 0
    sizes = [each.numel for each in traced(bert()).first]
    assert sizes[-1] == table and max(sizes[:-1]) > table


def test_inputs_of_models():
    found = example_inputs(bert(), 3, 5)
    assert {name: tuple(t.shape) for name, t in found.items()} == {"input_ids": (3, 5), "labels": (3,)}
    assert {t.device.type for t in found.values()} == {"meta"}
    assert tuple(example_inputs(llama(), 1, 5)["labels"].shape) == (1, 5)
    with pytest.raises(ValueError, match="takes no labels"):
        example_inputs(bert().bert, 1)
    model = llama()
    model.main_input_name = "something"
    with pytest.raises(ValueError, match="takes something"):
        example_inputs(model, 1)


# ---- autocast


def of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape or (2, 4, 8), dtype=dtype)


# What CUDA's autocast makes of each, as torch documents it: of bf16 first, and then of fp32.
CASES: dict[str, tuple[Callable[[torch.dtype], Any], torch.dtype, torch.dtype]] = {
    "linear": (lambda d: functional.linear(of(d), of(d, 3, 8)), BF16, BF16),
    "einsum": (lambda d: torch.einsum("abc,dc->abd", of(d), of(d, 3, 8)), BF16, BF16),
    "attention": (lambda d: functional.scaled_dot_product_attention(*[of(d, 1, 2, 4, 8)] * 3), BF16, BF16),
    "layer_norm": (lambda d: functional.layer_norm(of(d), (8,), of(FP32, 8)), FP32, FP32),
    "nn.RMSNorm": (lambda d: nn.RMSNorm(8)(of(d)), FP32, FP32),
    "group_norm": (lambda d: functional.group_norm(of(d), 2), FP32, FP32),
    "softmax": (lambda d: of(d).softmax(-1), FP32, FP32),
    "softmax as asked": (lambda d: torch.softmax(of(d), -1, dtype=BF16), BF16, BF16),
    "sum": (lambda d: of(d).sum(), FP32, FP32),
    "sum as asked": (lambda d: of(d).sum(-1, dtype=BF16), BF16, BF16),
    "normalize": (lambda d: functional.normalize(of(d), dim=-1), FP32, FP32),
    "mean": (lambda d: of(d).mean(), BF16, FP32),
    "power": (lambda d: of(d) ** 2, FP32, FP32),
    "gelu": (lambda d: functional.gelu(of(d)), BF16, FP32),
    "cross_entropy": (lambda d: functional.cross_entropy(of(d, 4, 8), torch.zeros(4, dtype=torch.long)), FP32, FP32),
    "mse_loss": (lambda d: functional.mse_loss(of(d), of(d)), FP32, FP32),
    "scatter_add": (lambda d: of(d, 4).scatter_add(0, torch.zeros(4, dtype=torch.long), of(FP32, 4)), FP32, FP32),
    "fp64": (lambda d: of(torch.float64).exp(), torch.float64, torch.float64),
}


def test_what_accelerators_cast_is_cast(memory):
    with autocast_region(BF16):
        found = {name: (function(BF16).dtype, function(FP32).dtype) for name, (function, *_) in CASES.items()}
    assert found == {name: (of_short, of_fp32) for name, (_, of_short, of_fp32) in CASES.items()}


def test_a_cast_weight_is_kept_until_the_region_ends(memory):
    weight, x = nn.Parameter(of(FP32, 8, 8)), of(BF16, 2, 8)
    with torch.no_grad():
        before = memory.live
        with autocast_region(BF16):
            for _ in range(2):
                del [functional.linear(x, weight)][:]
                assert memory.live == before + 2 * 64
        assert memory.live == before


def shapes_of(rows: int = 2, config: L2LConfig | None = None, **options: Any) -> RunShapes:
    model = llama().train()
    return RunShapes(model, config or L2LConfig(), example_inputs(model, rows, 8), **options)


@nightly
def test_graphs_keep_weights_that_autocast_has_cast():
    """Once for each micro-batch; without autocast, a graph grows with its rows alone."""
    kept = {}
    for dtype in (None, BF16):
        run = shapes_of(6, autocast=dtype)
        for size in (1, 6):
            found = run.on_device(L2LConfig(ubatch_size=size, stash="device", kept_graphs=1)).phases()
            kept[dtype, size] = dict(found)["backward of layer 2"]["kept graphs"]
    matrices = sum(p.numel() for p in llama().model.layers[0].parameters() if p.dim() == 2)  # type: ignore[union-attr, index]
    assert kept[None, 1] == kept[None, 6] > kept[BF16, 6]
    assert kept[BF16, 1] - kept[BF16, 6] == 5 * 2 * matrices


def test_autocast_of_the_program_around_the_estimate_is_no_part_of_it():
    """That of the host, where fakes are."""
    model = llama().train()
    inputs, precision = example_inputs(model, 2, 8), Precision(model)

    def peaks(**options: Any) -> list[int]:
        found = Tracer(model, precision, **options).trace(inputs)
        return [piece.backward_peak for piece in (*found.pieces, *(call.layer for call in found.calls))]

    plain = peaks()
    with torch.autocast("cpu", BF16):
        assert peaks() == plain
    assert peaks(autocast=BF16) != plain


@pytest.mark.parametrize(
    ("cmp", "frozen", "forward", "backward"),
    [("bf16", False, 3, 0), ("bf16", True, 2, 0), ("fp16", False, 1, 3), ("fp16", True, 1, 2)],
)
def test_products_of_a_head_in_chunks(cmp, frozen, forward, backward):
    """Of which a second device has every other chunk, and with them weights and sums of gradients, in the forward that
    computes gradients, too. With fp16, the backward makes logits again."""
    model = llama(vocab_size=500).train()
    model.lm_head.weight.requires_grad_(not frozen)
    inputs = example_inputs(model, 64, 8)
    options: dict[str, Any] = {"device": torch.device("cuda"), "devices": 2}
    run = RunShapes(model, L2LConfig(cmp=cmp, chunked_loss=128), inputs, **options)
    last, product = run.traced(64).pieces[-1], 2 * 64 * 8 * 500 * 16
    assert (last.forward_flops, last.backward_flops) == (forward * product, backward * product)
    head = run.split_head(run.config)
    assert head is not None
    assert head.spared_flops == (forward * product // 2, backward * product // 2)
    weights, sums = 2 * 500 * 16, 0 if frozen else 4 * 500 * 16
    assert head.copied == ((weights, sums) if backward else (weights + sums, 0))
    one = RunShapes(model, L2LConfig(cmp=cmp, chunked_loss=512), inputs, **options)
    assert one.split_head(one.config) is None, "one chunk"


def test_layers_multiply_in_the_dtype_of_autocast():
    """By which the rate of the device is chosen."""
    assert shapes_of().multiplies_in is None
    assert shapes_of(autocast=BF16).multiplies_in == shapes_of(config=L2LConfig(cmp="bf16")).multiplies_in == BF16


def test_merged_batches_are_cut_between_them():
    """Two of three rows each, by two, are four micro-batches, and not three."""
    assert shapes_of(6, batches=2).costs(L2LConfig(ubatch_size=2, stash="device")).ubatches == 4


def test_a_layer_that_is_called_several_times_in_a_row_travels_once():
    config = L2LConfig()

    def travels(calls: int) -> list[int]:
        model = albert(calls)
        run = RunShapes(model, config, example_inputs(model, 2), device=torch.device("cuda"))
        layers = run.costs(config).layers
        return [sum(getattr(cost, name) for cost in layers) for name in ("forward_up", "backward_up", "backward_down")]

    assert travels(4) == travels(1) and travels(1)[0] > 0 < travels(1)[2]
