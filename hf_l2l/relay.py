"""The relay: layers run one after the other, each with all ubatches of the device batch before the next.

This is algorithm 2 of arXiv:2002.05645 (algorithm 3 of the first text). A layer call becomes one node of the autograd
graph. Its forward uploads the layer, runs every ubatch without a graph and stashes what it was given; its backward uploads
the layer again and, per ubatch, recomputes, runs backward and sums the weight gradients on the device, then sends the sums
to the EPS. Autograd itself calls the nodes from the last layer to the first: the backward sweep.

Indices: `ubatch` is a pair (start, stop) of rows; a tensor "has rows" if one of its dimensions carries the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from hf_l2l import stream
from hf_l2l.capture import CapturedOutputs
from hf_l2l.config import L2LConfig
from hf_l2l.eps import EagerParamServer
from hf_l2l.shell import RootCall, Shell
from hf_l2l.splitting import Split, Splitter, Ubatch
from hf_l2l.stacks import flatten, is_cache, narrow
from hf_l2l.stash import Stash
from hf_l2l.transit import DeviceWeights

@dataclass
class LayerCall:
    """One call of one layer, as both sweeps need it. Holds no tensors but generator states."""

    layer: nn.Module
    forward: Callable[..., Any]
    leaves: list[Any]
    """The arguments, flattened; tensors are replaced by None."""
    tensor_positions: list[int]
    spec: pytree.TreeSpec
    device: torch.device
    stash: Stash
    eps: EagerParamServer
    autocast: stream.AutocastState
    split: Split | None = None
    rng: list[stream.RngState | None] = field(default_factory=list)
    """Per ubatch, the generators before it ran; None where it drew nothing."""
    weight_versions: list[int] = field(default_factory=list)
    captured_keys: tuple[str, ...] | None = None
    output_spec: pytree.TreeSpec | None = None
    output_leaves: list[Any] = field(default_factory=list)
    """The outputs, flattened; tensors are replaced by None."""
    output_positions: list[int] = field(default_factory=list)

    @property
    def ubatches(self) -> Sequence[Ubatch | None]:
        return [None] if self.split is None else self.split.ubatches

    def execute(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the layer's own forward on these tensor arguments and return its tensor outputs."""
        leaves = list(self.leaves)
        for position, tensor in zip(self.tensor_positions, tensors, strict=True):
            leaves[position] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        with CapturedOutputs(self.captured_keys) as captured:
            output = self.forward(*args, **kwargs)
        self.captured_keys = captured.keys
        outputs, self.output_spec = flatten((output, captured.taken))
        self.output_positions = [i for i, leaf in enumerate(outputs) if isinstance(leaf, torch.Tensor)]
        self.output_leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in outputs]
        return [outputs[i] for i in self.output_positions]

    def assemble(self, outputs: Sequence[torch.Tensor]) -> Any:
        """What the layer returns, from its tensor outputs; what was captured inside goes on to whoever collects it."""
        assert self.output_spec is not None
        leaves = list(self.output_leaves)
        for position, tensor in zip(self.output_positions, outputs, strict=True):
            leaves[position] = tensor
        output, captured = pytree.tree_unflatten(leaves, self.output_spec)
        CapturedOutputs.deliver(captured)
        return output

    def input_rows(self, tensors: Sequence[torch.Tensor], ubatch: Ubatch | None) -> list[torch.Tensor]:
        if ubatch is None or self.split is None:
            return list(tensors)
        return self.split.inputs.rows_of(tensors, self.split.rows, *ubatch)

    def output_dim(self, index: int) -> int | None:
        return None if self.split is None else self.split.outputs.dims[index]

    def execute_once(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the layer once without dropout, graph or trace: how the splitter learns about its outputs."""
        modules = [m for m in self.layer.modules() if m.training]
        weights = DeviceWeights(self.layer.modules(), self.device, requires_grad=False)
        try:
            for module in modules:
                module.training = False
            with (
                torch.no_grad(),
                stream.rng_state_kept(self.device),
                self.autocast.entered(),
                weights.resident(keep_buffers=False),
            ):
                return self.execute(tensors)
        finally:
            for module in modules:
                module.training = True

    # ---- forward sweep

    def forward_sweep(self, tensors: Sequence[torch.Tensor], *, for_backward: bool) -> list[torch.Tensor]:
        """The layer's tensor outputs for the whole device batch, without a graph."""
        if for_backward:
            self.weight_versions = [p._version for p in self.layer.parameters()]
        weights = DeviceWeights(self.layer.modules(), self.device, requires_grad=False)
        joined: list[torch.Tensor] = []
        with torch.no_grad(), self.autocast.entered(), weights.resident():
            for ubatch in self.ubatches:
                before = stream.get_rng_state(self.device) if for_backward else None
                outputs = self.execute(self.input_rows(tensors, ubatch))
                if before is not None:
                    self.rng.append(before if stream.get_rng_state(self.device) != before else None)
                joined = self._join(joined, outputs, ubatch)
        return joined

    def _join(
        self, joined: list[torch.Tensor], outputs: list[torch.Tensor], ubatch: Ubatch | None
    ) -> list[torch.Tensor]:
        """Put the outputs of one ubatch in their rows; what has no rows is taken from the first."""
        if ubatch is None or self.split is None:
            return outputs
        rows, (start, stop) = self.split.rows, ubatch
        if not joined:
            joined = [
                out if dim is None else _with_rows(out, dim, rows, stop - start)
                for out, dim in zip(outputs, self.split.outputs.dims, strict=True)
            ]
        for whole, out, dim in zip(joined, outputs, self.split.outputs.dims, strict=True):
            if dim is not None:
                narrow(whole, dim, rows, start, stop).copy_(out)
        return joined

    # ---- backward sweep

    def backward_sweep(
        self, kept: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None], needed: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """The gradients of the tensor arguments that are `needed`; those of the weights go to the EPS."""
        self._check_weights_unchanged()
        weights = DeviceWeights(self.layer.modules(), self.device, requires_grad=True)
        inputs = InputGradients(self, kept, needed)
        with (
            # After backward the generators stand where forward left them.
            stream.rng_state_kept(self.device),
            torch.enable_grad(),
            weights.resident(keep_buffers=False),
        ):
            for ubatch, rng in zip(self.ubatches, self.rng, strict=True):
                leaves = inputs.leaves(ubatch)
                if rng is not None:
                    stream.set_rng_state(rng, self.device)
                with self.autocast.entered():  # and not around the backward, which autocast would round
                    outputs = self.execute(leaves)
                self._backward(outputs, gradients, ubatch)
                inputs.collect(leaves, ubatch)
                del leaves, outputs  # one ubatch's activations at a time
        for master, gradient in weights.gradients:
            self.eps.receive(master, gradient)
        return inputs.total

    def _backward(
        self, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None], ubatch: Ubatch | None
    ) -> None:
        roots, root_gradients = [], []
        for index, (output, gradient) in enumerate(zip(outputs, gradients, strict=True)):
            if gradient is None or not output.requires_grad:
                continue
            if ubatch is not None and self.split is not None:
                dim = self.output_dim(index)
                if dim is None and ubatch[0] > 0:
                    continue  # it was taken from the first ubatch, which gets its whole gradient
                gradient = narrow(gradient, dim, self.split.rows, *ubatch)
            roots.append(output)
            root_gradients.append(gradient)
        if roots:
            torch.autograd.backward(roots, root_gradients)

    def _check_weights_unchanged(self) -> None:
        """Autograd refuses weights that changed after they were used; a recompute would not notice."""
        if [p._version for p in self.layer.parameters()] != self.weight_versions:
            raise RuntimeError(
                f"the weights of a layer must not change between its forward and its backward (a {type(self.layer).__name__} "
                "was changed in place); run backward before optimizer.step(), load_state_dict or other writes"
            )


class InputGradients:
    """Leaves for the tensor arguments of one layer call, ubatch by ubatch, and the gradients that reach them."""

    def __init__(self, call: LayerCall, kept: Sequence[torch.Tensor], needed: Sequence[bool]) -> None:
        self.call = call
        self.kept = kept
        self.needed = needed
        self.total: list[torch.Tensor | None] = [None] * len(kept)
        dims = (None,) * len(kept) if call.split is None else call.split.inputs.dims
        self.dims: Sequence[int | None] = dims
        # What has no rows is one leaf for all ubatches: its gradient sums up by itself.
        self.shared = {i: self._leaf(t, i) for i, t in enumerate(kept) if dims[i] is None}

    def _leaf(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        return self.call.stash.fetch(tensor).detach().requires_grad_(self.needed[index])

    def leaves(self, ubatch: Ubatch | None) -> list[torch.Tensor]:
        rows = self.call.input_rows(self.kept, ubatch)
        return [self.shared[i] if i in self.shared else self._leaf(t, i) for i, t in enumerate(rows)]

    def collect(self, leaves: Sequence[torch.Tensor], ubatch: Ubatch | None) -> None:
        for i, leaf in enumerate(leaves):
            if leaf.grad is None:
                continue
            if i in self.shared or ubatch is None:
                self.total[i] = leaf.grad
                continue
            assert self.call.split is not None
            whole = self.total[i]
            if whole is None:
                shape, dtype = self.kept[i].shape, self.kept[i].dtype
                whole = self.total[i] = torch.zeros(shape, dtype=dtype, device=leaf.device)
            dim, rows = self.dims[i], self.call.split.rows
            narrow(whole, dim, rows, *ubatch).copy_(leaf.grad)


def _with_rows(out: torch.Tensor, dim: int, rows: int, ubatch_rows: int) -> torch.Tensor:
    """An empty tensor like `out`, an output of `ubatch_rows` rows along `dim`, with room for `rows`."""
    shape = list(out.shape)
    shape[dim] = shape[dim] // ubatch_rows * rows
    return out.new_empty(shape)


class _RelayNode(torch.autograd.Function):
    """One layer call in the autograd graph."""

    @staticmethod
    def forward(ctx: Any, call: LayerCall, anchor: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        has_rows = [call.split is None or dim is not None for dim in _input_dims(call, len(tensors))]
        # Before the layer runs: what it writes into its inputs must not reach the stash.
        ctx.save_for_backward(*call.stash.keep(list(tensors), has_rows))
        outputs = call.forward_sweep(tensors, for_backward=True)
        ctx.mark_non_differentiable(*(out for out in outputs if not (out.is_floating_point() or out.is_complex())))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call: LayerCall = ctx.call
        return None, None, *call.backward_sweep(ctx.saved_tensors, gradients, ctx.needs_input_grad[2:])


def _input_dims(call: LayerCall, count: int) -> Sequence[int | None]:
    return (None,) * count if call.split is None else call.split.inputs.dims


class Relay:
    """Runs the layers of one model, each call through all its ubatches."""

    def __init__(self, config: L2LConfig, device: torch.device, eps: EagerParamServer, shell: Shell) -> None:
        self.device = device
        self.eps = eps
        self.shell = shell
        self.stash = Stash(config.stash, device)
        self.splitter = Splitter(config.ubatch_size, device)

    def run(self, layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call `forward`, the original forward of `layer`, layer to layer."""
        if self.shell.call is not None:
            return self._run(self.shell.call, layer, forward, args, kwargs)
        with self.shell.entered(layer, forward, args, kwargs) as root:  # the layer itself is called from outside
            return self._run(root, layer, forward, root.args, root.kwargs)

    def _run(self, root: RootCall, layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            args, kwargs = without_caches(layer, args, kwargs)
        leaves, spec = flatten((args, kwargs))
        positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors = [leaves[i] for i in positions]
        if root.replay is not None:
            return root.replay.next_outputs(leaves, spec, tensors)
        if not root.layer_calls:
            self.stash.start_forward()
        static = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        autocast = stream.AutocastState.current(self.device)
        call = LayerCall(layer, forward, static, positions, spec, self.device, self.stash, self.eps, autocast)
        call.split = self.splitter.split_for(root, layer, leaves, spec, tensors, call.execute_once)
        trains = torch.is_grad_enabled() and (
            any(t.requires_grad for t in tensors) or any(p.requires_grad for p in layer.parameters())
        )
        if trains:
            # An output must require a gradient even if no input does (frozen embeddings, LoRA): the anchor makes it so.
            anchor = torch.empty(0, requires_grad=True)
            outputs = _RelayNode.apply(call, anchor, *tensors)  # type: ignore[no-untyped-call]
        else:
            outputs = call.forward_sweep(tensors, for_backward=False)
        root.layer_calls.append((call, [(out.shape, out.dtype) for out in outputs]))
        return call.assemble(outputs)


def without_caches(layer: nn.Module, args: Any, kwargs: Any) -> Any:
    """Arguments of a layer without key-value caches: a recompute would write into them a second time.

    Raises:
        ValueError: if a cache already holds tokens, which the layer would then not see.
    """

    def dropped(leaf: Any) -> Any:
        if not is_cache(leaf):
            return leaf
        if leaf.get_seq_length() > 0:
            raise ValueError(
                f"a layer that trains must not be given a key-value cache with content (a {type(layer).__name__} got "
                f"{leaf.get_seq_length()} cached tokens); call the model with use_cache=False, or under torch.no_grad()"
            )
        return None

    args, kwargs = pytree.tree_map(dropped, (args, kwargs), is_leaf=is_cache)
    if kwargs.get("use_cache"):
        kwargs = {**kwargs, "use_cache": False}
    return args, kwargs
