"""Steps of some rows of a parameter, while other ranks step its other rows.

One rank alone would be late with the update of a large embedding, which the next forward needs first.
`layerwise_check.can_step_rows` finds optimizers for which rows that are stepped apart have the same bits.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_l2l.compat import without_interception
from hf_l2l.optim.layer_optimizers import LayerOptimizers, Places, SplitStep
from hf_l2l.optim.one_pass import OnePass


class RowsStep:
    """The step of some rows of a parameter that has state."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        places: Places,
        rows: slice,
        one_pass: OnePass | None = None,
        step_type: type[SplitStep] = SplitStep,
    ) -> None:
        """Record what the step needs, as `SplitStep` does.

        State of the shape of the parameter is written in its rows; other state, such as the number of steps, is this
        process's own.
        """
        self._name = type(optimizer).__name__
        with without_interception():
            self._own = parameter.detach()[rows].requires_grad_(parameter.requires_grad)
            attributes = {key: value for key, value in vars(parameter).items() if key != "_l2l_pending"}
            vars(self._own).update(attributes)
            self._state: dict[str, Any] = optimizer.state[parameter]
            self._views = {
                key: value[rows]
                for key, value in self._state.items()
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape
            }
            self._given = {**self._state, **self._views}
        of_rows = {**places, self._own: places[parameter]}
        layers = LayerOptimizers(optimizer, one_pass, state={self._own: self._given}, places=of_rows)
        self._step = step_type(layers, {self._own: gradient[rows]})

    @torch.no_grad()
    def run(self, factor: torch.Tensor | None = None) -> None:
        """Update the rows, whose gradient is multiplied by `factor` first (a 0-dim host tensor)."""
        before = {key: value is None for key, value in self._given.items()}
        self._step.part([self._own]).run({} if factor is None else {self._own: factor})
        after = {key: value is None for key, value in self._given.items()}
        other = sorted(key for key in before | after if before.get(key) != after.get(key))
        if other:
            raise RuntimeError(
                "ranks step rows of large parameters with optimizers whose state keeps its keys (got "
                f"{self._name}, which has made or dropped {', '.join(map(repr, other))}); train in one process"
            )
        for key, value in self._given.items():
            view = self._views.get(key)
            if view is None:
                self._state[key] = value
            elif value is not view:  # the step has made it anew
                view.copy_(value)
