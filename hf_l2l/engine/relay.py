"""The relay: layers run one after the other, each with all ubatches of the device batch before the next.

This is algorithm 2 of arXiv:2002.05645 (algorithm 3 of the first text). A layer call becomes one node of the autograd
graph. Its forward uploads the layer, runs every ubatch without a graph and stashes what it was given; its backward
uploads the layer again and, per ubatch, recomputes, runs backward and sums the weight gradients on the device, then
sends the sums to the EPS. Autograd itself calls the nodes from the last layer to the first: the backward sweep.

A `ubatch` is a pair (start, stop) of rows, or None for all rows; a tensor "has rows" if one of its dimensions carries
the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from hf_l2l.config import L2LConfig
from hf_l2l.engine.device_weights import DeviceWeights
from hf_l2l.engine.layer_call import InputGradients, LayerCall, without_caches
from hf_l2l.engine.shell import RootCall, Shell, Turnstile
from hf_l2l.engine.slots import GradientSlots, WeightSlots
from hf_l2l.engine.splitting import Splitter, Ubatch
from hf_l2l.engine.stash import Stash
from hf_l2l.eps.server import EagerParamServer
from hf_l2l.runtime import compute_state, stream
from hf_l2l.runtime.backward_callbacks import RaisedIn
from hf_l2l.runtime.tensors import flatten, narrow

Tensors = Sequence[torch.Tensor]


def forward_sweep(
    call: LayerCall, tensors: Tensors, weights: DeviceWeights, *, for_backward: bool
) -> list[torch.Tensor]:
    """Run one layer on every ubatch, without a graph.

    Args:
        call: the layer call.
        tensors: its tensor arguments, with all rows, on the device.
        weights: the layer's, on the device.
        for_backward: remember what a recompute needs beside the tensors: generator states, versions of the weights.

    Returns:
        The layer's tensor outputs, with all rows.

    Raises:
        ValueError: `for_backward`, if the layer writes tensors into an argument that is an object.
    """
    if for_backward:
        call.remember_weights()
    joined: list[torch.Tensor] = []
    arguments = call.refusing_writes_to_arguments() if for_backward else nullcontext()
    with torch.no_grad(), call.autocast.entered(), weights.resident(), arguments:
        for ubatch in call.ubatches:
            before = compute_state.get_rng_state(call.device) if for_backward else None
            outputs = call.execute(call.input_rows(tensors, ubatch))
            if before is not None:
                call.rng.append(before if compute_state.get_rng_state(call.device) != before else None)
            joined = _join(call, joined, outputs, ubatch)
    return joined


def _join(
    call: LayerCall, joined: list[torch.Tensor], outputs: list[torch.Tensor], ubatch: Ubatch | None
) -> list[torch.Tensor]:
    """Put the outputs of one ubatch in their rows; what has no rows is taken from the first."""
    if ubatch is None or call.split is None:
        return outputs
    rows, (start, stop), dims = call.split.rows, ubatch, call.split.outputs.dims
    _check_number(call, outputs, len(dims), "set ubatch_size to None for such layers")
    if not joined:
        joined = [
            out if dim is None else _with_rows(out, dim, rows, stop - start)
            for out, dim in zip(outputs, dims, strict=True)
        ]
    for whole, out, dim in zip(joined, outputs, dims, strict=True):
        if dim is not None:
            narrow(whole, dim, rows, start, stop).copy_(out)
    return joined


def _check_number(call: LayerCall, outputs: Tensors, expected: int, remedy: str) -> None:
    """Raise RuntimeError if a layer returned other outputs than it did, or than one of its kind did."""
    if len(outputs) != expected:
        raise RuntimeError(
            f"a layer must return the same number of tensors in all its ubatches, and when it is recomputed (a "
            f"{type(call.layer).__name__} returned {len(outputs)} after {expected}, captured ones included); {remedy}"
        )


def _with_rows(out: torch.Tensor, dim: int, rows: int, ubatch_rows: int) -> torch.Tensor:
    """An empty tensor like `out`, an output of `ubatch_rows` rows along `dim`, with room for `rows`."""
    shape = list(out.shape)
    shape[dim] = shape[dim] // ubatch_rows * rows
    return out.new_empty(shape)


def backward_sweep(
    call: LayerCall,
    inputs: InputGradients,
    gradients: Sequence[torch.Tensor | None],
    weights: DeviceWeights,
) -> None:
    """Recompute one layer ubatch by ubatch and run backward through it; the sums of its weight gradients are left
    with `weights`.

    Args:
        call: the layer call.
        inputs: hands out its tensor arguments, and collects their gradients.
        gradients: of the layer's tensor outputs, with all rows.
        weights: the layer's, on the device.
    """
    with (
        # After backward the generators stand where forward left them.
        compute_state.rng_state_kept(call.device),
        torch.enable_grad(),
        weights.resident(keep_buffers=False),
    ):
        for turn, (ubatch, rng) in enumerate(zip(call.ubatches, call.rng, strict=True)):
            leaves = inputs.leaves(ubatch)  # first: what was not fetched ahead goes before what is
            inputs.fetch_after(turn)
            if rng is not None:
                compute_state.set_rng_state(rng, call.device)
            with call.autocast.entered():  # and not around the backward, which autocast would round
                outputs = call.execute(leaves)
            _backward(call, outputs, gradients, ubatch)
            inputs.collect(leaves, ubatch)
            del leaves, outputs  # one ubatch's activations at a time


def _backward(
    call: LayerCall, outputs: Tensors, gradients: Sequence[torch.Tensor | None], ubatch: Ubatch | None
) -> None:
    """Run backward from the outputs of one ubatch, with its rows of their gradients."""
    _check_number(call, outputs, len(gradients), "let it return the same with and without gradients")
    roots, root_gradients = [], []
    for index, (output, gradient) in enumerate(zip(outputs, gradients, strict=True)):
        if gradient is None or not output.requires_grad:
            continue
        if ubatch is not None and call.split is not None:
            dim = call.split.outputs.dims[index]
            if dim is None and ubatch[0] > 0:
                continue  # it was taken from the first ubatch, which gets its whole gradient
            gradient = narrow(gradient, dim, call.split.rows, *ubatch)
        roots.append(output)
        root_gradients.append(gradient)
    if roots:
        torch.autograd.backward(roots, root_gradients)


class _RelayNode(torch.autograd.Function):
    """One layer call in the autograd graph."""

    @staticmethod
    def forward(
        ctx: Any, call: LayerCall, relay: Relay, anchor: torch.Tensor, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.relay = call, relay
        # An unsplit call is fetched whole, so that all of it may travel.
        has_rows = [call.split is None or dim is not None for dim in call.input_dims]
        with relay.stash.keeping(tensors, has_rows) as kept:
            call.remember(kept)
            ctx.save_for_backward(*kept)
            relay.eps.expect(_trained(call.layer))
            outputs = relay.forward(call, tensors, for_backward=True)
        ctx.mark_non_differentiable(*(out for out in outputs if not (out.is_floating_point() or out.is_complex())))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        timeline = ctx.relay.eps.timeline
        with ctx.relay.eps.backwards.joined(), timeline.inside("backward"), timeline.at(ctx.call.layer):
            if torch.is_grad_enabled():  # autograd is to record this backward
                raise RuntimeError(
                    "L2L computes first derivatives only, since a layer's graph is gone after its backward (got "
                    "create_graph=True); leave it out, or train this model without L2L"
                )
            inputs = InputGradients(ctx.call, ctx.relay.stash, ctx.saved_tensors, ctx.needs_input_grad[3:])
            ctx.relay.backward(ctx.call, inputs, gradients)
        return None, None, None, *inputs.total


class Relay:
    """Runs the layers of one model, each call through all its ubatches."""

    def __init__(self, config: L2LConfig, device: torch.device, eps: EagerParamServer, shell: Shell) -> None:
        self.device = device
        self.eps = eps
        self.shell = shell
        self.prefetch = config.prefetch
        self.stash = Stash(config.stash, device, eps.memory, rooms=len(shell.layers))
        self._slots: WeightSlots | None = None
        self._turnstile = Turnstile()  # a backward in one thread and a forward in another would meet here
        self._gradient_slots = GradientSlots(device, config.gradient_slots)
        self._next: dict[nn.Module, nn.Module] = {}
        """Layer -> the one that was called after it, last time."""
        self.splitter = Splitter(config.ubatch_size, device)
        eps.backwards.call(at_end=self._settle, at_failure=self._settle)

    def run(self, layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call `forward`, the original forward of `layer`, layer to layer."""
        if self.shell.call is not None:
            return self._run(self.shell.call, layer, forward, args, kwargs)
        with self.shell.entered(layer, forward, args, kwargs) as root:  # the layer itself is called from outside
            return self.shell.leaving(self._run(root, layer, forward, root.args, root.kwargs))

    def _run(self, root: RootCall, layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            args, kwargs = without_caches(layer, args, kwargs)
        arguments, spec = flatten((args, kwargs))
        call = LayerCall.of(layer, forward, arguments, spec, self.device, self.eps.copies)
        call.before = root.layer_calls[-1][0] if root.layer_calls else None
        tensors = [arguments[i] for i in call.tensor_positions]
        if root.replay is not None:
            return root.replay.next_outputs(spec, tensors)
        if call.before is None:
            root.on_exit = self._settle
            self.stash.start_forward()
            if self._slots is not None:
                self._slots.forget()
        else:
            self._next[call.before.layer] = layer
        with self.eps.timeline.at(layer):
            call.split = self.splitter.split_for(root, layer, arguments, spec, tensors, call.execute_once)
            outputs = self._execute(root, call, tensors)
        root.layer_calls.append((call, [(out.shape, out.dtype) for out in outputs]))
        return call.assemble(outputs)

    def _execute(self, root: RootCall, call: LayerCall, tensors: list[torch.Tensor]) -> Tensors:
        trains = torch.is_grad_enabled() and (
            any(t.requires_grad for t in tensors) or any(p.requires_grad for p in call.layer.parameters())
        )
        if not trains:
            return self.forward(call, tensors, for_backward=False)
        # An output must require a gradient even if no input does (frozen embeddings, LoRA): the anchor makes it so.
        outputs: Tensors = _RelayNode.apply(call, self, root.anchor, *tensors)  # type: ignore[no-untyped-call]
        return outputs

    def forward(self, call: LayerCall, tensors: Tensors, *, for_backward: bool) -> list[torch.Tensor]:
        """Run one layer forwards; the next one travels meanwhile."""
        following = self._next.get(call.layer)
        with (
            self._naming("the forward of", call.layer),
            self._turnstile.entered(),
            self._weights(call.layer, requires_grad=False) as weights,
            self._prefetching(following),
            self.eps.timeline.computes("forward", call.layer),
        ):
            return forward_sweep(call, tensors, weights, for_backward=for_backward)

    def backward(self, call: LayerCall, inputs: InputGradients, gradients: Sequence[torch.Tensor | None]) -> None:
        """Run one layer backwards; the one before it arrives meanwhile, and gradients of the one after it leave."""
        call.check_weights_unchanged()
        # No backward will ask for a layer below the lowest that trains.
        goes_on = call.before is not None and call.before.in_graph and any(inputs.needed)
        following = call.before.layer if call.before is not None and goes_on else None
        with (
            self._naming("the backward of", call.layer),
            self._turnstile.entered(),
            self._weights(call.layer, requires_grad=True) as weights,
            self._prefetching(following),
            self._summing(weights) as sums,
            self.eps.timeline.computes("backward", call.layer),
        ):
            backward_sweep(call, inputs, gradients, weights)
        # torch.autograd.grad and backward(inputs=...) ask for the gradients they name, not for those of the weights.
        if torch.autograd._is_checkpoint_valid():
            with self._naming("the download of", call.layer):
                self.eps.receive([*sums.items(), *weights.gradients], _trained(call.layer))
            if sums and not stream.shares_host_memory(self.device):
                self._gradient_slots.leave(self.eps.lane)

    def _settle(self) -> None:
        self.stash.settle()
        if self._slots is not None:
            self._slots.settle()

    def _summing(self, weights: DeviceWeights) -> AbstractContextManager[dict[torch.Tensor, torch.Tensor]]:
        if stream.shares_host_memory(self.device) and not self.eps.copies.precision.is_mixed:
            return nullcontext({})  # the gradients of the leaves are in their place already
        return self._gradient_slots.summing(weights)

    @contextmanager
    def _weights(self, layer: nn.Module, *, requires_grad: bool) -> Iterator[DeviceWeights]:
        if stream.shares_host_memory(self.device):
            yield DeviceWeights(layer.modules(), self.device, requires_grad=requires_grad, travelling=self.eps.copies)
            return
        if self._slots is None:
            self._slots = WeightSlots(list(self.shell.layers), self.device, self.eps.copies, overlap=self.prefetch)
        with self._slots.weights(layer, requires_grad=requires_grad) as weights:
            yield weights

    @contextmanager
    def _prefetching(self, layer: nn.Module | None) -> Iterator[None]:
        """Upload `layer` while the block gives the device the work of another one."""
        if self._slots is None or layer is None or not self.prefetch:
            yield
            return
        # A layer may make the host wait for the device, so the upload goes first; but an upload from pageable memory,
        # or of weights that are being updated, makes it wait, too, and then the device is to have its work before.
        first = self.eps.memory.is_locked and not self.eps.is_updating(layer.parameters())
        if not first:
            yield
        with self._naming("the upload of", layer):
            self._slots.prefetch(layer)
        if first:
            yield

    def _naming(self, what: str, layer: nn.Module) -> RaisedIn:
        return RaisedIn(lambda: f"{what} {self.eps.updates.masters.layers.get(layer, type(layer).__name__)}")


def _trained(layer: nn.Module) -> list[torch.Tensor]:
    return [p for p in layer.parameters() if p.requires_grad]
