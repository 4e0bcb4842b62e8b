"""`OptimizerEntry`: what the EPS knows about one optimizer."""

from __future__ import annotations

import torch
from torch.utils.hooks import RemovableHandle

from hf_l2l.optim.layer_optimizers import LayerOptimizers, parameters_of
from hf_l2l.optim.one_pass import OnePass


class OptimizerEntry:
    """The record of one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, splits: bool, one_pass: OnePass | None = None) -> None:
        self.splits = splits
        """True if it updates layer by layer, False if all layers at once."""
        self.is_retired = False
        """True if another optimizer updates the masters instead, until this one steps again."""
        self.shapes = [p.shape for p in parameters_of(optimizer)]
        """Shapes of its parameters when its state was made."""
        self.layers = LayerOptimizers(optimizer, one_pass)
        """What steps layer by layer."""
        self.is_widened = False
        """True while its state is fp32, for a step of all layers at once."""
        self.step_hook: RemovableHandle
        """The handle of `EagerParamServer.before_step`."""
        self.handles: list[RemovableHandle] = []
        """The handles of all hooks registered on it."""
