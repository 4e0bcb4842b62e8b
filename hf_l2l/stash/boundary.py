"""The boundary: what a layer returns and the next one takes. Decides where it lives, for each layer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_l2l.config import L2LConfig
from hf_l2l.log import logger
from hf_l2l.rows.host_rows import Passing
from hf_l2l.runtime import stream
from hf_l2l.runtime.tensors import size_text
from hf_l2l.stash.tiers import SHARE

_TENSORS = 4
"""As large as a layer's output, which the device holds in a backward: its input, its output, and their gradients."""


def fewest_bytes_on_host(memory: int | None) -> int | None:
    """With "auto", and so much memory on the device, the bytes of a layer's output from which on it passes through the
    host; None if it never does, since the memory is not known."""
    return None if memory is None else memory // (SHARE * _TENSORS)


def _nothing_is_told(num_bytes: int) -> None:
    pass


FOR_THE_MODEL = Passing(0, _nothing_is_told, None)
"""How the output of a layer on one of several devices passes to the model, which computes with it."""


class Boundary:
    """Where the outputs of layers live, and the gradients that flow back to them (arXiv:2002.05645, 2.2).

    On the host, they pass one micro-batch at a time to the next layer, or to what the model computes by micro-batches
    (a final norm, a head). What is read in another way is on the device, once that is known.
    """

    def __init__(self, config: L2LConfig, devices: Sequence[torch.device]) -> None:
        """The options and the execution devices."""
        passes = config.stash != "device" and config.boundary != "device" and not stream.shares_host_memory(devices[0])
        self._fewest_bytes: int | None = None
        """Outputs of fewer bytes stay on the device; None: all do."""
        if passes and config.boundary == "host":
            self._fewest_bytes = 0
        elif passes:
            self._fewest_bytes = fewest_bytes_on_host(stream.least_memory(devices))
        self._read: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
        """Modules whose output the model computes with, and functions in them."""
        self._waited_for: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Modules whose output is needed whole, as has been told."""
        self._by_rows: weakref.WeakMethod[Callable[..., Any]] | None = None

    def compute_by_rows(self, by_rows: Callable[..., Any]) -> None:
        """Call this bound method for functions of torch of what passes (see `Passing`), as long as its object lives.

        Only a weak reference is kept, so that device memory of a detached engine is freed at once.
        """
        self._by_rows = weakref.WeakMethod(by_rows)

    def after(self, module: nn.Module, is_in_forward: Callable[[], bool], function: str = "") -> Passing | None:
        """How the output of `module`, or of a function of torch in it, passes through host memory; None if it stays on
        the device. `is_in_forward` tells whether the model is running, and not the program."""
        if self._fewest_bytes is None or function in self._read.get(module, ()):
            return None
        return Passing(self._fewest_bytes, partial(self._is_read, module, function, is_in_forward), self._compute)

    def between_devices(self, module: nn.Module, is_in_forward: Callable[[], bool]) -> Passing | None:
        """How the output of `module`, which layers follow, passes to the device of the next one; None if the model
        computes with it itself. `is_in_forward` tells whether the model is running, and not the program."""
        if module in self._waited_for:
            return None
        return Passing(0, partial(self._is_waited_for, module, is_in_forward), None)

    def _is_waited_for(self, module: nn.Module, is_in_forward: Callable[[], bool], num_bytes: int) -> None:
        if is_in_forward() and module not in self._waited_for:
            self._waited_for.add(module)
            logger.warning(
                "all rows of what %s returns are needed at once, so there the devices wait for each other (%s)",
                type(module).__name__,
                size_text(num_bytes),
            )

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        by_rows = None if self._by_rows is None else self._by_rows()
        return NotImplemented if by_rows is None else by_rows(func, args, kwargs)

    def _is_read(self, module: nn.Module, function: str, is_in_forward: Callable[[], bool], num_bytes: int) -> None:
        functions = self._read.setdefault(module, set())
        if is_in_forward() and function not in functions:
            functions.add(function)
            logger.warning(
                "all rows of what %s returns are needed at once, so they stay on the device from now on (%s)",
                f"{function} in {type(module).__name__}" if function else type(module).__name__,
                size_text(num_bytes),
            )
