"""Which device executes, and what is asked of its module: page-locking, generators, waits."""

from __future__ import annotations

import gc
import mmap
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from types import ModuleType
from unittest.mock import Mock

import pytest
import torch
import tqdm.std
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hf_l2l import devices
from hf_l2l.hf import preparation
from hf_l2l.hf.preparation import devices_of, with_progress_bar
from hf_l2l.runtime import flat_memory, stream
from hf_l2l.runtime.flat_memory import Layout, Pages, elements, is_dense, pages_ahead
from hf_l2l.runtime.stream import HOST
from hf_l2l.runtime.tensors import sharing_memory
from tiers import times


def test_the_current_accelerator_executes_if_it_is_available(monkeypatch):
    current_accelerator = Mock(return_value=torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert devices.execution_device(None) == torch.device("cuda", 3)
    current_accelerator.assert_called_once_with(check_available=True)
    assert devices.execution_device("cuda") == torch.device("cuda", 3)
    assert devices.execution_device("cuda:1") == torch.device("cuda", 1)
    assert devices.execution_device("cpu:0") == devices.execution_device(HOST) == HOST


class FakeCuda:
    """A device module whose calls fail; as with CUDA, the next kernel launch of the device reports their error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current, self.last_error = "another device", 0
        monkeypatch.setattr(stream, "device_module", lambda device: self)
        monkeypatch.setattr(torch, "zeros", self.launch)

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.current = str(device)
        yield
        self.current = "another device"

    def cudart(self) -> FakeCuda:
        return self

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert flags == 1, "cudaHostRegisterPortable: other devices copy this memory, too"
        return self.fails(2)

    def cudaHostUnregister(self, address: int) -> int:
        return self.fails(713)

    def fails(self, code: int) -> int:
        assert self.current == "cuda:77"
        self.last_error = code
        return code

    def launch(self, *size: int, device: torch.device) -> None:
        assert self.current == str(device) == "cuda:77"
        code, self.last_error = self.last_error, 0
        if code:
            raise RuntimeError(f"CUDA error {code}, of a call before")


def test_no_kernel_reports_that_page_locking_was_refused(monkeypatch):
    cuda, device = FakeCuda(monkeypatch), torch.device("cuda", 77)
    assert stream.last_refusal(device) is None
    assert not stream.page_lock(4096, 4096, device)
    assert cuda.last_error == 0 and stream.last_refusal(device) == 2
    stream.page_unlock(4096, device)
    assert cuda.last_error == 0 and stream.last_refusal(device) == 2


def test_a_device_module_with_no_more_than_is_needed_computes_in_program_order(monkeypatch):
    module = ModuleType("torch.other")
    for name in ("is_available", "device_count", "get_rng_state", "set_rng_state"):
        setattr(module, name, lambda *args: 1)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    device = devices.execution_device("xpu:0")
    assert device == torch.device("xpu", 0)
    assert not stream.is_asynchronous(device) and not stream.can_page_lock(device) and stream.record(device) is None


def test_a_cache_is_emptied_by_the_module_or_by_torch_accelerator(monkeypatch):
    """A device in C++ that torch knows by a name alone has a module without such a function."""
    emptied = []
    module = ModuleType("torch.other")
    monkeypatch.setattr(stream, "device_module", lambda device: module)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: emptied.append("accelerator"))
    stream.empty_cache(torch.device("xpu", 0))
    module.empty_cache = lambda: emptied.append("module")
    stream.empty_cache(torch.device("xpu", 0))
    assert emptied == ["accelerator", "module"]


# ---- what is done before a training


UNITS = [[number] for number in range(8)]


def test_a_bar_appears_after_five_seconds_and_leaves_nothing_behind(monkeypatch, capfd):
    """Also where the work fails."""
    now, threads = [100.0], threading.active_count()
    monkeypatch.setattr(tqdm.std, "time", lambda: now[0])
    assert all(a is b for a, b in zip(with_progress_bar(UNITS, "Moving"), UNITS, strict=True))
    went_by = with_progress_bar(UNITS, "Moving")
    for done in range(4):
        next(went_by)
        now[0] += 2.0
        printed = capfd.readouterr().err
        assert printed == "" if done < 3 else "Moving" in printed and "3/8" in printed
    with pytest.raises(MemoryError):
        went_by.throw(MemoryError)
    assert capfd.readouterr().err.rpartition("\r")[2].strip() == "", "the line is cleared"
    assert threading.active_count() == threads


def test_each_rank_of_a_host_has_its_share_of_the_devices(monkeypatch):
    monkeypatch.setattr(preparation.stream, "device_count", lambda device: 6)
    monkeypatch.setattr(preparation, "processes_of_this_host", lambda count: count)
    monkeypatch.setattr(preparation, "execution_devices", lambda devices: [device.index for device in devices])
    of_rank = types.SimpleNamespace(device=torch.device("cuda", 1), world_size=2)
    assert [devices_of(of_rank, asked) for asked in (None, 1, 2, 3)] == [[1, 3, 5], [1], [1, 3], [1, 3, 5]]
    with pytest.raises(ValueError, match="must be at most what a rank has"):
        devices_of(of_rank, 4)
    alone = types.SimpleNamespace(device=torch.device("cuda", 0), world_size=1)
    assert devices_of(alone, 2) == [0, 1]


# ---- one piece of memory: where tensors lie in it, and pages that threads lock ahead of their use


FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
DTYPES = (*FLOATS, torch.int64, torch.int8, torch.bool)
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


@settings(deadline=None, max_examples=times(30, 300))
@given(st.lists(tensors(), max_size=6))
def test_places_are_aligned_and_apart_and_views_keep_what_is_written(given):
    layout = Layout(given)
    end = 0
    for tensor, piece in zip(given, layout.pieces, strict=True):
        start = piece.start
        assert piece.stop == start + tensor.nbytes
        assert start % ALIGNED == 0 and end <= start < end + ALIGNED
        end = start + tensor.nbytes
    assert end <= layout.num_bytes < end + ALIGNED
    memory = torch.empty(layout.num_bytes, dtype=torch.uint8)
    for tensor, view in zip(given, layout.views(memory), strict=True):
        view.copy_(tensor)
    for tensor, view in zip(given, layout.views(memory), strict=True):
        assert view.dtype == tensor.dtype and torch.equal(view, tensor)
        assert view.stride() == (tensor.stride() if is_dense(tensor) else tensor.contiguous().stride())
        assert view.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr() or not tensor.numel()


@settings(deadline=None, max_examples=times(30, 300))
@given(tensors())
def test_dense_is_what_has_as_many_elements_as_places_and_elements_are_those_of_the_memory(tensor):
    reach = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    places = {0}
    for n, step in zip(tensor.shape, tensor.stride(), strict=True):
        places = {place + i * step for place in places for i in range(n)}
    assert is_dense(tensor) == (tensor.numel() == 0 or len(places) == tensor.numel() == reach)
    if not is_dense(tensor):
        with pytest.raises(AssertionError, match="a tensor with gaps"):
            elements(tensor)
        return
    flat = elements(tensor)
    assert flat.shape == (tensor.numel(),) and flat.data_ptr() == tensor.data_ptr()
    assert sorted(flat.tolist(), key=str) == sorted(tensor.flatten().tolist(), key=str)
    like = Layout([tensor]).views(flat.contiguous().view(torch.uint8))[0]
    assert torch.equal(like, tensor) and like.stride() == tensor.stride()


def test_sharing_is_found_between_any_two_of_many():
    def places(tensor: torch.Tensor) -> set[int]:
        return {tensor.data_ptr() + 4 * i for i in range(tensor.numel())}

    generator = torch.Generator().manual_seed(3)
    for _ in range(times(50, 200)):
        memory = torch.zeros(40)
        bounds = torch.randint(0, 20, (6, 2), generator=generator).tolist()
        every = [nn.Parameter(memory[start : start + size]) for start, size in bounds]
        expected = {a for a in every if any(a is not b and places(a) & places(b) for b in every)}
        assert sharing_memory(every) == expected


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
    recorder.locking = lambda num_bytes: 1 // (3 * PAGE - num_bytes)
    threads = threading.active_count()
    blocks = pages_ahead([PAGE, 2 * PAGE, 3 * PAGE, 4 * PAGE], DEVICE)
    assert [len(next(blocks)), len(next(blocks))] == [PAGE, 2 * PAGE]
    with pytest.raises(ZeroDivisionError):
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
