"""The eager param-server (EPS): the host side of layer-to-layer training.

The model stays in host memory and its own parameters are the masters; the EPS takes the gradient sums that the layers
leave behind and holds them in `p.grad` until the optimizer has used them. Sums leave the device while it computes the
next layer; whoever calls `backward()` waits for the last of them. The update is serial (arXiv:2002.05645, first text,
figure 2b): all layers, in `optimizer.step()`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_l2l import stream
from hf_l2l.backwards import Backwards
from hf_l2l.config import size_text
from hf_l2l.host_memory import HostMemory
from hf_l2l.layout import elements, is_dense
from hf_l2l.stacks import tensor_bytes
from hf_l2l.timeline import Timeline

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)

_CHUNK = 2**20  # elements of a host sum that are on the device at once while a new one is added to it


class EagerParamServer:
    """Owner of the master weights and gradient sums of one model, all of them host tensors.

    The contract of `p.grad`: it is the truth until `optimizer.step()`, and None means "start a new sum", so that a
    batch thrown away (`zero_grad` without `step`) leaves nothing behind. When `backward()` returns, every gradient of
    it is there. A wrapped optimizer clears the gradients it has used.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        memory: HostMemory | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self.model = model
        self.device = device
        self.memory = memory or HostMemory(device, model)
        self.timeline = timeline or Timeline(device, model)
        self.lane = stream.Lane(device, "download")
        self._arriving: dict[torch.Tensor, torch.Tensor] = {}
        """Master -> the host tensor that will be its `grad` when this backward is over."""
        self.backwards = Backwards()
        self.backwards.call(at_end=self._publish, at_failure=self._discard)
        self._wrapped: WeakKeyDictionary[torch.optim.Optimizer, list[RemovableHandle]] = WeakKeyDictionary()

    def start_forward(self) -> None:
        """Get ready for a forward that a backward may follow.

        Raises:
            Exception: what went wrong at the end of the last backward, where torch lets nothing be raised.
        """
        self.backwards.errors.raise_first()
        self.timeline.start_forward()
        if self.lane.is_stream:
            self.memory.adopt()
            if torch.is_grad_enabled():
                self.memory.take_gradients()

    def receive_in_hook(self, master: torch.Tensor, gradient: torch.Tensor) -> None:
        """`receive` for hooks of autograd; an exception is raised later."""
        with self.backwards.errors:
            self.receive([(master, gradient)])

    @torch.no_grad()
    def receive(self, gradients: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Add gradient sums from the device to what `master.grad` holds, by the end of this backward.

        Only to be called inside a backward. The device may go on computing meanwhile.

        Args:
            gradients: pairs of master and gradient sum, which has the shape of the master and may be overwritten.
                Its memory may be freed at once; to write to it, wait for `lane`.
        """
        self.backwards.errors.raise_first()
        if not self.lane.is_stream:
            with stream.span(self.device, "download", gradients[0][0] if gradients else ""):
                for master, gradient in gradients:
                    _add_to_grad(master, stream.download(gradient))
            return
        self.backwards.join()
        complete = stream.record(self.device)
        with self.lane.entered():
            stream.wait(complete, "gradients leave when they are complete")
            with stream.span(self.device, "download", gradients[0][0] if gradients else ""):
                for master, gradient in gradients:
                    self._receive(master, gradient)

    def _receive(self, master: torch.Tensor, gradient: torch.Tensor) -> None:
        """Start to download one gradient, on the lane; where there is a sum already, it is added to that first."""
        total = self._arriving.get(master, master.grad)
        if not _alike(gradient, master if total is None else total):  # sparse ones, or a grad that the user put there
            self._publish()
            _add_to_grad(master, gradient.to(stream.HOST))
            return
        stream.keep_until_done(gradient)
        if total is None:
            total = self._arriving[master] = self.memory.gradient_like(master)
        else:
            for new, held in zip(elements(gradient).split(_CHUNK), elements(total).split(_CHUNK), strict=True):
                new.add_(held.to(self.device, non_blocking=True))
        total.copy_(gradient, non_blocking=True)

    @torch.no_grad()
    def _publish(self) -> None:
        """Wait for what has been received, and add it to `p.grad`."""
        stream.wait(self.lane.record(), "every gradient is there when backward returns", host=True)
        arrived, self._arriving = self._arriving, {}
        for master, gradient in arrived.items():
            _add_to_grad(master, gradient)

    def _discard(self) -> None:
        """Forget what a backward that failed had received and nobody has seen."""
        stream.wait(self.lane.record(), "what a failed backward has sent lands before anything else", host=True)
        self._arriving.clear()

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
            self._wrapped[inner] = [
                inner.register_step_pre_hook(lambda *args: self.backwards.errors.raise_first()),
                inner.register_step_pre_hook(lambda *args: self.timeline.start_update()),
                inner.register_step_post_hook(lambda *args: self.timeline.end_step()),
                inner.register_step_post_hook(_clear_used_gradients),
            ]
        return optimizer

    def _repr_html_(self) -> str:
        """A small table for notebooks: what the host holds now."""
        locked = self.memory.bytes_locked
        rows = "".join(
            f"<tr><td>{kind}</td><td>{len(tensors)}</td><td>{size_text(tensor_bytes(tensors))}</td></tr>"
            for kind, tensors in host_tensors(self.model, self._wrapped.keys()).items()
        )
        return (
            f"<table><caption>{type(self).__name__} of a {type(self.model).__name__}, layers run on {self.device}"
            f"{f'; {size_text(locked)} page-locked' if locked else ''}</caption>"
            f"<thead><tr><th>in host memory</th><th>tensors</th><th>size</th></tr></thead>"
            f"<tbody>{rows}</tbody></table>"
        )

    def release(self) -> None:
        """Let the optimizers that were wrapped step as they did before, and the host's memory be ordinary memory."""
        for handles in self._wrapped.values():
            for handle in handles:
                handle.remove()
        self._wrapped.clear()
        self.timeline.close()
        self.memory.release()

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


def _add_to_grad(master: torch.Tensor, gradient: torch.Tensor) -> None:
    if master.grad is None:
        master.grad = gradient
    elif master.grad.is_sparse and not gradient.is_sparse:
        master.grad = gradient + master.grad  # dense from now on, as autograd has it
    else:
        master.grad += gradient


def _alike(gradient: torch.Tensor, total: torch.Tensor) -> bool:
    """Whether a gradient can be copied over a host tensor element by element, in the order of memory."""
    return (
        gradient.layout is total.layout is torch.strided
        and gradient.dtype == total.dtype
        and gradient.stride() == total.stride()
        and total.device == stream.HOST
        and is_dense(total)
    )
