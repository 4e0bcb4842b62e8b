"""The eager param-server (EPS): the host side of layer-to-layer training.

The model stays in host memory and its own parameters are the masters; the EPS takes the gradient sums that the layers
leave behind and holds them in `p.grad` until the optimizer has used them. The update is serial
(arXiv:2002.05645, first text, figure 2b): all layers, in `optimizer.step()`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_l2l import stream
from hf_l2l.config import size_text
from hf_l2l.stacks import tensor_bytes

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


class EagerParamServer:
    """Owner of the master weights and gradient sums of one model, all of them host tensors.

    The contract of `p.grad`: it is the truth until `optimizer.step()`, and None means "start a new sum", so that a
    batch thrown away (`zero_grad` without `step`) leaves nothing behind. When `backward()` returns, every gradient of
    it is there. A wrapped optimizer clears the gradients it has used.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model
        self.device = device
        self._wrapped: WeakKeyDictionary[torch.optim.Optimizer, RemovableHandle] = WeakKeyDictionary()

    @torch.no_grad()
    def receive(self, master: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add a gradient sum from the device (shape and dtype of `master`) to what `master.grad` holds."""
        arrived = stream.download(gradient)
        if master.grad is None:
            master.grad = arrived
        else:
            master.grad += arrived

    def wrap(self, optimizer: OptimizerT) -> OptimizerT:
        """Check that `optimizer` can update the masters, and let its `step()` clear the gradients it used.

        The same optimizer comes back: its groups, state, state dict and schedulers are untouched. Calling it again
        with the same optimizer changes nothing.

        Raises:
            ValueError: if the optimizer needs a closure, or holds parameters that are not the model's, or a parameter
                carries a hook that expects gradients on the device.
        """
        self.check(optimizer)
        inner: Any = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper keeps the optimizer there
        if inner not in self._wrapped:
            self._wrapped[inner] = inner.register_step_post_hook(_clear_used_gradients)
        return optimizer

    def _repr_html_(self) -> str:
        """A small table for notebooks: what the host holds now."""
        rows = "".join(
            f"<tr><td>{kind}</td><td>{len(tensors)}</td><td>{size_text(tensor_bytes(tensors))}</td></tr>"
            for kind, tensors in host_tensors(self.model, self._wrapped.keys()).items()
        )
        return (
            f"<table><caption>{type(self).__name__} of a {type(self.model).__name__}, layers run on {self.device}"
            f"</caption><thead><tr><th>in host memory</th><th>tensors</th><th>size</th></tr></thead>"
            f"<tbody>{rows}</tbody></table>"
        )

    def release(self) -> None:
        """Let the optimizers that were wrapped step as they did before."""
        for handle in self._wrapped.values():
            handle.remove()
        self._wrapped.clear()

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ValueError if `optimizer` cannot update the masters (see `wrap`)."""
        optimizer = getattr(optimizer, "optimizer", optimizer)
        name = type(optimizer).__name__
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ValueError(
                f"the optimizer must step without a closure, which would run the model inside the update (got "
                f"{name}); use one that takes gradients, such as torch.optim.AdamW"
            )
        masters = {p: n for n, p in self.model.named_parameters()}
        held = [p for group in optimizer.param_groups for p in group["params"]]
        strange = [p for p in held if p not in masters]
        if strange:
            raise ValueError(
                f"the optimizer must hold parameters of the model only (got {name} with {len(strange)} others of "
                f"{len(held)}, the first of shape {list(strange[0].shape)}); build it from model.parameters() after "
                "the model has its final parameters, and with the model on the host"
            )
        hooked = [
            n for p, n in masters.items() if getattr(p, "_post_accumulate_grad_hooks", None) or p._backward_hooks
        ]
        if hooked:
            raise ValueError(
                f"parameters must carry no gradient hooks, which would never run: gradients are made on copies (got "
                f"one on {hooked[0]}); remove the hook, or use an optimizer that updates in step() and not during "
                "backward"
            )


def host_tensors(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, list[torch.Tensor]]:
    """What training keeps in host memory now: masters, gradients, and the optimizers' state ("moments")."""
    masters: list[torch.Tensor] = list(model.parameters())
    inner: list[Any] = [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers]
    states = [state for optimizer in inner for state in optimizer.state.values()]
    kinds: dict[str, list[torch.Tensor]] = {
        "masters": masters,
        "gradients": [p.grad for p in masters if p.grad is not None],
        "moments": [t for state in states for t in state.values() if isinstance(t, torch.Tensor)],
    }
    return {kind: [t for t in tensors if t.device == stream.HOST] for kind, tensors in kinds.items()}


def _clear_used_gradients(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = None
