"""The tensors that training keeps in host memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hf_l2l.compat import without_interception
from hf_l2l.runtime import stream


def host_tensors(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], copies: Iterable[torch.Tensor] | None = None
) -> dict[str, list[torch.Tensor]]:
    """The tensors that training keeps in host memory now, by kind: "masters", "gradients", "moments" (the optimizers'
    state) and, if given, "copies" (the 16-bit copies of masters)."""
    masters: list[torch.Tensor] = list(model.parameters())
    inner: list[Any] = [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers]
    # Copied, since an update in the background may add entries.
    states = [state for optimizer in inner for state in list(optimizer.state.values())]
    with without_interception():  # so that a gradient which an eager update has used reads as None
        kinds: dict[str, list[torch.Tensor]] = {
            "masters": masters,
            "gradients": [p.grad for p in masters if p.grad is not None],
            "moments": [t for state in states for t in list(state.values()) if isinstance(t, torch.Tensor)],
        }
        if copies is not None:
            kinds["copies"] = list(copies)
        return {kind: [t for t in tensors if t.device == stream.HOST] for kind, tensors in kinds.items()}
