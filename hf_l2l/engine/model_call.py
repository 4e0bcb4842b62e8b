"""A call of the model: what its layers and non-layer modules share while it runs, and which threads may make one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hf_l2l.compat import in_whole_backward, without_interception
from hf_l2l.engine.device_weights import DeviceWeights
from hf_l2l.engine.layer_call import FUNCTIONAL_CALL, LayerCall
from hf_l2l.eps.gradients import Gradients
from hf_l2l.model.batch_dims import NoConsistentSplit
from hf_l2l.runtime.backward_callbacks import ONE_THREAD, Backwards
from hf_l2l.runtime.compute_state import RngState


class OneThread:
    """Lets one thread at a time use a model; another one is refused and does not wait."""

    def __init__(self, backwards: Backwards) -> None:
        self._backwards = backwards
        self._model, self._layer = threading.Lock(), threading.Lock()
        self._last_thread: int | None = None

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Inside, this thread's call of the model runs.

        Raises:
            RuntimeError: if a call of another thread is inside the model, or its backward is under way.
        """
        with _refusing(self._model):
            me = threading.get_ident()
            self._backwards.refuse_others(own=self._last_thread in (None, me))
            self._last_thread = me
            yield

    @contextmanager
    def in_layer(self) -> Iterator[None]:
        """Inside, this thread runs a layer, forwards or backwards: a backward in one thread and a forward in another
        one meet here.

        Raises:
            RuntimeError: if another thread does.
        """
        with _refusing(self._layer):
            yield


@contextmanager
def _refusing(lock: threading.Lock) -> Iterator[None]:
    if not lock.acquire(blocking=False):
        raise RuntimeError(ONE_THREAD)
    try:
        yield
    finally:
        lock.release()


@dataclass
class ModelCall:
    """A call that entered the model from outside, as long as it runs."""

    module: nn.Module
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: int | None
    """Rows of its batch, None where it is not to be split."""
    weights: DeviceWeights
    """Of the non-layer modules, on the device."""
    rng: RngState
    """The generators as the call found them, to replay its beginning."""
    anchor: torch.Tensor | None
    """What leads to the masters in its graph; None without a graph."""
    layer_calls: list[LayerCall] = field(default_factory=list)
    """Those made so far."""
    at_end: Callable[[ModelCall], None] | None = None
    """Called when the call has returned or failed."""
    replay: Replay | None = None
    """Set while the beginning of the call is replayed to find batch dimensions."""
    thread: int = field(default_factory=threading.get_ident)
    """The one that called."""


class Replayed(BaseException):
    """Ends a replay at the layer call that is looked for. No error, so that no model handles it as one."""

    def __init__(self, shapes: list[torch.Size]) -> None:
        self.shapes = shapes


class Replay:
    """The beginning of a model call, run again with its batch doubled: layers return zeros, without being run."""

    def __init__(self, call: ModelCall, spec: pytree.TreeSpec) -> None:
        self.earlier = list(call.layer_calls)
        self.spec = spec
        self.next = 0

    def next_outputs(self, spec: pytree.TreeSpec, tensors: Sequence[torch.Tensor]) -> Any:
        """What the next layer call returns: zeros of the right shapes.

        Raises:
            Replayed: with the shapes of its tensor arguments, where it is the call that is looked for.
            NoConsistentSplit: if the model does other things when its batch is doubled.
        """
        if self.next == len(self.earlier):
            if spec != self.spec:
                raise NoConsistentSplit("it is given other arguments when the model's batch is doubled")
            raise Replayed([t.shape for t in tensors])
        call = self.earlier[self.next]
        self.next += 1
        if call.split is None:
            raise NoConsistentSplit(f"an earlier layer ({type(call.layer).__name__}) runs whole")
        device = next((t.device for t in tensors), None)
        zeros = []
        for (shape, dtype), dim in zip(call.output_kinds, call.split.outputs.dims, strict=True):
            sizes = list(shape)
            if dim is not None:
                sizes[dim] *= 2
            zeros.append(torch.zeros(sizes, dtype=dtype, device=device))
        return call.assemble(zeros)


def anchor_of(gradients: Gradients) -> torch.Tensor:
    """A tensor without elements that requires a gradient, and comes from the masters that are trained.

    Raises:
        ValueError: if other tensors than parameters stand in their places.
    """
    with without_interception():
        trained = [p for p in gradients.masters.parameters if p.requires_grad]
    strange = [p for p in trained if not isinstance(p, nn.Parameter)]
    if strange:
        raise ValueError(
            "the weights of a model that trains under L2L must be its own parameters, where gradients arrive (got a "
            f"{type(strange[0]).__name__} of shape {list(strange[0].shape)} in place of one); {FUNCTIONAL_CALL}"
        )
    itself = torch.empty(0, requires_grad=True)
    with without_interception():
        anchor: torch.Tensor = _Anchor.apply(gradients, itself, *trained)  # type: ignore[no-untyped-call]
    return anchor


class _Anchor(torch.autograd.Function):
    """A tensor without elements that comes from the masters, for the graph of a call.

    Copies of the masters compute, so that nothing else in the graph leads to them. A whole backward takes no gradient
    from here; one that asks for those of masters by name comes here, and would be left without. All layers of the call
    have run backwards by then, and nothing has been added to a gradient by autograd itself.
    """

    @staticmethod
    def forward(ctx: Any, gradients: Gradients, itself: torch.Tensor, *masters: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.gradients, ctx.count = gradients, 1 + len(masters)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: None) -> tuple[Any, ...]:
        with ctx.gradients.backwards.joined():
            if not in_whole_backward():
                raise RuntimeError(
                    "gradients of the parameters of a model under L2L are in p.grad after loss.backward() (got "
                    "parameters as inputs of torch.autograd.grad or backward); call loss.backward() without inputs"
                )
            ctx.gradients.keep_apart(node for node, _ in ctx.next_functions[1:])
        return None, *[None] * ctx.count
