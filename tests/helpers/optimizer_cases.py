"""The optimizers that are stepped in parts, each with two groups, and parameters for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.optimization import Adafactor as HFAdafactor

from hf_l2l import Lamb

SHAPES = ((5, 7), (7,), (), (0, 3), (4, 4, 2), (6,), (2, 9))
FROZEN = 5  # the number of the one that is not trained


def make(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[[list], torch.optim.Optimizer]:
    """A maker of this optimizer with two groups."""

    def made(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        own = {**options, "lr": options["lr"].clone()} if isinstance(options.get("lr"), torch.Tensor) else options
        second = {"params": parameters[4:], "weight_decay": 0.25}
        groups = [{"params": parameters[:4]}, second if kind is not torch.optim.SparseAdam else {**second, "eps": 0.1}]
        return kind(groups, **own)

    return made


OPTIM = torch.optim
CASES = {
    "adamw": make(OPTIM.AdamW, lr=0.1),
    "adamw foreach": make(OPTIM.AdamW, lr=0.1, foreach=True),
    "adamw fused": make(OPTIM.AdamW, lr=0.1, fused=True),
    "adamw amsgrad": make(OPTIM.AdamW, lr=0.1, amsgrad=True),
    "adamw maximize": make(OPTIM.AdamW, lr=0.1, maximize=True),
    "adamw tensor lr": make(OPTIM.AdamW, lr=torch.tensor(0.1)),
    "adam": make(OPTIM.Adam, lr=0.1),
    "adam foreach": make(OPTIM.Adam, lr=0.1, foreach=True, amsgrad=True),
    "adam fused tensor lr": make(OPTIM.Adam, lr=torch.tensor(0.1), fused=True),
    "sgd": make(OPTIM.SGD, lr=0.1),
    "sgd momentum": make(OPTIM.SGD, lr=0.1, momentum=0.9, dampening=0.1),
    "sgd nesterov": make(OPTIM.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "sgd fused": make(OPTIM.SGD, lr=0.1, momentum=0.9, fused=True),
    "adagrad": make(OPTIM.Adagrad, lr=0.1, lr_decay=0.1),
    "adagrad fused": make(OPTIM.Adagrad, lr=0.1, fused=True),
    "rmsprop": make(OPTIM.RMSprop, lr=0.1, momentum=0.9, centered=True),
    "adamax": make(OPTIM.Adamax, lr=0.1),
    "adadelta": make(OPTIM.Adadelta, lr=0.1),
    "nadam": make(OPTIM.NAdam, lr=0.1),
    "radam": make(OPTIM.RAdam, lr=0.1),
    "adafactor": make(OPTIM.Adafactor, lr=0.1),
    "transformers' adafactor": make(HFAdafactor, lr=None),
    "transformers' adafactor with lr": make(HFAdafactor, lr=0.1, relative_step=False, beta1=0.9),
    "rprop": make(OPTIM.Rprop, lr=0.1),
    "asgd": make(OPTIM.ASGD, lr=0.1, t0=2),
    "muon": make(OPTIM.Muon, lr=0.1),
    "sparse adam": make(OPTIM.SparseAdam, lr=0.1),
    "lamb": make(Lamb, lr=0.1),
}
REFUSED = {"adafactor": SHAPES.index((0, 3)), "sparse adam": SHAPES.index(())}
"""Shapes for which whole steps raise."""
ALL_AT_ONCE = "sgd fused"
"""Raises in torch 2.13 where some parameters have their first gradient later than others."""


def parameters_for(case: str) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(max(s, default=2), 3) for s in SHAPES] if case == "muon" else SHAPES
    made = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    if case in REFUSED:
        made[REFUSED[case]] = torch.nn.Parameter(torch.randn(3, generator=generator))
    made[FROZEN].requires_grad_(False)
    return made
