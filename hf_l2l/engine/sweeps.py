"""The two sweeps through one layer: every ubatch forward without a graph, and every ubatch recomputed and backward.

This is the inner loop of algorithm 2 of arXiv:2002.05645 (algorithm 3 of the first text).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch

from hf_l2l.compat import version_kept
from hf_l2l.device.device_weights import DeviceWeights
from hf_l2l.engine.layer_call import LayerCall
from hf_l2l.model.batch_dims import Split, Ubatch
from hf_l2l.model.layer_state import LayerState
from hf_l2l.rows.host_rows import HostRows, host_of
from hf_l2l.runtime import compute_state, stream, wait_reasons
from hf_l2l.runtime.observer import NON_LAYER, Rows
from hf_l2l.runtime.tensors import with_own_version
from hf_l2l.stash.boundary import FOR_THE_MODEL
from hf_l2l.stash.stash import Stash

Tensors = Sequence[torch.Tensor]


_SAME_OUTPUTS = "make it return the same outputs with and without gradients, or set ubatch_size to None"


def forward_sweep(
    call: LayerCall,
    sources: Tensors,
    weights: DeviceWeights,
    *,
    for_backward: bool,
    as_recomputed: bool = False,
    again: bool = False,
    graph: KeptGraph | None = None,
) -> list[torch.Tensor]:
    """Run one layer on every ubatch; no graph is left, except in `graph`.

    Args:
        call: the layer call.
        sources: its tensor arguments, with all rows, where its device finds them.
        weights: the layer's weights, on the device.
        for_backward: record what a recompute needs besides the tensors: generator states, versions of the weights.
        as_recomputed: run in grad mode, with tensors that require gradients where those of the recompute do.
        again: run it a second time, as if the first time had not been, but for its writes to buffers.
        graph: takes the graph of each ubatch, for a layer that is not to be recomputed.

    Returns:
        The layer's tensor outputs, with all rows; what passes to the next layer waits in the memory of the host or of
        another device if the call says so.

    Raises:
        ValueError: `for_backward`, if the layer writes tensors into an argument that is an object.
    """
    call.hooks.begin()
    if for_backward:
        call.versions, call.rng = call.unit.versions(), []
    if for_backward and graph is None and not again:
        call.state = LayerState(call.unit.modules, call.unit.known)
    state = call.state if for_backward and graph is None else None
    joined, stash = _Joined(call), call.at.stash
    sources = [t.detach() for t in sources]
    arguments = call.refusing_writes_to_arguments() if for_backward else nullcontext()
    grad_mode = compute_state.graph_without_tensors() if as_recomputed else torch.set_grad_enabled(graph is not None)
    put_back = state.put_back() if state is not None and again else nullcontext()
    with grad_mode, call.autocast.entered(), put_back, weights.placed(keep_buffers=not again), arguments:
        for turn, ubatch in enumerate(call.ubatches):
            if state is not None and again:
                state.set_generators(turn)
            before = compute_state.get_rng_state(call.device) if for_backward and graph is None else None
            rows = [stash.fetch(t) for t in call.input_rows(sources, ubatch)]
            stash.fetch_ahead(call.rows_of_turn(sources, turn + 1))
            if as_recomputed:
                rows = [_in_dead_end(t) if each else t for t, each in zip(rows, call.needed, strict=True)]
            if graph is not None:
                rows = [t.detach().requires_grad_(each) for t, each in zip(rows, call.needed, strict=True)]
                rows = graph.leaves(rows, call.input_dims)
            with state.ubatch() if state is not None and not again else nullcontext():
                outputs = call.execute(rows)
            if call.check is not None and for_backward and graph is None:
                call.check.forward(turn, outputs)
            if graph is not None:
                graph.ubatches.append((rows, outputs))
            if as_recomputed or graph is not None:
                outputs = [_without_graph(out) for out in outputs]
            if before is not None:
                call.rng.append(before if compute_state.get_rng_state(call.device) != before else None)
            if ubatch is None or call.split is None:
                joined.tensors = [joined.whole(number, out) for number, out in enumerate(outputs)]
                break
            call.check_number(outputs, len(call.split.outputs.dims), _SAME_OUTPUTS)
            joined.add(call.split, outputs, ubatch)
    if state is not None and not again:
        state.end_forward()
    return joined.tensors


def _without_graph(out: torch.Tensor) -> torch.Tensor:
    """The same memory without a graph. What is made of a view by `detach()` keeps the base of the view, whose graph
    has the weights, and hooks of the engine."""
    out = out.detach()
    return with_own_version(out.resolve_conj().resolve_neg()) if out._is_view() else out


def _in_dead_end(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, which require a gradient; a backward that arrives here is refused. As what a layer before
    returns, and unlike a leaf, it may be written to."""
    with torch.enable_grad(), version_kept(tensor):
        same: torch.Tensor = _DeadEnd.apply(tensor.detach(), torch.empty(0, requires_grad=True))  # type: ignore[no-untyped-call]
    return same


class _DeadEnd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(tensor)  # the tensor itself, and no view of it
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> NoReturn:
        compute_state.refuse_backward(gradient)


class _Gate:
    """Lets gradients of backwards of the layer arrive at the leaves of its graph, and no others. It does not refer to
    the leaves, which have its method as a hook: torch would never free such a cycle."""

    def __init__(self) -> None:
        self._is_open = False

    @contextmanager
    def open(self) -> Iterator[None]:
        """Inside, a backward of the layer runs."""
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def arrive(self, gradient: torch.Tensor) -> None:
        """A gradient arrives: one of a backward through the inside of the layer would be lost."""
        if not self._is_open:
            compute_state.refuse_backward(gradient)


class KeptGraph:
    """The graph of one layer call, from its forward to its backward: of each ubatch, its leaves and its outputs."""

    def __init__(self, weights: DeviceWeights) -> None:
        """`weights` are leaves of the graph, too."""
        self.weights = weights
        self.ubatches: list[tuple[Tensors, Tensors]] = []
        self.shared: dict[int, torch.Tensor] = {}
        """Arguments without rows, by their number: each is one leaf for all ubatches."""
        self.gate = _Gate()

    def leaves(self, rows: Tensors, dims: Sequence[int | None]) -> list[torch.Tensor]:
        """The tensor arguments of a ubatch as leaves, of which `rows` are fresh ones."""
        leaves = enumerate(zip(rows, dims, strict=True))
        found = [self.shared.setdefault(i, row) if dim is None else row for i, (row, dim) in leaves]
        for leaf in found:
            if leaf.requires_grad:
                leaf.register_hook(self.gate.arrive)
        return found

    def take(self, turn: int, *, keep: bool) -> tuple[Tensors, Tensors]:
        """Leaves, whose gradients are gone, and outputs of ubatch number `turn`; unless `keep`, nothing else has them
        afterwards."""
        leaves, outputs = self.ubatches[turn]
        if not keep:
            self.ubatches[turn] = [], []
        for i, leaf in enumerate(leaves):
            if i not in self.shared:
                leaf.grad = None  # of an earlier backward
        return leaves, outputs


class _Joined:
    """The outputs of all ubatches of one call."""

    def __init__(self, call: LayerCall) -> None:
        self._call, self._stash = call, call.at.stash
        self.tensors: list[torch.Tensor] = []

    def add(self, split: Split, outputs: Sequence[torch.Tensor], ubatch: Ubatch) -> None:
        """Put the outputs of one ubatch in their rows. Outputs without rows are those of the first ubatch."""
        # A hook may have begun a copy to the host that has not ended; the host itself reads it below.
        if any(out.device != self._call.device for out in outputs[self._call.own :]):
            computed = stream.record(self._call.device)
            stream.wait(computed, wait_reasons.COLLECTED_DOWNLOADED, host=True, on=self._call.device)
        if not self.tensors:
            self.tensors = [self._room(split, number, out, ubatch) for number, out in enumerate(outputs)]
        for number, (whole, out) in enumerate(zip(self.tensors, outputs, strict=True)):
            if split.outputs.dims[number] is None:
                continue
            rows = split.rows_of_output(host_of(whole), number, ubatch)
            if isinstance(whole, HostRows):
                self._stash.send(out, rows)
            else:
                rows.copy_(out)

    def _room(self, split: Split, number: int, out: torch.Tensor, ubatch: Ubatch) -> torch.Tensor:
        """An empty tensor for output `number` with all rows."""
        if split.outputs.dims[number] is None:
            return self.whole(number, out)
        shape = split.all_rows(out, number, ubatch)
        if out.device != self._call.device:
            return out.new_empty(shape)
        place, passing = self._call.way_of(split, number, shape, out.element_size())
        return out.new_empty(shape) if place is None else self._stash.room(out, shape, place, passing)

    def whole(self, number: int, out: torch.Tensor) -> torch.Tensor:
        """Output `number`, which is not made of rows of several ubatches."""
        call = self._call
        if call.way is None or out.device != call.device:  # a number of the host
            return out
        passes = number < call.own and out.shape in call.input_shapes
        return self._stash.pass_on(out, *(call.way if passes else (call.at.first, FOR_THE_MODEL)))


def backward_sweep(
    call: LayerCall,
    inputs: InputGradients,
    gradients: Sequence[torch.Tensor | None],
    weights: DeviceWeights,
) -> None:
    """Recompute one layer ubatch by ubatch and run backward through it.

    Weight gradients are summed in the leaves of `weights`, or where their hooks sum them.

    Args:
        call: the layer call.
        inputs: gives the call's tensor arguments as leaves, and collects their gradients.
        gradients: the gradients of the layer's tensor outputs, with all rows, on the device or in host memory.
        weights: the layer's weights, on the device.
    """
    state = call.state
    assert state is not None, "a call that is recomputed has had a forward"
    own = len(gradients) - len(call.hooks.have_graph)
    collecting = any(gradient is not None for gradient in gradients[own:])
    with (
        # The recompute must not change the random numbers that the program draws after backward.
        compute_state.rng_state_kept(call.device),
        torch.enable_grad(),
        state.put_back(collecting=collecting),
        weights.placed(keep_buffers=False),
    ):
        for turn, (ubatch, rng) in enumerate(zip(call.ubatches, call.rng, strict=True)):
            leaves = inputs.leaves(ubatch)  # first: rows needed now are uploaded before rows needed later
            inputs.fetch_after(turn)
            if rng is not None:
                compute_state.set_rng_state(rng, call.device)
            state.set_generators(turn)
            with call.autocast.entered():  # not around the backward, whose results autocast would round
                outputs = call.recompute(leaves, turn)
            returned = outputs[: call.own]
            call.check_number(returned, own, _SAME_OUTPUTS)
            if call.check is not None:
                call.check.recompute(turn, outputs if collecting else returned)
            if collecting:
                call.check_number(outputs, len(gradients), _SAME_OUTPUTS)
                _backward(call, outputs, gradients, ubatch, inputs.stash)
            else:  # what hooks collect may have changed, and nobody has used it
                _backward(call, returned, gradients[:own], ubatch, inputs.stash)
            inputs.collect(leaves, ubatch)
            del leaves, outputs, returned  # so that the device holds the activations of one ubatch at a time


def backward_of_graph(
    call: LayerCall,
    inputs: InputGradients,
    gradients: Sequence[torch.Tensor | None],
    graph: KeptGraph,
    *,
    keep: bool,
) -> None:
    """`backward_sweep` of a layer that keeps its graph: nothing is recomputed. With `keep`, the graph stays."""
    inputs.shared = graph.shared
    for leaf in (*graph.shared.values(), *graph.weights.leaves):
        leaf.grad = None  # of an earlier backward
    # Code of the layer runs only if it recomputes a part of itself.
    with torch.enable_grad(), graph.weights.placed(keep_buffers=False):
        for turn, ubatch in enumerate(call.ubatches):
            inputs.fetch_after(turn)
            leaves, outputs = graph.take(turn, keep=keep)
            with graph.gate.open():
                _backward(call, outputs, gradients, ubatch, inputs.stash, keep=keep)
            inputs.collect(leaves, ubatch)
            del leaves, outputs  # so that the memory of each ubatch is freed


def _backward(
    call: LayerCall,
    outputs: Tensors,
    gradients: Sequence[torch.Tensor | None],
    ubatch: Ubatch | None,
    stash: Stash,
    *,
    keep: bool = False,
) -> None:
    """Run backward from the outputs of one ubatch, with the rows of `gradients` that belong to it."""
    roots, root_gradients = [], []
    for number, (output, gradient) in enumerate(zip(outputs, gradients, strict=True)):
        if gradient is None or not output.requires_grad:
            continue
        rows = call.gradient_rows(gradient, number, ubatch)
        if rows is not None:
            roots.append(output)
            root_gradients.append(stash.fetch(rows, "output gradient").to(output.device))  # a hook may move its output
    if roots:
        call.at.backward(roots, root_gradients, keep=keep)


class InputGradients:
    """Makes leaves of the tensor arguments of one layer call, ubatch by ubatch, and collects their gradients."""

    def __init__(
        self,
        call: LayerCall,
        kept: Sequence[torch.Tensor],
        needed: Sequence[bool],
        places: Sequence[torch.device | None],
        gradients: Sequence[torch.Tensor | None],
    ) -> None:
        """`kept` are the tensor arguments in the stash (none of a call that keeps its graph), of which some are
        `needed`; their gradients go to these `places`, None for the device; `gradients` are those of the outputs."""
        self.call = call
        self.places = places
        self.gradients = gradients
        self.stash = call.at.stash
        self.kept = kept
        self.needed = needed
        self.total: list[torch.Tensor | None] = [None] * len(call.input_dims)
        # An argument without rows is one leaf for all ubatches: autograd sums its gradient.
        self.shared = {i: self._leaf(t, i) for i, t in enumerate(kept) if call.input_dims[i] is None}

    def _leaf(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        return self.stash.fetch(tensor).detach().requires_grad_(self.needed[index])

    def leaves(self, ubatch: Ubatch | None) -> list[torch.Tensor]:
        """The tensor arguments of one ubatch, on the device, as leaves of a new graph."""
        rows = self.call.input_rows(self.kept, ubatch)
        return [self.shared[i] if i in self.shared else self._leaf(t, i) for i, t in enumerate(rows)]

    def fetch_after(self, turn: int) -> None:
        """Start to upload the rows after ubatch number `turn`: of the next ubatch, or the first of the device's next
        layer.

        What the next layer will upload in its turn of this number is read from disk meanwhile, if it is there.
        """
        before = self.call.before_here
        if before is not None:
            self.stash.tiers.read_ahead(partial(before.kept_rows, turn))
        if not self.stash.travels:
            return
        count = len(self.call.ubatches)
        if turn + 1 < count:
            ubatch = self.call.ubatches[turn + 1]
            given = enumerate(self.gradients)
            rows = [self.call.gradient_rows(each, number, ubatch) for number, each in given if each is not None]
            self.stash.fetch_ahead(self.call.kept_rows(turn + 1))
            gradients = [each for each in rows if each is not None]
            self.stash.fetch_ahead(gradients, Rows("output gradient", self.call.unit.module))
            return
        if before is not None:
            self.stash.fetch_ahead(before.kept_rows(0), Rows("input", before.unit.module))
        if turn > 0 and before is self.call.before:  # else another device runs the layer before
            following = NON_LAYER if before is None else before.unit.module
            self.stash.fetch_ahead(self._first_rows(), Rows("output gradient", following))

    def _first_rows(self) -> list[torch.Tensor]:
        """The rows of the gradients in host memory that the layer before needs first."""
        split, [first, *_] = self.call.split, self.call.ubatches
        if split is None or first is None:
            return []
        gradients = [(i, each.rows.host) for i, each in enumerate(self.total) if isinstance(each, HostRows)]
        return [split.rows_of_input(host, i, first) for i, host in gradients]

    def collect(self, leaves: Sequence[torch.Tensor], ubatch: Ubatch | None) -> None:
        """Copy the gradients of one ubatch's leaves to their rows of `total`."""
        for i, leaf in enumerate(leaves):
            split = self.call.split
            if i in self.shared or ubatch is None or split is None:
                self.total[i] = leaf.grad if leaf.grad is not None else self.total[i]
            elif leaf.grad is not None or isinstance(self.total[i], HostRows):
                self._collect_rows(i, leaf, split, ubatch)

    def complete(self) -> list[torch.Tensor | None]:
        """All gradients, on their way to the places where they go."""
        found = zip(self.total, self.places, strict=True)
        return [
            total
            if total is None or place is None or isinstance(total, HostRows)
            else self.stash.pass_on(total, place, what="input gradient")
            for total, place in found
        ]

    def _collect_rows(self, i: int, leaf: torch.Tensor, split: Split, ubatch: Ubatch) -> None:
        whole = self.total[i]
        place = self.places[i]
        if whole is None and place is not None:
            whole = self.total[i] = self.stash.room(leaf, self.call.input_shapes[i], place)
            for earlier in split.ubatches[: split.ubatches.index(ubatch)]:
                rows = split.rows_of_input(host_of(whole), i, earlier)
                zeros = torch.zeros(rows.shape, dtype=leaf.dtype, device=leaf.device)
                self.stash.send(zeros, rows, "input gradient")
        elif whole is None:
            whole = self.total[i] = torch.zeros(self.call.input_shapes[i], dtype=leaf.dtype, device=leaf.device)
        rows = split.rows_of_input(host_of(whole), i, ubatch)
        gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        if isinstance(whole, HostRows):
            self.stash.send(gradient, rows, "input gradient")
        else:
            rows.copy_(gradient)
