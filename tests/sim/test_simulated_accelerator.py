"""The simulated accelerator behaves as one GPU does: its memory, its copies, its backwards, under other libraries."""

from __future__ import annotations

import copy
import ctypes
import functools
import gc
import io
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from hf_l2l.testing import enable_simulated_accelerator, sim_backward
from tiers import nightly
from training import plain_trainer, settled_memory, tiny_bert

SIM = torch.device("sim", 0)


@pytest.fixture(autouse=True)
def _unlimited() -> Iterator[None]:
    gc.collect()
    torch.sim.reset_peak_memory_stats()
    yield
    enable_simulated_accelerator(None)


# Enabling


@nightly
def test_importing_registers_nothing_and_after_a_backward_nothing_can_be():
    script = """
import torch
from hf_l2l.testing import enable_simulated_accelerator
print(torch._C._get_privateuse1_backend_name(), hasattr(torch, "sim"))
torch.ones((), requires_grad=True).backward()
try:
    enable_simulated_accelerator()
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    before, after = done.stdout.splitlines()
    assert before == "privateuseone False"
    assert "before the first backward of the process" in after


def test_enabling_again_changes_only_the_capacity():
    x = torch.ones(4, device="sim")
    sizes = {"1MiB": 2**20, "500MB": 500 * 10**6, "1.5 kib": 1536, "77": 77, 1000: 1000}
    for size, nbytes in sizes.items():
        assert enable_simulated_accelerator(size) == SIM
        assert torch.sim.mem_get_info() == (nbytes - torch.sim.memory_allocated(), nbytes)
    assert x.tolist() == [1.0] * 4
    for wrong in (0, "0GiB", "8 gibs", "", True, 1.5):
        with pytest.raises(ValueError, match="capacity must be a positive number of bytes"):
            enable_simulated_accelerator(wrong)


def test_it_is_the_accelerator_and_there_is_one():
    assert torch.accelerator.current_accelerator().type == "sim"
    assert torch.accelerator.device_count() == torch.sim.device_count() == 1
    assert torch.sim.current_device() == torch.accelerator.current_device_index() == 0
    x = torch.ones(100, device="sim")
    assert torch.accelerator.memory_allocated() == torch.sim.memory_allocated() >= x.nbytes
    assert torch.sim.memory_stats()["allocated_bytes.all.current"] == torch.sim.memory_allocated()
    assert repr(x[:2]) == "tensor([1., 1.], device='sim:0')"
    for device in ("sim:1", "cpu", 1):
        with pytest.raises(ValueError, match="the only one"):
            torch.sim.memory_allocated(device)
    with pytest.raises(RuntimeError, match="invalid device sim:1"):
        torch.ones(2).to("sim:1")


# Memory


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


# Copies


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


# Backwards


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
    found: dict[int, int] = {}

    def fail(number: int) -> None:
        def hook(grad: torch.Tensor) -> None:
            raise KeyError(number)

        y = torch.ones(3, device="sim", requires_grad=True) * 2
        y.register_hook(hook)
        both.wait(timeout=60)
        try:
            y.sum().backward()
        except KeyError as error:
            found[number] = error.args[0]

    for _ in range(5):
        threads = [threading.Thread(target=fail, args=(number,)) for number in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == {1: 1, 2: 2}


@pytest.mark.parametrize("adds_reference", [True, False], ids=["as torch 2.13", "as torch 2.11"])
def test_what_a_backward_stashes_has_one_reference_more(adds_reference, monkeypatch):
    """Else it would be freed while a backward uses it, or by the value that takes its place."""
    original, torch_adds = torch._C._stash_obj_in_tls, sim_backward.adds_reference()
    count = ctypes.PYFUNCTYPE(None, ctypes.py_object)
    more, fewer = (count((name, ctypes.pythonapi)) for name in ("Py_IncRef", "Py_DecRef"))

    def stash(key: str, value: object) -> None:
        if adds_reference != torch_adds:
            (more if adds_reference else fewer)(value)
        original(key, value)

    monkeypatch.setattr(torch._C, "_stash_obj_in_tls", stash)
    monkeypatch.setattr(sim_backward, "adds_reference", functools.cache(sim_backward.adds_reference.__wrapped__))
    assert sim_backward.adds_reference() == adds_reference
    value = object()
    before = sys.getrefcount(value)
    for other in (None, object()):
        sim_backward.stash("a test", value)
        assert sys.getrefcount(value) == before + 1
        sim_backward.stash("a test", other)
        assert sys.getrefcount(value) == before
        assert sim_backward.in_tls("a test") is other
    sim_backward.stash("a test", None)


# Autocast


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


# The Hugging Face libraries


def test_trainer_trains_evaluates_and_resumes_as_on_the_host(tmp_path):
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "dataloader_pin_memory": True}
    made = []
    for kind, more in (("sim", {}), ("cpu", {"use_cpu": True})):
        trained = plain_trainer(tmp_path / kind, model=tiny_bert(0.0, 2), **options, **more)
        trained.train()
        assert {p.device.type for p in trained.model.parameters()} == {kind}
        made.append(trained)
    on_sim, host = made
    assert on_sim.evaluate()["eval_loss"] == host.evaluate()["eval_loss"]
    again = plain_trainer(tmp_path / "sim", model=tiny_bert(0.0, 2), **options)
    again.train(resume_from_checkpoint=str(tmp_path / "sim" / "checkpoint-2"))
    for name, value in again.model.state_dict().items():
        assert torch.equal(value.cpu(), host.model.state_dict()[name]), name
