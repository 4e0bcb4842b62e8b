"""Operations of the simulated accelerator: the host's results, gradients and random numbers, and CUDA's refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from runs import on_host

SIM = torch.device("sim", 0)
Function = Callable[..., Any]


def results_on(device: str) -> dict[str, object]:
    """Results of many small operations on `device`, from the same seed."""
    torch.manual_seed(3)
    d = torch.device(device)
    x = torch.randn(4, 5, device=d)
    i = torch.tensor([[0, 1], [2, 3]], device=d)
    return {
        "arange": (torch.arange(5, device=d), torch.linspace(0, 1, 5, device=d), torch.eye(3, device=d)),
        "like": (torch.empty_like(x).fill_(1), torch.zeros_like(x), x.new_ones(2), x.new_tensor([1, 2])),
        "random": (torch.rand(3, device=d), torch.randint(9, (4,), device=d), torch.randperm(6, device=d)),
        "random like": (torch.rand_like(x), torch.randn_like(x), torch.randint_like(x, 9)),
        "multinomial": torch.multinomial(torch.ones(5, device=d), 3),
        "bernoulli": (torch.bernoulli(torch.full((9,), 0.5, device=d)), x.clone().bernoulli_(0.3)),
        "drawn in place": (torch.empty(3, device=d).normal_(), x.clone().exponential_(), x.clone().uniform_()),
        "dropout": (functional.dropout(x, 0.5), functional.alpha_dropout(x, 0.5), functional.dropout(x, 1.0)),
        "index": (x[[0, 1]], x[x > 0], x[i[0], i[1]], x[:, 1:3], x[..., None], x[-1, 2]),
        "where": (torch.where(x > 0, x, 0.0), torch.where(x > 0), x.nonzero(), x.masked_fill(x > 0, -1)),
        "scatter": torch.zeros(4, 5, device=d).scatter_(1, i.repeat(2, 1), 1.0),
        "sort": (x.sort(), x.topk(2), x.cumsum(1), x.argmax(-1), x.unique()),
        "scalars": (x.sum().item(), x.tolist(), bool((x == x).all()), torch.equal(x, x), torch.allclose(x, x + 1)),
        "out": (torch.add(x, x, out=torch.empty(0, device=d)), torch.max(x, 1), x.std(), torch.var_mean(x)),
        "dtypes": (x.half(), x.to(torch.int64), x.bool(), x.double(), torch.view_as_real(torch.polar(x.exp(), x))),
        "resized": (torch.arange(6, device=d).resize_(4), torch.arange(3, device=d).resize_(6)[:3]),
        "foreach": torch._foreach_add([x, x], [x, x], alpha=2),
    }


def test_operations_give_what_the_host_gives_and_nothing_of_it_is_on_the_host():
    expected, found = results_on("cpu"), results_on("sim")
    for name, value in expected.items():
        torch.testing.assert_close(on_host(found[name]), value, rtol=0, atol=0, msg=name)
    tensors = [x for x in torch.utils._pytree.tree_leaves(found) if isinstance(x, torch.Tensor)]
    assert len(tensors) > 40 and {x.device for x in tensors} == {SIM}


def assert_as_on_the_host(
    module: Function, x: torch.Tensor, tolerance: float, use: Function = lambda module, x: module(x)
) -> None:
    """What `use` makes of a function or module and `x`, and the gradients of `x` and of parameters."""
    found = []
    for device in ("sim", "cpu"):
        of = copy.deepcopy(module).to(device) if isinstance(module, nn.Module) else module
        leaves = [x.to(device, copy=True).requires_grad_(), *(of.parameters() if isinstance(of, nn.Module) else ())]
        torch.manual_seed(1)
        outputs = [each for each in torch.utils._pytree.tree_leaves(use(of, leaves[0])) if each.is_floating_point()]
        sum(each.square().sum() for each in outputs).backward()
        assert {each.grad.device.type for each in leaves} == {device}
        found.append([each.detach().cpu() for each in (*outputs, *(leaf.grad for leaf in leaves))])
    torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance)


DIFFERENTIABLE: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: functional.embedding(torch.tensor([1, 1, 3], device=x.device), x),
    lambda x: functional.cross_entropy(x, torch.tensor([0, 1, 2, -100], device=x.device)),
    lambda x: functional.conv2d(x.view(1, 1, 4, 6), x.new_ones(2, 1, 2, 2), stride=2),
    lambda x: x.index_add(0, torch.tensor([0, 0], device=x.device), x[:2]),
    lambda x: torch.einsum("ij,kj->ik", x, x).softmax(-1),
    lambda x: functional.batch_norm(x, None, None, training=True),
    lambda x: functional.interpolate(x[None, None], scale_factor=2, mode="bilinear"),
    lambda x: torch.utils.checkpoint.checkpoint(functional.silu, x, use_reentrant=False),
    lambda x: torch.view_as_real(torch.view_as_complex(x.view(4, 3, 2)) * torch.polar(x[:, :3], x[:, 3:])),
    lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=1) * torch.conj(torch.fft.rfft(x * x, dim=1)), n=6, dim=1),
]
attend = functional.scaled_dot_product_attention
ATTENTION: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: attend(x, x, x, torch.ones(6, 6, device=x.device).tril().bool()),
    lambda x: attend(x, x, x, torch.zeros(6, 6, device=x.device)),
    lambda x: attend(x, x, x, x[0, 0, :, :6]),  # a mask that is trained
    lambda x: attend(x, x, x, is_causal=True),
    lambda x: attend(x, x[:, :2], x[:, :2], enable_gqa=True),
    lambda x: attend(x, x, x, dropout_p=0.5),
]


def test_operations_have_the_hosts_gradients():
    for function in DIFFERENTIABLE:
        assert_as_on_the_host(function, torch.randn(4, 6), 0)
    for function in ATTENTION:
        assert_as_on_the_host(function, torch.randn(2, 4, 6, 8), 1e-6)


def test_recurrent_layers_and_their_gradients():
    x, lengths = torch.randn(3, 3, 4, dtype=torch.float64), torch.tensor([3, 2, 1])

    def packed(layer: nn.RNNBase, x: torch.Tensor) -> object:
        outputs, states = layer(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))
        return outputs.data, states

    twice: dict[str, Any] = {"bias": False, "num_layers": 2, "bidirectional": True}
    for kind, options in ((nn.LSTM, twice), (nn.GRU, {})):
        layer = kind(4, 5, batch_first=True, dtype=torch.float64, **options)
        assert_as_on_the_host(layer, x, 1e-12)
        assert_as_on_the_host(layer, x, 1e-12, packed)
    # One of its outputs is not used.
    assert_as_on_the_host(nn.LSTMCell(4, 5, dtype=torch.float64), x[:, 0], 1e-12, lambda cell, x: cell(x)[1])


REFUSED: list[tuple[str, Callable[[torch.Tensor, torch.Tensor], object]]] = [
    ("sim", lambda x, h: x + h),
    ("sim", lambda x, h: h @ x),
    ("sim", lambda x, h: functional.embedding(torch.tensor([0]), x)),
    ("sim", lambda x, h: torch.where(x > 0, x, h)),
    ("sim", lambda x, h: h[torch.tensor([0], device="sim")]),
    ("sim", lambda x, h: torch.add(x, x, out=h)),
    ("sim", lambda x, h: torch.ones(3, device="sim").set_(h.untyped_storage())),
    ("Use Tensor.cpu", lambda x, h: x.numpy()),
    ("a generator on cpu was given", lambda x, h: torch.randn(2, device="sim", generator=torch.Generator())),
    ("the host has no kernel", lambda x, h: torch.ops.aten._scaled_dot_product_flash_attention(*[x[None, None]] * 3)),
]


def test_what_cuda_refuses_is_refused():
    x, host, wrong = torch.ones(4, 4, device="sim"), torch.ones(4, 4), torch.empty(2, device="sim")
    for number, (match, operation) in enumerate(REFUSED):
        with pytest.raises((RuntimeError, TypeError), match=match):
            operation(x, host)
            pytest.fail(f"operation {number}")
    with pytest.raises(RuntimeError, match="not resizable"), pytest.warns(UserWarning, match="resized"):
        torch.add(torch.ones(9, device="sim"), 1, out=wrong)  # its memory cannot be moved away


PRODUCTS: list[Callable[[torch.Tensor, torch.Tensor], object]] = [
    lambda x, y: torch.addmm(x[0], y, y),
    lambda x, y: torch.einsum("ij,jk->ik", x, y),
    lambda x, y: functional.conv1d(x, y[:, :, None], y[0]),
    lambda x, y: functional.scaled_dot_product_attention(x[None], y[None], y[None]),
    lambda x, y: functional.scaled_dot_product_attention(x[None], x[None], x[None], y),
]


def test_products_of_several_dtypes_are_refused_as_on_cuda_and_those_of_16_bits_rounded_once():
    narrow, wide = (torch.ones(4, 4, device=SIM, dtype=dtype) for dtype in (torch.bfloat16, torch.float64))
    for number, product in enumerate(PRODUCTS):
        for given in ((narrow, wide), (wide, narrow), (narrow, narrow.half())):
            with pytest.raises(RuntimeError, match=r"dtype|scalar type|type .* should be the same"):
                product(*given)
                pytest.fail(f"product {number}")
    x = torch.randn(65, 65).bfloat16()
    assert torch.equal((x.to("sim") @ x.to("sim")).cpu(), (x.float() @ x.float()).bfloat16())


def test_device_and_host_have_generators_of_their_own_and_one_seed():
    host, state = torch.get_rng_state(), torch.sim.get_rng_state("sim")
    x = torch.ones(50, device="sim")
    for draw in (
        lambda: functional.dropout(x, 0.5),
        lambda: torch.randn(50, device="sim"),
        lambda: x.clone().exponential_(),
        lambda: functional.rrelu(-x, training=True),
        lambda: functional.scaled_dot_product_attention(*[x.view(1, 1, 5, 10)] * 3, dropout_p=0.5),
    ):
        torch.sim.set_rng_state(state, "sim")
        first, moved = draw(), torch.sim.get_rng_state()
        assert not torch.equal(moved, state)
        second = draw()
        torch.sim.set_rng_state_all([state])
        assert torch.equal(draw(), first) and not torch.equal(first, second)
        assert torch.equal(torch.sim.get_rng_state(), moved)
        assert torch.equal(torch.get_rng_state(), host)
    torch.randn(5)
    assert torch.equal(torch.sim.get_rng_state_all()[0], moved)
    torch.manual_seed(11)
    assert torch.sim.initial_seed() == 11
    first = torch.rand(3, device="sim")
    torch.sim.manual_seed(11)
    assert torch.equal(torch.rand(3, device="sim"), first)
    with torch.random.fork_rng(device_type="sim"):
        inside = torch.rand(3, device="sim")
    assert torch.equal(torch.rand(3, device="sim"), inside)


def test_every_random_operation_can_be_given_the_devices_generator():
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    # Written out for the device; and called random by torch, but draw nothing on the host.
    known = {"native_dropout", "_fused_sdp_choice", "_scaled_dot_product_flash_attention_for_cpu"}
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and has_kernel(name, "CPU"):
            short, _, overload = name.removeprefix("aten::").partition(".")
            op = getattr(getattr(torch.ops.aten, short), overload or "default")
            if torch.Tag.nondeterministic_seeded in op.tags and short not in known:
                assert any(argument.name == "generator" for argument in op._schema.arguments), name
