"""Where tensors lie in one piece of memory: aligned, apart, and each shaped like the tensor it stands for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_l2l.runtime.flat_memory import Layout, elements, is_dense
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


def filled(layout: Layout, given: list[torch.Tensor]) -> torch.Tensor:
    """Memory that holds what every tensor of the layout holds."""
    memory = torch.empty(layout.num_bytes, dtype=torch.uint8)
    for tensor, view in zip(given, layout.views(memory), strict=True):
        view.copy_(tensor)
    return memory


@settings(deadline=None, max_examples=times(30, 300))
@given(st.lists(tensors(), max_size=6))
def test_places_are_aligned_and_apart_and_nothing_is_wasted(given):
    layout = Layout(given)
    end = 0
    for tensor, piece in zip(given, layout.pieces, strict=True):
        start = piece.start
        assert piece.stop == start + num_bytes(tensor)
        assert start % ALIGNED == 0 and end <= start < end + ALIGNED
        end = start + num_bytes(tensor)
    assert end <= layout.num_bytes < end + ALIGNED


@settings(deadline=None, max_examples=times(30, 300))
@given(st.lists(tensors(), max_size=6))
def test_every_view_is_like_its_tensor_and_keeps_what_is_written(given):
    layout = Layout(given)
    memory = filled(layout, given)
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


def test_what_is_transposed_stays_so_and_what_has_gaps_is_closed():
    memory = torch.zeros(64, dtype=torch.uint8)
    transposed, gaps = torch.randn(2, 3).T, torch.randn(3, 4)[:, ::2]
    assert Layout([transposed]).views(memory)[0].stride() == (1, 3)
    assert Layout([gaps]).views(memory)[0].stride() == (2, 1)
    images = torch.randn(1, 2, 2, 2).to(memory_format=torch.channels_last)
    assert Layout([images]).views(memory)[0].stride() == images.stride()


def test_a_view_ends_where_its_tensor_ends():
    one, other = torch.zeros(3, dtype=torch.int8), torch.zeros(3, dtype=torch.int8)
    layout = Layout([one, other])
    memory = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    layout.views(memory)[1].fill_(-1)
    assert memory.nonzero().flatten().tolist() == [256, 257, 258]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_empty_tensor_takes_no_memory(dtype):
    empty, scalar = torch.empty(0, 3, dtype=dtype), torch.ones((), dtype=dtype)
    given = [empty, scalar, empty]
    layout = Layout(given)
    assert [piece.start for piece in layout.pieces] == [0, 0, ALIGNED] and layout.num_bytes == ALIGNED
    views = layout.views(filled(layout, given))
    assert views[0].shape == views[2].shape == (0, 3) and views[1].item() == 1
