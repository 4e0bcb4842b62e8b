"""Non-finite gradients: the decision to make, skip or refuse a step, and the search for their origin.

The decision needs only the norm of the gradients, which is known anyway. If a gradient is not finite, the last forward
is run once more with hooks on every layer, to find the first non-finite values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hf_l2l.eps.masters import Master, Masters
from hf_l2l.eps.pending import PendingSum, pending_of
from hf_l2l.optim.layer_optimizers import parameters_of
from hf_l2l.optim.loss_scale import LossScale
from hf_l2l.runtime.tensors import is_cache, leaves_of, map_tensors


class NonFiniteError(RuntimeError):
    """Gradients of a step are infinite or NaN, so the step is not made.

    The masters have their values from before the step; eager updates may already have updated some layers.
    """

    def __init__(self, step: int, where: str) -> None:
        super().__init__(
            f"step {step}: gradients are not finite ({where}); lower the learning rate, check the data, or skip such "
            "steps with nonfinite='skip' (--l2l_nonfinite skip)"
        )
        self.step = step
        """The number of the optimizer step, from 1."""
        self.where = where
        """Where non-finite values appear first, with the name of the layer."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.step, self.where)


def check_finite(norms: Iterable[torch.Tensor], step: int, what: str) -> None:
    """Raise NonFiniteError if one of `norms` (0-dim, on the host) is not finite; `what` names the refused update."""
    norms = list(norms)
    if norms and not bool(torch.stack(norms).isfinite().all()):
        raise NonFiniteError(step, f"in {what}, which was not made")


class LastForward:
    """Records the last forward with gradients, so that it can be run once more if those are not finite."""

    def __init__(self) -> None:
        self._again: Callable[[], Any] | None = None
        self._module: nn.Module | None = None

    def remember(
        self, module: nn.Module, args: Any, kwargs: Any, replayed: Callable[[Callable[[], Any]], Any]
    ) -> None:
        """Record a call of `module` by the program.

        Args:
            module: the model, or a part of it.
            args: the arguments of the call; they are held until the step is made.
            kwargs: its keyword arguments; likewise.
            replayed: runs a function with the random numbers of that call.
        """
        if any(map(is_cache, leaves_of((args, kwargs)))):
            self.forget()  # the call writes to the cache, so that it cannot be repeated
            return
        args, kwargs = map_tensors(torch.Tensor.detach, (args, kwargs))
        self._module, self._again = module, lambda: replayed(lambda: module(*args, **kwargs))

    def forget(self) -> None:
        """Release the recorded arguments."""
        self._module = self._again = None

    def first_nonfinite(self, layers: Mapping[nn.Module, str]) -> str | None:
        """Run the forward again and find the first non-finite values: in one of `layers`, or before them.

        Buffers are restored.

        Returns:
            where they appear, by the names in `layers`; None if the outputs of all layers are finite.
        """
        if self._module is None or self._again is None:
            return None
        found: list[str] = []

        def seen(value: Any, where: str) -> None:
            tensors = [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor) and t.is_floating_point()]
            if not found and not all(bool(t.isfinite().all()) for t in tensors if t.numel()):
                found.append(where)

        handles = []
        for layer, name in layers.items():
            handles += [
                layer.register_forward_pre_hook(
                    lambda _, args, kwargs: seen(_hidden(args, kwargs), "the modules before the layers"),
                    with_kwargs=True,
                ),
                layer.register_forward_hook(lambda _, args, out, name=name: seen(out, f"the forward of {name}")),
            ]
        buffers = {b: b.clone() for b in self._module.buffers()}
        try:
            with torch.no_grad():
                self._again()
        finally:
            for handle in handles:
                handle.remove()
            with torch.no_grad():
                for buffer, values in buffers.items():
                    buffer.copy_(values)
        return found[0] if found else None


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The hidden states in a layer's arguments: its first argument. Others are not checked: masks hold infinities."""
    return args[0] if args else kwargs.get("hidden_states")


class Vote:
    """Decides once per step whether its gradients may be used: if all of them are finite."""

    def __init__(self, masters: Masters, loss_scale: LossScale | None) -> None:
        """With a `loss_scale`, a step whose gradients are not all finite is skipped; without one it is an error."""
        self.masters = masters
        self.loss_scale = loss_scale
        self.last_forward = LastForward()
        self._result: bool | None = None
        self._vetoed = False
        self._stepped: WeakSet[torch.optim.Optimizer] = WeakSet()

    def reset(self) -> None:
        """Discard the result, since there are new gradients."""
        if self._stepped:  # a new step begins, even if some optimizers took no part in the last one
            self._vetoed = False
        self._result = None
        self._stepped.clear()

    @property
    def is_decided(self) -> bool:
        """Whether the vote on this step is over."""
        return self._result is not None

    @property
    def is_vetoed(self) -> bool:
        """Whether the loss of this step is not finite."""
        return self._vetoed

    def veto(self) -> None:
        """Vote against this step, whatever its gradients are: the loss is not finite."""
        self._result, self._vetoed = None, True

    def after_step(self, optimizer: torch.optim.Optimizer, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Record that the step of `optimizer` is over; after those of all `optimizers`, prepare the next vote."""
        self._stepped.add(optimizer)
        if all(each in self._stepped for each in optimizers):
            self.reset()
            self._vetoed = False
            self.last_forward.forget()

    def result(self, norm: Callable[[], torch.Tensor], step: int, optimizers: Iterable[torch.optim.Optimizer]) -> bool:
        """Vote, if that has not been done in this step.

        With a loss scale, False means that the step is skipped; gradients that are not finite are then dropped, for
        all optimizers.

        Args:
            norm: returns the norm of all gradients, a 0-dim host tensor.
            step: the number of the step, from 1.
            optimizers: the gradients of their parameters count; if there are none, those of all parameters.

        Raises:
            NonFiniteError: without a loss scale.
        """
        if self._result is None:
            finite = not self._vetoed and bool(norm().isfinite())
            bad: list[torch.Tensor] = []
            if not finite:
                # The norm may overflow although all gradients are finite, or a parameter in no optimizer may have
                # gradients that are not.
                trained = {p for optimizer in optimizers for p in parameters_of(optimizer)}
                bad = [p for p in trained or self.masters.parameters if not _is_finite(p)]
                finite = not bad and not self._vetoed
            if self.loss_scale is None and not finite:
                self._vetoed = False
                raise NonFiniteError(step, self._where({self.masters.of(p) for p in bad}))
            self._result = finite if self.loss_scale is None else self.loss_scale.vote(finite=finite)
            for p in bad:
                p.grad = None
        return self._result

    def _where(self, bad: set[Master]) -> str:
        names = self.masters.layer_names
        touched = [name for layer, name in names.items() if not bad.isdisjoint(self.masters.unit(layer).masters)]
        where = None
        if touched and list(names.values())[-1] not in touched:
            where = f"the backward of {touched[-1]}"  # the gradients of later layers are finite
        where = where or self.last_forward.first_nonfinite(names)
        self.last_forward.forget()
        return where or "the loss or its gradient, after the layers; the last forward has finite outputs in all layers"


def _is_finite(parameter: torch.Tensor) -> bool:
    gradient = parameter.grad
    if gradient is None:
        return True
    pending = pending_of(gradient)
    if isinstance(pending, PendingSum) and pending.norm is not None and pending.norm_decides:
        return bool(pending.norm.isfinite())
    return bool((gradient.coalesce().values() if gradient.is_sparse else gradient).isfinite().all())
