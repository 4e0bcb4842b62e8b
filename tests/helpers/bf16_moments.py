"""Training whose optimizer keeps its moments in bfloat16."""

from __future__ import annotations

from typing import Any

import torch

from cmp_cases import batch, made
from hf_l2l import L2LConfig, Lamb, attach_l2l

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, foreach=False),
    "lamb": lambda p: Lamb(p, lr=1e-2),
}


def trained(mode: str, name: str = "adamw", steps: int = 4, device: str = "cpu", **options: Any) -> Any:
    model = made()
    torch.manual_seed(11)
    config = {"layer_classes": ("Block",), "moment_dtype": "bf16", **options}
    eps = attach_l2l(model, L2LConfig(device=device, eps_update=mode, **config))
    optimizer = eps.wrap(OPTIMIZERS[name](model.parameters()))
    for step in range(steps):
        model(**batch(step)).loss.backward()
        if mode != "eager":
            eps.clip_grad_norm_(1e9)
        optimizer.step()
    eps.synchronize()
    return model, optimizer
