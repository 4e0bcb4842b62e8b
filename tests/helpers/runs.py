"""One way to train a small model, in three kinds of loop, and one comparison of what that leaves."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers as hf
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.optim.lr_scheduler import LinearLR

from devices import DEVICE
from hf_l2l import EagerParamServer, L2LConfig, L2LTrainer, Lamb, attach_l2l
from models import Toy, batch_for
from training import inner_optimizer, logs, trainer

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-3),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "LAMB": lambda groups: Lamb(groups, lr=1e-2),
}
UPDATED_BY = {"serial": "SGD", "deferred": "AdamW", "eager": "LAMB"}
"""Every `eps_update` with an optimizer: each of both once."""
CLIPS = {"serial": 0.5, "deferred": 0.5, "eager": 0.0, "plain": 0.5}
"""`eps_update` -> the norm that gradients are clipped to in tests of all modes; 0 for none, as eager updates need.
"plain" is transformers' own Trainer."""

UNCHECKED = {"check_recompute": "off"}
"""What is compared with another training needs no comparison of its recomputes, which takes a fifth of a short one."""


class Run(NamedTuple):
    """What a training leaves behind, on the host."""

    weights: dict[str, torch.Tensor]
    """The whole `state_dict`, buffers included."""
    state: dict[str, Any]
    """Of the optimizer."""
    logged: list[Any]
    """Losses, norms, learning rates."""


def run_of(model: nn.Module, optimizer: torch.optim.Optimizer, logged: list[Any]) -> Run:
    """What there is now of a model and its optimizer."""
    weights = {name: value.detach().to("cpu", copy=True) for name, value in model.state_dict().items()}
    return Run(weights, copy.deepcopy(on_host(optimizer.state_dict())), logged)


def run_of_trainer(trained: hf.Trainer) -> Run:
    """What there is now of a trainer."""
    return run_of(trained.model, inner_optimizer(trained), logs(trained))


def on_host(value: Any) -> Any:
    """`value` with all tensors in it on the host."""
    return torch.utils._pytree.tree_map(lambda each: each.cpu() if isinstance(each, torch.Tensor) else each, value)


def assert_same_run(found: Run | hf.Trainer, expected: Run | hf.Trainer) -> None:
    """All bits are equal: of what was logged, of weights and of the optimizer's state, whose order is the same."""
    found, expected = (each if isinstance(each, Run) else run_of_trainer(each) for each in (found, expected))
    assert found.logged == expected.logged
    assert_same_tensors(found.weights, expected.weights)
    assert found.state["param_groups"] == expected.state["param_groups"]
    assert list(found.state["state"]) == list(expected.state["state"])
    for index, state in expected.state["state"].items():
        assert list(found.state["state"][index]) == list(state)
        assert_same_tensors(found.state["state"][index], state)


def assert_run_of_plain(found: Run, expected: Run) -> None:
    """All bits are equal; on CUDA, which rounds in other places than the host that `expected` was computed or updated
    on, values are close."""
    if DEVICE != "cuda":
        assert_same_run(found, expected)
        return
    logged, others = (torch.tensor(torch.utils._pytree.tree_leaves(each.logged)) for each in (found, expected))
    torch.testing.assert_close(logged, others, rtol=1e-4, atol=1e-6)
    assert_close_tensors(found.weights, expected.weights, 1e-4)


def assert_same_tensors(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same names, and the same bits of each; None equals None."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value is None or found[name] is None:
            assert found[name] is value, name
        else:
            assert torch.equal(torch.as_tensor(found[name]).cpu(), torch.as_tensor(value).cpu()), name


def assert_close_tensors(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    """The same names, and values that differ by no more than `tolerance` times the largest one of all."""
    assert found.keys() == expected.keys()
    largest = max(float(torch.as_tensor(value).abs().max()) for value in expected.values())
    for name, value in expected.items():
        differ = (torch.as_tensor(found[name]).cpu().float() - torch.as_tensor(value).cpu().float()).abs().max()
        assert float(differ) <= tolerance * largest, name


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two parameter groups, as the Trainer makes them."""
    decay, rest = ([p for p in model.parameters() if (p.dim() > 1) is matrix] for matrix in (True, False))
    return [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


def seed_all(device: str = DEVICE) -> None:
    """The generators of the host and of the device."""
    torch.manual_seed(11)
    if device != "cpu":
        torch.get_device_module(device).manual_seed(11)


def attach(
    model: nn.Module | None = None,
    make: Callable[[Any], torch.optim.Optimizer] = OPTIMIZERS["AdamW"],
    *,
    device: str = DEVICE,
    **options: Any,
) -> tuple[nn.Module, EagerParamServer, torch.optim.Optimizer, dict[str, torch.Tensor]]:
    """A model that trains layer to layer (a `Toy`, unless one is given), its EPS, an optimizer, and a batch of 8 rows
    that are not all in whole micro-batches of 3."""
    model = Toy() if model is None else model
    eps = attach_l2l(model, config_for(model, **{"ubatch_size": 3, "device": device, **UNCHECKED, **options}))
    seed_all(device)
    return model.train(), eps, eps.wrap(make(model.parameters())), batch_for(model, masked=False)


def config_for(model: nn.Module, **options: Any) -> L2LConfig:
    """With the classes of layers that are not found by themselves."""
    if isinstance(model, Toy):
        options.setdefault("layer_classes", ("Block",))
    return L2LConfig(**options)


def train(
    model: nn.Module | None = None,
    *,
    loop: str = "raw",
    steps: int = 2,
    optimizer: str = "AdamW",
    accumulation: int = 1,
    max_norm: float | None = None,
    folder: Path | None = None,
    device: str = DEVICE,
    eps_update: str = "deferred",
    **options: Any,
) -> Run:
    """Train a model (a `Toy` with dropout, unless one is given) layer to layer, with parameter groups and a scheduler.

    Args:
        loop: "raw", a loop in plain torch; "accelerate"; "trainer", L2LTrainer in `folder`.
        max_norm: what gradients are clipped to, 0 for none; None: 0.5, but for eager updates.
        options: of `L2LConfig`; of the Trainer's arguments if `loop` is "trainer".
    """
    max_norm = CLIPS[eps_update] if max_norm is None else max_norm
    if loop == "trainer":
        assert folder is not None
        options |= {"max_steps": steps, "gradient_accumulation_steps": accumulation, "max_grad_norm": max_norm}
        return _train_by_trainer(model, folder, optimizer, eps_update=eps_update, weight_decay=0.1, **options)
    model = Toy() if model is None else model
    options = {"ubatch_size": 5, "device": device, "eps_update": eps_update, **UNCHECKED, **options}
    eps = attach_l2l(model, config_for(model, **options))
    made = OPTIMIZERS[optimizer](groups_of(model))
    model.train()
    if loop == "accelerate":
        return _train_by_accelerate(model, eps.wrap(made), steps, accumulation, max_norm, device)
    made = eps.wrap(made)
    scheduler = LinearLR(made, 1.0, 0.1, steps)
    seed_all(device)
    logged: list[Any] = []
    for step in range(steps):
        for turn in range(accumulation):
            with eps.accumulate() if turn < accumulation - 1 else nullcontext():
                loss = model(**batch_for(model, masked=False, seed=step * accumulation + turn)).loss / accumulation
                loss.backward()
            logged.append(loss.item())
        if max_norm:
            logged.append(eps.clip_grad_norm_(max_norm).item())
        made.step()
        scheduler.step()
        made.zero_grad()
        logged.append(scheduler.get_last_lr())
    eps.synchronize()
    return run_of(model, made, logged)


def _train_by_accelerate(
    model: nn.Module, optimizer: Any, steps: int, accumulation: int, max_norm: float, device: str
) -> Run:
    """A loop of Accelerate, which owns accumulation and the scheduler."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(gradient_accumulation_steps=accumulation, cpu=device == "cpu")
    model, made = accelerator.prepare(model, optimizer)
    scheduler = accelerator.prepare_scheduler(LinearLR(made, 1.0, 0.1, steps))
    seed_all(device)
    logged: list[Any] = []
    for step in range(steps * accumulation):
        with accelerator.accumulate(model):
            loss = model(**batch_for(model, masked=False, seed=step)).loss
            accelerator.backward(loss)
            logged.append(loss.item())
            if accelerator.sync_gradients and max_norm:
                logged.append(float(accelerator.clip_grad_norm_(model.parameters(), max_norm)))
            made.step()
            scheduler.step()
            made.zero_grad()
    return run_of(model, made.optimizer, logged)


def _train_by_trainer(model: nn.Module | None, folder: Path, optimizer: str, **options: Any) -> Run:
    """L2LTrainer; or transformers' own, with `eps_update="plain"`."""
    kind: type[hf.Trainer] = L2LTrainer
    if options["eps_update"] == "plain":
        kind = hf.Trainer
        known = ("max_steps", "gradient_accumulation_steps", "max_grad_norm", "weight_decay")
        options = {name: options[name] for name in known}
    if optimizer == "SGD":
        options["optimizer_cls_and_kwargs"] = torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}
    elif optimizer == "LAMB" and kind is hf.Trainer:
        options["optimizer_cls_and_kwargs"] = Lamb, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
    elif optimizer == "LAMB":
        options["l2l_optimizer"] = "lamb"
    made = trainer(kind, folder, model=model, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*moves the weights")
        made.train()
    return run_of_trainer(made)
