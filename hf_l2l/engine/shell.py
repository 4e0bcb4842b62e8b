"""The shell: what is not in a layer (embeddings, pooler, final norm, heads, and their buffers).

Hooks on single modules would not do: encoders and losses read weights without calling the module that has them. So the
module that is entered from outside trades the parameters and buffers of its whole subtree, layers excepted, for device
copies while the call lasts; what it calls finds them there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hf_l2l.engine.anchor import anchor_of
from hf_l2l.engine.device_weights import DeviceWeights
from hf_l2l.eps.server import EagerParamServer
from hf_l2l.model.batch_dims import batch_rows
from hf_l2l.model.precision import in_fp32
from hf_l2l.model.stacks import shell_modules
from hf_l2l.optim.loss_scale import LossScale, with_gradients_times
from hf_l2l.runtime import compute_state, stream
from hf_l2l.runtime.backward_callbacks import ONE_THREAD
from hf_l2l.runtime.tensors import map_tensors


class Turnstile:
    """Lets one call at a time through; who comes meanwhile, from another thread, is refused and does not wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Be the one inside.

        Raises:
            RuntimeError: if somebody else is.
        """
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(ONE_THREAD)
        try:
            yield
        finally:
            self._lock.release()


@dataclass
class RootCall:
    """A call that entered the model from outside, as long as it runs."""

    module: nn.Module
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: int | None
    """Rows of its batch, None where it is not to be split."""
    weights: DeviceWeights
    """The shell on the device."""
    rng: compute_state.RngState
    """The generators as the call found them, to replay its beginning."""
    anchor: torch.Tensor | None
    """What leads to the masters in its graph; None without a graph."""
    layer_calls: list[Any] = field(default_factory=list)
    """What the relay keeps of the layer calls made so far."""
    on_exit: Callable[[], None] = lambda: None
    """Called when the call has returned or failed."""
    replay: Any = None
    """Set while the beginning of the call is replayed to find batch dimensions."""
    thread: int = field(default_factory=threading.get_ident)
    """The one that called."""


class Shell:
    """Runs calls that enter a model from outside with the shell's weights on the device.

    Weights are uploaded for each such call and live as long as its graph, so two forwards before a backward are as
    right as one. A gradient goes to the EPS when it is complete: a leaf's hook fires once per backward, however often
    the weight is tied or used.
    """

    def __init__(self, layers: list[nn.Module], device: torch.device, eps: EagerParamServer) -> None:
        self.layers = set(layers)
        self.device = device
        self.eps = eps
        self._turnstile = Turnstile()
        self._last_thread: int | None = None
        self._call: RootCall | None = None

    @property
    def call(self) -> RootCall | None:
        """The call of this thread that is inside the model, if there is one."""
        call = self._call
        return call if call is not None and call.thread == threading.get_ident() else None

    def run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call `forward`, the original forward of `module`; calls nested in another one are simply made."""
        if self.call is not None:
            return forward(*args, **kwargs)
        with self.entered(module, forward, args, kwargs) as call:
            return self.leaving(forward(*call.args, **call.kwargs))

    @property
    def _scale(self) -> LossScale | None:
        scale = self.eps.loss_scale
        return scale if scale is not None and scale.is_dynamic else None

    def leaving(self, output: Any) -> Any:
        """What a call returns to the program, which knows nothing of 16 bits and the scale of gradients inside."""
        scale = self._scale
        if self.eps.copies.precision.is_mixed:
            output = in_fp32(output)
        return output if scale is None else with_gradients_times(lambda: scale.value, output)

    @contextmanager
    def entered(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Iterator[RootCall]:
        """Shell weights and tensor arguments are on the device inside, and the masters back in place afterwards.

        Raises:
            RuntimeError: if a call from another thread is inside the model, or its backward is under way.
        """
        assert self.call is None, "a call is already inside the model"
        with self._turnstile.entered(), self.eps.timeline.inside("forward"):
            self.eps.backwards.refuse_others(own=self._last_thread in (None, threading.get_ident()))
            self._last_thread = threading.get_ident()
            self.eps.start_forward()
            # First: inside, other tensors stand in the places of the masters.
            anchor = anchor_of(self.eps.model.parameters(), self.eps.gradients) if torch.is_grad_enabled() else None
            given, scale = (args, kwargs), self._scale
            with stream.span(self.device, "upload", "inputs"):
                args, kwargs = to_device((args, kwargs), self.device)
                if scale is not None:
                    args, kwargs = with_gradients_times(lambda: 1 / scale.value, (args, kwargs))
                args, kwargs = self.eps.copies.precision.of_inputs(module, args, kwargs)
            with stream.span(self.device, "upload", "what is not in a layer"):
                weights = self._upload(module)
            rng = compute_state.get_rng_state(self.device)
            if torch.is_grad_enabled():
                self.eps.vote.last_forward.remember(module, *given, lambda forward: self._replayed(rng, forward))
            # A layer that is entered itself has no beginning to replay, so its batch dimensions cannot be found.
            rows = None if module in self.layers else batch_rows((args, kwargs))
            call = self._call = RootCall(module, forward, args, kwargs, rows, weights, rng, anchor)
            try:
                with weights.resident():
                    yield call
            finally:
                self._call = None
                call.on_exit()

    def _replayed(self, rng: compute_state.RngState, forward: Callable[[], Any]) -> Any:
        with compute_state.rng_state_kept(self.device):
            compute_state.set_rng_state(rng, self.device)
            return forward()

    def _upload(self, module: nn.Module) -> DeviceWeights:
        weights = DeviceWeights(
            shell_modules(module, self.layers),
            self.device,
            requires_grad=torch.is_grad_enabled(),
            travelling=self.eps.copies,
        )
        for master, leaf in weights.leaves.items():
            if leaf.requires_grad:
                leaf.register_post_accumulate_grad_hook(self._sender(master))
        self.eps.expect(master for master, leaf in weights.leaves.items() if leaf.requires_grad)
        return weights

    def _sender(self, master: torch.Tensor) -> Callable[[torch.Tensor], None]:
        def send(leaf: torch.Tensor) -> None:
            assert leaf.grad is not None
            self.eps.receive_in_hook(master, leaf.grad.to(master.dtype))
            leaf.grad = None

        return send


def to_device(value: Any, device: torch.device) -> Any:
    """`value` with every tensor in it on `device`."""
    return map_tensors(lambda tensor: tensor.to(device), value)
