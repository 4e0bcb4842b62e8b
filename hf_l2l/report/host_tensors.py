"""What training keeps in host memory, counted tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hf_l2l.runtime import stream
from hf_l2l.runtime.compat import without_interception


def host_tensors(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], copies: Iterable[torch.Tensor] | None = None
) -> dict[str, list[torch.Tensor]]:
    """What training keeps in host memory now: masters, gradients, the optimizers' state ("moments"), and the 16-bit
    copies that travel, where `copies` are given."""
    masters: list[torch.Tensor] = list(model.parameters())
    inner: list[Any] = [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers]
    # Copies, since an update in the background may be adding to them.
    states = [state for optimizer in inner for state in list(optimizer.state.values())]
    with without_interception():  # also what an eager update has taken may be asked for: it is not there
        kinds: dict[str, list[torch.Tensor]] = {
            "masters": masters,
            "gradients": [p.grad for p in masters if p.grad is not None],
            "moments": [t for state in states for t in list(state.values()) if isinstance(t, torch.Tensor)],
        }
        if copies is not None:
            kinds["copies"] = list(copies)
        return {kind: [t for t in tensors if t.device == stream.HOST] for kind, tensors in kinds.items()}
