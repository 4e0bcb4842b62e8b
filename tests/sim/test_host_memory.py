"""Masters and gradients in page-locked memory: the same objects, the same bits, freed when unused."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook
from safetensors.torch import load_file
from torch import nn

from hf_l2l import EagerParamServer, L2LConfig, attach_l2l, detach_l2l
from hf_l2l.eps import gradients as gradients_module
from hf_l2l.eps.host_memory import HostMemory
from hf_l2l.hf.attach import attachment_of
from hf_l2l.runtime.tensors import sharing_memory, tensor_bytes
from hf_l2l.testing import page_lock_limit, page_locked_bytes
from models import TOLERANCE, assert_same_bits, attached, batch_for, bert, gpt2, gradients, llama, train_once
from training import tiny_bert


@pytest.fixture(autouse=True)
def _nothing_stays_locked() -> Iterator[None]:
    """After every test here nothing is registered that was not before it."""
    before = page_locked_bytes()
    yield
    assert settled(before) == before


def settled(expected: int) -> int:
    """The bytes locked once models that are gone are collected and the device's thread has let go of them."""
    for _ in range(100):
        gc.collect()
        if page_locked_bytes() == expected:
            break
        time.sleep(0.02)
    return page_locked_bytes()


def on_sim(model: nn.Module, **options: Any) -> nn.Module:
    return attached(model, device="sim", **options)


def memory_of(model: nn.Module) -> HostMemory:
    found = attachment_of(model)
    assert found is not None
    return found.eps.memory


def storages(tensors: Any) -> list[int]:
    return [t.untyped_storage().data_ptr() for t in tensors]


def grads(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


# ---- masters


@pytest.mark.parametrize("make", [bert, gpt2])
def test_masters_stay_the_same_objects_with_the_same_bits_and_a_storage_each(make):
    model = make()
    objects, values = list(model.parameters()), {n: p.detach().clone() for n, p in model.named_parameters()}
    on_sim(model)
    assert all(a is b for a, b in zip(model.parameters(), objects, strict=True))
    assert_same_bits(dict(model.named_parameters()), values)
    assert len(set(storages(objects))) == len(objects)
    assert all(p.is_leaf and p.requires_grad and p.is_pinned() for p in objects)
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in objects)
    memory = memory_of(model)
    assert page_locked_bytes() == memory.bytes_locked == memory.bytes_wanted - tensor_bytes(objects) > 0
    train_once(model, batch_for(model))  # which needs the gradients' memory
    assert page_locked_bytes() == memory.bytes_locked == memory.bytes_wanted


def test_masters_of_every_kind_keep_dtype_shape_and_strides():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.transposed = nn.Parameter(torch.randn(4, 3).T)
            self.short = nn.Parameter(torch.randn(3, 3).half(), requires_grad=False)
            self.switch = nn.Parameter(torch.tensor([True, False]), requires_grad=False)
            self.empty = nn.Parameter(torch.empty(0, 3))
            self.scalar = nn.Parameter(torch.tensor(2.0))
            self.gaps = nn.Parameter(torch.randn(3, 6)[:, ::2])

        def forward(self, x):
            return x @ self.transposed[:, :3].float() * self.scalar + self.gaps + self.empty.sum()

    model = nn.Sequential(nn.Linear(3, 3), nn.ModuleList([Block(), Block()]))
    model.forward = lambda x: model[1][1](model[1][0](model[0](x))).square().mean()
    before = {
        n: (p.dtype, p.shape, p.stride(), p.requires_grad, p.detach().clone()) for n, p in model.named_parameters()
    }
    plain, x = copy.deepcopy(list(model.parameters())), torch.randn(3, 3)
    attach_l2l(model, L2LConfig(device="sim", layer_classes=("Block",)))
    for name, p in model.named_parameters():
        dtype, shape, stride, trains, value = before[name]
        assert (p.dtype, p.shape, p.requires_grad) == (dtype, shape, trains) and torch.equal(p, value)
        assert p.stride() == ((3, 1) if "gaps" in name else stride)
    assert len(plain) == len(before)
    model(x).backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
    assert all(p.grad.stride() == p.stride() for p in model.parameters() if p.requires_grad)


def test_memory_is_of_exact_size():
    """Torch's own allocator would take 1.5 times as much for these shapes."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down, self.norm = nn.Linear(192, 768), nn.Linear(768, 192), nn.LayerNorm(192)

        def forward(self, x):
            return x + self.down(self.up(self.norm(x)).relu())

    model = nn.Sequential(nn.Linear(192, 192), *[Block() for _ in range(3)], nn.Linear(192, 3))
    attach_l2l(model, L2LConfig(device="sim", layer_classes=("Block",)))
    needed = sum(p.nbytes for p in model.parameters())
    assert needed <= page_locked_bytes() <= 1.1 * needed
    model(torch.randn(2, 192)).sum().backward()
    assert 2 * needed <= page_locked_bytes() <= 1.1 * 2 * needed
    assert all(g.is_pinned() for g in grads(model))
    assert page_locked_bytes() == memory_of(model).bytes_locked == memory_of(model).bytes_wanted


def saved_bytes(model: nn.Module, folder: Path) -> tuple[int, int, int]:
    folder.mkdir()
    model.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "state.pt")
    for i, p in enumerate(model.parameters()):
        torch.save(p.detach(), folder / f"{i}.pt")
    one = sum((folder / f"{i}.pt").stat().st_size for i, _ in enumerate(model.parameters()))
    return (folder / "model.safetensors").stat().st_size, (folder / "state.pt").stat().st_size, one


def test_files_are_as_large_as_before_and_hold_the_same(tmp_path):
    model = gpt2()
    before = saved_bytes(model, tmp_path / "before")
    on_sim(model)
    train_once(model, batch_for(model))
    assert saved_bytes(model, tmp_path / "after") == before
    saved, state = load_file(tmp_path / "after" / "model.safetensors"), model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in saved.items())
    state = torch.load(tmp_path / "after" / "state.pt", weights_only=True)
    assert state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()


def test_tied_parameters_stay_tied_and_move_once():
    model = gpt2()
    assert model.lm_head.weight is model.transformer.wte.weight
    on_sim(model)
    assert model.lm_head.weight is model.transformer.wte.weight
    memory = memory_of(model)
    groups = memory._groups(set(memory.masters.all()))
    masters = [master for group in groups for master in group]
    assert len(masters) == len(set(masters)) == len(list(model.parameters()))


def same_tensor(one: nn.Linear, other: nn.Linear) -> None:
    other.weight = nn.Parameter(one.weight.data)


def views_of_one(one: nn.Linear, other: nn.Linear) -> None:
    both = torch.randn(6, 4)
    one.weight, other.weight = nn.Parameter(both[:4]), nn.Parameter(both[2:])


def buffer_view(one: nn.Linear, other: nn.Linear) -> None:
    other.register_buffer("first_row", one.weight.data[0])
    other.weight = nn.Parameter(one.weight.data)


class Block(nn.Module):
    def __init__(self, width: int = 4):
        super().__init__()
        self.one, self.other = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.other(self.one(x).tanh())


class Stacked(nn.Module):
    def __init__(self, layers: int = 3, width: int = 4):
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def stacked(model: nn.Module, **options: Any) -> nn.Module:
    attach_l2l(model, L2LConfig(device="sim", layer_classes=("Block",), **options))
    return model


@pytest.mark.parametrize("share", [same_tensor, views_of_one, buffer_view])
def test_parameters_that_share_memory_stay_where_they_are_and_share(share: Callable[..., None]):
    model = Stacked()
    share(model.blocks[0].one, model.blocks[1].other)
    one, other = model.blocks[0].one.weight, model.blocks[1].other.weight
    before = one.data_ptr(), other.data_ptr()
    stacked(model)
    assert (one.data_ptr(), other.data_ptr()) == before and not one.is_pinned() and not other.is_pinned()
    assert model.blocks[0].one.bias.is_pinned() and model.blocks[2].one.weight.is_pinned()
    with torch.no_grad():
        one.fill_(2.0)
    assert (other == 2.0).any()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(5, 4)).backward()
    assert one.grad is not None and other.grad is not None and one.grad.data_ptr() != other.grad.data_ptr()
    optimizer.step()


@pytest.mark.parametrize("disk", [False, True])
@pytest.mark.parametrize(
    "keep",
    [
        lambda module, weight: setattr(module, "kept", weight.view(-1)),
        lambda module, weight: setattr(module, "kept", weight.detach()[1:]),
        lambda module, weight: setattr(module, "kept", [{"first": weight.data}]),
    ],
)
def test_a_view_that_a_module_keeps_has_the_values_of_its_weight(keep, disk, tmp_path):
    """Also after training, and in a module that is no layer."""
    model = Stacked()
    for module in (model, model.blocks[1]):
        keep(module, (model.embed if module is model else module.one).weight)
    options = {"state_tier": "disk", "state_dir": str(tmp_path)} if disk else {}
    eps = attach_l2l(model, L2LConfig(device="sim", layer_classes=("Block",), eps_update="deferred", **options))
    optimizer = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    before = copy.deepcopy(model.blocks[1].one.weight)
    for _ in range(2):
        model(torch.randn(5, 4)).backward()
        optimizer.step()
        eps.synchronize()
        check_views(model)
    assert not torch.equal(before, model.blocks[1].one.weight)
    detach_l2l(model)
    check_views(model)


def check_views(model: nn.Module) -> None:
    for module, weight in ((model, model.embed.weight), (model.blocks[1], model.blocks[1].one.weight)):
        kept = module.kept if isinstance(module.kept, torch.Tensor) else module.kept[0]["first"]
        assert torch.equal(kept.flatten(), weight.flatten()[-kept.numel() :])


def test_a_resident_layer_of_which_a_module_keeps_a_view_is_refused():
    model = Stacked()
    model.kept = model.blocks[1].one.weight.detach()
    with pytest.raises(ValueError, match=r"got blocks\.1\.one\.weight: it shares memory with another tensor"):
        attach_l2l(model, L2LConfig(device="sim", layer_classes=("Block",), resident_layers=3))


def overlapping(one: torch.Tensor, other: torch.Tensor) -> bool:
    bytes_of = [{t.data_ptr() + 4 * i for i in range(t.numel())} for t in (one, other)]
    return bool(bytes_of[0] & bytes_of[1])


def test_sharing_is_found_between_any_two_of_many():
    generator = torch.Generator().manual_seed(3)
    for _ in range(200):
        memory, model = torch.zeros(40), nn.Module()
        for i in range(6):
            start, size = (int(n) for n in torch.randint(0, 20, (2,), generator=generator))
            model.register_parameter(f"p{i}", nn.Parameter(memory[start : start + size]))
        every = list(model.parameters())
        expected = {a for a in every if any(a is not b and overlapping(a, b) for b in every)}
        assert sharing_memory([*model.parameters(), *model.buffers()]) == expected


def test_parameters_in_shared_memory_stay_there():
    model = Stacked()
    model.blocks[0].share_memory()
    before = storages(model.blocks[0].parameters())
    stacked(model)
    assert storages(model.blocks[0].parameters()) == before
    assert all(p.is_shared() for p in model.blocks[0].parameters())
    assert all(p.is_pinned() for p in model.blocks[1].parameters())


# ---- what else is done to models


def trains_as_plain(model: nn.Module, steps: int = 2) -> None:
    """Train `model` and a plain copy of it, and compare."""
    plain, batch = copy.deepcopy(model), batch_for(model)
    for each in (model, plain):
        each.train()
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9)
        each.zero_grad()
        for _ in range(steps):
            each(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6, msg=name)


def test_a_deep_copy_is_a_plain_model_in_ordinary_memory():
    model = on_sim(tiny_bert(dropout=0.0))
    train_once(model, batch_for(model))
    locked, other = page_locked_bytes(), copy.deepcopy(model)
    assert page_locked_bytes() == locked and not any(p.is_pinned() for p in other.parameters())
    assert_same_bits(dict(other.named_parameters()), dict(model.named_parameters()))
    assert attachment_of(other) is None
    trains_as_plain(model)


@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_a_pickled_model_is_a_plain_model(how):
    model = on_sim(tiny_bert(dropout=0.0))
    train_once(model, batch_for(model))
    if how == "pickle":
        other = pickle.loads(pickle.dumps(model))  # noqa: S301
    else:
        file = io.BytesIO()
        torch.save(model, file)
        other = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert not any(p.is_pinned() for p in other.parameters())
    assert_same_bits(dict(other.named_parameters()), dict(model.named_parameters()))
    train_once(other, batch_for(other))
    assert on_sim(other) is other


def test_a_model_whose_memory_is_shared_after_attach_trains():
    model = on_sim(tiny_bert(dropout=0.0))
    model.share_memory()
    assert all(p.is_shared() for p in model.parameters())
    assert page_locked_bytes() == 0
    trains_as_plain(model)


@pytest.mark.parametrize("assign", [False, True])
def test_weights_loaded_after_attach_are_trained_with(assign):
    model, other = on_sim(tiny_bert(dropout=0.0)), bert(num_hidden_layers=4, max_position_embeddings=16)
    train_once(model, batch_for(model))
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
    assert_same_bits(dict(model.named_parameters()), dict(other.named_parameters()))
    trains_as_plain(model)


@pytest.mark.parametrize("make", [gpt2, llama, lambda: tiny_bert(dropout=0.0)])
def test_embeddings_resized_after_attach_are_trained_with(make):
    model = on_sim(make())
    train_once(model, batch_for(model))
    model.resize_token_embeddings(80, mean_resizing=False)
    trains_as_plain(model)
    assert model.get_input_embeddings().weight.shape[0] == 80


def test_what_was_replaced_is_given_back():
    """Parameters that are gone from the model are not kept by the engine, nor is the memory of their gradients."""
    model = on_sim(tiny_bert(dropout=0.0))
    train_once(model, batch_for(model))
    model.zero_grad()
    locked = page_locked_bytes()
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    trains_as_plain(model)
    train_once(model, batch_for(model))
    assert all(p.is_pinned() and p.grad.is_pinned() for p in model.parameters())  # the new ones took their place
    assert settled(locked) == locked


@pytest.mark.parametrize("make", [gpt2, llama, lambda: tiny_bert(dropout=0.0)])
def test_a_model_with_resized_embeddings_is_detached_and_copied(make):
    """Transformers puts the hook of the old embeddings on the new ones."""
    model = on_sim(make())
    model.resize_token_embeddings(80, mean_resizing=False)
    copied = copy.deepcopy(model)
    detach_l2l(model)
    for each in (model, copied):
        hooks = [getattr(m, "_hf_hook", None) for m in each.modules()]
        assert all(hook is None or type(hook) is ModelHook for hook in hooks)
        train_once(each, batch_for(each))
    assert not any("_old_forward" in vars(m) or "forward" in vars(m) for m in model.modules())
    assert_same_bits(gradients(copied), gradients(model))


# ---- how long


def test_detach_makes_it_ordinary_memory_and_attach_locks_it_again():
    model, batch = on_sim(tiny_bert(dropout=0.0), stash="host", ubatch_size=3), batch_for(tiny_bert())
    train_once(model, batch)
    locked = page_locked_bytes()
    values, sums = {n: p.detach().clone() for n, p in model.named_parameters()}, gradients(model)
    detach_l2l(model)
    assert page_locked_bytes() == 0 and not any(t.is_pinned() for t in [*model.parameters(), *grads(model)])
    assert_same_bits(dict(model.named_parameters()), values)
    assert_same_bits(gradients(model), sums)
    model.zero_grad()
    on_sim(model, stash="host", ubatch_size=3)
    train_once(model, batch)
    assert page_locked_bytes() == locked
    assert_same_bits(gradients(model), sums)


def test_a_model_that_is_gone_unlocks_its_memory():
    model = on_sim(tiny_bert(), stash="host")
    train_once(model, batch_for(model))
    kept = model.classifier.weight.grad
    del model
    of_one = -(-kept.nbytes // 256) * 256  # a parameter of the shell has a piece of its own
    assert settled(of_one) == of_one, "what the user holds is still there"
    del kept


def test_a_graph_that_outlives_the_engine_can_be_run_backwards():
    model = on_sim(tiny_bert(dropout=0.0), stash="host", ubatch_size=3)
    batch = batch_for(model)
    loss = model(**batch).loss
    detach_l2l(model)
    loss.backward()
    found = gradients(model)
    model.zero_grad()
    train_once(model, batch)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(found[name], gradient)


# ---- limits


def trained(limit: int | None, **options: Any) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Weights after three steps under a limit of page-locked bytes, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = tiny_bert()
        torch.sim.manual_seed(11)
        if limit is None:
            weights = steps(model, **options)
        else:
            with page_lock_limit(limit):
                weights = steps(model, **options)
    return weights, [str(w.message) for w in caught]


def steps(model: nn.Module, **options: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(11)
    eps = attach_l2l(model, L2LConfig(device="sim", **options))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))
    for seed in range(3):
        train_once(model, batch_for(model, seed=seed))
        optimizer.step()
    return {n: p.detach().clone() for n, p in model.named_parameters()}


@cache
def unlimited(**options: Any) -> tuple[dict[str, torch.Tensor], list[str]]:
    return trained(None, **options)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("options", [{}, {"stash": "host", "ubatch_size": 3}], ids=str)
@pytest.mark.parametrize("limit", [0, pytest.param(1000, marks=pytest.mark.slow), 20_000, 60_000])
def test_with_less_page_locked_memory_the_bits_are_the_same_and_one_warning_says_so(limit, options):
    expected, no_warnings = unlimited(**options)
    assert no_warnings == []
    found, said = trained(limit, **options)
    assert_same_bits(found, expected)
    (warning,) = said
    refused = (
        " of host memory could be page-locked for sim:0, whose driver refused more (code 2); the rest stays pageable"
    )
    assert refused in warning


def test_the_warning_counts_masters_once():
    """Tied ones, too."""
    with page_lock_limit(0), pytest.warns(UserWarning, match="could be page-locked") as caught:
        model = on_sim(gpt2())
    wanted = memory_of(model).bytes_wanted
    assert wanted == 2 * sum(p.nbytes for p in model.parameters())  # and as much for their gradients
    assert str(caught[0].message).startswith("0 bytes of ")
    assert not any(p.is_pinned() for p in model.parameters())


def test_the_warning_comes_with_the_gradients_where_masters_fit():
    reference = on_sim(tiny_bert())
    masters = page_locked_bytes()
    del reference
    assert settled(0) == 0
    with page_lock_limit(masters):
        model = on_sim(tiny_bert())
        assert all(p.is_pinned() for p in model.parameters())
        model.eval()
        with torch.no_grad():
            model(**batch_for(model))
        with pytest.warns(UserWarning, match=r"KiB of .* KiB of host memory could be page-locked"):
            train_once(model, batch_for(model))
        model.zero_grad()
        train_once(model, batch_for(model))
        assert not any(g.is_pinned() for g in grads(model))


def test_a_device_without_page_locking_is_not_asked_and_causes_no_warning(monkeypatch):
    monkeypatch.setattr("hf_l2l.runtime.stream.can_page_lock", lambda device: False)
    model = on_sim(tiny_bert(), stash="host", ubatch_size=3)
    train_once(model, batch_for(model))
    assert page_locked_bytes() == 0


# ---- gradients


def test_gradients_have_the_same_memory_in_every_step():
    model = on_sim(tiny_bert())
    train_once(model, batch_for(model))
    before = [g.data_ptr() for g in grads(model)]
    assert len(before) == len(list(model.parameters())) and all(g.is_pinned() for g in grads(model))
    optimizer = attach_l2l(model, L2LConfig(device="sim")).wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    for end in (optimizer.step, optimizer.zero_grad, model.zero_grad, optimizer.step):
        end()
        assert not grads(model)
        train_once(model, batch_for(model))
        assert [g.data_ptr() for g in grads(model)] == before


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "keep",
    [
        lambda g: g,
        lambda g: g.detach(),
        lambda g: g[:1],
        lambda g: g.view(-1)[1:],
        lambda g: g.numpy(),
        lambda g: torch.from_dlpack(g),
        lambda g: g.untyped_storage(),
    ],
    ids=["itself", "detached", "rows", "flat", "numpy", "dlpack", "storage"],
)
def test_a_gradient_that_the_user_keeps_keeps_its_values(keep: Callable[[torch.Tensor], Any]):
    def values(kept: Any) -> list[Any]:
        return torch.as_tensor(kept.tolist()).tolist()

    model = on_sim(tiny_bert(dropout=0.0))
    weight = model.bert.encoder.layer[1].output.dense.weight
    train_once(model, batch_for(model))
    address, kept = weight.grad.data_ptr(), keep(weight.grad)
    before = values(kept)
    for seed in (5, 6):
        model.zero_grad()
        train_once(model, batch_for(model, seed=seed))
        assert values(kept) == before and weight.grad.data_ptr() != address
    plain = copy.deepcopy(model)
    plain.zero_grad()
    train_once(plain, batch_for(plain, seed=6))
    assert_same_bits(gradients(model), gradients(plain))
    del kept
    model.zero_grad()
    train_once(model, batch_for(model))
    assert weight.grad.data_ptr() == address, "its memory is free again"


def set_by_user(grad: Callable[[torch.Tensor], torch.Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Gradients after a backward on top of what the user put into `p.grad`, here and in plain torch."""
    model = tiny_bert(dropout=0.0)
    plain, batch = copy.deepcopy(model), batch_for(model)
    on_sim(model)
    for each in (model, plain):
        for p in each.parameters():
            p.grad = grad(p.detach())
        train_once(each, batch)
    return gradients(model), gradients(plain)


@pytest.mark.parametrize(
    "grad",
    [
        lambda p: torch.full_like(p, 0.5),
        lambda p: torch.stack([p, p], dim=-1)[..., 0],
        lambda p: (p * 0.1).t().contiguous().t() if p.dim() == 2 else p.clone(),
        lambda p: torch.zeros(p.numel() + 1)[1:].view(p.shape),
    ],
    ids=["dense", "gaps", "transposed", "offset"],
)
@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
def test_a_gradient_that_the_user_set_is_added_to(grad):
    assert_same_bits(*set_by_user(grad))


def test_the_users_own_tensor_is_the_one_that_is_added_to():
    model = on_sim(tiny_bert(dropout=0.0))
    own = [torch.ones_like(p) for p in model.parameters()]
    for p, g in zip(model.parameters(), own, strict=True):
        p.grad = g
    train_once(model, batch_for(model))
    assert all(p.grad is g for p, g in zip(model.parameters(), own, strict=True))
    assert any((g != 1).any() for g in own)


def test_a_sparse_gradient_that_the_user_set_is_added_to():
    def grad(p: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(p).to_sparse()

    found, expected = set_by_user(grad)
    for name, value in expected.items():
        torch.testing.assert_close(found[name].to_dense(), value.to_dense(), msg=name)


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


def in_a_backward(do: Callable[[], None]) -> None:
    """Call `do` inside a backward, as the relay calls the EPS; what it raises, backward raises."""
    Calling.apply(torch.ones((), device="sim", requires_grad=True), do).backward()


@pytest.mark.parametrize("order", ["sd", "ds", "sds", "ssd", "s+d", "d+s", "d+s+d"])
def test_sparse_and_dense_gradients_of_one_weight_add_up(order):
    """Within a backward and, after a "+", in the next one. The simulated device itself makes no sparse tensors."""
    module, other = nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2)
    eps = EagerParamServer(nn.ModuleList([module, other]), torch.device("sim", 0))
    sums = torch.zeros(4, 2)

    def receive(kind: str, value: float) -> None:
        gradient = torch.zeros(4, 2)
        gradient[1:3] = value
        sums.add_(gradient)
        sent = gradient.to_sparse() if kind == "s" else gradient.to("sim")
        eps.receive([(eps.masters.of(module.weight), sent), (eps.masters.of(other.bias), torch.ones(2, device="sim"))])

    for turn, backward in enumerate(order.split("+")):
        in_a_backward(lambda: [receive(kind, 10.0**i + turn) for i, kind in enumerate(backward)])  # noqa: B023
    assert module.weight.grad.is_sparse == ("d" not in order)
    assert torch.equal(module.weight.grad.to_dense(), sums)
    assert other.bias.grad.tolist() == [len(order.replace("+", ""))] * 2
    eps.release()


def test_nothing_of_a_failed_backward_is_left_where_a_sparse_gradient_was_in_it():
    module, other = nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2)
    eps = EagerParamServer(nn.ModuleList([module, other]), torch.device("sim", 0))

    def fail() -> None:
        eps.receive(
            [
                (eps.masters.of(module.weight), torch.ones(4, 2).to_sparse()),
                (eps.masters.of(other.bias), torch.ones(2, device="sim")),
            ]
        )
        raise KeyError

    with pytest.raises(KeyError):
        in_a_backward(fail)
    in_a_backward(lambda: eps.receive([(eps.masters.of(other.bias), torch.ones(2, device="sim"))]))
    assert other.bias.grad.tolist() == [1.0, 1.0]
    eps.release()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("chunk", [gradients_module._CHUNK, 7, 16])
def test_accumulated_gradients_have_the_bits_of_plain_torch(chunk, monkeypatch):
    monkeypatch.setattr(gradients_module, "_CHUNK", chunk)
    model = tiny_bert(dropout=0.0)
    plain = copy.deepcopy(model)
    on_sim(model)
    for each in (model, plain):
        for seed in range(3):
            train_once(each, batch_for(each, seed=seed))
    assert_same_bits(gradients(model), gradients(plain))


class Repeating(Stacked):
    """The same layers, three times over, as ALBERT has it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for _ in range(3):
            for block in self.blocks:
                x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("chunk", [gradients_module._CHUNK, 3])
def test_a_layer_that_is_called_several_times_sums_as_plain_torch_does(layers, slots, chunk, monkeypatch):
    monkeypatch.setattr(gradients_module, "_CHUNK", chunk)
    plain = Repeating(layers)
    model = stacked(copy.deepcopy(plain), gradient_slots=slots)
    x = torch.randn(5, 4)
    for each in (plain, model):
        each(x).backward()
    assert_same_bits(gradients(model), gradients(plain))
    for each in (plain, model):  # on top of that in another order: each call's part is added to p.grad by itself
        each(x + 1).backward()
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(model)[name], gradient, rtol=1e-5, atol=1e-5)


def test_layers_that_share_a_weight_sum_as_plain_torch_does():
    plain = Stacked()
    plain.blocks[2].one.weight = plain.blocks[0].one.weight
    plain.blocks[1].one.weight = plain.embed.weight  # one of the shell
    model = stacked(copy.deepcopy(plain))
    x = torch.randn(5, 4)
    for each in (plain, model):
        each(x).backward()
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(model)[name], gradient, rtol=TOLERANCE[torch.float32], atol=1e-7)
