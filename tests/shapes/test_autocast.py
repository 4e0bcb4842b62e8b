"""Autocast on tensors without values: what accelerators cast, and the memory of the casts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from hf_l2l.compat import FakeTensorMode
from hf_l2l.config import L2LConfig
from hf_l2l.model.precision import Precision
from hf_l2l.plan.run_shapes import RunShapes
from hf_l2l.shapes.autocast import autocast_region
from hf_l2l.shapes.fake_memory import FakeMemory, counted
from hf_l2l.shapes.inputs import example_inputs
from hf_l2l.shapes.traced import Tracer
from models import llama

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture
def memory() -> Iterator[FakeMemory]:
    with counted(FakeTensorMode(), lambda *_: True) as memory:
        yield memory


def of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape or (2, 4, 8), dtype=dtype)


# What CUDA's autocast makes of each, as torch documents it: of bf16 first, and then of fp32.
CASES: dict[str, tuple[Callable[[torch.dtype], Any], torch.dtype, torch.dtype]] = {
    "linear": (lambda d: functional.linear(of(d), of(d, 3, 8)), BF16, BF16),
    "einsum": (lambda d: torch.einsum("abc,dc->abd", of(d), of(d, 3, 8)), BF16, BF16),
    "mv": (lambda d: torch.mv(of(d, 3, 8), of(d, 8)), BF16, BF16),
    "attention": (lambda d: functional.scaled_dot_product_attention(*[of(d, 1, 2, 4, 8)] * 3), BF16, BF16),
    "layer_norm": (lambda d: functional.layer_norm(of(d), (8,), of(FP32, 8)), FP32, FP32),
    "nn.RMSNorm": (lambda d: nn.RMSNorm(8)(of(d)), FP32, FP32),
    "group_norm": (lambda d: functional.group_norm(of(d), 2), FP32, FP32),
    "softmax": (lambda d: of(d).softmax(-1), FP32, FP32),
    "functional.softmax": (lambda d: functional.softmax(of(d), dim=-1), FP32, FP32),
    "softmin": (lambda d: functional.softmin(of(d), dim=-1), FP32, FP32),
    "softmax as asked": (lambda d: torch.softmax(of(d), -1, dtype=BF16), BF16, BF16),
    "sum": (lambda d: of(d).sum(), FP32, FP32),
    "sum as asked": (lambda d: of(d).sum(-1, dtype=BF16), BF16, BF16),
    "sum of input": (lambda d: torch.sum(input=of(d)), FP32, FP32),
    "normalize": (lambda d: functional.normalize(of(d), dim=-1), FP32, FP32),
    "norm": (lambda d: of(d).norm(), FP32, FP32),
    "mean": (lambda d: of(d).mean(), BF16, FP32),
    "power": (lambda d: of(d) ** 2, FP32, FP32),
    "reciprocal": (lambda d: 1 / of(d), FP32, FP32),
    "rsqrt": (lambda d: torch.rsqrt(of(d)), FP32, FP32),
    "gelu": (lambda d: functional.gelu(of(d)), BF16, FP32),
    "cross_entropy": (lambda d: functional.cross_entropy(of(d, 4, 8), torch.zeros(4, dtype=torch.long)), FP32, FP32),
    "mse_loss": (lambda d: functional.mse_loss(of(d), of(d)), FP32, FP32),
    "scatter_add": (
        lambda d: of(d, 4).scatter_add(0, torch.zeros(4, dtype=torch.long), of(FP32, 4)),
        FP32,
        FP32,
    ),
    "fp64": (lambda d: of(torch.float64).exp(), torch.float64, torch.float64),
}


@pytest.mark.parametrize("name", CASES)
def test_what_accelerators_cast_is_cast(memory, name):
    function, of_short, of_fp32 = CASES[name]
    with autocast_region(BF16):
        assert (function(BF16).dtype, function(FP32).dtype) == (of_short, of_fp32)


def test_nothing_is_cast_where_autocast_is_off(memory):
    def dtypes() -> tuple[torch.dtype, ...]:
        return of(BF16).softmax(-1).dtype, of(BF16).sum().dtype, functional.linear(of(FP32), of(FP32, 3, 8)).dtype

    with autocast_region(BF16):
        assert dtypes() == (FP32, FP32, BF16)
        with torch.autocast("cpu", enabled=False):  # as rotary positions are computed
            assert dtypes() == (BF16, BF16, FP32)
    assert dtypes() == (BF16, BF16, FP32)


def test_a_cast_weight_is_kept_until_the_region_ends(memory):
    weight, x = nn.Parameter(of(FP32, 8, 8)), of(BF16, 2, 8)
    with torch.no_grad():
        before = memory.live
        with autocast_region(BF16):
            for _ in range(2):
                del [functional.linear(x, weight)][:]
                assert memory.live == before + 2 * 64
        assert memory.live == before


def test_the_memory_of_cross_entropy(memory):
    """Logarithms in the dtype of the logits, and once more in fp32, are kept for the backward, where the gradients of
    both have 4 and 2 bytes per number."""
    logits, labels = nn.Parameter(of(BF16, 128, 512)), torch.zeros(128, dtype=torch.long)
    numbers, start = logits.numel(), memory.begin()
    with autocast_region(BF16):
        loss = functional.cross_entropy(logits, labels)
    assert (memory.live - start) // numbers == (memory.peak - start) // numbers == 6
    memory.begin()
    loss.backward()
    assert (memory.peak - start) // numbers == 6 + 4


def test_graphs_keep_weights_that_autocast_has_cast():
    """Once for each micro-batch; without autocast, a graph grows with its rows alone."""
    kept = {}
    for dtype in (None, BF16):
        model = llama().train()
        run = RunShapes(model, L2LConfig(), example_inputs(model, 6, 8), autocast=dtype)
        options: dict[str, Any] = {"stash": "device", "kept_graphs": 1}
        for size in (1, 3, 6):
            found = run.on_device(L2LConfig(ubatch_size=size, **options)).phases()
            kept[dtype, size] = dict(found)["backward of layer 2"]["kept graphs"]
    matrices = sum(p.numel() for p in llama().model.layers[0].parameters() if p.dim() == 2)  # type: ignore[union-attr, index]
    assert kept[None, 1] == kept[None, 3] == kept[None, 6] > kept[BF16, 6]
    assert kept[BF16, 3] - kept[BF16, 6] == 2 * matrices
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


def test_layers_multiply_in_the_dtype_of_autocast():
    """By which the rate of the device is chosen."""
    model = llama()
    inputs = example_inputs(model, 2, 8)
    assert RunShapes(model, L2LConfig(), inputs).multiplies_in is None
    assert RunShapes(model, L2LConfig(), inputs, autocast=BF16).multiplies_in == BF16
    assert RunShapes(model, L2LConfig(cmp="bf16"), inputs).multiplies_in == BF16


def test_merged_batches_are_cut_between_them():
    """Two of three rows each, by two, are four micro-batches, and not three."""
    model = llama()
    run = RunShapes(model, L2LConfig(), example_inputs(model, 6, 8), batches=2)
    assert run.costs(L2LConfig(ubatch_size=2, stash="device")).ubatches == 4
