"""The simulated accelerator behaves as one GPU does: its memory, copies, backwards, and page-locked host memory."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional

from hf_l2l.testing import enable_simulated_accelerator, page_lock_limit, page_locked_bytes, sim_backward, sim_pages
from tiers import nightly
from training import settled_memory

SIM = torch.device("sim", 0)


@pytest.fixture(autouse=True)
def _unlimited() -> Iterator[None]:
    gc.collect()
    torch.sim.reset_peak_memory_stats()
    yield
    enable_simulated_accelerator(None)


@nightly
def test_importing_registers_nothing_and_after_a_backward_nothing_can_be():
    script = """
import torch
from hf_l2l.testing import enable_simulated_accelerator
print(torch._C._get_privateuse1_backend_name(), hasattr(torch, "sim"))
torch.ones((), requires_grad=True).backward()
enable_simulated_accelerator()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout == "privateuseone False\n" and "before the first backward of the process" in done.stderr


def test_enabling_again_changes_only_the_capacity():
    x = torch.ones(4, device="sim")
    assert torch.accelerator.current_accelerator().type == "sim" and torch.accelerator.device_count() == 1
    for size, nbytes in {"1MiB": 2**20, "500MB": 500 * 10**6, "1.5 kib": 1536, "77": 77, 1000: 1000}.items():
        assert enable_simulated_accelerator(size) == SIM
        assert torch.sim.mem_get_info() == (nbytes - torch.accelerator.memory_allocated(), nbytes)
    assert x.tolist() == [1.0] * 4
    for wrong in (0, "0GiB", "8 gibs", "", True, 1.5):
        with pytest.raises(ValueError, match="capacity must be a positive number of bytes"):
            enable_simulated_accelerator(wrong)
    with pytest.raises(RuntimeError, match="invalid device sim:1"):
        torch.ones(2).to("sim:1")


def test_live_and_peak_bytes():
    start = torch.sim.memory_allocated()

    def live() -> int:
        return torch.sim.memory_allocated() - start

    torch.sim.reset_peak_memory_stats()
    x = torch.zeros(10, 100, device="sim")
    assert live() == 4000
    y = x * 2
    assert live() == 8000
    del y
    assert live() == 4000
    x + x[:1]
    x[:1].clone()
    assert torch.sim.max_memory_allocated() - start == 8000, "later and smaller allocations leave the peak"
    torch.sim.reset_peak_memory_stats()
    assert torch.sim.max_memory_allocated() - start == 4000
    clone = copy.deepcopy(x)
    assert live() == 8000
    del clone
    views = [x.view(-1)[5:], x.t(), x[3], x.unfold(1, 3, 1), x.detach(), x.expand(2, 10, 100), x.reshape(1000)]
    views[2].fill_(7)
    del x
    assert live() == 4000, "views share the bytes and keep them"
    assert views[1].sum().item() == 700
    views.clear()
    assert live() == 0


def test_past_the_capacity():
    x = torch.zeros(100, device="sim")
    live = torch.sim.memory_allocated()
    enable_simulated_accelerator(live + 500)
    for make in (lambda: torch.empty(200, device="sim"), lambda: x.repeat(2), lambda: torch.ones(200).to("sim")):
        torch.sim.reset_peak_memory_stats()
        with pytest.raises(torch.OutOfMemoryError, match=f"800 bytes asked, {live} bytes live.*{live + 500} bytes"):
            make()
        assert torch.sim.memory_allocated() == torch.sim.max_memory_allocated() == live
    with pytest.raises(torch.OutOfMemoryError, match="40000000000000 bytes asked"):
        torch.empty(10**13, device="sim")  # more than the host could give
    fits = torch.empty(125, device="sim")
    assert torch.sim.memory_allocated() == live + fits.nbytes


def test_copies_and_files():
    host = torch.arange(4.0)
    x = host.to("sim")
    host.fill_(9)
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0], "the device must not share memory with the host"
    assert copy.deepcopy(nn.Linear(2, 2).to("sim")).weight.device == SIM
    unpickled = pickle.loads(pickle.dumps(x))  # noqa: S301  # pickled on the same line
    for clone in (copy.deepcopy(x), unpickled, copy.copy(x).clone()):
        assert clone.device == SIM
        clone.add_(1)
        assert x.tolist() == [0.0, 1.0, 2.0, 3.0]
    for there, back in ((x, "cpu"), (x.cpu(), "sim"), (x, None)):
        file = io.BytesIO()
        torch.save(there, file)
        file.seek(0)
        loaded = torch.load(file, map_location=back)
        assert loaded.device.type == (back or "sim") and loaded.tolist() == x.tolist()


def raises(*args: object) -> torch.Tensor:
    raise KeyError("from the backward") from ValueError("its cause")


def raises_in_a_backward(grad: torch.Tensor) -> None:
    with torch.enable_grad():
        y = grad.detach().requires_grad_() * 2
        y.register_hook(raises)
        y.sum().backward()


def raises_when_wanted(x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, raises):
        return x.sin()


RUINED: dict[str, Callable[[torch.Tensor], object]] = {
    "nested": lambda x: x.register_hook(raises_in_a_backward),
    "before a node": lambda x: x.grad_fn.register_prehook(raises),
    "saved tensor": raises_when_wanted,
}


@pytest.mark.parametrize("whole", [True, False], ids=["backward", "grad"])
def test_an_exception_in_a_backward_reaches_the_caller(whole):
    before = settled_memory()
    for name, ruin in RUINED.items():
        x = torch.ones(3, device="sim", requires_grad=True)
        y = x * 2
        z = ruin(y)
        loss = (z if isinstance(z, torch.Tensor) else y).sum()
        with pytest.raises(KeyError, match="from the backward") as raised:
            loss.backward() if whole else torch.autograd.grad(loss, x)
        assert isinstance(raised.value.__cause__, ValueError), name
        assert raised.traceback[-1].name == "raises"
        (x * 2).sum().backward()
        assert x.grad.tolist() == [2.0] * 3
        del x, y, z, loss, raised
    assert settled_memory() == before


def test_an_exception_of_one_thread_is_not_anothers():
    both = threading.Barrier(2)

    def failing(number: int) -> int | None:
        def hook(grad: torch.Tensor) -> None:
            raise KeyError(number)

        y = torch.ones(3, device="sim", requires_grad=True) * 2
        y.register_hook(hook)
        both.wait(timeout=60)
        try:
            y.sum().backward()
        except KeyError as error:
            return error.args[0]

    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            assert list(pool.map(failing, (1, 2))) == [1, 2]


def test_what_a_backward_stashes_has_one_reference_more():
    """Else it would be freed while a backward uses it, or by the value that takes its place."""
    value = object()
    before = sys.getrefcount(value)
    for other in (None, object()):
        sim_backward.stash("a test", value)
        assert sys.getrefcount(value) == before + 1
        sim_backward.stash("a test", other)
        assert sys.getrefcount(value) == before
        assert sim_backward.in_tls("a test") is other
    sim_backward.stash("a test", None)


def test_autocast_casts_what_cuda_casts_and_that_of_the_host_nothing():
    model, x = nn.Linear(4, 4).to("sim"), torch.randn(2, 4, device="sim")
    query = torch.randn(1, 2, 3, 4, device="sim")
    with torch.autocast("sim", dtype=torch.bfloat16):
        out = model(x)
        assert out.dtype == model(out).dtype == torch.bfloat16
        assert functional.scaled_dot_product_attention(query, query, query).dtype == torch.bfloat16
        for float32 in (out.softmax(-1), functional.layer_norm(out, (4,)), out.exp(), out.sum(), out + x):
            assert float32.dtype == torch.float32
        assert torch.softmax(out, -1, dtype=torch.float64).dtype == torch.float64
    out.float().sum().backward()
    assert model.weight.grad.dtype == torch.float32 and model(x).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x.t()).dtype == torch.float32
        assert (x.cpu() @ x.cpu().t()).dtype == torch.bfloat16


@pytest.mark.parametrize("cached", [True, False])
def test_autocast_keeps_cast_weights_until_it_ends(cached):
    weight, x = nn.Parameter(torch.ones(2, 2, device="sim")), torch.ones(1, 2, device="sim")
    with torch.autocast("sim", dtype=torch.bfloat16, cache_enabled=cached):
        x @ weight
        with torch.no_grad():
            weight.zero_()
        assert (x @ weight).sum().item() == (4.0 if cached else 0.0), "as on CUDA: the cache is keyed by the leaf"
    with torch.autocast("sim", dtype=torch.bfloat16):
        assert (x @ weight).sum().item() == 0.0


# Page-locked host memory

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
    inside = (part, part[5:9], part.view(torch.float32)[::3], memory[2 * PAGE : 3 * PAGE])
    beside = (memory, memory[PAGE - 1 : PAGE + 1], memory[3 * PAGE - 1 : 3 * PAGE + 1], memory[3 * PAGE :])
    assert all(x.is_pinned() for x in inside) and not any(x.is_pinned() for x in beside)
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


def test_a_page_is_registered_once_and_a_range_is_named_by_its_first_address(memory):
    for one, other, expected in PAIRS:
        first, second = (memory[start : start + size] for start, size in (one, other))
        assert register(first) == GRANTED
        assert register(second) == expected, (one, other)
        assert page_locked_bytes() == first.nbytes + (second.nbytes if expected == GRANTED else 0)
        assert unregister(second) == (GRANTED if expected == GRANTED or one == other else NOT_REGISTERED)
        assert unregister(first) == (GRANTED if one != other else NOT_REGISTERED)
    assert RUNTIME.cudaHostRegister(0, PAGE, 0) == RUNTIME.cudaHostRegister(memory.data_ptr(), 0, 0) == INVALID
    assert (register(memory), unregister(memory[PAGE:]), unregister(memory)) == (GRANTED, NOT_REGISTERED, GRANTED)


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


class Registered:
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
                Registered(far + 2 * turn * PAGE)
            gc.set_threshold(allocations)
            gc.enable()
            assert not sim_pages.PAGES.hold(far - PAGE, far - PAGE + 1)
            assert sim_pages.PAGES.register(2 * far, PAGE) == 0
            assert sim_pages.PAGES.unregister(2 * far) == 0
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()
        gc.collect()
