"""The same training under every `eps_update`, in three kinds of loop: bits that must be equal, whatever the device.

`test_update_bits.py` runs these on the CPU, `sim/test_sim_update_bits.py` on the simulated accelerator.
"""

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
from transformers.utils import ModelOutput

from hf_l2l import L2LConfig, L2LTrainer, Lamb, attach_l2l
from models import VOCAB, batch_for
from training import inner_optimizer, logs, tiny_bert, trainer

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-3),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "LAMB": lambda groups: Lamb(groups, lr=1e-2),
}


class Run(NamedTuple):
    """What training leaves behind."""

    weights: dict[str, torch.Tensor]
    state: dict[str, Any]
    """Of the optimizer."""
    logged: list[Any]
    """Losses, norms, learning rates."""


def assert_same(found: Run, expected: Run) -> None:
    """All bits are equal, and so is the order of the optimizer's state."""
    assert found.logged == expected.logged
    assert found.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        assert torch.equal(found.weights[name], weight), name
    assert found.state["param_groups"] == expected.state["param_groups"]
    assert list(found.state["state"]) == list(expected.state["state"])
    for index, state in expected.state["state"].items():
        assert list(found.state["state"][index]) == list(state)
        for key, value in state.items():
            other = found.state["state"][index][key]
            assert value is other or torch.equal(torch.as_tensor(other), torch.as_tensor(value)), (index, key)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


class Toy(nn.Module):
    """A stack of few operations, and an embedding that is tied to the head."""

    def __init__(self, layers: int = 3, width: int = 8) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> ModelOutput:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return ModelOutput(loss=nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()))


def toy() -> nn.Module:
    """The same weights at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Toy()


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    decay, rest = ([p for p in model.parameters() if (p.dim() > 1) is matrix] for matrix in (True, False))
    return [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


def _seed(device: str) -> None:
    torch.manual_seed(11)
    if device != "cpu":
        torch.get_device_module(device).manual_seed(11)


def result(model: nn.Module, optimizer: torch.optim.Optimizer, logged: list[Any]) -> Run:
    state = copy.deepcopy(optimizer.state_dict())  # as it is now
    return Run({name: p.detach().clone() for name, p in model.named_parameters()}, state, logged)


def raw_loop(
    device: str, mode: str, optimizer: str, *, steps: int, accumulation: int = 1, max_norm: float = 0.0, **options: Any
) -> Run:
    """A loop in plain torch, with dropout, groups and a scheduler; a `max_norm` of 0 does not clip."""
    model = toy()
    eps = attach_l2l(
        model, L2LConfig(device=device, eps_update=mode, ubatch_size=5, layer_classes=("Block",), **options)
    )
    made = eps.wrap(OPTIMIZERS[optimizer](groups_of(model)))
    scheduler = LinearLR(made, 1.0, 0.1, steps)
    _seed(device)
    logged: list[Any] = []
    model.train()
    for step in range(steps):
        for turn in range(accumulation):
            with eps.accumulate() if turn < accumulation - 1 else nullcontext():
                loss = model(**batch_for(model, masked=False, seed=step * accumulation + turn)).loss / accumulation
                loss.backward()
            logged.append(loss.item())
        logged.append((eps.clip_grad_norm_(max_norm) if max_norm else eps.grad_norm()).item())
        made.step()
        scheduler.step()
        logged.append(scheduler.get_last_lr())
        made.zero_grad()
    return result(model, made, logged)


def accelerate_loop(
    device: str, mode: str, optimizer: str, *, steps: int, accumulation: int = 1, max_norm: float = 0.0, **options: Any
) -> Run:
    """A loop with Accelerate, which knows which backward is the last of a step; mode "plain" is without L2L."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(gradient_accumulation_steps=accumulation, cpu=device == "cpu")
    model = toy()
    made = OPTIMIZERS[optimizer](groups_of(model))
    if mode != "plain":
        config = L2LConfig(device=device, eps_update=mode, layer_classes=("Block",), **options)
        made = attach_l2l(model, config).wrap(made)
    model, made, scheduler = accelerator.prepare(model, made, LinearLR(made, 1.0, 0.1, steps))
    _seed(device)
    logged: list[Any] = []
    model.train()
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
    return result(model, made.optimizer, logged)


def trainer_loop(
    folder: Path,
    mode: str,
    optimizer: str,
    *,
    steps: int,
    accumulation: int = 1,
    max_norm: float = 0.0,
    rows: int = 8,
    **options: Any,
) -> Run:
    """A run of `L2LTrainer`, or, with mode "plain", of transformers' own."""
    ours: dict[str, Any] = {} if mode == "plain" else {"eps_update": mode, **options}
    if optimizer == "SGD":
        ours["optimizer_cls_and_kwargs"] = torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}
    elif optimizer == "LAMB" and mode == "plain":
        ours["optimizer_cls_and_kwargs"] = Lamb, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
    elif optimizer == "LAMB":
        ours["l2l_optimizer"] = "lamb"
    made = trainer(
        hf.Trainer if mode == "plain" else L2LTrainer,
        folder,
        model=tiny_bert(layers=2),
        max_steps=steps,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=accumulation,
        max_grad_norm=max_norm,
        weight_decay=0.1,
        **ours,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*moves the weights")
        made.train()
    return result(made.model, inner_optimizer(made), logs(made))


def toy_under(
    device: str, mode: str, make: Callable[[Any], torch.optim.Optimizer] = OPTIMIZERS["AdamW"], **options: Any
) -> Any:
    """A model, its EPS, an optimizer and a batch."""
    model = toy()
    config = L2LConfig(device=device, eps_update=mode, ubatch_size=3, layer_classes=("Block",), **options)
    eps = attach_l2l(model, config)
    _seed(device)
    return model.train(), eps, eps.wrap(make(model.parameters())), batch_for(model, masked=False)


def check_clipping_between_backwards(device: str) -> None:
    """Gradients that were clipped are what the next backward adds to."""
    runs = []
    for mode in ("serial", "deferred"):
        model, eps, optimizer, batch = toy_under(device, mode)
        norms = []
        for _ in range(2):
            model(**batch).loss.backward()
            norms.append(eps.clip_grad_norm_(0.01).item())
            model(**batch).loss.backward()
            norms.append(eps.grad_norm().item())
            optimizer.step()
        runs.append(result(model, optimizer, norms))
    assert_same(runs[1], runs[0])
    first, second = runs[0].logged[:2]
    assert 0.5 * first < second < 1.5 * first


def check_penalty(device: str, mode: str, *, together: bool) -> None:
    """A loss may use masters themselves: autograd writes to their gradients without any callback."""
    model, eps, optimizer, batch = toy_under(device, mode)
    for _ in range(2):
        loss = model(**batch).loss
        penalty = sum(100.0 * p.square().sum() for p in model.parameters())
        if together:
            (loss.cpu() + penalty).backward()
        else:
            loss.backward()
            penalty.backward()
        norm = eps.grad_norm()
        gradients = [p.grad.clone() for p in model.parameters()]
        assert torch.equal(norm, torch.nn.utils.get_total_norm(gradients))
        assert norm > 100.0
        optimizer.step()


def check_hooks_of_a_step(device: str) -> None:
    """Whenever they were registered, they find the gradients, and what they make of them counts."""
    runs = []
    for mode in ("serial", "deferred"):
        model, _, optimizer, batch = toy_under(device, mode)
        found: list[int] = []

        def sign(each: torch.optim.Optimizer, args: Any, kwargs: Any, found: list[int] = found) -> None:
            given = [p for group in each.param_groups for p in group["params"] if p.grad is not None]
            found.append(len(given))
            for p in given:
                p.grad.sign_()

        optimizer.register_step_pre_hook(sign)
        for _ in range(3):
            model(**batch).loss.backward()
            optimizer.step()
        runs.append(result(model, optimizer, found))
    assert_same(runs[1], runs[0])
    assert runs[0].logged == [len(runs[0].weights)] * 3
