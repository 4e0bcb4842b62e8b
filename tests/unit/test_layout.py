"""Where tensors lie in one piece of memory: aligned, apart, and each shaped like the tensor it stands for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hf_l2l.runtime.flat_memory import Layout, elements, is_dense
from hf_l2l.runtime.tensors import sharing_memory
from tiers import times

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
ALIGNED = 256


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Tensors of every dtype, of none up to four dimensions: permuted, with gaps, repeated, empty."""
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    made = torch.randn(shape, dtype=torch.float64).mul(9).to(draw(st.sampled_from(DTYPES)))
    made = made.permute(draw(st.permutations(range(len(shape)))))
    kind = draw(st.sampled_from(["dense", "gaps", "repeated"]))
    if kind == "gaps" and made.dim():
        return made[..., ::2]
    return made.unsqueeze(0).expand(3, *made.shape) if kind == "repeated" else made


def num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@settings(deadline=None, max_examples=times(30, 300))
@given(st.lists(tensors(), max_size=6))
def test_places_are_aligned_and_apart_and_views_keep_what_is_written(given):
    layout = Layout(given)
    end = 0
    for tensor, piece in zip(given, layout.pieces, strict=True):
        start = piece.start
        assert piece.stop == start + num_bytes(tensor)
        assert start % ALIGNED == 0 and end <= start < end + ALIGNED
        end = start + num_bytes(tensor)
    assert end <= layout.num_bytes < end + ALIGNED
    memory = torch.empty(layout.num_bytes, dtype=torch.uint8)
    for tensor, view in zip(given, layout.views(memory), strict=True):
        view.copy_(tensor)
    for tensor, view in zip(given, layout.views(memory), strict=True):
        assert view.dtype == tensor.dtype and view.shape == tensor.shape
        assert torch.equal(view, tensor)
        assert view.stride() == (tensor.stride() if is_dense(tensor) else tensor.contiguous().stride())
        assert view.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr() or not tensor.numel()


@settings(deadline=None, max_examples=times(30, 300))
@given(tensors())
def test_dense_is_what_has_as_many_elements_as_places(tensor):
    reach = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    places = {0}
    for n, step in zip(tensor.shape, tensor.stride(), strict=True):
        places = {place + i * step for place in places for i in range(n)}
    assert is_dense(tensor) == (tensor.numel() == 0 or len(places) == tensor.numel() == reach)


@settings(deadline=None, max_examples=times(30, 300))
@given(tensors())
def test_elements_are_those_of_the_memory_in_its_order(tensor):
    if not is_dense(tensor):
        with pytest.raises(AssertionError, match="a tensor with gaps"):
            elements(tensor)
        return
    flat = elements(tensor)
    assert flat.shape == (tensor.numel(),) and flat.data_ptr() == tensor.data_ptr()
    assert sorted(flat.tolist(), key=str) == sorted(tensor.flatten().tolist(), key=str)
    like = Layout([tensor]).views(flat.contiguous().view(torch.uint8))[0]
    assert torch.equal(like, tensor) and like.stride() == tensor.stride()


def overlapping(one: torch.Tensor, other: torch.Tensor) -> bool:
    bytes_of = [{t.data_ptr() + 4 * i for i in range(t.numel())} for t in (one, other)]
    return bool(bytes_of[0] & bytes_of[1])


def test_sharing_is_found_between_any_two_of_many():
    generator = torch.Generator().manual_seed(3)
    for _ in range(times(50, 200)):
        memory = torch.zeros(40)
        bounds = torch.randint(0, 20, (6, 2), generator=generator).tolist()
        every = [nn.Parameter(memory[start : start + size]) for start, size in bounds]
        expected = {a for a in every if any(a is not b and overlapping(a, b) for b in every)}
        assert sharing_memory(every) == expected
