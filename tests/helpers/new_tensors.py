"""What tensors are made while something runs."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class NewTensors(TorchDispatchMode):
    """Notes the number of elements, and of bytes, of tensors that are not made of what an operation is given."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = (*args, *(kwargs or {}).values())
        given = {each.untyped_storage().data_ptr() for each in values if isinstance(each, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in given:
            self.sizes.append(made.numel())
            self.num_bytes += made.untyped_storage().nbytes()
        return made
