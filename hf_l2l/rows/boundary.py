"""The boundary: what a layer returns and the next one takes. Decides where it lives, for each layer."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from hf_l2l.config import L2LConfig
from hf_l2l.rows.tiers import SHARE
from hf_l2l.runtime import stream

_TENSORS = 4
"""As large as a layer's output, which the device holds in a backward: its input, its output, and their gradients."""


class Passing(NamedTuple):
    """How an output passes to the next layer through host memory."""

    fewest_bytes: int
    """An output of fewer bytes stays on the device."""
    made_real: Callable[[], None]
    """Called when it is needed on the device after all."""


class Boundary:
    """Where the outputs of layers live, and the gradients that flow back to them (arXiv:2002.05645, 2.2).

    On the host, they pass to the next layer one micro-batch at a time. A layer whose output the model computes with
    (a norm after the last one of an encoder) has it on the device, once that is known.
    """

    def __init__(self, config: L2LConfig, device: torch.device) -> None:
        """The options and the execution device."""
        passes = config.stash != "device" and config.boundary != "device" and not stream.shares_host_memory(device)
        self._fewest_bytes: int | None = None
        """Outputs of fewer bytes stay on the device; None: all do."""
        if passes and config.boundary == "host":
            self._fewest_bytes = 0
        elif passes:
            memory = stream.memory_of(device)
            self._fewest_bytes = None if memory is None else memory // (SHARE * _TENSORS)
        self._read: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Layers whose output the model computes with."""

    def after(self, layer: nn.Module, is_in_forward: Callable[[], bool]) -> Passing | None:
        """How the output of `layer`, which another layer follows, passes through host memory; None if it stays on the
        device. `is_in_forward` tells whether the model is running, and not the program."""
        if self._fewest_bytes is None or layer in self._read:
            return None
        return Passing(self._fewest_bytes, partial(self._is_read, layer, is_in_forward))

    def _is_read(self, layer: nn.Module, is_in_forward: Callable[[], bool]) -> None:
        if is_in_forward():
            self._read.add(layer)
