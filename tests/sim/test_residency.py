"""Resident weights: those of non-layer modules stay on the device, and are updated there, with the same results."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from hf_l2l import L2LConfig, L2LTrainingArguments, attach_l2l, copy_as, detach_l2l, estimate
from hf_l2l.eps.host_memory import HostMemory
from hf_l2l.eps.nonfinite import NonFiniteError
from hf_l2l.runtime.observer import OBSERVERS, observe
from hf_l2l.testing import enable_simulated_accelerator
from models import FAMILIES, attached, batch_for, gradients, train_once
from tiers import combined
from training import SAVING, arguments, inner_optimizer, l2l_trainer, logs, plain_trainer, settled_memory, tiny_bert
from update_cases import OPTIMIZERS, Run, assert_same, raw_loop, toy, toy_under, trainer_loop

SIM = torch.device("sim:0")
CLIPS = {"serial": 0.5, "deferred": 0.5, "eager": 0.0}


def on_host(value: Any) -> Any:
    """`value` with all tensors in it on the host."""
    return torch.utils._pytree.tree_map(lambda v: v.cpu() if isinstance(v, torch.Tensor) else v, value)


def run_on_host(run: Run) -> Run:
    return Run(*(on_host(part) for part in run))


def places(model: nn.Module) -> dict[str, torch.device]:
    return {name: p.device for name, p in model.named_parameters()}


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("optimizer", "mode", "accumulation"), combined(OPTIMIZERS, CLIPS, [1, 2], one_in=3))
def test_they_train_as_streamed_ones(optimizer, mode, accumulation):
    same = {"steps": 4, "accumulation": accumulation, "max_norm": CLIPS[mode]}
    streamed = raw_loop("sim", mode, optimizer, **same)
    assert_same(run_on_host(raw_loop("sim", mode, optimizer, resident="shell", **same)), streamed)


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "options",
    [
        {"cmp": "bf16"},
        {"cmp": "fp16", "loss_scale_init": 1024.0},
        {"cmp": "bf16", "host_copies": "per_sweep", "stash": "host"},
        {"prefetch": False, "gradient_slots": 1},
        {"nonfinite": "skip"},
    ],
    ids=str,
)
def test_they_train_as_streamed_ones_with_other_options(options):
    same = {"steps": 4, "max_norm": 0.5, **options}
    streamed = raw_loop("sim", "deferred", "AdamW", **same)
    assert_same(run_on_host(raw_loop("sim", "deferred", "AdamW", resident="shell", **same)), streamed)


@pytest.mark.parametrize("options", [{"grad_dtype": "16bit"}, {"moment_dtype": "bf16"}], ids=str)
def test_only_what_is_on_the_host_is_kept_in_16_bits(options):
    model, eps, optimizer, batch = toy_under("sim", "deferred", resident="shell", **options)
    for _ in range(3):
        model(**batch).loss.backward()
        gradient_dtypes = {name: p.grad.dtype for name, p in model.named_parameters()}
        optimizer.step()
    eps.synchronize()
    for name, p in model.named_parameters():
        short = torch.float32 if name.startswith(("embed", "head")) else torch.bfloat16
        if "grad_dtype" in options:
            assert gradient_dtypes[name] == short
        else:
            assert optimizer.state[p]["exp_avg"].dtype == short


@pytest.mark.one_in(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_gradients_of_streamed_weights(family):
    torch.manual_seed(0)
    streamed = FAMILIES[family]()
    resident, batch = copy.deepcopy(streamed), batch_for(streamed)
    attached(streamed, device="sim", ubatch_size=3), attached(resident, device="sim", ubatch_size=3, resident="shell")
    optimizer = resident._l2l.eps.wrap(torch.optim.SGD(resident.parameters(), lr=0.1))
    torch.sim.manual_seed(1)
    expected = train_once(streamed, batch)
    torch.sim.manual_seed(1)
    assert torch.equal(train_once(resident, batch), expected)
    found = gradients(resident)
    assert optimizer.state == {}
    for name, gradient in gradients(streamed).items():
        assert (found[name] is None) == (gradient is None), name
        assert gradient is None or torch.equal(found[name].cpu(), gradient), name
    in_layers = {p for layer in resident._l2l.stacks for each in layer.layers for p in each.parameters()}
    for p in resident.parameters():
        assert p.device.type == ("cpu" if p in in_layers else "sim")
        assert p.grad is None or p.grad.device == p.device


class Copies:
    """Records the copies of a device: their kind, and of what."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def waits(self, point: Any, why: str) -> None: ...

    def host_reached(self, point: Any) -> None: ...

    @contextmanager
    def span(self, row: str, of: object, *, exposed: bool) -> Iterator[None]:
        self.seen.append((row, of if isinstance(of, str) else type(of).__name__))
        yield


def test_in_a_step_nothing_of_them_travels():
    model, eps, optimizer, batch = toy_under("sim", "deferred", resident="shell")
    names = {p: name for name, p in model.named_parameters()}
    before, copies = OBSERVERS.get(SIM), Copies()
    received = []
    receive = eps.gradients.receive
    eps.gradients.receive = lambda sums, *rest: (
        received.extend(names[m.parameter] for m, _ in sums),
        receive(sums, *rest),
    )
    for turn in range(3):
        if turn == 1:
            observe(SIM, copies)
        model(**batch).loss.backward()
        eps.clip_grad_norm_(0.5)
        optimizer.step()
    if before is not None:
        observe(SIM, before)
    kinds = {of for row, of in copies.seen if row in ("upload", "download")}
    assert kinds == {"Block", "inputs", "Parameter"}  # a layer's sums are called by their first parameter
    uploads = [of for row, of in copies.seen if row == "upload"]
    assert "non-layer modules" not in uploads
    downloads = sum(row == "download" for row, _ in copies.seen)
    assert downloads == 2 * 3  # one for each layer of each step
    assert "embed.weight" in received  # the EPS knows of it all the same


def test_parameters_stay_the_same_objects():
    model = toy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = list(model.parameters())
    eps = attach_l2l(model, L2LConfig(device="sim", layer_classes=("Block",), resident="shell"))
    eps.wrap(optimizer)
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert model.embed.weight is model.head.weight
    assert places(model)["embed.weight"] == SIM
    batch = batch_for(model, masked=False)
    model(**batch).loss.backward()
    optimizer.step()
    detach_l2l(model)
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert {v.device.type for state in optimizer.state.values() for v in state.values()} == {"cpu"}
    model(**batch).loss.backward()
    optimizer.step()


def test_a_run_goes_on_attached_and_detached():
    """State that an optimizer has already follows its parameters, there and back."""

    def trained(resident: str) -> tuple[Any, Any]:
        model, logged = toy().eval(), []
        batch, optimizer = batch_for(model, masked=False), torch.optim.AdamW(model.parameters(), lr=1e-2)
        config = L2LConfig(device="sim", layer_classes=("Block",), resident=resident)
        for turn in range(6):
            if turn == 2:
                attach_l2l(model, config).wrap(optimizer)
            if turn == 4:
                detach_l2l(model)
            loss = model(**batch).loss
            loss.backward()
            logged.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return logged, [p.detach().clone() for p in model.parameters()]

    (losses, weights), (expected, streamed) = trained("shell"), trained("none")
    assert losses == expected
    assert all(torch.equal(a, b) for a, b in zip(weights, streamed, strict=True))


class _Counting(torch.optim.SGD):
    """Keeps its momentum in fp32, a count of integers, and steps as SGD does."""

    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            state["count"] = state.get("count", torch.zeros(p.shape, dtype=torch.int64, device=p.device)) + 1
            state["mean"] = state.get("mean", torch.zeros(p.shape, device=p.device)).lerp(p.grad.float(), 0.5)
        super().step()


def test_what_moves_keeps_dtype_and_groups():
    model = toy().to(torch.bfloat16)
    optimizer = _Counting(model.parameters(), lr=0.1)
    model(**batch_for(model, masked=False)).loss.backward()
    optimizer.step()
    group, step = optimizer.param_groups[0], {"count": torch.int64, "mean": torch.float32}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the master weights are torch.bfloat16")
        attach_l2l(model, L2LConfig(device="sim", layer_classes=("Block",), resident="shell")).wrap(optimizer)
    for _ in range(2):
        for p in model.parameters():
            assert {key: optimizer.state[p][key].dtype for key in step} == step
            assert {optimizer.state[p][key].device for key in step} == {p.device}
        assert optimizer.param_groups[0] is group
        detach_l2l(model)


def test_moments_in_16_bits_stay_so_when_the_model_is_detached():
    model, eps, optimizer, batch = toy_under("sim", "deferred", resident="shell", moment_dtype="bf16")
    model(**batch).loss.backward()
    optimizer.step()
    eps.synchronize()
    before = {p: optimizer.state[p]["exp_avg"].dtype for p in model.parameters()}
    detach_l2l(model)
    assert {p: optimizer.state[p]["exp_avg"].dtype for p in model.parameters()} == before
    assert set(before.values()) == {torch.float32, torch.bfloat16}


@pytest.mark.parametrize("resident", [pytest.param("none", marks=pytest.mark.slow), "shell"])
def test_several_graphs(resident):
    """Two forwards before a backward, a graph that is kept, a backward that fails, and only some weights trained."""
    found = []
    for place in ("none", resident):
        model, _, optimizer, batch = toy_under("sim", "deferred", resident=place)
        first, second = model(**batch).loss, model(**batch_for(model, masked=False, seed=2)).loss
        (first + second).backward()
        optimizer.step()
        loss = model(**batch).loss
        loss.backward(retain_graph=True)
        loss.backward()
        handle = model.blocks[0].register_forward_hook(lambda module, args, out: out * 1)
        failing = model(**batch).loss
        failing.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            failing.backward()
        handle.remove()
        found.append({name: p.grad.cpu() for name, p in model.named_parameters()})
        optimizer.step()
        model.blocks.requires_grad_(False)
        model(**batch).loss.backward()
        found[-1] |= {f"{name} alone": p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        found[-1]["after"] = model.embed.weight.detach().cpu()
    assert found[0].keys() == found[1].keys() and "embed.weight alone" in found[0]
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_accumulation_holds_one_gradient():
    """Beside the new one, which is added at once."""
    peaks = []
    for accumulation in (1, 2):
        model, eps, optimizer, batch = toy_under("sim", "deferred", resident="shell")
        optimizer.zero_grad()
        for turn in range(accumulation):
            loss = model(**batch).loss
            held = settled_memory()  # without what earlier tests have left
            loss.backward()
            if turn == accumulation - 1:
                peaks.append(settled_memory() - held)  # the device's thread frees the graph a little later
        del loss, model, eps, optimizer
    assert peaks[1] <= peaks[0] - 0.9 * 4 * 8 * 60  # the second backward leaves no gradient more


def test_detaching_while_a_graph_lives():
    model, _, _, batch = toy_under("sim", "deferred", resident="shell")
    loss = model(**batch).loss
    detach_l2l(model)
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    del loss


def test_a_parameter_that_a_graph_has_saved_stays_there_with_a_warning():
    model, _, optimizer, batch = toy_under("sim", "deferred", resident="shell")
    model(**batch).loss.backward()
    optimizer.step()
    penalty = model.embed.weight.square().sum()
    with pytest.warns(UserWarning, match=r"embed.weight stays on sim:0.*call model.to\('cpu'\)") as caught:
        detach_l2l(model)
    assert caught[0].filename == __file__
    assert {name for name, place in places(model).items() if place == SIM} == {"embed.weight"}
    assert optimizer.state[model.embed.weight]["exp_avg"].device == SIM
    assert optimizer.state[model.head.bias]["exp_avg"].device.type == "cpu"
    del penalty


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "mode"), [("AdamW", "deferred"), ("LAMB", "eager"), ("SGD", "serial")])
def test_the_trainer_trains_as_with_streamed_ones(tmp_path, optimizer, mode):
    same = {"steps": 3, "max_norm": CLIPS[mode], "accumulation": 2, "ubatch_size": 2}
    streamed = trainer_loop(tmp_path / "streamed", mode, optimizer, **same)
    found = trainer_loop(tmp_path / "resident", mode, optimizer, l2l_resident="shell", **same)
    assert_same(run_on_host(found), streamed)


def weights_of(trainer: hf.Trainer) -> dict[str, torch.Tensor]:
    return {name: value.cpu() for name, value in trainer.model.state_dict().items()}


RESIDENT, STREAMED = {"l2l_resident": "shell"}, {"l2l_resident": "none"}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("first", "then"), [(RESIDENT, RESIDENT), (RESIDENT, STREAMED), (STREAMED, RESIDENT)])
def test_a_checkpoint_resumes_resident_or_not(tmp_path, first, then):
    saving = {**SAVING, "max_grad_norm": 0.5}
    whole = l2l_trainer(tmp_path / "whole", **saving, **STREAMED)
    whole.train()
    cut = l2l_trainer(tmp_path / "cut", **saving, **first)
    cut.train()
    resumed = l2l_trainer(tmp_path / "resumed", **saving, **then)
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-2"))
    assert logs(resumed)[2:4] == logs(whole)[2:4]
    expected = weights_of(whole)
    assert all(torch.equal(value, expected[name]) for name, value in weights_of(resumed).items())


def test_plain_trainer_resumes_from_their_checkpoint(tmp_path):
    begun = l2l_trainer(tmp_path / "begun", **SAVING, **RESIDENT)
    begun.train()
    plain = plain_trainer(tmp_path / "plain", **SAVING)
    plain.train(resume_from_checkpoint=str(tmp_path / "begun" / "checkpoint-2"))
    assert plain.state.global_step == SAVING["max_steps"]


def test_bf16_moments_of_a_streamed_run_are_resumed(tmp_path):
    options = {**SAVING, "l2l_moment_dtype": "bf16"}
    l2l_trainer(tmp_path / "begun", **options).train()
    resumed = l2l_trainer(tmp_path / "resumed", **options, **RESIDENT)
    resumed.train(resume_from_checkpoint=str(tmp_path / "begun" / "checkpoint-2"))
    optimizer = inner_optimizer(resumed)
    for p in resumed.model.parameters():
        average = optimizer.state[p]["exp_avg"]
        assert (average.device, average.dtype) == (p.device, torch.float32 if p.device == SIM else torch.bfloat16)


@pytest.mark.parametrize("mode", CLIPS)
def test_a_gradient_that_is_not_finite_is_refused(mode):
    model, eps, optimizer, batch = toy_under("sim", mode, resident="shell")
    model(**batch).loss.backward()
    before = model.embed.weight.detach().clone()
    model.embed.weight.grad[3, 3] = torch.nan
    with pytest.raises(NonFiniteError):
        optimizer.step()
    assert torch.equal(model.embed.weight, before)


def test_a_step_is_skipped_for_one_of_them():
    model, eps, optimizer, batch = toy_under("sim", "deferred", resident="shell", nonfinite="skip")
    model(**batch).loss.backward()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.embed.weight.grad[3, 3] = torch.inf
    optimizer.step()
    eps.synchronize()
    assert eps.scaler.skipped == 1
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_torch_clips_them_with_the_others():
    norms = []
    for resident in ("none", "shell"):
        model, eps, optimizer, batch = toy_under("sim", "deferred", resident=resident)
        model(**batch).loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
        norms.append(float(sum(p.detach().double().sum().cpu() for p in model.parameters())))
    assert norms[:2] == norms[2:]


def test_a_penalty_on_one_of_them():
    """A loss that uses a resident master directly adds to its gradient."""
    found = []
    for resident in ("none", "shell"):
        model, _, optimizer, batch = toy_under("sim", "deferred", resident=resident)
        for _ in range(2):
            penalty = model.embed.weight.square().sum().cpu()
            (model(**batch).loss.cpu() + penalty).backward()
        found.append(model.embed.weight.grad.cpu())
        optimizer.step()
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)


def test_what_moves_a_model_leaves_them():
    model, *_ = toy_under("sim", "deferred", resident="shell")
    before = places(model)
    assert model.to("cpu") is model
    assert model.to("sim") is model
    assert places(model) == before
    with pytest.raises(ValueError, match="keeps the dtype"):
        model.half()


def test_the_trainer_leaves_them_when_it_trains_again(tmp_path):
    trainer = l2l_trainer(tmp_path, max_steps=1, **RESIDENT)
    trainer.train()
    before = places(trainer.model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*loss_is_scaled.*")
        trainer.train()
        trainer.evaluate()
        trainer._move_model_to_device(trainer.model, trainer.args.device)  # as transformers does for a new model
    assert places(trainer.model) == before
    assert before["bert.embeddings.word_embeddings.weight"] == SIM


def test_a_copy_is_attached_like_any_model_on_a_device():
    model, *_ = toy_under("sim", "deferred", resident="shell")
    other = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="it moves to the host"):
        attach_l2l(other, L2LConfig(device="sim", layer_classes=("Block",), resident="shell"))
    assert places(other) == places(model)
    assert other.embed.weight is not model.embed.weight


def test_resized_embeddings_stay_resident():
    model = tiny_bert()
    eps = attach_l2l(model, L2LConfig(device="sim", resident="shell"))
    model.resize_token_embeddings(70, mean_resizing=False)
    assert places(model)["bert.embeddings.word_embeddings.weight"] == SIM
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))
    batch = batch_for(model)
    before = model.bert.embeddings.word_embeddings.weight.detach().clone()
    model(**batch).loss.backward()
    optimizer.step()
    eps.synchronize()
    assert not torch.equal(model.bert.embeddings.word_embeddings.weight, before)


def test_saved_copies_are_on_the_host(tmp_path):
    model = tiny_bert()
    attach_l2l(model, L2LConfig(device="sim", resident="shell"))
    assert {p.device.type for p in copy_as(model, torch.bfloat16).parameters()} == {"cpu"}
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    mine = model.state_dict()
    assert all(torch.equal(value, mine[name].cpu()) for name, value in loaded.state_dict().items())


def test_evaluation_uses_them():
    model, _, _, batch = toy_under("sim", "deferred", resident="shell")
    streamed, *_ = toy_under("sim", "deferred")
    with torch.no_grad():
        assert torch.equal(model.eval()(**batch).loss, streamed.eval()(**batch).loss)
        other = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        at_zero = torch.func.functional_call(model, other, kwargs=batch).loss
        assert at_zero.item() == pytest.approx(torch.tensor(float(model.head.out_features)).log().item())


@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.slow), {"cmp": "bf16"}], ids=str)
def test_the_estimate_has_what_they_take(options):
    """Device memory after a step is that of the streamed run and what the estimate says more."""
    held, said = [], []
    for resident in ("none", "shell"):
        before = settled_memory()
        model = tiny_bert(layers=2, width=64)
        config = L2LConfig(device="sim", resident=resident, **options)
        eps = attach_l2l(model, config)
        optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))
        for _ in range(2):
            model(**batch_for(model)).loss.backward()
            optimizer.step()
        model(**batch_for(model)).loss.backward()
        eps.synchronize()
        held.append(settled_memory() - before)
        said.append(estimate(model, config, optimizer))
        shell = [p for name, p in model.named_parameters() if "encoder" not in name]
        count = sum(p.numel() for p in shell)
        del model, eps, optimizer, shell
    more = held[1] - held[0]
    assert 0.97 < more / (4 * 4 * count) < 1.03  # master, gradient and two moments
    there = 4 * 4 * count if not options else (4 * 4 + 2 * 2) * count
    assert said[1].shell - said[0].shell == pytest.approx(there - (8 if not options else 4) * count, rel=0.01)
    assert said[0].masters - said[1].masters == 4 * count
    assert said[0].gradients - said[1].gradients == 4 * count
    assert said[0].moments - said[1].moments == pytest.approx(8 * count, rel=0.01)


def test_the_summary_says_it(tmp_path):
    text = l2l_trainer(tmp_path, **RESIDENT).l2l_summary()
    assert "(stays there, with its optimizer state)" in text


# ---- what cannot be honoured


def test_bad_values(tmp_path):
    with pytest.raises(ValueError, match=r"resident must be one of 'none', 'shell', 'all' \(got 'embeddings'\)"):
        L2LConfig(resident="embeddings")
    with pytest.raises(ValueError, match=r"l2l_resident must be one of"):
        arguments(L2LTrainingArguments, tmp_path, l2l_resident=1)


def test_a_weak_reference_is_refused_before_anything_moves():
    model = toy()
    held = weakref.ref(model.head.bias)
    with pytest.raises(ValueError, match=r"impossible for head.bias.*something refers to it weakly"):
        attach_l2l(model, L2LConfig(device="sim", layer_classes=("Block",), resident="shell"))
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert held() is model.head.bias


def test_a_gradient_hook_is_refused_before_anything_moves():
    model = toy()
    model.head.bias.register_hook(lambda gradient: gradient)
    with pytest.raises(ValueError, match=r"gradient hooks.*got one on head.bias"):
        attach_l2l(model, L2LConfig(device="sim", layer_classes=("Block",), resident="shell"))
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_a_trace_that_cannot_be_written_leaves_the_model(tmp_path):
    model, folder = toy(), tmp_path / "gone"
    folder.mkdir()
    config = L2LConfig(device="sim", layer_classes=("Block",), resident="shell", trace=str(folder / "trace.json"))
    folder.rmdir()
    with pytest.raises(ValueError, match="trace must go where"):
        attach_l2l(model, config)
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_values_that_a_graph_has_saved_are_refused():
    model = toy()
    penalty = model.head.bias.square().sum()
    with pytest.raises(ValueError, match=r"impossible for head.bias.*attach the model before its first forward"):
        attach_l2l(model, L2LConfig(device="sim", layer_classes=("Block",), resident="shell"))
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    del penalty
    attach_l2l(model, L2LConfig(device="sim", layer_classes=("Block",), resident="shell"))


def test_an_error_of_the_engine_leaves_the_model(monkeypatch):
    def failing(self: Any) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(HostMemory, "adopt", failing)
    model = toy()
    with pytest.raises(MemoryError):
        attach_l2l(model, L2LConfig(device="sim", layer_classes=("Block",), resident="shell"))
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_an_optimizer_that_is_not_wrapped_is_refused():
    model = toy()
    attach_l2l(model, L2LConfig(device="sim", layer_classes=("Block",), resident="shell"))
    with pytest.raises(RuntimeError, match=r"resident weights need a wrapped optimizer.*eps.wrap\(optimizer\)"):
        model(**batch_for(model, masked=False)).loss.backward()


class _GlobalNorm(torch.optim.SGD):
    """Divides all gradients by their norm."""

    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            p.grad /= norm
        super().step()


@pytest.mark.parametrize("mode", ["serial", "deferred"])
def test_an_optimizer_that_mixes_parameters_is_refused(mode):
    with pytest.raises(ValueError, match=r"resident='shell'.*_GlobalNorm cannot update.*use resident='none'"):
        toy_under("sim", mode, lambda parameters: _GlobalNorm(parameters, lr=0.1), resident="shell")


def test_a_weight_that_is_put_into_a_layer_is_refused():
    model, _, _, batch = toy_under("sim", "deferred", resident="shell")
    model.out = nn.Parameter(torch.zeros(16, device="sim"))
    model.blocks[0].up.bias = model.out
    with pytest.raises(ValueError, match=r"weights of a streamed layer stay on the host \(got .* on the device"):
        model(**batch)


def test_weights_that_do_not_fit_go_back_to_the_host():
    model = toy()
    enable_simulated_accelerator(torch.accelerator.memory_allocated() + model.embed.weight.nbytes)
    try:
        with pytest.raises(torch.OutOfMemoryError) as raised:
            attach_l2l(model, L2LConfig(device="sim", layer_classes=("Block",), resident="shell"))
    finally:
        enable_simulated_accelerator(None)
    assert "raised while resident='shell' moved weights to sim:0" in raised.value.__notes__[-1]
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert not hasattr(model, "_l2l")


def test_weights_that_share_memory_stay_on_the_host_with_a_warning():
    model = toy()
    model.head.weight = nn.Parameter(model.embed.weight.detach())  # tied by memory, not by name
    with pytest.warns(UserWarning, match="resident='shell' leaves embed.weight, head.weight on the host") as caught:
        eps = attach_l2l(model, L2LConfig(device="sim", layer_classes=("Block",), resident="shell"))
    assert caught[0].filename == __file__
    found = places(model)
    assert (found["embed.weight"].type, found["head.bias"].type) == ("cpu", "sim")
    optimizer = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    model(**batch_for(model, masked=False)).loss.backward()
    optimizer.step()
    eps.synchronize()


def test_a_parameter_of_a_layer_too_is_the_layers():
    model = toy()
    model.blocks[0].up.bias = model.out_bias = nn.Parameter(torch.zeros(16))
    attach_l2l(model, L2LConfig(device="sim", layer_classes=("Block",), resident="shell"))
    assert places(model)["out_bias"].type == "cpu"
