"""Norms of the weight gradients of each micro-batch, which the relay has in passing: one for each weight, squared and
summed on the device, over micro-batches and layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hf_l2l.eps.masters import MasterUnit
from hf_l2l.model.batch_dims import Ubatch
from hf_l2l.runtime import stream, wait_reasons


def norm_of_gradient(gradient: torch.Tensor) -> torch.Tensor:
    """The norm of the gradient of one micro-batch, a 0-dim tensor on its device, in fp32 or wider."""
    is_wide = gradient.dtype in (torch.float32, torch.float64)
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, dtype=None if is_wide else torch.float32)
    return norm


class UbatchNorms:
    """The sum, over the layers and micro-batches of one backward, of squared norms of gradients."""

    def __init__(self) -> None:
        self.ubatches: Sequence[Ubatch | None] = ()
        """The micro-batches of the backward; None stands for all rows."""
        self.problem: str | None = None
        """Why these are not the norms of the gradients of micro-batches; None if they are."""
        self._units: set[MasterUnit] = set()
        self._sums: dict[torch.device, tuple[torch.Tensor, stream.Point | None]] = {}
        """Device -> the sum of its layers (0-dim), and the point after which it is there."""

    def add(
        self,
        unit: MasterUnit,
        ubatches: Sequence[Ubatch | None],
        norms: Mapping[int, Sequence[torch.Tensor]],
        device: torch.device,
    ) -> None:
        """A layer has run its backward: number of a weight -> the norms of its gradients, as they came."""
        if not norms:
            return  # nothing of it trains
        name = type(unit.module).__name__
        if unit in self._units:
            self.problem = f"{name}, which runs several times before a backward"
        elif self._units and list(ubatches) != list(self.ubatches):
            self.problem = f"{name}, which has other micro-batches than the layers after it"
        elif any(len(each) > len(ubatches) for each in norms.values()):
            self.problem = f"{name}, which runs backwards of its own"
        self._units.add(unit)
        self.ubatches = ubatches
        with torch.no_grad():
            total = torch.stack([norm for each in norms.values() for norm in each]).square().sum()
            before, computed = self._sums.get(device, (None, None))
            stream.wait(computed, wait_reasons.UBATCH_NORMS_COMPUTED)  # a layer may run on the stream of the program
            self._sums[device] = total if before is None else before + total, stream.record(device)

    def sum_of_squares(self) -> float:
        """The sum; the host waits for it."""
        for device, (_, computed) in self._sums.items():
            stream.wait(computed, wait_reasons.UBATCH_NORMS_COMPUTED, host=True, on=device)
        return sum(float(total) for total, _ in self._sums.values())
