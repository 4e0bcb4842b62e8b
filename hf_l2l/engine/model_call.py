"""A call of the model: the state that its layers and non-layer modules share, and the check for one thread at a time.

`Replay` runs the beginning of a call again, to find batch dimensions; `anchor_of` connects its graph to the masters.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hf_l2l.compat import graph_is_retained, in_whole_backward, without_interception
from hf_l2l.device.device_weights import DeviceWeights
from hf_l2l.engine.layer_call import LayerCall
from hf_l2l.eps.gradients import Gradients
from hf_l2l.model.batch_dims import NoConsistentSplit
from hf_l2l.model.caches import Sizes
from hf_l2l.runtime.backward_callbacks import ONE_THREAD, Backwards
from hf_l2l.runtime.compute_state import RngState


class OneThread:
    """Lets one thread at a time use a model; calls of other threads raise at once, instead of waiting."""

    def __init__(self, backwards: Backwards) -> None:
        self._backwards = backwards
        self._model, self._layer = threading.Lock(), threading.Lock()
        self._last_thread: int | None = None
        self._thread_in_layer: int | None = None

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Run this thread's call of the model inside.

        Raises:
            RuntimeError: if a call of the model, or its backward, is running in another thread.
        """
        with _refusing(self._model):
            me = threading.get_ident()
            self._backwards.refuse_others(own=self._last_thread in (None, me))
            self._last_thread = me
            yield

    @contextmanager
    def in_layer(self) -> Iterator[None]:
        """Run a forward or backward of a layer inside. `in_model` does not see a backward that begins while another
        thread's forward runs; this does.

        Raises:
            RuntimeError: if another thread runs a layer, or if the backward of a layer leads into that of another one.
        """
        me = threading.get_ident()
        if self._thread_in_layer == me:
            raise RuntimeError(
                "a layer that trains must get what needs a gradient as an argument, since its backward computes it "
                "again in a graph of its own (a forward hook inside a layer, or its own code, uses a tensor that "
                "another layer has computed); pass it to the layer, or use tensor.detach()"
            )
        with _refusing(self._layer):
            self._thread_in_layer = me
            try:
                yield
            finally:
                self._thread_in_layer = None


@contextmanager
def _refusing(lock: threading.Lock) -> Iterator[None]:
    if not lock.acquire(blocking=False):
        raise RuntimeError(ONE_THREAD)
    try:
        yield
    finally:
        lock.release()


@dataclass(slots=True)
class EnclosingCall:
    """A call of a module outside the layers, inside which layers are called: the root, or one nested in it."""

    module: nn.Module
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    first: int
    """How many layer calls had been made before."""


@dataclass
class ModelCall:
    """A call of the model by the program, while it runs. `module` is the model, or the part of it that is called."""

    module: nn.Module
    forward: Callable[..., Any] | None
    """None for what calls that run together share."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: int | None
    """Number of rows of its batch; None if the batch is not to be split."""
    weights: DeviceWeights
    """Weights of the non-layer modules, on the device."""
    rng: RngState
    """State of the generators when the call began, to replay its beginning."""
    anchor: torch.Tensor | None
    """The tensor that connects its graph to the masters (see `anchor_of`); None without a graph."""
    layer_calls: list[LayerCall] = field(default_factory=list)
    """The layer calls made so far."""
    enclosing: list[EnclosingCall] = field(default_factory=list)
    """The calls that the program is inside of now: this one, and those nested in it."""
    is_plain: bool = False
    """Whether it runs as without L2L: with the parameters themselves, to which autograd adds gradients."""
    at_end: Callable[[ModelCall], None] | None = None
    """Called when the call has returned or failed."""
    replay: Replay | None = None
    """Set while the beginning of the call is replayed to find batch dimensions."""
    cache_sizes: Sizes = field(default_factory=dict)
    """Of the key-value caches that its layers are given."""
    thread: int = field(default_factory=threading.get_ident)
    """The thread that made the call."""
    shared: ModelCall | None = None
    """What it shares weights and the order of layer calls with, if it is one of several that run together."""

    def __post_init__(self) -> None:
        if self.forward is not None:
            self.enclosing.append(EnclosingCall(self.module, self.forward, self.args, self.kwargs, 0))

    def nested(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the forward of a module outside the layers, inside this call."""
        self.enclosing.append(EnclosingCall(module, forward, args, kwargs, len(self.layer_calls)))
        try:
            return forward(*args, **kwargs)
        finally:
            self.enclosing.pop()

    @property
    def outermost(self) -> ModelCall:
        """That in which all layer calls are in the order in which they are made."""
        return self if self.shared is None else self.shared

    def called(self, call: LayerCall) -> None:
        """A layer call has been made."""
        self.layer_calls.append(call)
        if self.shared is not None:
            self.shared.layer_calls.append(call)

    @property
    def makes_graph(self) -> bool:
        """Whether what runs now trains, or is the replay of a call that does."""
        return torch.is_grad_enabled() or (self.replay is not None and self.anchor is not None)


class Replayed(BaseException):
    """Ends a replay at the layer call that is looked for. A BaseException, so that no model handles it as an error."""

    def __init__(self, shapes: list[torch.Size]) -> None:
        self.shapes = shapes


class Replay:
    """Runs the beginning of a model call again with its batch doubled; layers are not run, but return zeros."""

    def __init__(self, call: ModelCall, first: int, spec: pytree.TreeSpec) -> None:
        """Of the part of `call` that begins with layer call number `first`."""
        self.earlier = call.layer_calls[first:]
        self.spec = spec
        self.next = 0

    def next_outputs(self, spec: pytree.TreeSpec, tensors: Sequence[torch.Tensor], containers: Sequence[Any]) -> Any:
        """Return zeros with the shapes of the outputs of the next layer call, and write such into its `containers`.

        Raises:
            Replayed: if it is the call that is looked for; with the shapes of its tensor arguments.
            NoConsistentSplit: if the model calls its layers differently when its batch is doubled.
        """
        if self.next == len(self.earlier):
            if spec != self.spec:
                raise NoConsistentSplit("it gets different arguments when the model's batch is doubled")
            raise Replayed([t.shape for t in tensors])
        call = self.earlier[self.next]
        self.next += 1
        if call.split is None:
            raise NoConsistentSplit(f"an earlier layer ({type(call.layer).__name__}) cannot be split")
        device = next((t.device for t in tensors), None)
        zeros = []
        for (shape, dtype), dim in zip(call.output_kinds, call.split.outputs.dims, strict=True):
            sizes = list(shape)
            if dim is not None:
                sizes[dim] *= 2
            zeros.append(torch.zeros(sizes, dtype=dtype, device=device))
        return call.assemble(zeros, containers)


def anchor_of(gradients: Gradients) -> torch.Tensor:
    """A tensor without elements that requires a gradient, with a node in the graph that leads to the trained masters.

    Raises:
        ValueError: if a trained parameter has been replaced by a tensor that is no `nn.Parameter`.
    """
    with without_interception():
        trained = [p for p in gradients.masters.parameters if p.requires_grad]
    itself = torch.empty(0, requires_grad=True)
    with without_interception():
        anchor: torch.Tensor = _Anchor.apply(gradients, itself, *trained)  # type: ignore[no-untyped-call]
    return anchor


class _Anchor(torch.autograd.Function):
    """The node that connects the graph of a call to the masters.

    Layers compute with copies of the masters, so no other node leads to them. A whole backward gets no gradient from
    this node. A backward with `inputs=` that names masters reaches it, too, and raises, since it would find no
    gradients. When it runs, all layers of the call have run backward, and autograd itself has not yet added anything
    to a gradient of a master.
    """

    @staticmethod
    def forward(ctx: Any, gradients: Gradients, itself: torch.Tensor, *masters: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.gradients, ctx.count = gradients, 1 + len(masters)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: None) -> tuple[Any, ...]:
        if ctx.gradients is None:  # the layers refuse a second backward, if there is any in the graph
            return None, *[None] * ctx.count
        with ctx.gradients.backwards.joined():
            if not in_whole_backward():
                raise RuntimeError(
                    "gradients of the parameters of a model under L2L are in p.grad after loss.backward() (got "
                    "parameters as inputs of torch.autograd.grad or backward); call loss.backward() without inputs"
                )
            # Called only if needed: torch makes an object per master for the list of nodes.
            ctx.gradients.keep_apart(lambda: [node for node, _ in ctx.next_functions[1:]])
        if not graph_is_retained():  # a loss that the program keeps must not keep the engine
            ctx.gradients = None
        return None, *[None] * ctx.count
