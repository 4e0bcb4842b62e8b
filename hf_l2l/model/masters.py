"""The masters of a model: their names, the order in which a forward needs them, and what must stay as it is."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import nn

from hf_l2l.optim.layerwise_step import gradient_hook_error, parameters_of


class Masters:
    """What the EPS knows of the parameters of one model."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module]) -> None:
        self.model = model
        names = {module: name for name, module in model.named_modules()}
        self.layers = {layer: names[layer] for layer in layers}
        """Layer -> its name, in the order of the model."""
        self._shapes: WeakKeyDictionary[torch.optim.Optimizer, list[torch.Size]] = WeakKeyDictionary()
        """Of what an optimizer has states for."""
        self._places: dict[torch.Tensor, int] = {}
        """Master -> the number of its layer; made once per step, since masters may be replaced."""

    def name(self, parameter: torch.Tensor) -> str:
        """What the model calls it."""
        return next((name for name, p in self.model.named_parameters() if p is parameter), "a parameter")

    def know(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember the shapes of the parameters of `optimizer`."""
        self._shapes[optimizer] = [p.shape for p in parameters_of(optimizer)]

    def check(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Raise ValueError if a parameter is not what one of these optimizers knows any more, or has a hook that never
        runs."""
        for optimizer, shapes in ((each, self._shapes[each]) for each in optimizers):
            for p, shape in zip(parameters_of(optimizer), shapes, strict=False):  # groups may have been added
                if p.shape != shape:
                    raise ValueError(
                        f"a parameter keeps its shape as long as an optimizer has a state for it (got "
                        f"{list(p.shape)} for {self.name(p)}, which was {list(shape)}); make a new optimizer from "
                        "model.parameters() and pass it to eps.wrap"
                    )
        for p in self.model.parameters():
            if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
                raise ValueError(gradient_hook_error(self.name(p)))

    def parts(self, masters: Iterable[torch.Tensor]) -> list[tuple[str, list[torch.Tensor]]]:
        """`masters` as the next forward needs them: what is in no layer, then layer by layer, each with its name."""
        if not self._places:
            for number, layer in enumerate(self.layers, start=1):
                for p in layer.parameters():
                    self._places.setdefault(p, number)  # what is tied belongs to the first
        found: dict[int, list[torch.Tensor]] = {}
        for master in masters:
            found.setdefault(self._places.get(master, 0), []).append(master)
        names = ["what is in no layer", *self.layers.values()]
        return [(names[number], found[number]) for number in sorted(found)]

    def end_step(self) -> None:
        """Masters may be replaced from now on."""
        self._places.clear()


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, *, wide: bool = False) -> None:
    """Raise ValueError if `optimizer` cannot update the masters of `model` (see `EagerParamServer.wrap`), which are to
    be in more than 16 bits where `wide` says so."""
    name = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"the optimizer must step without a closure, which would run the model inside the update (got "
            f"{name}); use one that takes gradients, such as torch.optim.AdamW"
        )
    masters = {p: n for n, p in model.named_parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    strange = [p for p in held if p not in masters]
    if strange:
        raise ValueError(
            f"the optimizer must hold parameters of the model only (got {name} with {len(strange)} others of "
            f"{len(held)}, the first of shape {list(strange[0].shape)}); build it from model.parameters() after "
            "the model has its final parameters, and with the model on the host"
        )
    short = [masters[p] for p in held if p.requires_grad and p.is_floating_point() and p.itemsize < 4]
    if wide and short:
        raise ValueError(
            f"parameters that train must be float32 with cmp (got {short[0]} in 16 bits, which was frozen when the "
            "model was attached); call hf_l2l.detach_l2l(model), and attach it again"
        )
    hooked = [n for p, n in masters.items() if getattr(p, "_post_accumulate_grad_hooks", None) or p._backward_hooks]
    if hooked:
        raise ValueError(gradient_hook_error(hooked[0]))
