"""Attaching and detaching: what a model is meanwhile, what copies of it are, and which models are refused."""

from __future__ import annotations

import copy
import inspect
import pickle
import types
from functools import partial

import pytest
import torch
from accelerate import Accelerator, dispatch_model
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from models import (
    assert_same_bits,
    batch_for,
    bert,
    gpt2,
    gradients,
    llama,
    reference,
    relative_error,
    train_once,
)
from tiers import cpu_suffices
from training import l2l_trainer, tiny_bert


def everything_of(model: nn.Module) -> dict[str, list[str]]:
    return {name: sorted(module.__dict__) for name, module in model.named_modules()}


def test_detach_undoes_attach():
    model = bert()
    before, forward = everything_of(model), model.forward.__func__
    parameters, names = list(model.parameters()), list(model.state_dict())
    attach_l2l(model)
    assert everything_of(model) != before
    train_once(model, batch_for(model))
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(isinstance(p, nn.Parameter) and p.device.type == "cpu" for p in model.parameters())
    assert list(model.state_dict()) == names
    model.zero_grad()
    assert detach_l2l(model) is model
    assert everything_of(model) == before
    assert model.forward.__func__ is forward
    batch = batch_for(model)
    loss, expected = reference(model, batch)
    assert torch.equal(train_once(model, batch), loss)
    assert_same_bits(gradients(model), expected)


def test_a_model_has_one_config_at_a_time():
    model = bert()
    eps = attach_l2l(model, L2LConfig(ubatch_size=2))
    named = L2LConfig(ubatch_size=2, device=str(torch.accelerator.current_accelerator() or "cpu"))
    assert attach_l2l(model, L2LConfig(ubatch_size=2)) is attach_l2l(model, named) is eps
    with pytest.raises(ValueError, match="ubatch_size=4, where it has 2, and stash='host'"):
        attach_l2l(model, L2LConfig(ubatch_size=4, stash="host"))
    detach_l2l(model)
    detach_l2l(model)
    assert attach_l2l(model, L2LConfig(ubatch_size=4)) is not eps


def test_masters_are_back_after_an_error_in_the_model():
    model = bert()
    parameters = list(model.parameters())
    attach_l2l(model)
    batch = batch_for(model)
    with pytest.raises(IndexError):
        model(input_ids=batch["input_ids"] + 10_000)

    def fail(*args: object) -> None:
        raise RuntimeError("from the user's hook")

    handle = model.bert.encoder.layer[1].output.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="from the user's hook"):
        model(**batch)
    handle.remove()
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    _, expected = reference(model, batch)
    train_once(model, batch)
    assert relative_error(gradients(model), expected) < 1e-6


# ---- copies


def doubled_output(self, *args, **kwargs):
    return type(self).forward(self, *args, **kwargs) * 2


def copied(model: nn.Module, by: str) -> nn.Module:
    if by == "deepcopy":
        return copy.deepcopy(model)
    return pickle.loads(pickle.dumps(model))  # noqa: S301  # our own bytes


def assert_detached(model: nn.Module) -> None:
    names = {name for module in model.modules() for name in vars(module)}
    assert not names & {"_hf_hook", "_old_forward", "_original_forward", "forward", "_apply", "__getstate__"}


@cpu_suffices
def test_a_copy_is_a_detached_model():
    model = bert()
    attach_l2l(model, L2LConfig(ubatch_size=3))
    batch = batch_for(model)
    train_once(model, batch)
    other = copied(model, "pickle")
    assert_detached(other)
    for (name, a), (_, b) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(a, b) and a is not b, name
    other.to(torch.float64)  # no guard
    assert other.classifier.weight.dtype == torch.float64
    other.float().zero_grad()
    loss, expected = reference(other, batch)
    assert torch.equal(train_once(other, batch), loss)
    assert_same_bits(gradients(other), expected)
    attach_l2l(other, L2LConfig(ubatch_size=2))
    detach_l2l(other)


def test_a_copy_has_the_forward_that_an_instance_was_given():
    model, paths = bert(), ("bert.encoder.layer.0.output", "classifier")
    for path in paths:
        patched = model.get_submodule(path)
        patched.forward = types.MethodType(doubled_output, patched)
    batch = batch_for(model)
    loss, expected = reference(model, batch)
    attach_l2l(model)
    other = copy.deepcopy(model)
    for path in paths:
        assert other.get_submodule(path).forward.__self__ is other.get_submodule(path)
    assert torch.equal(train_once(other, batch), loss)
    assert_same_bits(gradients(other), expected)


def test_a_copy_of_a_prepared_model_is_plain():
    """Where Accelerate computes in bf16, it wraps the hook's forward, and keeps that in an attribute."""
    model = bert()
    attach_l2l(model, L2LConfig(device="cpu"))
    prepared = Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    assert "_original_forward" in vars(prepared)
    assert_detached(copied(prepared, "pickle"))


@pytest.mark.parametrize(("make", "by"), [(bert, "deepcopy"), (llama, "pickle")])
def test_a_model_with_resized_embeddings_is_guarded_copied_and_detached(make, by):
    """Accelerate puts the hook of the old embeddings on the new ones, and its own function in their forward."""
    model = make()
    attach_l2l(model)
    model.resize_token_embeddings(80, mean_resizing=False)
    for module in filter(None, (model.get_input_embeddings(), model.get_output_embeddings())):
        with pytest.raises(ValueError, match="dtype of its master"):
            module.half()
    other = copied(model, by)
    batch = batch_for(model)
    batch["input_ids"][0, 0] = 79
    loss = train_once(model, batch)
    detach_l2l(model)
    assert_detached(model)
    assert_detached(other)
    assert torch.allclose(train_once(other, batch), loss)
    assert relative_error(gradients(other), gradients(model)) < 1e-6
    attach_l2l(other)


def test_generate_of_the_instance_stays_its_own():
    def own(self, *args, **kwargs):
        return "own"

    model = gpt2()
    signature = inspect.signature(model.generate)
    attach_l2l(model)
    assert inspect.signature(model.generate) == signature
    detach_l2l(model)
    model.generate = types.MethodType(own, model)
    attach_l2l(model)
    assert model.generate() == copy.deepcopy(model).generate() == "own"
    detach_l2l(model)
    assert model.generate() == "own" and isinstance(model.generate, types.MethodType)


# ---- what a program may do meanwhile


def test_moves_of_an_attached_model(device):
    model = bert()
    attach_l2l(model)
    assert model.to("cpu") is model
    assert model.bert.cpu() is model.bert
    moves = (model.half, lambda: model.to(torch.float64), lambda: model.bert.encoder.layer[0].bfloat16())
    for move in moves:
        with pytest.raises(ValueError, match="dtype of its master"):
            move()
    with pytest.raises(ValueError, match="move to meta"):
        model.to("meta")
    detach_l2l(model)
    assert model.to(torch.float64).dtype == torch.float64


def test_parts_of_a_model_can_be_called_from_outside(device):
    model = bert().eval()
    layer, batch = model.bert.encoder.layer[0], batch_for(model)
    hidden = torch.randn(2, 3, 16, requires_grad=True)
    layer(hidden).sum().backward()
    expected, input_gradient = gradients(layer), hidden.grad
    states = model.bert(batch["input_ids"]).last_hidden_state
    layer.zero_grad()
    hidden.grad = None
    attach_l2l(model, L2LConfig(ubatch_size=4))
    layer(hidden.to(device)).sum().backward()
    assert relative_error(gradients(layer), expected) < 1e-5
    assert torch.allclose(hidden.grad, input_gradient, atol=1e-6)
    assert torch.allclose(model.bert(batch["input_ids"]).last_hidden_state.cpu(), states, atol=1e-6)


def replaced_forward(self, input_ids, labels=None, **kwargs):
    """Reads the head's weight itself, as fused losses do."""
    hidden = self.transformer(input_ids=input_ids).last_hidden_state
    weight = self.lm_head.weight.to(hidden.device)
    return nn.functional.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten().to(hidden.device))


def test_a_forward_replaced_after_attaching_is_noticed():
    model = gpt2()
    attach_l2l(model)
    batch = batch_for(model, masked=False)
    other = copy.deepcopy(model)  # of which nothing is watched
    for each in (model, other):
        each.forward = types.MethodType(replaced_forward, each)
    expected = other(**batch)
    expected.backward()
    with pytest.raises(ValueError, match="forward that it was attached with"):
        model(**batch)
    detach_l2l(model)
    model.forward = types.MethodType(replaced_forward, model)
    attach_l2l(model, L2LConfig(ubatch_size=2))
    found = model(**batch)
    found.backward()
    assert torch.allclose(found.cpu(), expected)
    assert relative_error(gradients(model), gradients(other)) < 1e-6


def test_a_forward_that_is_wrapped_and_parts_that_are_called_are_not_taken_for_replaced():
    model = gpt2()
    attach_l2l(model)
    batch = batch_for(model, masked=False)
    inner = model.forward
    model.forward = lambda **kwargs: inner(**kwargs)
    model(**batch).loss.backward()
    model.transformer(input_ids=batch["input_ids"])
    model.forward = lambda: None
    with pytest.raises(TypeError):
        model(nothing=1)  # ends before the forward begins
    model.transformer(input_ids=batch["input_ids"])


# ---- models that are refused


@pytest.fixture
def group_of_two():
    """A process group in which this process has a partner that answers whatever it expects."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    distributed.destroy_process_group()


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


class _FabricModule(nn.Module):
    """As Lightning Fabric's `setup` returns it: attributes of the wrapper are those of the model."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self._forward_module = self._original_module = model


def with_device_map(model: nn.Module, name: str = "") -> nn.Module:
    model.hf_device_map = {"bert": 0, "classifier": "cpu"}
    model.name_or_path = name
    return model


def within(wrap, model: nn.Module, path: str = "bert.encoder.layer.1") -> nn.Module:
    container, _, attribute = path.rpartition(".")
    setattr(model.get_submodule(container), attribute, wrap(model.get_submodule(path)))
    return model


def sharded(model: nn.Module, path: str) -> nn.Module:
    fully_shard(model.get_submodule(path), mesh=init_device_mesh("cpu", (2,)))
    return model


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


DDP = nn.parallel.DistributedDataParallel
REFUSED = {
    "device_map": (with_device_map, "without device_map$"),
    "device_map of a checkpoint": (partial(with_device_map, name="some/model"), r"from_pretrained\('some/model'"),
    "Fabric": (_FabricModule, "attach the model first"),
    "DDP in the model": (partial(within, DDP, path="bert"), "DistributedDataParallel at 'bert'"),
    "FSDP": (partial(FullyShardedDataParallel, device_id=torch.device("cpu")), "FullyShardedDataParallel"),
    "compiled in place": (compiled_in_place, "torch.compile"),
    "a compiled layer": (partial(within, compiled), "compiled model at 'bert.encoder.layer.1'"),
    "a sharded layer": (partial(sharded, path="bert.encoder.layer.1"), "a DTensor"),
}
"""Beside those of the table in docs/settings.md."""


def test_models_that_are_placed_or_wrapped_are_refused(group_of_two, tmp_path):
    for change, says in REFUSED.values():
        model = change(tiny_bert(layers=2))
        for attach in (attach_l2l, lambda model: l2l_trainer(tmp_path, model=model)):
            with pytest.raises(ValueError, match=says):
                attach(model)


def test_a_process_group_comes_before_attaching(request, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        with pytest.raises(ValueError, match="no process group"):
            attach_l2l(tiny_bert(layers=2))
    model = bert()
    attach_l2l(model)
    request.getfixturevalue("group_of_two")
    with torch.no_grad():  # each process by itself
        model(**batch_for(model))
    with pytest.raises(ValueError, match="one of 2 afterwards"):
        model(**batch_for(model))


def test_a_device_map_that_is_all_host_and_bare_hooks_are_no_placement():
    for places in ({"": torch.device("cpu")}, {"bert": "cpu", "classifier": "cpu"}):
        model = bert()
        dispatch_model(model, places)
        assert model.hf_device_map == places
        add_hook_to_module(model.bert, ModelHook())  # which copies carry
        attach_l2l(model)
        train_once(model, batch_for(model))


def test_masters_of_16_bits_are_warned_of():
    with pytest.warns(UserWarning, match="the master weights are torch.bfloat16"):
        attach_l2l(bert().bfloat16())
