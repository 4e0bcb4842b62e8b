"""Gradients that are not finite: in which step, and where they come from.

Looking for it costs nothing as long as all is well: only when a gradient turned out not to be finite is the forward
that it came from run once more, with every layer watched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hf_l2l.eps.masters import Master, Masters
from hf_l2l.optim.layerwise_step import parameters_of
from hf_l2l.optim.loss_scale import LossScale
from hf_l2l.runtime.tensors import is_cache, leaves_of, map_tensors


class NonFiniteError(RuntimeError):
    """A step would have been made with gradients that are infinite or no numbers.

    The masters are as before it; with eager updates, those may have been updated whose gradients came before.
    """

    def __init__(self, step: int, where: str) -> None:
        super().__init__(
            f"step {step}: gradients are not finite ({where}); lower the learning rate, look at the data, or go on "
            "without such steps with nonfinite='skip' (--l2l_nonfinite skip)"
        )
        self.step = step
        """The number of the optimizer step, from 1."""
        self.where = where
        """The name of the layer, with what is wrong there."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.step, self.where)


def check_finite(norms: Iterable[torch.Tensor], step: int, what: str) -> None:
    """Raise NonFiniteError if one of `norms` (0-dim, on the host) is not finite."""
    norms = list(norms)
    if norms and not bool(torch.stack(norms).isfinite().all()):
        raise NonFiniteError(step, f"in {what}, which was not made")


class LastForward:
    """The last forward that gradients may come from, run once more if they are not finite."""

    def __init__(self) -> None:
        self._again: Callable[[], Any] | None = None
        self._module: nn.Module | None = None

    def remember(
        self, module: nn.Module, args: Any, kwargs: Any, replayed: Callable[[Callable[[], Any]], Any]
    ) -> None:
        """`module` was called from outside with these arguments.

        Args:
            module: the model, or a part of it.
            args: as they were given; they are held until the step is made.
            kwargs: the same.
            replayed: runs what it is given with the random numbers of that call.
        """
        if any(map(is_cache, leaves_of((args, kwargs)))):
            self.forget()  # it has been written to
            return
        args, kwargs = map_tensors(torch.Tensor.detach, (args, kwargs))
        self._module, self._again = module, lambda: replayed(lambda: module(*args, **kwargs))

    def forget(self) -> None:
        """Let go of the arguments."""
        self._module = self._again = None

    def first_nonfinite(self, layers: Mapping[nn.Module, str]) -> str | None:
        """Where numbers stop being finite in it: a name of `layers`, or what is before them; None if nowhere there.

        What modules write to their buffers is taken back.
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
                    lambda _, args, kwargs: seen(_hidden(args, kwargs), "what comes before the layers"),
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
    """The hidden states that a layer is given: its first argument. Masks may hold infinities."""
    return args[0] if args else kwargs.get("hidden_states")


class Vote:
    """Whether the gradients of the step that is under way may be used: if all of them are finite."""

    def __init__(self, masters: Masters, loss_scale: LossScale | None) -> None:
        """With a `loss_scale`, a step whose gradients are not all finite is skipped; without one it is an error."""
        self.masters = masters
        self.loss_scale = loss_scale
        self.last_forward = LastForward()
        self._result: bool | None = None
        self._vetoed = False
        self._stepped: WeakSet[torch.optim.Optimizer] = WeakSet()

    def reset(self) -> None:
        """There are new gradients."""
        if self._stepped:  # a new step begins, even if some optimizers did not take part in the last one
            self._vetoed = False
        self._result = None
        self._stepped.clear()

    def veto(self) -> None:
        """The loss is not finite, whatever its gradients are."""
        self._result, self._vetoed = None, True

    def after_step(self, optimizer: torch.optim.Optimizer, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """The step of `optimizer` is over; when all `optimizers` have stepped, the next step has a vote of its own."""
        self._stepped.add(optimizer)
        if all(each in self._stepped for each in optimizers):
            self.reset()
            self._vetoed = False
            self.last_forward.forget()

    def result(self, norm: Callable[[], torch.Tensor], step: int, optimizers: Iterable[torch.optim.Optimizer]) -> bool:
        """Vote, if that has not been done.

        With a loss scale, False means that the step is skipped; gradients that are not finite are dropped then,
        whichever optimizer was to use them.

        Args:
            norm: gives the norm of all gradients, a 0-dim host tensor.
            step: the number of the step, from 1.
            optimizers: whose gradients count; without one, those of all parameters do.

        Raises:
            NonFiniteError: without a loss scale.
        """
        if self._result is None:
            finite = not self._vetoed and bool(norm().isfinite())
            bad: list[torch.Tensor] = []
            if not finite:
                # The norm of large numbers may be infinite where they are not, and some train what is in no group.
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
            where = f"the backward of {touched[-1]}"  # what comes after it is finite
        where = where or self.last_forward.first_nonfinite(names)
        self.last_forward.forget()
        return where or "the loss or its gradient, after the layers; in the last forward all layers are finite"


def _is_finite(parameter: torch.Tensor) -> bool:
    gradient = parameter.grad
    if gradient is None:
        return True
    return bool((gradient.coalesce().values() if gradient.is_sparse else gradient).isfinite().all())
