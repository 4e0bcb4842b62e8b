"""The simulated accelerator behaves as one GPU does: its memory, its refusals, its random numbers, its gradients."""

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
from types import FrameType

import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn import functional

from hf_l2l.testing import enable_simulated_accelerator, sim_backward
from training import settled_memory

SIM = torch.device("sim", 0)
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


@pytest.fixture(autouse=True)
def _unlimited() -> Iterator[None]:
    gc.collect()
    torch.sim.reset_peak_memory_stats()
    yield
    enable_simulated_accelerator(None)


def run_alone(script: str) -> str:
    """Run `script` in a process of its own and return what it prints."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Enabling


def test_importing_registers_nothing() -> None:
    script = "import torch, hf_l2l.testing; print(torch._C._get_privateuse1_backend_name(), hasattr(torch, 'sim'))"
    assert run_alone(script).split() == ["privateuseone", "False"]


def test_enabling_after_a_backward_is_refused() -> None:
    script = """
import torch
from hf_l2l.testing import enable_simulated_accelerator
torch.ones((), requires_grad=True).backward()
for _ in range(2):
    try:
        enable_simulated_accelerator()
    except RuntimeError as error:
        print(error)
"""
    printed = run_alone(script)
    assert printed.count("before the first backward of the process") == 2


def test_enabling_again_changes_only_the_capacity() -> None:
    x = torch.ones(4, device="sim")
    assert enable_simulated_accelerator("1MiB") == SIM
    assert torch.sim.mem_get_info()[1] == 2**20
    assert enable_simulated_accelerator(1000) == SIM
    assert torch.sim.mem_get_info() == (1000 - torch.sim.memory_allocated(), 1000)
    assert x.tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("size", "nbytes"), [("8GiB", 8 * 2**30), ("500MB", 500 * 10**6), ("1.5 kib", 1536), ("77", 77), (1, 1)]
)
def test_sizes(size: int | str, nbytes: int) -> None:
    enable_simulated_accelerator(size)
    assert torch.sim.mem_get_info()[1] == nbytes


@pytest.mark.parametrize("size", [0, -1, "0GiB", "8 gibs", "GiB", "", True, 1.5, "-3MB"])
def test_a_bad_capacity_names_the_rule_and_the_value(size: object) -> None:
    with pytest.raises(ValueError, match="capacity must be a positive number of bytes.*got.*leave it out") as raised:
        enable_simulated_accelerator(size)  # type: ignore[arg-type]
    assert repr(size) in str(raised.value)


def test_it_is_the_accelerator() -> None:
    assert torch.accelerator.current_accelerator().type == "sim"
    assert torch.accelerator.device_count() == torch.sim.device_count() == 1
    torch.accelerator.synchronize()
    torch.sim.set_device("sim:0")
    assert torch.sim.current_device() == torch.accelerator.current_device_index() == 0
    x = torch.ones(100, device="sim")
    assert torch.accelerator.memory_allocated() == torch.sim.memory_allocated() >= x.nbytes
    assert torch.sim.memory_stats()["allocated_bytes.all.current"] == torch.sim.memory_allocated()


@pytest.mark.parametrize("device", ["sim:1", "cpu", 1])
def test_there_is_one_device(device: str | int) -> None:
    with pytest.raises(ValueError, match="the only one"):
        torch.sim.memory_allocated(device)


def test_a_second_device_is_refused() -> None:
    with pytest.raises(RuntimeError, match="invalid device sim:1"):
        torch.ones(2).to("sim:1")


# Memory


def test_live_and_peak_bytes() -> None:
    start = torch.sim.memory_allocated()
    torch.sim.reset_peak_memory_stats()
    x = torch.empty(1000, device="sim")
    assert torch.sim.memory_allocated() - start == 4000
    y = x * 2
    assert torch.sim.memory_allocated() - start == 8000
    del y
    assert torch.sim.memory_allocated() - start == 4000
    x + x[:1]
    x[:1].clone()
    assert torch.sim.max_memory_allocated() - start == 8000, "later and smaller allocations leave the peak"
    torch.sim.reset_peak_memory_stats()
    assert torch.sim.max_memory_allocated() - start == 4000


def test_views_share_their_bytes_and_keep_them() -> None:
    start = torch.sim.memory_allocated()
    x = torch.zeros(10, 100, device="sim")
    views = [x.view(-1)[5:], x.t(), x[3], x.unfold(1, 3, 1), x.detach(), x.expand(2, 10, 100), x.reshape(1000)]
    assert torch.sim.memory_allocated() - start == 4000
    views[2].fill_(7)
    del x
    assert torch.sim.memory_allocated() - start == 4000
    assert views[1].sum().item() == 700
    views.clear()
    assert torch.sim.memory_allocated() == start


def test_bytes_of_a_graph_come_back_with_it() -> None:
    layer = nn.Linear(64, 64).to("sim")
    held = torch.sim.memory_allocated()
    loss = layer(torch.ones(8, 64, device="sim")).tanh().sum()
    assert torch.sim.memory_allocated() > held
    loss.backward()
    del loss
    assert torch.sim.memory_allocated() == held + sum(p.nbytes for p in layer.parameters())


def test_past_the_capacity() -> None:
    x = torch.zeros(100, device="sim")
    live = torch.sim.memory_allocated()
    enable_simulated_accelerator(live + 500)
    for make in (lambda: torch.empty(200, device="sim"), lambda: x.repeat(2), lambda: torch.ones(200).to("sim")):
        torch.sim.reset_peak_memory_stats()
        with pytest.raises(torch.OutOfMemoryError, match=f"800 bytes asked, {live} bytes live.*{live + 500} bytes"):
            make()
        assert torch.sim.memory_allocated() == torch.sim.max_memory_allocated() == live
    fits = torch.empty(125, device="sim")
    assert torch.sim.memory_allocated() == live + fits.nbytes


def test_an_absurd_size_is_out_of_memory_and_not_the_hosts_error() -> None:
    enable_simulated_accelerator("8GiB")
    with pytest.raises(torch.OutOfMemoryError, match="40000000000000 bytes asked"):
        torch.empty(10**13, device="sim")


def test_out_of_memory_in_backward_arrives_and_leaves_the_account_right() -> None:
    x = torch.ones(1000, device="sim", requires_grad=True)
    loss = (x * 2).tanh().sum()
    live = torch.sim.memory_allocated()
    enable_simulated_accelerator(live + 100)
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    del loss
    assert x.grad is None
    enable_simulated_accelerator(None)
    assert settled_memory() < live  # the device's thread lets go of a graph that failed a moment later


# Devices


def test_what_crosses_devices() -> None:
    x = torch.arange(6.0).view(2, 3)
    on_sim = x.to("sim")
    assert on_sim.device == SIM and on_sim.is_sim and not on_sim.is_cpu
    assert on_sim.to("sim") is on_sim and on_sim.to("sim:0") is on_sim
    for back in (
        on_sim.cpu(),
        on_sim.to("cpu"),
        torch.zeros(2, 3).copy_(on_sim),
        on_sim.double().to("cpu", torch.float),
    ):
        assert back.device.type == "cpu" and torch.equal(back, x)
    on_sim.add_(1)
    assert torch.equal(x, torch.arange(6.0).view(2, 3)), "the device must not share memory with the host"
    assert (on_sim + torch.tensor(1.0)).device == SIM
    assert on_sim[torch.tensor([1])].device == SIM, "CUDA takes indices from the host as well"


@pytest.mark.parametrize(
    "mix",
    [
        lambda x, h: x + h,
        lambda x, h: h @ x,
        lambda x, h: torch.cat([x, h]),
        lambda x, h: h.add_(x),
        lambda x, h: x.mul_(h),
        lambda x, h: functional.embedding(torch.tensor([0]), x),
        lambda x, h: torch.where(x > 0, x, h),
        lambda x, h: functional.layer_norm(x, (3,), h[0]),
        lambda x, h: h[torch.tensor([0], device="sim")],
        lambda x, h: torch.add(x, x, out=h),
        lambda x, h: torch._foreach_add_([h], [x]),
        lambda x, h: h.sum().add_(x.sum()),
        lambda x, h: torch.ones(3, device="sim").set_(h.untyped_storage()),
    ],
)
def test_a_mixture_is_refused(mix: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
    with pytest.raises(RuntimeError, match="sim"):
        mix(torch.ones(3, 3, device="sim"), torch.ones(3, 3))


def test_numpy_is_refused_as_for_cuda() -> None:
    with pytest.raises(TypeError, match="Use Tensor.cpu"):
        torch.ones(2, device="sim").numpy()


# Operations


def on(device: str) -> dict[str, object]:
    """Return results of many small operations on `device`, from the same seed."""
    torch.manual_seed(3)
    d = torch.device(device)
    x = torch.randn(4, 5, device=d)
    i = torch.tensor([[0, 1], [2, 3]], device=d)
    return {
        "zeros": (torch.zeros(2, device=d), torch.ones(2, device=d), torch.full((2,), 3, device=d)),
        "arange": (torch.arange(5, device=d), torch.linspace(0, 1, 5, device=d), torch.eye(3, device=d)),
        "like": (torch.empty_like(x).fill_(1), torch.zeros_like(x), x.new_ones(2), x.new_tensor([1, 2])),
        "tri": (x.tril(), x.triu(1), torch.tril_indices(3, 3, device=d)),
        "random": (torch.rand(3, device=d), torch.randint(9, (4,), device=d), torch.randperm(6, device=d)),
        "random like": (
            torch.rand_like(x),
            torch.randn_like(x),
            torch.randint_like(x, 9),
            torch.empty(3, device=d).normal_(),
        ),
        "multinomial": (
            torch.multinomial(torch.ones(5, device=d), 3),
            torch.bernoulli(torch.full((9,), 0.5, device=d)),
        ),
        "exponential": (x.clone().exponential_(), x.clone().uniform_(), x.clone().bernoulli_(0.3)),
        "dropout": (functional.dropout(x, 0.5), functional.alpha_dropout(x, 0.5), functional.dropout(x, 1.0)),
        "index": (x[[0, 1]], x[x > 0], x[i[0], i[1]], x[:, 1:3], x[..., None], x[-1, 2]),
        "where": (torch.where(x > 0, x, 0.0), torch.where(x > 0), x.nonzero(), x.masked_fill(x > 0, -1)),
        "one_hot": (
            functional.one_hot(i),
            torch.zeros(4, 5, device=d).scatter_(1, i.repeat(2, 1), 1.0),
            x.gather(1, i),
        ),
        "sort": (x.sort(), x.topk(2), x.cumsum(1), x.argmax(-1), x.unique()),
        "scalars": (x.sum().item(), x.tolist(), bool((x == x).all()), torch.equal(x, x), torch.allclose(x, x + 1)),
        "joined": (
            torch.stack([x, x]),
            torch.cat([x, x], 1),
            x.split(2),
            x.unbind(1),
            torch.einsum("ij,kj->ik", x, x),
        ),
        "out": (torch.add(x, x, out=torch.empty(0, device=d)), torch.max(x, 1), x.std(), torch.var_mean(x)),
        "dtypes": (x.half(), x.to(torch.int64), x.bool(), x.double(), torch.view_as_real(torch.polar(x.exp(), x))),
        "resized": (torch.arange(6, device=d).resize_(4), torch.arange(3, device=d).resize_(6)[:3]),
        "foreach": torch._foreach_add([x, x], [x, x], alpha=2),
    }


def to_host(x: object) -> object:
    """Return `x` with the tensors in it on the host."""
    if isinstance(x, torch.Tensor):
        return x.cpu()
    return [to_host(y) for y in x] if isinstance(x, (list, tuple)) else x


def test_operations_give_what_the_host_gives() -> None:
    want, got = on("cpu"), on("sim")
    for name in want:
        torch.testing.assert_close(to_host(got[name]), to_host(want[name]), rtol=0, atol=0, msg=name)


def test_nothing_of_a_device_result_is_on_the_host() -> None:
    tensors = [t for t in torch.utils._pytree.tree_leaves(on("sim")) if isinstance(t, torch.Tensor)]
    assert len(tensors) > 50
    assert {t.device for t in tensors} == {SIM}


def attention(query: torch.Tensor, kind: str) -> torch.Tensor:
    size, device = query.size(-2), query.device
    key = query[:, :2] if kind == "gqa" else query
    mask = {
        "bool": torch.ones(size, size, device=device).tril().bool(),
        "float": torch.zeros(size, size, device=device),
    }
    p = 0.5 if kind == "dropout" else 0.0
    return functional.scaled_dot_product_attention(
        query, key, key, mask.get(kind), p, is_causal=kind == "causal", enable_gqa=kind == "gqa"
    )


@pytest.mark.parametrize("kind", ["plain", "bool", "float", "causal", "gqa", "dropout", "trained mask"])
def test_attention_and_its_gradient(kind: str) -> None:
    results = []
    for device in ("cpu", "sim"):
        torch.manual_seed(0)
        query = torch.randn(2, 4, 6, 8).to(device).requires_grad_()
        torch.manual_seed(1)
        if kind == "trained mask":
            mask = torch.ones(6, 6, device=device, requires_grad=True)
            functional.scaled_dot_product_attention(query, query, query, mask).sum().backward()
            results.append((mask.grad.cpu(), query.grad.cpu()))
        else:
            out = attention(query, kind)
            out.square().sum().backward()
            results.append((out.detach().cpu(), query.grad.cpu()))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: functional.embedding(torch.tensor([1, 1, 3], device=x.device), x),
        lambda x: functional.layer_norm(x, (6,)),
        lambda x: functional.cross_entropy(x, torch.tensor([0, 1, 2, -100], device=x.device)),
        lambda x: functional.conv2d(x.view(1, 1, 4, 6), x.new_ones(2, 1, 2, 2), stride=2),
        lambda x: x.index_add(0, torch.tensor([0, 0], device=x.device), x[:2]),
        lambda x: x.index_put((torch.tensor([1], device=x.device),), x[0]),
        lambda x: x.cumsum(0).topk(2).values,
        lambda x: x[x > 0].square(),
        lambda x: x.gather(1, torch.zeros(4, 2, dtype=torch.long, device=x.device)),
        lambda x: torch.einsum("ij,kj->ik", x, x).softmax(-1),
        lambda x: functional.gelu(x).unfold(1, 2, 1).flip(0),
        lambda x: functional.batch_norm(x, None, None, training=True),
        lambda x: functional.interpolate(x[None, None], scale_factor=2, mode="bilinear"),
        lambda x: torch.utils.checkpoint.checkpoint(functional.silu, x, use_reentrant=False),
        lambda x: torch.vmap(torch.sin)(x),
        lambda x: torch.view_as_real(torch.view_as_complex(x.view(4, 3, 2)) * torch.polar(x[:, :3], x[:, 3:])),
        lambda x: torch.view_as_complex(x.view(4, 3, 2)).conj().imag,
        lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=1) * torch.conj(torch.fft.rfft(x * x, dim=1)), n=6, dim=1),
    ],
)
def test_gradients_of_operations(fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    start = torch.randn(4, 6)
    grads = []
    for device in ("cpu", "sim"):
        x = start.to(device).clone().requires_grad_()
        fn(x).square().sum().backward()
        assert x.grad.device.type == device
        grads.append(x.grad.cpu())
    assert torch.equal(*grads)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"num_layers": 2, "bidirectional": True}])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_and_their_gradients(kind: Callable[..., nn.RNNBase], options: dict[str, object]) -> None:
    host = kind(4, 5, batch_first=True, dtype=torch.float64, **options)
    x, lengths = torch.randn(3, 6, 4, dtype=torch.float64), torch.tensor([6, 4, 1])
    for packs in (False, True):
        found = []
        for module, device in ((host, "cpu"), (copy.deepcopy(host).to(SIM), SIM)):
            given = x.to(device, copy=True).requires_grad_()
            packed = nn.utils.rnn.pack_padded_sequence(given, lengths, batch_first=True) if packs else given
            outputs, states = module(packed)
            outputs = outputs.data if packs else outputs
            outputs.square().sum().backward()
            states = states if isinstance(states, tuple) else (states,)
            gradients = [given.grad, *(p.grad for p in module.parameters())]
            found.append([each.detach().cpu() for each in (outputs, *states, *gradients)])
            module.zero_grad()
        for expected, result in zip(*found, strict=True):
            assert torch.allclose(result, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_a_state_of_which_no_output_is_used_gets_its_gradient(kind: Callable[..., nn.Module]) -> None:
    host, found = kind(4, 5, dtype=torch.float64), []
    x = torch.randn(3, 4, dtype=torch.float64)
    for module, device in ((host, "cpu"), (copy.deepcopy(host).to(SIM), SIM)):
        given = x.to(device, copy=True).requires_grad_()
        output = module(given)
        (output[1] if isinstance(output, tuple) else output).sum().backward()
        found.append(given.grad.cpu())
    assert torch.allclose(*found, rtol=1e-12)


def test_sixteen_bit_products_are_rounded_once() -> None:
    x = torch.randn(65, 65).bfloat16()
    assert torch.equal((x.to("sim") @ x.to("sim")).cpu(), (x.float() @ x.float()).bfloat16())


@pytest.mark.parametrize(
    "product",
    [
        lambda x, y: torch.mm(x, y),
        lambda x, y: x @ y,
        lambda x, y: x[None].expand(2, 4, 4) @ y,
        lambda x, y: torch.bmm(x[None], y[None]),
        lambda x, y: torch.dot(x[0], y[0]),
        lambda x, y: torch.addmm(x[0], y, y),
        lambda x, y: torch.addmv(x[0], y, y[0]),
        lambda x, y: torch.baddbmm(x[None], y[None], y[None]),
        lambda x, y: torch.einsum("ij,jk->ik", x, y),
        lambda x, y: functional.linear(x, y, y[0]),
        lambda x, y: functional.linear(x[None], y, y[0]),
        lambda x, y: functional.linear(y, y, x[0]),
        lambda x, y: functional.conv1d(x, y[:, :, None], y[0]),
        lambda x, y: functional.scaled_dot_product_attention(x[None], y[None], y[None]),
        lambda x, y: functional.scaled_dot_product_attention(x[None], x[None], x[None], y),
    ],
)
def test_products_of_several_dtypes_are_refused_as_on_cuda(product: Callable[..., object]) -> None:
    narrow, wide = (torch.ones(4, 4, device=SIM, dtype=dtype) for dtype in (torch.bfloat16, torch.float64))
    for given in ((narrow, wide), (wide, narrow), (narrow, narrow.half())):
        with pytest.raises(RuntimeError, match=r"dtype|scalar type|type .* should be the same"):
            product(*given)


def test_printing() -> None:
    assert repr(torch.ones(2, device="sim")) == "tensor([1., 1.], device='sim:0')"


def test_an_operation_the_host_lacks_says_so() -> None:
    with pytest.raises(NotImplementedError, match="not available on sim: the host has no kernel"):
        torch.ops.aten._scaled_dot_product_flash_attention(*[torch.ones(1, 1, 4, 8, device="sim")] * 3)


def test_an_output_of_the_wrong_shape_cannot_move_memory_away() -> None:
    wrong = torch.empty(2, device="sim")
    with pytest.raises(RuntimeError, match="not resizable"), pytest.warns(UserWarning, match="resized"):
        torch.add(torch.ones(9, device="sim"), 1, out=wrong)


# Copies


def test_copies_and_files() -> None:
    x = torch.arange(4.0, device="sim")
    module = nn.Linear(2, 2).to("sim")
    assert copy.deepcopy(module).weight.device == SIM
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


def test_deepcopied_bytes_are_counted() -> None:
    x = torch.zeros(100, device="sim")
    live = torch.sim.memory_allocated()
    clone = copy.deepcopy(x)
    assert torch.sim.memory_allocated() == live + clone.nbytes


def test_moving_a_module_keeps_its_parameters_and_ties() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    model["a"].register_buffer("seen", torch.zeros(1))
    weight, optimizer = model["a"].weight, torch.optim.SGD(model.parameters(), lr=1.0)
    before = weight.detach().clone()
    model.to("sim")
    assert model["a"].weight is weight is model["b"].weight and weight.device == SIM and model["a"].seen.device == SIM
    model["b"](model["a"](torch.ones(1, 3, device="sim"))).sum().backward()
    optimizer.step()
    model.to("cpu")
    assert model["a"].weight is weight and weight.device.type == weight.grad.device.type == "cpu"
    assert not torch.equal(weight.detach(), before)
    assert not torch.__future__.get_swap_module_params_on_conversion()


# Random numbers


def test_draws_leave_the_hosts_generator_alone() -> None:
    torch.manual_seed(0)
    host, state = torch.get_rng_state(), torch.sim.get_rng_state("sim")
    x = torch.ones(50, device="sim")
    for draw in (
        lambda: functional.dropout(x, 0.5),
        lambda: torch.randn(50, device="sim"),
        lambda: torch.rand_like(x),
        lambda: torch.randperm(50, device="sim"),
        lambda: torch.multinomial(x, 20),
        lambda: x.clone().exponential_(),
        lambda: torch.poisson(x * 5),
        lambda: functional.rrelu(-x, training=True),
        lambda: torch.ops.aten.native_dropout(x, 0.5, True)[0],
        lambda: functional.scaled_dot_product_attention(*[x.view(1, 1, 5, 10)] * 3, dropout_p=0.5),
    ):
        torch.sim.set_rng_state(state, "sim")
        first, moved = draw(), torch.sim.get_rng_state()
        assert not torch.equal(moved, state)
        second = draw()
        torch.sim.set_rng_state(state)
        assert torch.equal(draw(), first) and not torch.equal(first, second)
        assert torch.equal(torch.sim.get_rng_state(), moved)
        assert torch.equal(torch.get_rng_state(), host)


def test_every_random_operation_can_be_given_the_devices_generator() -> None:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    # Written out for the device; and called random by torch, but draw nothing on the host.
    known = {"native_dropout", "_fused_sdp_choice", "_scaled_dot_product_flash_attention_for_cpu"}
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and has_kernel(name, "CPU"):
            short, _, overload = name.removeprefix("aten::").partition(".")
            op = getattr(getattr(torch.ops.aten, short), overload or "default")
            if torch.Tag.nondeterministic_seeded in op.tags and short not in known:
                assert any(argument.name == "generator" for argument in op._schema.arguments), name


def test_host_draws_leave_the_device_alone() -> None:
    state = torch.sim.get_rng_state_all()
    torch.randn(5)
    assert torch.equal(torch.sim.get_rng_state(), state[0])
    torch.randn(5, device="sim")
    torch.sim.set_rng_state_all(state)
    assert torch.equal(torch.sim.get_rng_state(), state[0])


def test_seeding() -> None:
    torch.manual_seed(11)
    assert torch.sim.initial_seed() == 11
    first = torch.rand(3, device="sim")
    torch.sim.manual_seed(11)
    assert torch.equal(torch.rand(3, device="sim"), first)
    with torch.random.fork_rng(device_type="sim"):
        inside = torch.rand(3, device="sim")
    assert torch.equal(torch.rand(3, device="sim"), inside)


def test_a_host_generator_is_refused() -> None:
    with pytest.raises(RuntimeError, match="a generator on cpu was given"):
        torch.randn(2, device="sim", generator=torch.Generator())


# Autograd


class NestedDouble(torch.autograd.Function):
    """Doubles, by a backward inside its backward; notes its thread."""

    thread: int | None = None

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
        NestedDouble.thread = threading.get_ident()
        assert grad.device == SIM
        with torch.enable_grad():
            leaf = ctx.saved_tensors[0].detach().requires_grad_()
            (leaf * 2).backward(grad)
        return leaf.grad


def test_backward_has_its_own_thread_and_nests() -> None:
    x = torch.ones(3, device="sim", requires_grad=True)
    NestedDouble.apply(NestedDouble.apply(x)).sum().backward()
    assert x.grad.tolist() == [4.0] * 3
    assert NestedDouble.thread not in (None, threading.get_ident())


def raises(*args: object) -> torch.Tensor:
    raise KeyError("from the backward") from ValueError("its cause")


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
        return raises()


def raises_in_a_backward(grad: torch.Tensor) -> None:
    with torch.enable_grad():
        y = grad.detach().requires_grad_() * 2
        y.register_hook(raises)
        y.sum().backward()


def raises_when_wanted(x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, raises):
        return x.sin()


@pytest.mark.parametrize(
    "ruined",
    [
        pytest.param(lambda x: x.register_hook(raises), id="tensor hook"),
        pytest.param(lambda x: x.register_hook(raises_in_a_backward), id="nested"),
        pytest.param(lambda x: x.grad_fn.register_prehook(raises), id="before a node"),
        pytest.param(lambda x: x.grad_fn.register_hook(raises), id="after a node"),
        pytest.param(Raises.apply, id="function"),
        pytest.param(raises_when_wanted, id="saved tensor"),
    ],
)
def test_an_exception_in_a_backward_reaches_the_caller(ruined: Callable[[torch.Tensor], object]) -> None:
    before = settled_memory()
    for whole in (True, False):
        x = torch.ones(3, device="sim", requires_grad=True)
        y = x * 2
        z = ruined(y)
        loss = (z if isinstance(z, torch.Tensor) else y).sum()
        with pytest.raises(KeyError, match="from the backward") as raised:
            loss.backward() if whole else torch.autograd.grad(loss, x)
        assert isinstance(raised.value.__cause__, ValueError)
        assert raised.traceback[-1].name == "raises"
        (x * 2).sum().backward()
        assert x.grad.tolist() == [2.0] * 3
        del y, z, loss, raised
    del x
    assert settled_memory() == before


def test_an_exception_of_one_thread_is_not_anothers() -> None:
    both = threading.Barrier(2)
    found: dict[int, int] = {}

    def fail(number: int) -> None:
        def hook(grad: torch.Tensor) -> None:
            raise KeyError(number)

        x = torch.ones(3, device="sim", requires_grad=True)
        y = x * 2
        y.register_hook(hook)
        both.wait(timeout=60)
        try:
            y.sum().backward()
        except KeyError as error:
            found[number] = error.args[0]

    for _ in range(20):
        threads = [threading.Thread(target=fail, args=(number,)) for number in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == {1: 1, 2: 2}


def bert() -> hf.PreTrainedModel:
    return hf.BertForSequenceClassification(hf.BertConfig(vocab_size=100, **TINY))


def gpt2() -> hf.PreTrainedModel:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=2)
    )


def llama() -> hf.PreTrainedModel:
    return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=100, num_key_value_heads=2, **TINY))


def t5() -> hf.PreTrainedModel:
    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=100, decoder_start_token_id=0, **sizes))


def deberta() -> hf.PreTrainedModel:
    relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
    return hf.DebertaV2ForSequenceClassification(hf.DebertaV2Config(vocab_size=100, **relative, **TINY))


def vit() -> hf.PreTrainedModel:
    return hf.ViTForImageClassification(hf.ViTConfig(image_size=16, patch_size=8, **TINY))


def batch_for(model: hf.PreTrainedModel) -> dict[str, torch.Tensor]:
    if isinstance(model, hf.ViTForImageClassification):
        return {"pixel_values": torch.randn(3, 3, 16, 16), "labels": torch.tensor([0, 1, 0])}
    ids = torch.randint(3, 100, (3, 12))
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    labels = torch.tensor([0, 1, 0]) if "Classification" in type(model).__name__ else ids
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("make", [bert, gpt2, llama, t5, deberta, vit])
def test_whole_models_have_the_hosts_gradients(make: Callable[[], hf.PreTrainedModel]) -> None:
    model = make().eval()
    batch = batch_for(model)
    twin = copy.deepcopy(model).to("sim")
    loss = model(**batch).loss
    loss.backward()
    twin_loss = twin(**{name: t.to("sim") for name, t in batch.items()}).loss
    twin_loss.backward()
    assert twin_loss.item() == loss.item()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert q.device == SIM
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.equal(p.grad, q.grad.cpu()), name


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}])
def test_optimizers(optimizer: type[torch.optim.Optimizer], options: dict[str, bool]) -> None:
    after = []
    for device in ("cpu", "sim"):
        torch.manual_seed(0)
        model = nn.Linear(4, 4).to(device)
        steps = optimizer(model.parameters(), lr=0.1, **options)
        for _ in range(3):
            model(torch.ones(2, 4, device=device)).square().sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            steps.step()
            steps.zero_grad()
        after.append(model.weight.detach().cpu())
    assert torch.equal(*after)


# Autocast


def test_autocast_casts_what_cuda_casts() -> None:
    model, x = nn.Linear(4, 4).to("sim"), torch.randn(2, 4, device="sim")
    query = torch.randn(1, 2, 3, 4, device="sim")
    with torch.autocast("sim", dtype=torch.bfloat16):
        out = model(x)
        assert out.dtype == torch.bfloat16
        assert functional.scaled_dot_product_attention(query, query, query).dtype == torch.bfloat16
        for float32 in (out.softmax(-1), functional.layer_norm(out, (4,)), out.exp(), out.sum(), out + x):
            assert float32.dtype == torch.float32
        assert torch.softmax(out, -1, dtype=torch.float64).dtype == torch.float64
    out.float().sum().backward()
    assert model.weight.grad.dtype == torch.float32 and model(x).dtype == torch.float32


def test_autocast_of_the_host_does_not_reach_the_device() -> None:
    x = torch.randn(2, 4, device="sim")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x.t()).dtype == torch.float32
        assert (x.cpu() @ x.cpu().t()).dtype == torch.bfloat16


@pytest.mark.parametrize("cached", [True, False])
def test_autocast_keeps_cast_weights_until_it_ends(cached: bool) -> None:
    weight, x = nn.Parameter(torch.ones(2, 2, device="sim")), torch.ones(1, 2, device="sim")
    with torch.autocast("sim", dtype=torch.bfloat16, cache_enabled=cached):
        x @ weight
        with torch.no_grad():
            weight.zero_()
        assert (x @ weight).sum().item() == (4.0 if cached else 0.0), "as on CUDA: the cache is keyed by the leaf"
    with torch.autocast("sim", dtype=torch.bfloat16):
        assert (x @ weight).sum().item() == 0.0


# The Hugging Face libraries


class Sentences(torch.utils.data.Dataset):
    """Token ids and a label; lengths differ, so that evaluation pads."""

    def __init__(self, count: int) -> None:
        draw = torch.Generator().manual_seed(0)
        self.ids = [torch.randint(3, 100, (8 + i % 3,), generator=draw) for i in range(count)]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, object]:
        return {
            "input_ids": functional.pad(self.ids[i], (0, 12 - len(self.ids[i]))),
            "labels": int(self.ids[i][0]) % 2,
        }


def trained(tmp_path: object, **options: object) -> hf.Trainer:
    torch.manual_seed(0)
    model = hf.BertForSequenceClassification(
        hf.BertConfig(vocab_size=100, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **TINY)
    )
    settings = {"num_train_epochs": 1, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "seed": 5}
    args = hf.TrainingArguments(str(tmp_path), per_device_train_batch_size=4, **settings | options)
    accuracy = {"compute_metrics": lambda p: {"right": int((p.predictions.argmax(-1) == p.label_ids).sum())}}
    trainer = hf.Trainer(model, args, train_dataset=Sentences(16), eval_dataset=Sentences(6), **accuracy)
    trainer.train()
    return trainer


def test_trainer_trains_and_evaluates_as_on_the_host(tmp_path: object) -> None:
    on_sim, on_host = trained(tmp_path), trained(tmp_path, use_cpu=True)
    assert on_sim.args.device == SIM and on_host.args.device.type == "cpu"
    assert on_sim.args.dataloader_pin_memory
    for p, q in zip(on_sim.model.parameters(), on_host.model.parameters(), strict=True):
        assert p.device == SIM and q.device.type == "cpu" and torch.equal(p.cpu(), q)
    got, want = on_sim.evaluate(), on_host.evaluate()
    assert (got["eval_loss"], got["eval_right"]) == (want["eval_loss"], want["eval_right"])
    assert (on_sim.predict(Sentences(5)).predictions == on_host.predict(Sentences(5)).predictions).all()


def test_trainer_saves_and_resumes(tmp_path: object) -> None:
    options = {"save_strategy": "epoch", "eval_strategy": "epoch", "bf16": True}
    first = trained(tmp_path, **options)
    settings = hf.TrainingArguments(str(tmp_path), num_train_epochs=2, report_to=[], disable_tqdm=True, **options)
    settings.per_device_train_batch_size = first.args.per_device_train_batch_size
    again = hf.Trainer(bert(), settings, train_dataset=Sentences(16), eval_dataset=Sentences(6))
    again.train(resume_from_checkpoint=True)
    assert again.model.device == SIM and again.state.global_step == 8


def test_accelerate_picks_it_and_gathers() -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator()
    assert accelerator.device == SIM
    tensors = {"a": torch.ones(2, 3, device="sim"), "b": torch.tensor(1.0, device="sim")}
    assert accelerator.gather_for_metrics(tensors)["a"].device == SIM
    assert accelerator.pad_across_processes(tensors["a"], dim=1).shape == (2, 3)
    model, loader = accelerator.prepare(nn.Linear(3, 1), torch.utils.data.DataLoader(torch.ones(4, 3), batch_size=2))
    assert [model(batch).device for batch in loader] == [SIM, SIM]
    AcceleratorState._reset_state(reset_partial_state=True)
    assert Accelerator(cpu=True).device.type == "cpu"
    AcceleratorState._reset_state(reset_partial_state=True)


def test_trainer_helpers() -> None:
    from transformers.trainer_pt_utils import nested_concat, nested_detach, nested_numpify

    nested = (torch.ones(1, 2, device="sim"), [torch.zeros(1, 3, device="sim", requires_grad=True) * 2])
    both = nested_concat(nested_detach(nested), nested_detach(nested))
    assert both[0].device == SIM and nested_numpify(both)[1][0].shape == (2, 3)


@pytest.mark.parametrize("workers", [0, 1])
def test_pinning_is_a_copy_that_says_so(workers: int) -> None:
    loader = torch.utils.data.DataLoader(torch.arange(4.0), batch_size=2, pin_memory=True, num_workers=workers)
    batches = list(loader)
    assert all(batch.is_pinned() for batch in batches) and torch.cat(batches).tolist() == [0.0, 1.0, 2.0, 3.0]
    x = torch.ones(2)
    assert not x.is_pinned() and x.pin_memory().is_pinned() and x.pin_memory()[1:].is_pinned()


# Speed


def test_a_bert_layer_costs_some_calls_of_python_whatever_else_is_there() -> None:
    """Which take tens of milliseconds on a machine that does nothing else."""
    config = hf.BertConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=256)
    layer = hf.BertModel(config).encoder.layer[0].to("sim")
    x = torch.randn(4, 32, 64, device="sim", requires_grad=True)

    calls = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += event == "call"

    def step() -> int:
        nonlocal calls
        calls = 0
        sys.setprofile(count)
        try:
            layer(x)
        finally:
            sys.setprofile(None)
        return calls

    step()  # the first one learns
    alone = step()
    others = [torch.zeros(1, device="sim") for _ in range(1000)]
    assert step() == alone < 3000
    del others


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
