"""The shell: the non-layer modules (embeddings, pooler, final norm, heads) and their buffers.

Their weights and buffers are uploaded at the start of each call of the model by the program. During the call, device
copies replace those of all non-layer modules below the called module. Hooks on single modules would not be enough,
since encoders and losses read weights without calling the module that has them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hf_l2l.engine.device_weights import DeviceWeights, OnGradient, uploaded
from hf_l2l.engine.model_call import ModelCall, OneThread, anchor_of
from hf_l2l.eps.masters import MasterUnit
from hf_l2l.eps.server import EagerParamServer
from hf_l2l.model.batch_dims import batch_rows
from hf_l2l.model.precision import in_fp32
from hf_l2l.optim.loss_scale import LossScale, with_gradients_times
from hf_l2l.runtime import compute_state, stream
from hf_l2l.runtime.tensors import to_device


class Shell:
    """Runs the program's calls of a model with the weights of the non-layer modules on the device.

    Weights are uploaded for each such call and live as long as its graph, so a program may make two forwards before a
    backward. The EPS receives a gradient when it is complete: the hook of a leaf runs once per backward, however often
    the weight is tied or used.
    """

    def __init__(self, device: torch.device, eps: EagerParamServer) -> None:
        self.device = device
        self.eps = eps
        self.one_thread = OneThread(eps.backwards)
        self._call: ModelCall | None = None

    @property
    def call(self) -> ModelCall | None:
        """The call of the model that this thread is inside of, if there is one."""
        call = self._call
        return call if call is not None and call.thread == threading.get_ident() else None

    def run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call `forward`, the original forward of `module`; a call nested in another one needs no preparation."""
        if self.call is not None:
            return forward(*args, **kwargs)
        with self.entered(module, forward, args, kwargs) as call:
            return self.leaving(forward(*call.args, **call.kwargs))

    @property
    def _scale(self) -> LossScale | None:
        scale = self.eps.loss_scale
        return scale if scale is not None and scale.is_dynamic else None

    def leaving(self, output: Any) -> Any:
        """The return value for the program: with `cmp` in fp32, and its gradients are multiplied by the loss scale."""
        scale = self._scale
        if self.eps.copies.precision.is_mixed:
            output = in_fp32(output)
        return output if scale is None else with_gradients_times(lambda: scale.value, output)

    @contextmanager
    def entered(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Iterator[ModelCall]:
        """Inside, non-layer weights and tensor arguments are on the device; the masters are restored afterwards.

        Raises:
            RuntimeError: if a call of the model, or its backward, is running in another thread.
        """
        assert self.call is None, "a call is already inside the model"
        with self.one_thread.in_model(), self.eps.timeline.inside("forward"):
            self.eps.start_forward()
            # Before `resident`, inside which device copies replace the masters.
            anchor = anchor_of(self.eps.gradients) if torch.is_grad_enabled() else None
            given, scale = (args, kwargs), self._scale
            with stream.span(self.device, "upload", "inputs"):
                args, kwargs = to_device((args, kwargs), self.device)
                if scale is not None:
                    args, kwargs = with_gradients_times(lambda: 1 / scale.value, (args, kwargs))
                args, kwargs = self.eps.copies.precision.of_inputs(module, args, kwargs)
            with stream.span(self.device, "upload", "non-layer modules"):
                weights = self._upload(module)
            rng = compute_state.get_rng_state(self.device)
            if torch.is_grad_enabled():
                self.eps.vote.last_forward.remember(module, *given, lambda forward: self._replayed(rng, forward))
            # A call of a layer by the program has no beginning to replay, so its batch dimensions cannot be found.
            rows = None if module in self.eps.masters.layer_names else batch_rows((args, kwargs))
            call = self._call = ModelCall(module, forward, args, kwargs, rows, weights, rng, anchor)
            try:
                with weights.resident():
                    yield call
            finally:
                self._call = None
                if call.at_end is not None:
                    call.at_end(call)
                self.eps.masters.end_call()

    def _replayed(self, rng: compute_state.RngState, forward: Callable[[], Any]) -> Any:
        with compute_state.rng_state_kept(self.device):
            compute_state.set_rng_state(rng, self.device)
            return forward()

    def _upload(self, module: nn.Module) -> DeviceWeights:
        masters = self.eps.masters
        # A layer that the program calls itself has no non-layer modules; the relay uploads it.
        unit = masters.non_layer_unit(module)
        requires_grad = torch.is_grad_enabled()
        weights = uploaded(
            unit, self.device, self.eps.copies, requires_grad=requires_grad, on_gradient=self._sender(unit)
        )
        if requires_grad:
            self.eps.expect(unit)
        return weights

    def _sender(self, unit: MasterUnit) -> OnGradient:
        def send(number: int, leaf: torch.Tensor) -> None:
            gradient, leaf.grad = leaf.grad, None
            assert gradient is not None
            master = unit.masters[number]
            self.eps.receive_in_hook(master, gradient.to(master.dtype))

        return send
