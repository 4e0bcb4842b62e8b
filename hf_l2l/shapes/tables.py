"""`Tables`: what becomes of rows of embeddings while a model runs without values."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class Tables(TorchFunctionMode):
    """Inside, rows that are taken from tables that train are known; `apart`, the tables get no gradient."""

    def __init__(self, *, apart: bool) -> None:
        super().__init__()
        self._apart = apart
        self._rows: list[tuple[StorageWeakRef, torch.Size, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not functional.embedding or len(args) < 2:
            return func(*args, **kwargs)
        table = args[1]
        if self._apart:
            found = func(args[0], table.detach(), *args[2:], **kwargs).requires_grad_(table.requires_grad)
        else:
            found = func(*args, **kwargs)
        if found.requires_grad:
            self._rows.append((StorageWeakRef(found.untyped_storage()), found.shape, found.nbytes))
        return found

    def largest_besides(self, given: Container[int]) -> tuple[torch.Size, int]:
        """Shape and bytes of the largest rows that still live, and are not among the memory that is `given`."""
        alive = [each for each in self._rows if not each[0].expired() and each[0].cdata not in given]
        return max(((shape, size) for _, shape, size in alive), key=lambda each: each[1], default=(torch.Size(), 0))


class Plain:
    """Runs the forward of a module as it is."""

    def run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What `forward` returns."""
        return forward(*args, **kwargs)


def configs_of(module: nn.Module) -> Iterator[Any]:
    """The config of a module, and the parts of it that say whether a cache is used."""
    config = getattr(module, "config", None)
    if config is not None:
        yield config
        for value in vars(config).values():
            if hasattr(value, "use_cache"):
                yield value
