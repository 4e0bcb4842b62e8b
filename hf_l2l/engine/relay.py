"""The relay: layers run one after the other, each with all ubatches of the device batch before the next.

This is algorithm 2 of arXiv:2002.05645 (algorithm 3 of the first text). A layer call becomes one node of the autograd
graph. Its forward uploads the layer, runs every ubatch without keeping a graph and stashes the layer's inputs; its
backward uploads the layer again and, per ubatch, recomputes, runs backward and sums the weight gradients on the
device, then sends the sums to the EPS. Autograd itself calls the nodes from the last layer to the first: the backward
sweep.

A `ubatch` is a pair (start, stop) of rows, or None for all rows; a tensor "has rows" if one of its dimensions carries
the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_l2l.compat import graph_is_retained, in_whole_backward, without_interception
from hf_l2l.config import L2LConfig
from hf_l2l.device.device_weights import DeviceWeights, uploaded
from hf_l2l.device.layer_device import layer_devices, tell_idle
from hf_l2l.device.prefetch import Prefetch, fetched_in_backward, fetched_in_forward
from hf_l2l.device.slots import LayerSums, WeightSlots
from hf_l2l.engine.in_turn import device_of, holds_tensors, refusing_writes_to_copies, versions
from hf_l2l.engine.layer_call import LayerCall
from hf_l2l.engine.model_call import ModelCall
from hf_l2l.engine.recompute_check import CallCheck, RecomputeCheck
from hf_l2l.engine.shell import Shell
from hf_l2l.engine.splitting import Splitter
from hf_l2l.engine.sweeps import InputGradients, KeptGraph, Tensors, backward_of_graph, backward_sweep, forward_sweep
from hf_l2l.eps.gradients import Sums
from hf_l2l.eps.masters import MasterUnit
from hf_l2l.eps.pending import settle
from hf_l2l.eps.server import EagerParamServer
from hf_l2l.memory.dense_masks import dense_masks
from hf_l2l.memory.device_memory import BOUNDARY, KEPT_GRAPHS, KEPT_WEIGHTS, MASK, RESIDENT, SLOTS, STASH
from hf_l2l.memory.ledger import COPIES, HOST_STASH
from hf_l2l.model.caches import without_caches
from hf_l2l.model.container_writes import containers_of
from hf_l2l.model.layer_hooks import kind_of_hooks
from hf_l2l.rows.host_rows import HostRows, memory_behind
from hf_l2l.runtime import compute_state, stream
from hf_l2l.runtime.backward_callbacks import RaisedIn
from hf_l2l.runtime.tensors import flatten, have_cache
from hf_l2l.stash.boundary import FOR_THE_MODEL, Boundary
from hf_l2l.stash.tiers import Tiers


def let_go_of_engine(ctx: Any) -> None:
    """At the end of a node's backward: a loss that the program keeps must not keep the weights and the slots, with the
    call and the relay. (torch frees the tensors that a node has saved, and nothing else of it.)"""
    if not graph_is_retained():
        ctx.call = ctx.engine = None


def refuse_second_backward(ctx: Any) -> None:
    """Raise RuntimeError, as torch does, if an earlier backward has freed the graph."""
    if ctx.call is None:
        raise RuntimeError(
            "Trying to backward through the graph a second time: the first backward frees what a second one needs of "
            "the layers; use retain_graph=True in the first one"
        )


class _Arrived(NamedTuple):
    """The gradients of a layer at the end of the backward of a call of it."""

    call: LayerCall
    received: Sums
    sums: LayerSums
    in_slot: bool
    """Whether the sums in the slot are all that was received."""


class _RelayNode(torch.autograd.Function):
    """One layer call in the autograd graph."""

    @staticmethod
    def forward(
        ctx: Any, call: LayerCall, relay: Relay, anchor: torch.Tensor, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.places = [call.at.gradient_place(t) for t in tensors]
        ctx.call, ctx.engine = call, relay
        sources = call.given(tensors)
        with call.at.running(draws=False), relay.stashing(call, sources) as kept:
            call.remember(kept)
            relay.eps.ledger.on_device.holds(STASH, memory_behind(kept))
            ctx.save_for_backward(*kept)
            relay.eps.expect(call.unit)
            # Autograd itself finds out changes of arguments that get a gradient.
            pairs = zip(sources, call.needed, strict=True)
            given = [t for t, needed in pairs if t.is_floating_point() and not needed]
            before = versions(given)
            with refusing_writes_to_copies(call, tensors, sources):
                outputs = relay.forward(call, sources, for_backward=True)
            ctx.graph, call.graph = call.graph, None
            ctx.has_changed_arguments = versions(given) != before
        have_graph = [*(True for _ in outputs[: call.own]), *call.hooks.have_graph]
        ctx.mark_non_differentiable(
            *(
                out
                for out, has_graph in zip(outputs, have_graph, strict=True)
                if not (has_graph and (out.is_floating_point() or out.is_complex()))
            )
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        refuse_second_backward(ctx)
        relay: Relay = ctx.engine
        timeline, memory, unit = relay.eps.timeline, relay.eps.ledger.on_device, ctx.call.unit
        memory.holds(BOUNDARY, memory_behind(gradients))
        told = RaisedIn("the backward of", unit.name)
        with relay.eps.backwards.joined(), told, timeline.inside("backward"), timeline.at(unit.module):
            if torch.is_grad_enabled():  # autograd would record this backward
                raise RuntimeError(
                    "L2L computes first derivatives only, since a layer's graph is freed in its backward (got "
                    "create_graph=True); leave it out, or train this model without L2L"
                )
            if ctx.has_changed_arguments:
                raise RuntimeError(
                    "a layer that trains must not change its arguments in place, since its recompute would begin with "
                    f"the changed ones (got a {type(ctx.call.layer).__name__} that does); make it change a copy, or "
                    "train this model without L2L"
                )
            there = ctx.call.given_back(gradients)
            with ctx.call.at.running(draws=False):
                inputs = InputGradients(ctx.call, ctx.saved_tensors, ctx.needs_input_grad[3:], ctx.places, there)
            graph = ctx.graph
            ctx.graph = graph if graph_is_retained() else None
            found = relay.backward(ctx.call, inputs, there, graph)
            memory.holds(BOUNDARY, memory_behind(found))
        if ctx.call.before is None or not ctx.call.before.in_graph:  # the last layer of the backward sweep
            with relay.eps.backwards.joined():
                relay.check.tell()
        let_go_of_engine(ctx)
        return None, None, None, *found


class Relay:
    """Runs the layers of one model, each call through all its ubatches."""

    def __init__(
        self, config: L2LConfig, devices: Sequence[torch.device], eps: EagerParamServer, shell: Shell
    ) -> None:
        """Layers run on `devices` in turn; the first one runs the non-layer modules, too."""
        device = self.device = devices[0]
        self.eps = eps
        self.shell = shell
        stashed = max(1, sum(not unit.place.keeps_input for unit in eps.masters.layer_units))
        tiers = Tiers(config, devices, eps.memory, layers=stashed, bytes_to_come=eps.bytes_of_first_step)
        self.devices, self.stash = layer_devices(config, devices, eps, tiers, shell.lane)
        self.check = RecomputeCheck(config.check_recompute, eps.backwards)
        self.prefetch = Prefetch(self.devices, eps, is_on=config.prefetch)
        self.boundary = Boundary(config, devices)
        shell.runs_plainly = len(devices) == 1
        self._last_time: dict[object, list[nn.Module]] = {}
        """The module that the program calls -> the layers that its last call called, in that order; and for calls
        that run together, those of all."""
        self.cuts = shell.cuts
        self.splitter = Splitter(self.cuts, device)
        shell.call_at_start(self._start_forward)
        eps.ledger.on_device.finds(SLOTS, self._slot_memory)
        eps.ledger.on_device.finds(BOUNDARY, self.stash.transit.reserved_memory)
        eps.ledger.on_device.finds(KEPT_WEIGHTS, self._kept_memory)
        eps.ledger.on_device.finds(RESIDENT, self._copy_memory)
        eps.ledger.counts(HOST_STASH, tiers.host_bytes)
        eps.ledger.counts(COPIES, self._staged_bytes)
        self._open: _Arrived | None = None
        """Gradient sums of a layer that the next call of the backward adds to."""
        # First: the EPS publishes what it has been given by then.
        eps.backwards.call(at_end=self._send_open, at_failure=self._drop_open, first=True)
        eps.backwards.call(at_end=self.settle, at_failure=self.settle)

    def run(self, layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a call of `layer`, whose original forward is `forward`, in the relay."""
        call = self.shell.call
        if call is not None:
            return self._run(call, layer, forward, args, kwargs)
        with self.shell.entered(layer, forward, args, kwargs) as root:  # the program calls the layer itself
            return self.shell.leaving(self._run(root, layer, forward, root.args, root.kwargs))

    def _run(self, root: ModelCall, layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if root.is_plain:
            return self._run_plainly(self.eps.masters.unit(layer), forward, args, kwargs)
        unit = self.eps.masters.unit(layer)
        # Batches that run together come to a layer one after the other while it is on the device.
        if root.shared is not None and root.replay is None and not unit.place.is_resident:
            assert self.shell.coroutines is not None, "what is shared is that of coroutines"
            self.shell.coroutines.wait_for(layer)
        arguments, spec = flatten((args, kwargs))
        if root.makes_graph and (kwargs.get("use_cache") or have_cache(arguments)):
            arguments, spec = flatten(without_caches(layer, args, kwargs, root.cache_sizes))
        containers = containers_of((args, kwargs), arguments)
        at = device_of(self.devices, unit, len(root.layer_calls), arguments)
        call = LayerCall.of(unit, forward, arguments, spec, at, self.eps.copies)
        call.on_own_stream = not (have_cache(arguments) or any(map(holds_tensors, arguments)))
        tensors = [arguments[i] for i in call.tensor_positions]
        if root.replay is not None:
            return root.replay.next_outputs(spec, tensors, containers)
        if not torch.compiler.is_compiling():
            for tensor in tensors:
                settle(tensor)  # a weight of the non-layer modules; autograd passes it to the node without a use
        memory = self.eps.ledger.on_device
        memory.holds(MASK, dense_masks(tensors))
        memory.holds(BOUNDARY, memory_behind(tensors))
        with RaisedIn("the forward of", call.unit.name), self.eps.timeline.at(layer):
            execute = partial(call.execute_once, keep_buffers=True)
            call.split = self.splitter.split_for(root, call.unit, arguments, spec, kwargs, tensors, execute)
            outputs = self._execute(root, call, tensors)
            memory.holds(BOUNDARY, memory_behind(outputs))
        call.output_kinds = [(out.shape, out.dtype) for out in outputs]
        root.called(call)
        root.weights.upload_ahead(len(root.layer_calls))
        return call.assemble(outputs, containers)

    def _run_plainly(self, unit: MasterUnit, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the forward of a layer as without L2L, with its buffers on the device."""
        if not unit.with_buffers:
            return forward(*args, **kwargs)
        with DeviceWeights(unit, unit.parameters, self.device, self.eps.copies.precision).placed():
            return forward(*args, **kwargs)

    def _execute(self, root: ModelCall, call: LayerCall, tensors: list[torch.Tensor]) -> Tensors:
        number, called = len(root.layer_calls), root.outermost.layer_calls
        count = len(self.devices)
        last_time = self._last_time.get(self._key(root.outermost), ())
        call.fetched_in_forward = self.prefetch.after(last_time, len(called), call.layer)
        call.before = called[-1] if called else None
        call.before_here = next((each for each in reversed(called[-count:]) if each.at is call.at), None)
        order = self._last_time.get(root.module, self.eps.masters.layers)
        # What the program does with the last output is a use like those of the model.
        after = fetched_in_forward(order, number, call.layer)
        following = None if after is None else self.eps.masters.unit(after)
        if torch.is_grad_enabled() and (following is None or not following.place.keeps_input):
            call.passing = self.boundary.after(call.layer, self.is_in_forward if after else lambda: True)
        if count > 1:
            passing = None
            next_one = self.devices[0]
            if following is not None:
                passing = self.boundary.between_devices(call.layer, self.is_in_forward)
            if following is not None and passing is not None:
                next_one = device_of(self.devices, following, number + 1)
            # The first device is sent what the last layer returns.
            next_here = number + (1 if call.at is self.devices[0] else count)
            call.at.reserve(is_needed=next_here < len(order))
            call.way = next_one.device, passing or FOR_THE_MODEL
        for tensor, dim in zip(tensors, call.input_dims, strict=True):
            if dim and isinstance(tensor, HostRows):
                tensor.on_device()  # the model has turned it, so that rows are not along the first dimension
        leads_down = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if not (leads_down or (torch.is_grad_enabled() and call.unit.is_trained)):
            given = call.given(tensors)
            with refusing_writes_to_copies(call, tensors, given):
                return self.forward(call, given, for_backward=False)
        # No backward reaches a layer below the lowest one that trains.
        lowest = 0 if leads_down and call.before is not None and call.before.in_graph else len(called)
        below = fetched_in_backward(
            called,
            len(called),
            lowest,
            lambda each: each.unit.place.is_fetched_in_backward and each.unit is not call.unit,
            count,
        )
        call.fetched_in_backward = None if below is None else below.unit
        # An output must require a gradient even if no input does (frozen embeddings, LoRA), hence the anchor as input.
        outputs: Tensors = _RelayNode.apply(call, self, root.anchor, *tensors)  # type: ignore[no-untyped-call]
        return outputs

    def stashing(self, call: LayerCall, sources: Tensors) -> AbstractContextManager[list[torch.Tensor]]:
        """Stash the tensor arguments of a call in the block; yields what is stashed, nothing if the graph is kept."""
        if call.unit.place.keeps_input:
            return nullcontext([] if call.unit.place.keeps_graph else list(sources))
        # The whole stash of an unsplit call is uploaded at once, so all of it may be kept on the host.
        has_rows = [call.split is None or dim is not None for dim in call.input_dims]
        return call.at.stash.keeping(sources, has_rows)

    def is_in_forward(self) -> bool:
        """Whether the model is running, and not the program."""
        return self.shell.call is not None and not self.shell.is_leaving

    def forward(self, call: LayerCall, sources: Tensors, *, for_backward: bool) -> list[torch.Tensor]:
        """Run the forward of one layer, whose tensor arguments are `sources`, overlapped with the upload of the next
        one of its device."""
        keeps_graph = for_backward and call.unit.place.keeps_graph
        if for_backward and not keeps_graph:
            call.check = self._check_of(call)
        is_watched = call.draws or call.check is not None or bool(kind_of_hooks(call.unit.modules))
        as_recomputed = for_backward and is_watched and not keeps_graph
        with (
            self.shell.one_thread.in_layer(),
            call.at.running(draws=True, on_own_stream=call.on_own_stream),
            self._weights(call, requires_grad=as_recomputed or keeps_graph) as weights,
            self.prefetch.during(call.at, call.fetched_in_forward),
            self.eps.timeline.computes("forward", call.unit.module, call.device),
        ):
            if keeps_graph:
                call.graph = KeptGraph(weights)
                outputs = forward_sweep(call, sources, weights, for_backward=True, graph=call.graph)
                self.eps.ledger.on_device.enter(KEPT_GRAPHS)
            elif for_backward and not as_recomputed:
                outputs = self._forward_that_may_draw(call, sources, weights)
            else:
                outputs = forward_sweep(call, sources, weights, for_backward=for_backward, as_recomputed=as_recomputed)
        if any(state is not None for state in call.rng):
            call.unit.drawing_modes.add(call.layer.training)
        self.prefetch.late()
        if for_backward and call.unit.keeps.places is None:
            call.learn_what_it_keeps(sources)
        return outputs

    def _check_of(self, call: LayerCall) -> CallCheck | None:
        """What checks the recompute of a call, if it is one of those that are checked."""
        compute = self.eps.copies.precision.dtype
        return self.check.of_call(
            call.unit.known,
            (
                call.layer.training,
                call.split is None,
                tuple(call.tensor_positions),
                call.autocast,
                kind_of_hooks(call.unit.modules),
            ),
            call.layer,
            call.unit.name,
            ubatches=len(call.ubatches),
            device=call.device,
            dtypes=(*call.autocast.enabled_dtypes, *([] if compute is None else [compute])),
        )

    def _forward_that_may_draw(self, call: LayerCall, sources: Tensors, weights: DeviceWeights) -> list[torch.Tensor]:
        """The forward of a layer that has drawn no random numbers so far: under `no_grad`, which takes the least time.

        If it draws some now, the sweep is repeated in grad mode, as the recompute runs, and so are all later ones of
        this layer. For torch chooses the kernel of attention by `requires_grad`, among other things, and another
        kernel makes another dropout mask from the same generator state. That a layer draws can be seen from outside;
        which of its functions choose in this way cannot.
        """
        before = versions(sources)
        outputs = forward_sweep(call, sources, weights, for_backward=True)
        drew = next((state for state in call.rng if state is not None), None)
        if drew is None:
            return outputs
        if versions(sources) != before:
            return outputs  # the layer has written into its arguments, so that this call cannot be repeated
        del outputs  # so that the device holds the outputs of one sweep at a time
        compute_state.set_rng_state(drew, call.device)  # as at the start: ubatches before it drew nothing
        with self._weights(call, requires_grad=True) as leaves:
            return forward_sweep(call, sources, leaves, for_backward=True, as_recomputed=True, again=True)

    def backward(
        self,
        call: LayerCall,
        inputs: InputGradients,
        gradients: Sequence[torch.Tensor | None],
        graph: KeptGraph | None,
    ) -> list[torch.Tensor | None]:
        """Run the backward of one layer, overlapped with the upload of a layer before, and with the download of the
        gradients of the following one; through `graph` if the layer has kept it. Returns the gradients of the layer's
        tensor arguments."""
        call.check_weights_unchanged()
        open_sums = self._take_open(call)
        call.at.reserve(is_needed=call.before_here is not None and call.before_here.in_graph)
        # A backward to an intermediate result ends above the layer before.
        fetched = call.fetched_in_backward if any(inputs.needed) else None
        with (
            self.shell.one_thread.in_layer(),
            call.at.running(draws=False, on_own_stream=call.on_own_stream),
            self._weights(call, requires_grad=True, graph=graph) as weights,
            self.prefetch.during(call.at, fetched),
            self._summing(call, weights, open_sums) as sums,
            self.eps.timeline.computes("backward", call.unit.module, call.device),
        ):
            if graph is None:
                with self.shell.computing_again(call.unit.name):
                    backward_sweep(call, inputs, gradients, weights)
            else:
                backward_of_graph(call, inputs, gradients, graph, keep=graph_is_retained())
                self.eps.ledger.on_device.enter(KEPT_GRAPHS)
            pairs = zip(call.unit.masters, sums.totals, strict=False)
            summed = [(master, total) for master, total in pairs if total is not None]
            received = [*summed, *weights.take_gradients()]
            found = inputs.complete()
        # torch.autograd.grad and backward(inputs=...) return the gradients they name, and add none to the weights.
        if in_whole_backward():
            stream_of_layer = call.at.running(draws=False, on_own_stream=call.on_own_stream)
            with stream_of_layer:
                with without_interception():  # as in plain torch, what was frozen after the forward gets no gradient
                    received = [(m, total) for m, total in received if m.parameter.requires_grad]
                # Sums that are in the slot, of every parameter that trains.
                in_slot = sums.flat is not None and len(received) == len(summed) == len(call.unit.trained)
                arrived = _Arrived(call, received, sums if summed else LayerSums([], None), in_slot=in_slot)
                if in_slot and call.is_after_itself:
                    self._open = arrived
                else:
                    self._send(arrived)
        return found

    def _take_open(self, call: LayerCall) -> LayerSums | None:
        """The sums that the last call of a backward has left in their slot, if `call` is another one of its layer; if
        not, they are sent."""
        found, self._open = self._open, None
        if found is None:
            return None
        if found.call.unit is call.unit and found.call.at is call.at:
            self.eps.expect(call.unit, -1)  # the gradients of both arrive together
            return found.sums
        self._send(found)
        return None

    def _send(self, found: _Arrived) -> None:
        """Give gradients of a layer to the EPS, which downloads them."""
        call, flat = found.call, found.sums.flat
        with (
            RaisedIn("the download of", call.unit.name),
            call.at.running(draws=False, on_own_stream=call.on_own_stream),
        ):
            self.eps.receive(found.received, call.unit, flat if found.in_slot else None)
            if flat is not None:
                call.at.gradient_slots.leave(self.eps.gradients.lane_of(call.device))

    def _send_open(self) -> None:
        """A backward is over that has not reached the call that would have added to these sums."""
        found, self._open = self._open, None
        if found is not None:
            self._send(found)

    def _drop_open(self) -> None:
        """A backward has failed."""
        self._open = None

    def _start_forward(self, root: ModelCall) -> None:
        """Begin the uploads that the call needs first: of its first layer, and of modules before that."""
        root.at_end = self._end_forward
        self._settle_copies()
        for at in self.devices:
            at.start_forward()
        root.weights.upload_first()
        self.prefetch.begin(self._last_time.get(self._key(root), ()))

    @staticmethod
    def _key(root: ModelCall) -> object:
        """Of `_last_time`."""
        return root.module if root.forward is not None else "together"

    def _end_forward(self, root: ModelCall) -> None:
        self._last_time[self._key(root)] = [call.unit.module for call in root.layer_calls]
        if root.shared is not None:
            return
        tell_idle(self.devices, len(root.layer_calls), len(self.eps.masters.layer_units))
        self.stash.transit.forget_reserved()
        if root.anchor is None:
            self.settle()
        else:
            self._settle_copies()
            for slots in self._weight_slots():
                slots.leave_reading()
        for at in self.devices:
            at.forget_given()
            if at.weight_slots is not None and self.eps.masters.is_changed_for_call:
                at.weight_slots.forget(self.eps.masters.layer_units)

    def _slot_memory(self) -> list[torch.Tensor]:
        """The memory of all slots."""
        found = [slot for at in self.devices for slot in at.gradient_slots.slots]
        return [slot.memory for slot in (*(slot for each in self._weight_slots() for slot in each.slots), *found)]

    def _weight_slots(self) -> list[WeightSlots]:
        return [at.weight_slots for at in self.devices if at.weight_slots is not None]

    def _staged_bytes(self) -> int:
        return sum(each.staged_bytes for each in self._weight_slots())

    def _kept_memory(self) -> list[torch.Tensor]:
        return [memory for each in self._weight_slots() for memory in each.kept_memory(copies=False)]

    def _copy_memory(self) -> list[torch.Tensor]:
        return [memory for each in self._weight_slots() for memory in each.kept_memory(copies=True)]

    def settle(self) -> None:
        """Make the host wait until all copies of layers, and of what passes between them, have finished."""
        self._settle_copies()
        for each in self._weight_slots():
            each.settle()

    def finish(self) -> None:
        """`settle`, and make the host wait until all layers have been computed: a call may have failed."""
        self.settle()
        for at in self.devices:
            at.finish()

    def _settle_copies(self) -> None:
        for at in self.devices:
            with at.running(draws=False):
                at.stash.settle()
        self.stash.settle()
        self.stash.transit.arrivals.settle()

    def _stays(self, unit: MasterUnit) -> bool:
        """Whether the masters of `unit` are where it runs: nothing of it travels."""
        return unit.place.is_resident or stream.shares_host_memory(self.device)

    def _summing(
        self, call: LayerCall, weights: DeviceWeights, before: LayerSums | None
    ) -> AbstractContextManager[LayerSums]:
        stays = self._stays(weights.unit)
        if stays and not self._sums_in_hooks(call):
            # Autograd sums the gradients in the leaves, which are where the masters are.
            return nullcontext(LayerSums([], None))
        return call.at.gradient_slots.summing(weights, call.ubatches, in_slot=not stays, before=before)

    def _sums_in_hooks(self, call: LayerCall) -> bool:
        return self.eps.copies.precision.is_mixed or call.at.gradient_slots.norms is not None

    def _weights(
        self, call: LayerCall, *, requires_grad: bool, graph: KeptGraph | None = None
    ) -> AbstractContextManager[DeviceWeights]:
        """The weights of the layer on its device, in the block; those of a `graph` are leaves of it."""
        copies, unit = self.eps.copies, call.unit
        if self._stays(unit) and graph is not None:
            return nullcontext(graph.weights)
        if self._stays(unit):
            hook = call.at.gradient_slots.add if self._sums_in_hooks(call) else None
            weights = uploaded(unit, call.device, copies, requires_grad=requires_grad, on_gradient=hook)
            self.eps.ledger.on_device.holds(RESIDENT, weights.leaves)
            return nullcontext(weights)
        return call.at.slots().weights(unit, requires_grad=requires_grad)
