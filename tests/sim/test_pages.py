"""Page-locked host memory of the simulated accelerator: what CUDA grants and refuses."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from hf_l2l.testing import page_lock_limit, page_locked_bytes, sim_pages

RUNTIME = torch.sim.cudart()
PAGE = 4096
GRANTED, INVALID, OUT_OF_MEMORY, ALREADY, NOT_REGISTERED = 0, 1, 2, 712, 713


@pytest.fixture
def memory() -> Iterator[torch.Tensor]:
    """Eight whole pages of host memory, of which nothing is left registered."""
    assert page_locked_bytes() == 0
    host = torch.zeros(9 * PAGE, dtype=torch.uint8)
    first = -host.data_ptr() % PAGE
    yield host[first : first + 8 * PAGE]
    assert page_locked_bytes() == 0, "what is registered is to be unregistered"


def register(tensor: torch.Tensor) -> int:
    return RUNTIME.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)


def unregister(tensor: torch.Tensor) -> int:
    return RUNTIME.cudaHostUnregister(tensor.data_ptr())


def test_what_is_registered_is_pinned_until_it_is_unregistered(memory):
    part = memory[PAGE : 3 * PAGE]
    assert not part.is_pinned()
    assert register(part) == GRANTED
    assert page_locked_bytes() == 2 * PAGE
    assert part.is_pinned() and part[5:9].is_pinned() and part.view(torch.float32)[::3].is_pinned()
    assert memory[2 * PAGE : 3 * PAGE].is_pinned(), "the same memory by another tensor"
    assert not memory.is_pinned() and not memory[PAGE - 1 : PAGE + 1].is_pinned()
    assert not memory[3 * PAGE - 1 : 3 * PAGE + 1].is_pinned() and not memory[3 * PAGE :].is_pinned()
    assert unregister(part) == GRANTED
    assert not part.is_pinned() and page_locked_bytes() == 0
    halves = memory[: 4 * PAGE], memory[4 * PAGE :]
    assert [register(half) for half in halves] == [GRANTED, GRANTED]
    assert all(half.is_pinned() for half in halves) and not memory.is_pinned(), "a tensor over two ranges"
    assert [unregister(half) for half in halves] == [GRANTED, GRANTED]


PAIRS = [
    ((0, PAGE), (PAGE, PAGE), GRANTED),
    ((0, 10), (20, 10), ALREADY),  # beside each other on one page
    ((0, PAGE + 1), (2 * PAGE - 1, 5), ALREADY),  # the first ends on the page where the other begins
    ((PAGE + 5, 5), (0, PAGE + 1), ALREADY),
    ((PAGE + 5, 5), (0, PAGE), GRANTED),
    ((PAGE, PAGE), (0, 4 * PAGE), ALREADY),  # within
    ((0, 4 * PAGE), (PAGE, PAGE), ALREADY),
    ((0, PAGE), (0, PAGE), ALREADY),  # the same
]


def test_a_page_is_registered_once(memory):
    for one, other, expected in PAIRS:
        first, second = (memory[start : start + size] for start, size in (one, other))
        assert register(first) == GRANTED
        assert register(second) == expected, (one, other)
        assert page_locked_bytes() == first.nbytes + (second.nbytes if expected == GRANTED else 0)
        assert unregister(second) == (GRANTED if expected == GRANTED or one == other else NOT_REGISTERED)
        assert unregister(first) == (GRANTED if one != other else NOT_REGISTERED)


def test_what_cannot_be_registered_or_unregistered(memory):
    assert RUNTIME.cudaHostRegister(0, PAGE, 0) == INVALID
    assert RUNTIME.cudaHostRegister(memory.data_ptr(), 0, 0) == INVALID
    assert unregister(memory) == NOT_REGISTERED
    assert register(memory) == GRANTED
    assert unregister(memory[PAGE:]) == NOT_REGISTERED, "a range is named by its first address"
    assert (unregister(memory), unregister(memory)) == (GRANTED, NOT_REGISTERED)


def test_a_limit_counts_what_is_registered_already_and_ends_with_its_block(memory):
    parts = [memory[i * PAGE : (i + 1) * PAGE] for i in range(3)]
    assert register(parts[0]) == GRANTED
    with page_lock_limit(2 * PAGE):
        assert register(memory[PAGE : 4 * PAGE]) == OUT_OF_MEMORY
        assert [register(part) for part in parts[1:]] == [GRANTED, OUT_OF_MEMORY]
        with pytest.raises(KeyError), page_lock_limit(0):
            assert unregister(parts[1]) == GRANTED
            assert register(parts[1]) == OUT_OF_MEMORY
            raise KeyError
        assert register(parts[1]) == GRANTED
    assert register(parts[2]) == GRANTED
    assert page_locked_bytes() == 3 * PAGE
    assert [unregister(part) for part in parts] == [GRANTED] * 3
    with pytest.raises(ValueError, match=r"0 or more \(got -1\)"), page_lock_limit(-1):
        pass


def test_an_asynchronous_download_is_made_pinned_as_on_cuda():
    x = torch.ones(4, device="sim")
    arriving = x.to("cpu", non_blocking=True)
    torch.sim.synchronize()
    assert arriving.is_pinned() and arriving.tolist() == [1.0] * 4
    assert not x.to("cpu").is_pinned() and not x.is_pinned()


class _Registered:
    """A range of addresses that garbage collection unregisters."""

    def __init__(self, pointer: int) -> None:
        self.pointer, self.cycle = pointer, self
        sim_pages.PAGES.register(pointer, PAGE)

    def __del__(self) -> None:
        sim_pages.PAGES.unregister(self.pointer)


def test_ranges_may_go_while_they_are_looked_through():
    """A finalizer runs wherever Python makes an object, inside the lock, too."""
    thresholds, far = gc.get_threshold(), 2**46
    try:
        for allocations in range(1, 100):
            gc.collect()
            gc.disable()
            for turn in range(20):
                _Registered(far + 2 * turn * PAGE)
            gc.set_threshold(allocations)
            gc.enable()
            assert not sim_pages.PAGES.hold(far - PAGE, far - PAGE + 1)
            assert sim_pages.PAGES.register(2 * far, PAGE) == 0
            assert sim_pages.PAGES.unregister(2 * far) == 0
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()
        gc.collect()
