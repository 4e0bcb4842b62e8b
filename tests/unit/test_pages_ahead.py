"""One piece of memory: where tensors lie in it, and pages that threads make present and lock ahead of their use."""

from __future__ import annotations

import gc
import mmap
import threading
from collections.abc import Callable
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hf_l2l.runtime import flat_memory, stream
from hf_l2l.runtime.flat_memory import Layout, Pages, elements, is_dense, pages_ahead
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


# ---- pages ahead; the device is a stand-in that only records


DEVICE = torch.device("cuda", 0)
PAGE = mmap.PAGESIZE


class Recorder:
    """What the stand-in was asked for."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, int]] = []
        """("touch", size of the block, first byte) and ("lock", bytes, address), in order."""
        self.refused = False
        self.locking: Callable[[int], object] = lambda num_bytes: None
        """Called with the bytes while they are locked."""
        self.unlocked: list[int] = []


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()
    touch = Pages.touch

    def touching(pages: Pages, start: int, stop: int) -> None:
        touch(pages, start, stop)
        found.events.append(("touch", len(pages), start))

    def locking(address: int, num_bytes: int, device: torch.device) -> bool:
        found.locking(num_bytes)
        found.events.append(("lock", num_bytes, address))
        return not found.refused

    monkeypatch.setattr(stream, "can_page_lock", lambda device: True)
    monkeypatch.setattr(stream, "last_refusal", lambda device: 2 if found.refused else None)
    monkeypatch.setattr(stream, "page_lock", locking)
    monkeypatch.setattr(stream, "page_unlock", lambda address, device: found.unlocked.append(address))
    monkeypatch.setattr(flat_memory, "usable_cores", lambda: 8)
    monkeypatch.setattr(Pages, "touch", touching)
    return found


def test_blocks_come_in_their_order_whichever_is_ready_first(recorder):
    second_is_locked = threading.Event()

    def locking(num_bytes: int) -> None:
        if num_bytes == PAGE:
            assert second_is_locked.wait(10)
        else:
            second_is_locked.set()

    recorder.locking = locking
    sizes = [PAGE, 2 * PAGE, 3 * PAGE, 5, 4 * PAGE + 1, 7 * PAGE]
    made = list(pages_ahead(sizes, DEVICE))
    assert [len(pages) for pages in made] == sizes
    assert all(pages.locked is not None for pages in made)


def test_all_pages_are_touched_before_the_block_is_locked(recorder, monkeypatch):
    monkeypatch.setattr(flat_memory, "TOUCHED_AT_ONCE", 4 * PAGE)
    sizes = [10 * PAGE + 7, PAGE, 4 * PAGE, 9 * PAGE]
    list(pages_ahead(sizes, DEVICE))
    for size in sizes:
        mine = [event for event in recorder.events if event[1] == size]
        assert mine[-1][0] == "lock"
        assert sorted(start for _, _, start in mine[:-1]) == list(range(0, size, 4 * PAGE))


def test_as_many_blocks_are_made_ahead_as_there_are_threads(recorder, monkeypatch):
    alive: list[int] = []
    new = Pages.__init__

    def made(pages: Pages, num_bytes: int) -> None:
        new(pages, num_bytes)
        alive.append(num_bytes)

    monkeypatch.setattr(Pages, "__init__", made)
    blocks = pages_ahead([PAGE] * 20, DEVICE)
    assert alive == []
    for taken, _ in enumerate(islice(blocks, 10), 1):
        assert len(alive) == taken + 4
    blocks.close()
    assert len(alive) == 14


def test_blocks_that_nobody_took_are_unlocked_and_no_thread_is_left(recorder):
    threads = threading.active_count()
    blocks = pages_ahead([PAGE] * 8, DEVICE)
    taken = next(blocks)
    blocks.close()
    assert threading.active_count() == threads
    del blocks
    gc.collect()
    locked = [address for kind, _, address in recorder.events if kind == "lock"]
    assert taken.locked is not None
    assert sorted([*recorder.unlocked, taken.locked[0]]) == sorted(locked)


def test_an_error_of_a_thread_is_raised_where_the_block_is_taken(recorder):
    def locking(num_bytes: int) -> None:
        if num_bytes == 3 * PAGE:
            raise RuntimeError("the device is gone")

    recorder.locking = locking
    threads = threading.active_count()
    blocks = pages_ahead([PAGE, 2 * PAGE, 3 * PAGE, 4 * PAGE], DEVICE)
    assert [len(next(blocks)), len(next(blocks))] == [PAGE, 2 * PAGE]
    with pytest.raises(RuntimeError, match="the device is gone"):
        next(blocks)
    assert threading.active_count() == threads


def test_what_will_not_be_locked_is_not_touched(recorder, monkeypatch):
    recorder.refused = True
    made = list(pages_ahead([PAGE] * 3, DEVICE))
    assert [pages.locked for pages in made] == [None] * 3
    assert [kind for kind, *_ in recorder.events] == ["lock"] * 3  # the device may grant some, all the same
    monkeypatch.undo()
    monkeypatch.setattr(flat_memory, "ThreadPoolExecutor", None)  # a device that locks nothing needs no threads
    assert [len(pages) for pages in pages_ahead([PAGE, 5], torch.device("cpu"))] == [PAGE, 5]
