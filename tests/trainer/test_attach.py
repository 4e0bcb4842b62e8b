"""Attaching and detaching: what a model is meanwhile, what copies of it are, layers that change between steps, and
which models are refused."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from accelerate import Accelerator, dispatch_model
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from hf_l2l import L2LConfig, L2LTrainer, L2LTrainingArguments, attach_l2l, detach_l2l
from models import assert_same_bits, batch_for, bert, gpt2, gradients, llama, reference, relative_error, t5, train_once
from plain import assert_as_plain, is_attached, small_bert
from runs import assert_same_tensors
from tiers import cpu_suffices
from training import CHECKPOINTING, arguments, inner_optimizer, l2l_trainer, on, rows, tiny_bert, trainer


def everything_of(model: nn.Module) -> dict[str, list[str]]:
    return {name: sorted(module.__dict__) for name, module in model.named_modules()}


def test_detach_undoes_attach():
    model = bert()
    before, forward = everything_of(model), model.forward.__func__
    parameters, names = list(model.parameters()), list(model.state_dict())
    attach_l2l(model)
    assert everything_of(model) != before
    assert model.to("cpu") is model and model.bert.cpu() is model.bert
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


# ---- copies


def pickled(model: nn.Module) -> nn.Module:
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
    other = pickled(model)
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
    def doubled_output(self, *args, **kwargs):
        return type(self).forward(self, *args, **kwargs) * 2

    model, paths = bert(), ("bert.encoder.layer.0.output", "classifier")
    for patched in map(model.get_submodule, paths):
        patched.forward = types.MethodType(doubled_output, patched)
    batch = batch_for(model)
    loss, expected = reference(model, batch)
    attach_l2l(model)
    other = copy.deepcopy(model)
    assert all(each.forward.__self__ is each for each in map(other.get_submodule, paths))
    assert torch.equal(train_once(other, batch), loss)
    assert_same_bits(gradients(other), expected)


def test_a_copy_of_a_prepared_model_is_plain():
    """Where Accelerate computes in bf16, it wraps the hook's forward, and keeps that in an attribute."""
    model = bert()
    attach_l2l(model, L2LConfig(device="cpu"))
    prepared = Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    assert "_original_forward" in vars(prepared)
    assert_detached(pickled(prepared))


@pytest.mark.parametrize(("make", "copies"), [(bert, copy.deepcopy), (llama, pickled)])
def test_a_model_with_resized_embeddings_is_guarded_copied_and_detached(make, copies):
    """Accelerate puts the hook of the old embeddings on the new ones, and its own function in their forward."""
    model = make()
    attach_l2l(model)
    model.resize_token_embeddings(80, mean_resizing=False)
    for module in filter(None, (model.get_input_embeddings(), model.get_output_embeddings())):
        with pytest.raises(ValueError, match="dtype of its master"):
            module.half()
    other = copies(model)
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
    model = gpt2()
    signature = inspect.signature(model.generate)
    attach_l2l(model)
    assert inspect.signature(model.generate) == signature
    detach_l2l(model)
    model.generate = types.MethodType(lambda self: "own", model)
    attach_l2l(model)
    assert model.generate() == copy.deepcopy(model).generate() == "own"
    detach_l2l(model)
    assert model.generate() == "own" and isinstance(model.generate, types.MethodType)


def generated(model: nn.Module, device: str, **options: Any) -> torch.Tensor:
    ids = torch.randint(5, 60, (1, 5), generator=torch.Generator().manual_seed(1))
    ids = torch.cat([ids, ids], dim=1)  # so that a lookup in the prompt finds something
    found: torch.Tensor = model.generate(ids.to(device), do_sample=False, max_new_tokens=6, pad_token_id=0, **options)
    return found.cpu()


WAYS: list[Any] = [
    (gpt2, {}, ""),
    (llama, {"prompt_lookup_num_tokens": 2}, ""),
    (t5, {"num_beams": 2}, ""),
    (llama, {}, "with an attached assistant"),
    (llama, {}, "with an assistant on the device"),
]


@cpu_suffices
@pytest.mark.parametrize(("make", "options", "assisted"), WAYS)
def test_ways_of_decoding(device, make, options, assisted):
    """With a key-value cache, before and after training: the tokens are those of torch."""
    model, assistant = make().eval(), llama().eval()
    helped = {"assistant_model": copy.deepcopy(assistant)} if assisted else {}
    expected = generated(model, "cpu", **options, **helped)
    attach_l2l(model, L2LConfig(ubatch_size=1))
    if "attached" in assisted:
        attach_l2l(assistant)
    if assisted:
        options = {"assistant_model": assistant if "attached" in assisted else assistant.to(device)}
    assert torch.equal(generated(model, device, **options), expected)
    train_once(model, batch_for(model))  # without an update
    assert torch.equal(generated(model.eval(), device, **options), expected)
    detach_l2l(model)
    detach_l2l(assistant)


# ---- what a program may do meanwhile


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


def test_a_forward_replaced_after_attaching_is_noticed():
    """One that reads the head's weight itself, as fused losses do."""

    def replaced(self, input_ids, labels=None, **kwargs):
        hidden = self.transformer(input_ids=input_ids).last_hidden_state
        weight = self.lm_head.weight.to(hidden.device)
        return nn.functional.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten().to(hidden.device))

    model = gpt2()
    attach_l2l(model)
    batch = batch_for(model, masked=False)
    other = copy.deepcopy(model)  # of which nothing is watched
    for each in (model, other):
        each.forward = types.MethodType(replaced, each)
    expected = other(**batch)
    expected.backward()
    with pytest.raises(ValueError, match="forward that it was attached with"):
        model(**batch)
    detach_l2l(model)
    model.forward = types.MethodType(replaced, model)
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


# ---- layers that change between steps


def grow(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Stack the layers on themselves; the new ones train in the first group of the optimizer."""
    layers = model.bert.encoder.layer
    layers.extend([copy.deepcopy(layer) for layer in layers])
    new = [p for layer in layers[len(layers) // 2 :] for p in layer.parameters()]
    optimizer.param_groups[0]["params"].extend(new)


def drop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    layers = model.bert.encoder.layer
    gone = {*layers[0].parameters()}
    del layers[0]
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p not in gone]
    for p in gone:
        p.detach()  # waits for its update, which writes its state
        optimizer.state.pop(p, None)


def swap(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    layers = model.bert.encoder.layer
    layers[0], layers[1] = layers[1], layers[0]


CHANGES: list[Any] = [(grow, 6, {}), (drop, 2, {"eps_update": "deferred", "stash": "host"}), (swap, 3, {})]
"""What is done to three layers, how many there are then, and options."""


@cpu_suffices
@pytest.mark.parametrize(("change", "count", "options"), CHANGES)
def test_a_callback_changes_the_layers(tmp_path, change, count, options):
    """After the second step. Models that are attached beside the trained one stay so."""

    def changes(args, state, control, model, optimizer, **_):
        if state.global_step == 2:
            change(model, getattr(optimizer, "optimizer", optimizer))

    def trained(kind, **more):
        model, callbacks = small_bert(dropout=0, layers=3), [on("on_step_end", changes)]
        made = trainer(kind, tmp_path / kind.__name__, model=model, callbacks=callbacks, **more)
        reference = made.accelerator.prepare_model(small_bert(layers=1), evaluation_mode=True)
        made.train()
        return made, reference

    found, reference = trained(L2LTrainer, **options)
    layers = found.model.bert.encoder.layer
    assert len(layers) == count and all(map(is_attached, layers))
    steps = [inner_optimizer(found).state[p]["step"] for p in layers[0].parameters()]
    assert set(map(float, steps)) == {4.0}
    assert_as_plain(found, trained(hf.Trainer, **{CHECKPOINTING: True})[0])
    assert is_attached(reference)
    detach_l2l(found.model)
    assert not is_attached(reference)


@cpu_suffices
def test_the_example_of_the_documentation_is_saved_and_resumed(tmp_path):
    """Its callback; from a checkpoint of the grown model, with the order of its optimizer."""
    page = (Path(__file__).parents[2] / "docs" / "changing_layers.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(code, documented := {})
    saving = {"max_steps": 4, "save_strategy": "steps", "save_steps": 3}
    made = l2l_trainer(tmp_path, model=small_bert(dropout=0), callbacks=[documented["Grow"]()], **saving)
    made.train()
    layers = made.model.bert.encoder.layer
    assert len(layers) == 4
    state = inner_optimizer(made).state
    assert {float(state[p]["step"]) for p in layers[0].parameters()} == {4.0}
    assert {float(state[p]["step"]) for p in layers[-1].parameters()} == {2.0}
    made.save_model(str(tmp_path / "saved"))
    loaded = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert_same_tensors(loaded.state_dict(), made.model.state_dict())

    folder = str(tmp_path / "checkpoint-3")
    args = arguments(L2LTrainingArguments, tmp_path, **saving)
    grown = hf.AutoModelForSequenceClassification.from_pretrained(folder, dtype="float32")
    with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
        L2LTrainer(copy.deepcopy(grown), args, train_dataset=rows()).train(resume_from_checkpoint=folder)
    names, own = {p: name for name, p in made.model.named_parameters()}, dict(grown.named_parameters())
    groups = inner_optimizer(made).param_groups
    optimizer = torch.optim.AdamW([{**group, "params": [own[names[p]] for p in group["params"]]} for group in groups])
    L2LTrainer(grown, args, train_dataset=rows(), optimizers=(optimizer, None)).train(resume_from_checkpoint=folder)
    assert [name for p, name in names.items() if not torch.equal(own[name], p)] == []


# ---- models that are refused


@pytest.fixture
def group_of_two():
    """A process group in which this process has a partner that answers whatever it expects."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    distributed.destroy_process_group()


class _FabricModule(nn.Module):
    """As Lightning Fabric's `setup` returns it: attributes of the wrapper are those of the model."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self._forward_module = self._original_module = model


def placed(model: nn.Module) -> nn.Module:
    model.hf_device_map, model.name_or_path = {"bert": 0, "classifier": "cpu"}, "some/model"
    return model


def within(wrap, model: nn.Module, path: str = "bert.encoder.layer.1") -> nn.Module:
    container, _, attribute = path.rpartition(".")
    setattr(model.get_submodule(container), attribute, wrap(model.get_submodule(path)))
    return model


def sharded(model: nn.Module, path: str) -> nn.Module:
    fully_shard(model.get_submodule(path), mesh=init_device_mesh("cpu", (2,)))
    return model


def compiled(model: nn.Module, *, in_place: bool = False) -> nn.Module:
    if in_place:
        model.compile(backend="eager")
    return model if in_place else torch.compile(model, backend="eager")


DDP = nn.parallel.DistributedDataParallel
REFUSED = {
    r"from_pretrained\('some/model'": placed,
    "attach the model first": _FabricModule,
    "DistributedDataParallel at 'bert'": partial(within, DDP, path="bert"),
    "torch.compile": partial(compiled, in_place=True),
    "compiled model at 'bert.encoder.layer.1'": partial(within, compiled),
    "a DTensor": partial(sharded, path="bert.encoder.layer.1"),
}
"""Beside those of the table in docs/settings.md."""


def test_models_that_are_placed_or_wrapped_are_refused(group_of_two, tmp_path):
    for says, change in REFUSED.items():
        model = change(tiny_bert(layers=2))
        for attach in (attach_l2l, lambda model: l2l_trainer(tmp_path, model=model)):
            with pytest.raises(ValueError, match=says):
                attach(model)


def test_a_process_group_comes_before_attaching(request):
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
