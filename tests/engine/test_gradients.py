"""What `p.grad` holds: sums of gradients as in plain torch, which the program may read, set, clip and keep;
and masters that are the right ones whatever a program does to the model, between which parts of a step."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from devices import DEVICE
from hf_l2l import EagerParamServer, L2LConfig, NonFiniteError, attach_l2l
from memory_switches import forced_copies
from models import (
    Block,
    Toy,
    assert_bits_of_plain,
    assert_same_bits,
    batch_for,
    gradients,
    has_bits_of_plain,
    train_once,
)
from runs import assert_same_run, assert_same_tensors, attach, config_for, run_of
from tiers import cpu_suffices, more, nightly, on_a_device, on_the_host


@pytest.fixture(params=["views", "copies"] if DEVICE == "cpu" else ["copies"])
def copies(request):
    """On the CPU, gradients are handed over, or copied as on a device with memory of its own."""
    with forced_copies() if request.param == "copies" and DEVICE == "cpu" else nullcontext():
        yield


def pair(model: nn.Module, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A model under L2L, and the same in plain torch on the host; neither draws dropout."""
    plain = copy.deepcopy(model).eval()
    attach_l2l(model.eval(), config_for(model, device=DEVICE, **options))
    return model, plain


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


# ---- sums


def test_gradients_are_the_programs(copies):
    """None starts a sum, more is added, and what the program has set is added to."""
    model, _ = pair(Toy(2))
    batch = batch_for(model, masked=False)
    model(**batch).loss.backward()
    once, kept = gradients(model), {name: p.grad for name, p in model.named_parameters()}
    memory = [t.untyped_storage().data_ptr() for p in model.parameters() for t in (p, p.grad)]
    assert len(set(memory)) == len(memory) and not any(g.requires_grad for g in kept.values())
    model(**batch).loss.backward()
    assert all(p.grad is kept[name] for name, p in model.named_parameters())
    assert_same_bits(gradients(model), {name: 2 * g for name, g in once.items()})
    for set_to_none in (True, False):
        model.zero_grad(set_to_none=set_to_none)
        assert all((p.grad is None) == set_to_none for p in model.parameters())
        model(**batch).loss.backward()
        assert_same_bits(gradients(model), once)
    own = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.grad = own[name]
    model(**batch).loss.backward()
    assert all(p.grad is own[name] for name, p in model.named_parameters())
    assert_same_bits(own, {name: torch.ones_like(g) + g for name, g in once.items()})


SET = {
    "gaps": lambda p: torch.stack([p, p], dim=-1)[..., 0],
    "transposed": lambda p: (p * 0.1).t().contiguous().t() if p.dim() == 2 else p.clone(),
    "offset": lambda p: torch.zeros(p.numel() + 1)[1:].view(p.shape),
    "sparse": lambda p: torch.ones_like(p).to_sparse(),
}


@cpu_suffices
@pytest.mark.parametrize("name", SET)
@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
def test_a_gradient_of_any_layout_that_the_program_set_is_added_to(name):
    model, plain = pair(Toy(2))
    for each in (model, plain):
        for p in each.parameters():
            p.grad = SET[name](p.detach())
        each(**batch_for(model, masked=False)).loss.backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.to_dense(), q.grad.to_dense(), rtol=1e-5, atol=1e-7)


KEPT: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda g: g,
    "detached": lambda g: g.detach(),
    "rows": lambda g: g[:1],
    "flat": lambda g: g.view(-1)[1:],
    "numpy": lambda g: g.numpy(),
    "dlpack": lambda g: torch.from_dlpack(g),
    "storage": lambda g: g.untyped_storage(),
}


@cpu_suffices
def test_gradients_that_the_program_keeps_keep_their_values():
    model, plain = pair(Toy(2))
    for name, keep in KEPT.items():
        model.zero_grad()
        model(**batch_for(model, masked=False)).loss.backward()
        weight = model.blocks[1].down.weight
        address, kept = weight.grad.data_ptr(), keep(weight.grad)
        before = kept.tolist()
        for seed in (5, 6):
            model.zero_grad()
            model(**batch_for(model, masked=False, seed=seed)).loss.backward()
            assert kept.tolist() == before and weight.grad.data_ptr() != address, name
    plain(**batch_for(plain, masked=False, seed=6)).loss.backward()
    torch.testing.assert_close(gradients(model), gradients(plain), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("layers", "calls", "slots"), [(1, 1, 1), (2, 3, 2), *more((1, 3, 2), (2, 3, 1))])
def test_several_calls_of_a_layer_and_several_backwards_sum_as_in_plain_torch(layers, calls, slots, copies):
    """A weight has more entries than are added to a sum in the host at once."""
    width = 730 if layers == 1 else 8
    # A tied head of that width is so sure of the token it has got that no gradient is left.
    model, plain = pair(Toy(layers, width, calls=calls, tied=layers > 1), gradient_slots=slots)
    for each in (model, plain):
        for seed in range(2):
            each(**batch_for(each, masked=False, rows=2, seed=seed)).loss.backward()
    # Of the second backward, the gradients of each call are added to p.grad by themselves.
    torch.testing.assert_close(gradients(model), gradients(plain), rtol=1e-4, atol=1e-5)
    for each in (model, plain):
        each.zero_grad()
        each(**batch_for(each, masked=False, rows=2)).loss.backward()
    assert all(gradient.any() for gradient in gradients(plain).values())
    assert_bits_of_plain(gradients(model), gradients(plain))


def test_layers_that_share_a_weight_sum_as_in_plain_torch():
    made = Toy(3, tied=False)
    made.blocks[2].up.weight = made.blocks[0].up.weight
    made.blocks[1].up.bias = nn.Parameter(torch.zeros(16))
    made.head.weight = made.blocks[1].up.weight = nn.Parameter(torch.randn(60, 8)[:16].repeat(4, 1)[:60])
    made.blocks[1].up, made.blocks[1].down = nn.Linear(8, 60), nn.Linear(60, 8)
    made.blocks[1].up.weight = made.head.weight  # one of the shell
    model, plain = pair(made)
    for each in (model, plain):
        each(**batch_for(each, masked=False)).loss.backward()
    torch.testing.assert_close(gradients(model), gradients(plain), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("ubatch_size", [3, None])
def test_a_loss_of_two_models_has_the_gradients_of_both(ubatch_size):
    """A student's and a teacher's that trains, too, of more layers; micro-batches have 3 and 2 rows."""
    students, teachers = pair(Toy(2), ubatch_size=ubatch_size), pair(Toy(3), ubatch_size=3)
    for student, teacher in zip(students, teachers, strict=True):
        batch = batch_for(student, masked=False)
        one, two = student(**batch), teacher(**batch)
        (one.loss + two.loss + nn.functional.mse_loss(one.logits, two.logits)).backward()
    for ours, plain in (students, teachers):
        torch.testing.assert_close(gradients(ours), gradients(plain), rtol=1e-4, atol=1e-6)


# ---- sparse gradients


class Calling(torch.autograd.Function):
    """Calls something in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, do: Callable[[], None]) -> torch.Tensor:
        ctx.do = do
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.do()
        return gradient, None


def in_a_backward(do: Callable[[], Any]) -> None:
    """Call `do` inside a backward, as the relay calls the EPS; what it raises, backward raises."""
    Calling.apply(torch.ones((), device=DEVICE, requires_grad=True), do).backward()


@pytest.mark.parametrize("order", ["sds", "ssd", "s+d", "d+s+d"])
def test_sparse_and_dense_gradients_of_one_weight_add_up(order, copies):
    """Within a backward and, after a "+", in the next one. The simulated device itself makes no sparse tensors."""
    module, other = nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2)
    eps = EagerParamServer(nn.ModuleList([module, other]), torch.empty(0, device=DEVICE).device)
    sums = torch.zeros(4, 2)

    def receive(kind: str, value: float) -> None:
        gradient = torch.zeros(4, 2)
        gradient[1:3] = value
        sums.add_(gradient)
        sent = gradient.to_sparse() if kind == "s" else gradient.to(DEVICE)
        eps.receive([(eps.masters.of(module.weight), sent), one_of_the_other()])

    def fail() -> None:
        receive("s", 7.0)
        raise KeyError

    def one_of_the_other() -> Any:
        return eps.masters.of(other.bias), torch.ones(2, device=DEVICE)

    for turn, backward in enumerate(order.split("+")):
        in_a_backward(lambda: [receive(kind, 10.0**i + turn) for i, kind in enumerate(backward)])  # noqa: B023
    assert module.weight.grad.is_sparse == ("d" not in order)
    assert torch.equal(module.weight.grad.to_dense(), sums)
    assert other.bias.grad.tolist() == [len(order.replace("+", ""))] * 2
    if DEVICE != "cpu":  # where nothing is on its way, what was received before a failure is there
        module.zero_grad(), other.zero_grad()
        with pytest.raises(KeyError):
            in_a_backward(fail)
        in_a_backward(lambda: eps.receive([one_of_the_other()]))
        assert other.bias.grad.tolist() == [1.0, 1.0]
    eps.release()


class Looking(nn.Module):
    """A layer with a table for which gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(4, 4), nn.Embedding(9, 4, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).tanh() + self.table(torch.arange(x.shape[0], device=x.device) * 2 % 9)


@on_the_host  # the simulated accelerator makes no sparse tensors
@pytest.mark.parametrize("mode", ["serial", "eager"])
def test_sparse_gradients_are_trained_with_as_in_plain_torch(mode, copies):
    plain = nn.Sequential(nn.Embedding(9, 4, sparse=True), Looking(), Looking())
    model = copy.deepcopy(plain)
    eps = attach_l2l(model, L2LConfig(layer_classes=("Looking",), eps_update=mode, device=DEVICE))
    optimizers = []
    for each in (plain, model):
        dense, sparse = ([p for n, p in each.named_parameters() if ("linear" in n) is kind] for kind in (True, False))
        optimizers += [torch.optim.SparseAdam(sparse, lr=0.1), torch.optim.SGD(dense, lr=0.1)]
    for optimizer in optimizers[2:]:
        eps.wrap(optimizer)
    for step in range(2):
        for each in (plain, model):
            with eps.accumulate():
                each(torch.arange(5) + step).square().mean().backward()
            each(torch.arange(5) + step + 1).square().mean().backward()
        if mode == "serial":
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                assert p.grad.layout == q.grad.layout
                torch.testing.assert_close(p.grad.to_dense(), q.grad.to_dense(), rtol=1e-5, atol=1e-7)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(dict(model.named_parameters()), dict(plain.named_parameters()))


# ---- norms and clipping


def test_clipping_is_torchs_own_and_seen_by_whoever_reads():
    """A read between clipping and step returns clipped gradients, and a write there takes effect."""
    found = []
    for mode in ("serial", "deferred"):
        model, eps, optimizer, batch = attach(Toy(dropout=0.0), sgd, eps_update=mode)
        train_once(model, batch)
        expected = {name: p.grad.clone() for name, p in model.named_parameters()}
        parameters = [nn.Parameter(torch.zeros_like(g)) for g in expected.values()]
        for p, g in zip(parameters, expected.values(), strict=True):
            p.grad = g
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.1)
        assert norm > 0.2 and torch.equal(eps.clip_grad_norm_(0.1), norm)
        assert_same_bits(gradients(model), expected)
        model.head.bias.grad.zero_()
        optimizer.step()
        assert all(p.grad is None for p in model.parameters())
        found.append({name: p.detach().clone() for name, p in model.named_parameters()})
        assert torch.equal(model.head.bias, Toy().head.bias)
    assert_same_tensors(*found)


def test_what_was_clipped_is_added_to():
    runs = []
    in_one_graph = {"resident": "all", "kept_graphs": 3, "ubatch_size": None}
    for options in ({"eps_update": "serial"}, {"eps_update": "deferred"}, in_one_graph):
        model, eps, optimizer, batch = attach(Toy(dropout=0.0), **options)
        norms = []
        for _ in range(2):
            train_once(model, batch)
            norms.append(eps.clip_grad_norm_(0.01).item())
            train_once(model, batch)
            norms.append(eps.grad_norm().item())
            optimizer.step()
        runs.append(run_of(model, optimizer, norms))
    assert_same_run(runs[1], runs[0])
    assert runs[2].logged == pytest.approx(runs[0].logged, rel=1e-3)
    first, second = runs[0].logged[:2]
    assert 0.5 * first < second < 1.5 * first


@cpu_suffices
@pytest.mark.parametrize(("mode", "together"), [("serial", True), ("deferred", False)])
def test_norms_contain_what_a_loss_makes_of_the_masters_themselves(mode, together):
    """Autograd writes to their gradients without any callback; in the second backward, to sums that are there."""
    model, eps, optimizer, batch = attach(eps_update=mode)
    for _ in range(2):
        for _ in range(2):
            loss = model(**batch).loss
            penalty = sum(100.0 * p.square().sum() for p in model.parameters())
            if together:
                (loss.cpu() + penalty).backward()
            else:
                loss.backward()
                penalty.backward()
        norm = eps.grad_norm()
        assert torch.equal(norm, torch.nn.utils.get_total_norm([p.grad.clone() for p in model.parameters()]))
        assert norm > 100.0
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, 2 * 200.0 * p.detach(), rtol=0.0, atol=2.0, msg=name)
        optimizer.step()


@nightly
@on_a_device
def test_an_eager_update_leaves_a_gradient_that_autograd_put_there_to_the_step(monkeypatch):
    """It comes while the sum of the layers is on its way."""
    runs = []
    for mode in ("serial", "eager"):
        model, eps, optimizer, batch = attach(eps_update=mode)
        master, arrived = model.blocks[1].down.weight, eps.updates.arrived

        def meanwhile(masters: Any, master: Any = master, arrived: Any = arrived) -> None:
            if any(each.parameter is master for each in masters):
                master.grad = torch.ones_like(master)
            arrived(masters)

        if mode == "eager":
            monkeypatch.setattr(eps.updates, "arrived", meanwhile)
        train_once(model, batch)
        if mode == "serial":
            master.grad += 1.0
        optimizer.step()
        runs.append(run_of(model, optimizer, []))
    assert_same_run(runs[1], runs[0])


# ---- evaluations with other weights


def evaluated_with(model: nn.Module, values: dict[str, torch.Tensor], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return torch.func.functional_call(model, values, args=(), kwargs=batch).loss


def average_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() * 0.5 for name, p in model.named_parameters()}


@pytest.mark.parametrize(("kind", "options"), [(torch.Tensor.clone, {}), (nn.Parameter, {"cmp": "bf16"})])
def test_an_evaluation_with_other_weights_changes_nothing_of_the_step(kind, options):
    plain = Toy(dropout=0.0)
    model, eps, optimizer, batch = attach(
        copy.deepcopy(plain), sgd, ubatch_size=None, eps_update="deferred", **options
    )
    train_once(model, batch)
    expected = eps.grad_norm()
    values = {name: kind(value) for name, value in average_of(model).items()}
    found, wanted = evaluated_with(model, values, batch), evaluated_with(plain, values, batch)
    assert options or has_bits_of_plain(found, wanted)
    assert expected > 0 and torch.equal(eps.grad_norm(), expected)
    eps.clip_grad_norm_(1e-3)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    steps = torch.stack([(p.detach() - old).norm() for p, old in zip(model.parameters(), before, strict=True)])
    assert 0 < steps.norm() <= 0.1 * 1e-3 * 1.01
    alive = [weakref.ref(value) for value in values.values()]
    del values
    gc.collect()
    assert not any(each() is not None for each in alive)


def test_an_evaluation_with_other_weights_hides_no_gradient_that_is_not_finite():
    model, eps, optimizer, batch = attach(Toy(dropout=0.0), sgd, eps_update="deferred")
    (model(**batch).loss * float("nan")).backward()
    evaluated_with(model, average_of(model), batch)
    with pytest.raises(NonFiniteError):
        eps.clip_grad_norm_(1e-3)
        optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())


@cpu_suffices
def test_a_refused_call_in_an_eager_step_leaves_the_step_as_it_is():
    model, _, optimizer, batch = attach(Toy(dropout=0.0), sgd, eps_update="eager")
    train_once(model, batch)
    with pytest.raises(ValueError, match="must be its own parameters"):
        torch.func.functional_call(model, average_of(model), args=(), kwargs=batch)
    optimizer.step()
    assert all(p.grad is None for p in model.parameters())
    train_once(model, batch)
    optimizer.step()


# ---- changes of the model


def test_a_replaced_parameter_is_freed():
    model, _, _, batch = attach(Toy(dropout=0.0), lambda ps: sgd([*ps][:1]))
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())  # not tied any more
    model(**batch)
    gone = weakref.ref(model.blocks[0].up.weight)
    model.blocks[0].up.weight = nn.Parameter(torch.zeros(16, 8))
    with torch.no_grad():
        model(**batch)
    train_once(model, batch)
    gc.collect()
    assert gone() is None and model.blocks[0].up.weight.grad is not None


@pytest.mark.parametrize("options", [{}, {"cmp": "bf16"}], ids=str)
def test_what_is_frozen_after_the_forward_is_not_trained(options):
    model, _, optimizer, batch = attach(Toy(dropout=0.0), sgd, **options)
    train_once(model, batch)
    optimizer.step()
    optimizer.zero_grad()
    loss = model(**batch).loss
    model.blocks[1].requires_grad_(False)
    before = [p.detach().clone() for p in model.blocks[1].parameters()]
    loss.backward()
    assert all(p.grad is None for p in model.blocks[1].parameters())
    assert model.blocks[0].up.weight.grad is not None
    optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(model.blocks[1].parameters(), before, strict=True))


@cpu_suffices
def test_a_layer_may_add_a_module_without_parameters():
    model, _, _, batch = attach(Toy(dropout=0.0))
    for block in model.blocks:
        block.register_forward_pre_hook(lambda block, _: block.add_module("late", nn.GELU()))
    for _ in range(2):
        train_once(model, batch)
    assert model.blocks[0].up.weight.grad is not None


class Copying(torch.optim.SGD):
    """Deep-copies the parameters that it updates."""

    def step(self, closure: Any = None) -> None:
        copies = [copy.deepcopy(p) for group in self.param_groups for p in group["params"]]
        assert all(type(each) in (torch.Tensor, nn.Parameter) for each in copies)
        super().step()


@cpu_suffices
def test_an_optimizer_may_copy_its_parameters():
    model, eps, optimizer, batch = attach(make=Copying, eps_update="deferred", cmp="bf16")
    for _ in range(2):
        train_once(model, batch)
        optimizer.step()
    eps.synchronize()


@cpu_suffices
@pytest.mark.parametrize("options", [{"cmp": "bf16"}, {"cmp": "fp16", "loss_scale_init": 8.0}], ids=str)
def test_two_forwards_in_the_first_step_have_the_gradients_of_both(options):
    first, _, kept, batch = attach(Toy(dropout=0.0), ubatch_size=4, **options)
    (first(**batch).loss + first(**batch).loss).backward()
    second, _, other, _ = attach(Toy(dropout=0.0), ubatch_size=4, **options)
    for _ in range(2):
        train_once(second, batch)
    torch.testing.assert_close(gradients(first), gradients(second), rtol=1e-2, atol=1e-4)
    assert kept is not other  # an EPS keeps no optimizer alive


class Keeping(Block):
    """Keeps something that its weight is in."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.up.weight.square().sum()
        return super().forward(x)


@on_a_device  # the weight is not the master itself
def test_a_backward_through_a_weight_that_a_layer_kept_disturbs_no_other():
    model = Toy(2)
    model.blocks = nn.ModuleList(Keeping(8, 0.0, buffers=False) for _ in range(2))
    model, _, _, batch = attach(model, layer_classes=("Keeping",), ubatch_size=None)
    train_once(model, batch)
    expected = model.blocks[0].up.weight.grad.clone()
    model.blocks[0].kept.backward()
    model.zero_grad()
    train_once(model, batch)
    assert torch.equal(model.blocks[0].up.weight.grad, expected)


class Convolved(nn.Sequential):
    """A layer of one module."""


@cpu_suffices
def test_strides_that_change_are_those_of_the_layer_and_its_gradients():
    model, seen = nn.Sequential(*(Convolved(nn.Conv2d(4, 4, 3, padding=1)) for _ in range(2))), []
    for layer in model:
        layer[0].register_forward_pre_hook(
            lambda module, _: seen.append(module.weight.is_contiguous(memory_format=torch.channels_last))
        )
    attach_l2l(model, L2LConfig(device=DEVICE, layer_classes=("Convolved",)))
    for memory_format in (torch.contiguous_format, torch.channels_last):
        model.to(memory_format=memory_format)
        model(torch.randn(2, 4, 5, 5)).square().mean().backward()
        assert {*seen} == {memory_format == torch.channels_last}
        weight = model[0][0].weight
        assert weight.grad.stride() == weight.stride()
        seen.clear()
        model.zero_grad()
