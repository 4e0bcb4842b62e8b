"""Attaching and detaching, in raw and Accelerate loops, and in the order of a notebook."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import types
from functools import partial

import pytest
import torch
import transformers as hf
from accelerate import Accelerator, dispatch_model
from accelerate.hooks import CpuOffload, ModelHook, add_hook_to_module
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from hf_l2l import L2LCallback, L2LConfig, attach_l2l, detach_l2l
from hf_l2l.hf.hooks import bound_method
from models import assert_same_bits, batch_for, bert, gpt2, gradients, llama, reference, train_once
from training import l2l_trainer, tiny_bert


def everything_of(model: nn.Module) -> dict[str, list[str]]:
    return {name: sorted(module.__dict__) for name, module in model.named_modules()}


def test_detach_undoes_attach():
    model = bert()
    before, forward = everything_of(model), model.forward.__func__
    attach_l2l(model)
    assert everything_of(model) != before
    assert detach_l2l(model) is model
    assert everything_of(model) == before
    assert model.forward.__func__ is forward
    batch = batch_for(model)
    loss, expected = reference(model, batch)
    assert torch.equal(train_once(model, batch), loss)
    assert_same_bits(gradients(model), expected)


def test_attach_is_idempotent_and_takes_one_config():
    model = bert()
    eps = attach_l2l(model, L2LConfig(ubatch_size=2))
    assert attach_l2l(model, L2LConfig(ubatch_size=2)) is eps
    with pytest.raises(ValueError, match=r"one config at a time \(got ubatch_size=3, where it has 2\).*detach_l2l"):
        attach_l2l(model, L2LConfig(ubatch_size=3))
    detach_l2l(model)
    detach_l2l(model)
    assert attach_l2l(model, L2LConfig(ubatch_size=3)) is not eps


def test_the_model_stays_the_same_object_with_the_same_parameters():
    model = bert()
    parameters = list(model.parameters())
    names = list(model.state_dict())
    attach_l2l(model, L2LConfig(ubatch_size=3))
    train_once(model, batch_for(model))
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == names
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())


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
    assert_same_bits(gradients(model), expected)


def raw_loop(model: nn.Module, *, l2l: bool) -> list[float]:
    if l2l:
        eps = attach_l2l(model, L2LConfig(ubatch_size=None))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    if l2l:
        optimizer = eps.wrap(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    torch.manual_seed(4)
    norms = []
    for step in range(4):
        train_once(model, batch_for(model, seed=step))
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return norms


def test_raw_loop_gives_the_bits_of_plain_torch():
    plain, ours = tiny_bert(), tiny_bert()
    assert raw_loop(ours, l2l=True) == raw_loop(plain, l2l=False)
    for a, b in zip(detach_l2l(ours).parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)


def accelerate_loop(model: nn.Module, *, l2l: bool) -> list[float]:
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    if l2l:
        eps = attach_l2l(model, L2LConfig(device="cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if l2l:
        optimizer = eps.wrap(optimizer)
    model, optimizer = accelerator.prepare(model, optimizer)
    torch.manual_seed(4)
    norms = []
    for step in range(6):
        with accelerator.accumulate(model):
            model.train()
            accelerator.backward(model(**batch_for(model, seed=step)).loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.step()
            optimizer.zero_grad()
    return norms


def test_accelerate_loop_gives_the_bits_of_the_plain_one():
    plain, ours = tiny_bert(), tiny_bert()
    expected = accelerate_loop(plain, l2l=False)
    assert len(expected) == 3
    assert accelerate_loop(ours, l2l=True) == expected
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("by", ["deepcopy", "pickle"])
def test_a_copy_is_a_detached_model(by):
    model = bert()
    attach_l2l(model, L2LConfig(ubatch_size=3))
    batch = batch_for(model)
    train_once(model, batch)
    if by == "deepcopy":
        other = copy.deepcopy(model)
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)  # our own bytes; the point is that a whole model can be saved
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


def doubled_output(self, *args, **kwargs):
    return type(self).forward(self, *args, **kwargs) * 2


@pytest.mark.parametrize("path", ["bert.encoder.layer.0", "classifier"])
def test_a_copy_has_the_forward_that_an_instance_was_given(path):
    model = bert()
    patched = model.get_submodule(path)
    patched.forward = types.MethodType(doubled_output, patched)
    batch = batch_for(model)
    loss, expected = reference(model, batch)
    attach_l2l(model)
    other = copy.deepcopy(model)
    assert other.get_submodule(path).forward.__self__ is other.get_submodule(path)
    assert torch.equal(train_once(other, batch), loss)
    assert_same_bits(gradients(other), expected)


def test_a_copy_of_a_prepared_model_is_plain():
    """Where Accelerate computes in bf16, it wraps the hook's forward, and keeps that in an attribute."""
    model = bert()
    attach_l2l(model)
    prepared = Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    assert "_original_forward" in vars(prepared)
    names = set(vars(pickle.loads(pickle.dumps(prepared))))  # noqa: S301  # our own bytes
    assert not names & {"_hf_hook", "_old_forward", "_original_forward", "forward"}


def test_pickles_that_name_bound_method_can_be_loaded():
    """Models that were pickled while they were attached, before attached modules left their hooks out."""

    class Replaced:
        def __reduce__(self):
            return bound_method, (layer, "forward")

    layer = nn.Linear(2, 2)
    layer.forward = Replaced()
    other = copy.deepcopy(layer)
    assert other.forward(torch.ones(2)).shape == (2,)
    assert bound_method.__module__ == "hf_l2l.hf.hooks"


@pytest.mark.parametrize("by", ["deepcopy", "pickle"])
@pytest.mark.parametrize("make", [bert, gpt2, llama], ids=lambda make: make.__name__)
def test_a_model_with_resized_embeddings_is_copied_and_detached(make, by):
    """Accelerate puts the hook of the old embeddings on the new ones, and its own function in their forward."""
    model = make()
    attach_l2l(model)
    model.resize_token_embeddings(80, mean_resizing=False)
    other = copy.deepcopy(model) if by == "deepcopy" else pickle.loads(pickle.dumps(model))  # noqa: S301  # our own bytes
    batch = batch_for(model)
    batch["input_ids"][0, 0] = 79
    loss = train_once(model, batch)
    detach_l2l(model)
    for each in (other, model):
        names = {name for module in each.modules() for name in vars(module)}
        assert not names & {"_hf_hook", "_old_forward", "forward", "_apply", "__getstate__"}
    assert torch.equal(train_once(other, batch), loss)
    assert_same_bits(gradients(other), gradients(model))
    attach_l2l(other)


def test_resized_embeddings_are_guarded():
    model = llama()
    attach_l2l(model)
    model.resize_token_embeddings(80, mean_resizing=False)
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        with pytest.raises(ValueError, match="keeps the dtype of its master weights"):
            module.half()


def test_moves_of_an_attached_model():
    model = bert()
    attach_l2l(model, L2LConfig(device="cpu"))
    assert model.to("cpu") is model
    assert model.bert.cpu() is model.bert
    for move in (
        lambda: model.half(),
        lambda: model.to(torch.float64),
        lambda: model.bert.encoder.layer[0].bfloat16(),
    ):
        with pytest.raises(ValueError, match=r"keeps the dtype of its master weights .*detach_l2l"):
            move()
    with pytest.raises(ValueError, match=r"lives on the host and runs on cpu .*move to meta.*detach_l2l"):
        model.to("meta")
    detach_l2l(model)
    assert model.to(torch.float64).dtype == torch.float64


def test_a_layer_called_from_outside_works_by_itself():
    model = bert()
    layer = model.bert.encoder.layer[0]
    hidden = torch.randn(2, 3, 16, requires_grad=True)
    layer(hidden).sum().backward()
    expected, input_gradient = gradients(layer), hidden.grad
    layer.zero_grad()
    hidden.grad = None
    attach_l2l(model, L2LConfig(ubatch_size=4))
    layer(hidden).sum().backward()
    assert_same_bits(gradients(layer), expected)
    assert torch.equal(hidden.grad, input_gradient)


def test_submodels_can_be_called():
    model = bert().eval()
    batch = batch_for(model)
    expected = model.bert(batch["input_ids"]).last_hidden_state
    attach_l2l(model, L2LConfig(ubatch_size=3))
    assert torch.allclose(model.bert(batch["input_ids"]).last_hidden_state, expected, atol=1e-6)


def test_train_interrupt_train_generate_detach(tmp_path):
    """The order of a notebook whose cells are run as they come."""
    model = tiny_bert()

    class Interrupt(hf.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2:
                raise KeyboardInterrupt

    made = l2l_trainer(tmp_path, model=model, ubatch_size=3, callbacks=[Interrupt()])
    with pytest.raises(KeyboardInterrupt):
        made.train()
    made.remove_callback(Interrupt)
    made.train()
    made.train()
    again = l2l_trainer(tmp_path, model=model, ubatch_size=3)  # the cell that makes the trainer, run twice
    again.train()
    assert again.state.global_step == 4
    detach_l2l(model)
    batch = batch_for(model)
    model.eval()
    with torch.no_grad():
        alone = model(**batch).logits
    attach_l2l(model)
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, alone)


def test_a_run_after_an_interrupt_in_backward_equals_a_fresh_one(tmp_path):
    fresh = l2l_trainer(tmp_path / "fresh", ubatch_size=3)
    fresh.train()

    model = tiny_bert()
    calls = []

    def interrupt(module: nn.Module, args: object, output: object) -> None:
        calls.append(torch._C._current_graph_task_id() != -1)
        if calls.count(True) == 2:  # in a recompute
            raise KeyboardInterrupt

    handle = model.bert.encoder.layer[2].output.dense.register_forward_hook(interrupt)
    broken = l2l_trainer(tmp_path / "broken", model=model, ubatch_size=3)
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    handle.remove()
    again = l2l_trainer(tmp_path / "again", model=model, ubatch_size=3)
    again.train()
    for a, b in zip(again.model.parameters(), fresh.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_generate_after_training_with_a_cache():
    plain = gpt2().eval()
    ours = copy.deepcopy(plain)
    attach_l2l(ours, L2LConfig(ubatch_size=1))
    train_once(ours, batch_for(ours))
    prompt = torch.tensor([[7, 8, 9], [10, 11, 12]])
    ours.eval()
    tokens = [m.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0) for m in (ours, plain)]
    assert torch.equal(tokens[0], tokens[1])


def test_training_ignores_an_empty_cache():
    """T5's decoder makes one although the configuration of the model says no."""
    from models import t5

    model = t5().double()
    model.config.use_cache = True
    batch = batch_for(model)
    plain = copy.deepcopy(model)
    train_once(plain, batch)
    attach_l2l(model)
    train_once(model, batch)
    assert all(
        torch.allclose(a.grad, b.grad, rtol=1e-12, atol=1e-14)
        for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )


def test_refused_models():
    model = bert()
    model.hf_device_map = {"bert": 0, "classifier": "cpu"}
    model.config.name_or_path = model.name_or_path = "some/model"
    with pytest.raises(
        ValueError,
        match=r"without a device_map .*SequenceClassification.from_pretrained\('some/model', dtype=torch.float32\)",
    ):
        attach_l2l(model)
    model.name_or_path = ""
    with pytest.raises(ValueError, match=r"'classifier': 'cpu'\}\); make or load it without device_map$"):
        attach_l2l(model)
    with torch.device("meta"):
        model = bert()
    with pytest.raises(ValueError, match=r"must hold values \(got bert.embeddings.word_embeddings.weight on the meta"):
        attach_l2l(model)
    model = bert()
    add_hook_to_module(model.bert, CpuOffload())
    with pytest.raises(ValueError, match=r"no other Accelerate hooks \(got a CpuOffload on 'bert'\)"):
        attach_l2l(model)
    with pytest.raises(ValueError, match=r"must have a stack of layers.*none was found in a Linear.*layer_classes="):
        attach_l2l(nn.Linear(2, 2))
    model = bert()
    model.is_quantized = True
    with pytest.raises(ValueError, match="quantized weights .* must be its parameters"):
        attach_l2l(model)


@pytest.fixture
def group_of_two():
    """A process group in which this process has a partner that answers whatever it expects."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    distributed.destroy_process_group()


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def replaced_forward(self, input_ids, labels=None, **kwargs):
    """Reads the head's weight itself, as fused losses do."""
    hidden = self.transformer(input_ids=input_ids).last_hidden_state
    return nn.functional.cross_entropy((hidden @ self.lm_head.weight.T).flatten(0, 1), labels.flatten())


def test_a_forward_replaced_after_attaching_is_noticed():
    model = gpt2()
    attach_l2l(model)
    batch = batch_for(model, masked=False)
    model.forward = types.MethodType(replaced_forward, model)
    with pytest.raises(ValueError, match="must run the forward that it was attached with.*GPT2LMHeadModel was"):
        model(**batch)
    detach_l2l(model)
    model.forward = types.MethodType(replaced_forward, model)
    plain = copy.deepcopy(model)
    plain.forward = types.MethodType(replaced_forward, plain)
    attach_l2l(model, L2LConfig(ubatch_size=2))
    found, expected = model(**batch), plain(**batch)
    found.backward()
    expected.backward()
    assert torch.allclose(found, expected)
    torch.testing.assert_close(model.lm_head.weight.grad, plain.lm_head.weight.grad)


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


def test_a_pickled_model_is_not_watched():
    model = gpt2()
    attach_l2l(model)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))  # noqa: S301
    copied(**batch_for(model, masked=False)).loss.backward()


def test_a_hook_of_the_program_may_call_a_part_of_the_model():
    model = gpt2()
    attach_l2l(model)
    batch = batch_for(model, masked=False)
    seen = []
    model.register_forward_pre_hook(lambda module, args: seen.append(module.transformer.wte(batch["input_ids"])))
    model(**batch).loss.backward()


def test_a_copy_of_an_attached_model_is_not_watched():
    model = gpt2()
    attach_l2l(model)
    copied = copy.deepcopy(model)
    copied.forward = types.MethodType(replaced_forward, copied)
    copied(**batch_for(model, masked=False)).backward()


class _FabricModule(nn.Module):
    """As Lightning Fabric's `setup` returns it: attributes of the wrapper are those of the model."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self._forward_module = self._original_module = model


WRAPPERS = {
    "model wrapped by Fabric": _FabricModule,
    "DataParallel": nn.DataParallel,
    "DistributedDataParallel": nn.parallel.DistributedDataParallel,
    "FullyShardedDataParallel": partial(FullyShardedDataParallel, device_id=torch.device("cpu")),
    "compiled model": lambda model: torch.compile(model, backend="eager"),
    "compiled model ": compiled_in_place,
}

REMEDIES = {
    "model wrapped by Fabric": "attach the model first",
    "DataParallel": "give it the model inside",
    "DistributedDataParallel": "attach the model before accelerator.prepare, or leave it out of that$",
    "FullyShardedDataParallel": "give it the model inside",
    "compiled model": "leave out torch.compile",
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrapped_models_are_refused(name, group_of_two, tmp_path):
    model = WRAPPERS[name](tiny_bert(layers=2))
    for attach in (attach_l2l, lambda model: l2l_trainer(tmp_path, model=model)):
        with pytest.raises(ValueError, match=rf"without a wrapper \(got a {name.strip()}\); {REMEDIES[name.strip()]}"):
            attach(model)


@pytest.mark.parametrize("name", ["DataParallel", "DistributedDataParallel", "compiled model"])
@pytest.mark.parametrize("path", ["bert", "bert.encoder.layer.1"])
def test_models_with_a_wrapped_module_are_refused(name, path, group_of_two, tmp_path):
    model = tiny_bert(layers=2)
    container, _, attribute = path.rpartition(".")
    setattr(model.get_submodule(container), attribute, WRAPPERS[name](model.get_submodule(path)))
    for attach in (attach_l2l, lambda model: l2l_trainer(tmp_path, model=model)):
        with pytest.raises(ValueError, match=rf"without a wrapper \(got a {name} at '{path}'\); {REMEDIES[name]}"):
            attach(model)


@pytest.mark.parametrize("path", ["", "bert.encoder.layer.1"])
def test_a_sharded_model_is_refused(path, group_of_two, tmp_path):
    model = tiny_bert(layers=2)
    fully_shard(model.get_submodule(path), mesh=init_device_mesh("cpu", (2,)))
    for attach in (attach_l2l, lambda model: l2l_trainer(tmp_path, model=model)):
        with pytest.raises(ValueError, match=rf"must be whole, .*\(got {path}.*weight, a DTensor\); load"):
            attach(model)


@pytest.mark.parametrize(
    "config", [{"stash": "host"}, "host", hf.BertConfig()], ids=lambda config: type(config).__name__
)
def test_a_config_of_another_kind_is_refused(config):
    with pytest.raises(ValueError, match=rf"must be an L2LConfig \(got a {type(config).__name__}\); write L2LConfig"):
        attach_l2l(tiny_bert(layers=2), config)
    with pytest.raises(ValueError, match="must be an L2LConfig"):
        L2LCallback(config)


def test_another_config_is_told_by_what_differs():
    model = tiny_bert(layers=2)
    attach_l2l(model, L2LConfig(device="cpu", ubatch_size=2))
    message = r"at a time \(got ubatch_size=4, where it has 2, and stash='host', where it has 'device'\); call hf_l2l"
    with pytest.raises(ValueError, match=message):
        attach_l2l(model, L2LConfig(ubatch_size=4, stash="host"))  # the device is the same, named or not


def test_a_launcher_without_a_process_group_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"got 2 of torchrun or another launcher, and no process group\); call torch"):
        attach_l2l(tiny_bert(layers=2))


def test_a_process_group_that_is_made_later_is_refused(request):
    model = bert()
    attach_l2l(model)
    request.getfixturevalue("group_of_two")
    with torch.no_grad():  # each process by itself
        model(**batch_for(model))
    with pytest.raises(ValueError, match=r"got one of 2 afterwards"):
        model(**batch_for(model))


@pytest.mark.parametrize("places", [{"": torch.device("cpu")}, {"bert": "cpu", "classifier": "cpu"}], ids=str)
def test_a_device_map_that_is_all_host_is_no_placement(places):
    model = bert()
    dispatch_model(model, places)
    assert model.hf_device_map == places
    attach_l2l(model)
    train_once(model, batch_for(model))


def test_a_bare_hook_is_what_copies_carry():
    model = bert()
    add_hook_to_module(model.bert, ModelHook())
    attach_l2l(model)
    train_once(model, batch_for(model))


def test_masters_of_16_bits_are_warned_of():
    with pytest.warns(UserWarning, match=r"the master weights are torch.bfloat16: .*dtype=torch.float32"):
        attach_l2l(bert().bfloat16())


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"must name a torch device \(got 'gpu'.*write 'cuda'"):
        L2LConfig(device="gpu")
    missing = "cuda" if not torch.cuda.is_available() else f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(ValueError, match=rf"must be one this machine has \(got {missing}\)"):
        attach_l2l(bert(), L2LConfig(device=missing))
    with pytest.raises(ValueError, match=r"must be able to run a layer \(got meta"):
        attach_l2l(bert(), L2LConfig(device="meta"))
