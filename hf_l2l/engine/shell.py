"""The shell: the non-layer modules (embeddings, pooler, final norm, heads) and their buffers.

Their weights and buffers are uploaded at the start of each call of the model by the program, except resident weights,
which are on the device already. During the call, device
copies replace those of all non-layer modules below the called module. Hooks on single modules would not be enough,
since encoders and losses read weights without calling the module that has them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hf_l2l.compat import graph_is_retained, tables_of, without_interception
from hf_l2l.device.device_weights import DeviceWeights, OnGradient, uploaded
from hf_l2l.engine.model_call import ModelCall, OneThread, anchor_of
from hf_l2l.engine.non_layer_weights import NonLayerWeights
from hf_l2l.eps.masters import MasterUnit
from hf_l2l.eps.pending import pending_of, settle
from hf_l2l.eps.server import EagerParamServer
from hf_l2l.logits.deferred import has_readers
from hf_l2l.memory.dense_masks import impossible_masks_refused
from hf_l2l.memory.device_memory import EMBEDDING, INPUTS, KEPT_GRAPHS, SHELL
from hf_l2l.model.batch_dims import RowCuts, batch_rows
from hf_l2l.model.caches import warn_of_cache, without_use_cache
from hf_l2l.model.container_writes import Containers, Same, containers_of, write
from hf_l2l.model.precision import in_fp32
from hf_l2l.optim.loss_scale import with_gradients_times
from hf_l2l.runtime import compute_state, stream
from hf_l2l.runtime.observer import NON_LAYER
from hf_l2l.runtime.tensors import leaves_of, to_device

try:
    from hf_l2l.engine.coroutines import Coroutines
except ImportError:  # without greenlet, batches run one after the other
    Coroutines = None  # type: ignore[assignment, misc]

T = TypeVar("T")


class Owner:
    """The shell and the unit to which the leaves of one call belong. What the program keeps of a graph that has run
    backward must not keep the engine, and with it the model: then these are there as long as others have them."""

    def __init__(self, shell: Shell, unit: MasterUnit) -> None:
        self._held: tuple[Shell, MasterUnit] | None = (shell, unit)
        self._shell, self._unit = weakref.ref(shell), weakref.ref(unit)

    def get(self) -> tuple[Shell, MasterUnit]:
        """Both of them."""
        shell, unit = self._shell(), self._unit()
        if shell is None or unit is None:
            raise RuntimeError(
                "a backward must run before its model is gone (got a second one through a graph whose model has been "
                "deleted, or detached); run it earlier"
            )
        return shell, unit

    def let_go(self) -> None:
        """A backward has ended that has freed its graph."""
        self._held = None

    def call_ended(self, error: type[BaseException] | None, *_: object) -> None:
        """The call has ended. What is left of the graph of one that raised must not keep the model either."""
        if error is not None:
            self.let_go()

    def note_spent(self, leaf: torch.Tensor) -> None:
        """See `Shell.note_spent`."""
        self.get()[0].note_spent(leaf)


class Shell:
    """Runs the program's calls of a model with the weights of the non-layer modules on the device.

    Weights are uploaded for each such call and live as long as its graph, so a program may make two forwards before a
    backward. The EPS receives a gradient when it is complete: the hook of a leaf runs once per backward, however often
    the weight is tied or used.
    """

    def __init__(
        self, device: torch.device, eps: EagerParamServer, *, overlap: bool = True, cuts: RowCuts | None = None
    ) -> None:
        """Without `overlap`, uploads run on the compute stream, in program order."""
        self.device = device
        self.cuts = cuts or RowCuts(None)
        self.keeps_copies = False
        """Whether what is uploaded stays on the device until it is updated."""
        self.eps = eps
        self.lane = stream.Lane(device, "upload", beside=overlap)
        """The lane that uploads weights, those of layers, too."""
        self.one_thread = OneThread(eps.backwards)
        self._at_start: weakref.WeakMethod[Callable[[ModelCall], None]] | None = None
        self._call: ModelCall | None = None
        self._round: ModelCall | None = None
        """What calls that run together share."""
        self.coroutines: Coroutines[Any] | None = None if Coroutines is None else Coroutines(device, self._swap_call)
        eps.runs_together(self.together)
        self.runs_plainly = True
        """Whether a model whose weights are all resident runs as without L2L."""
        self.is_leaving = False
        """True while the return value for the program is made of what the model has returned."""
        self.outer: nn.Module | None = None
        """The attached model, if its forward is not the one of the hook: from the beginning of a call of it until the
        hook's forward is called after all. None otherwise."""
        self.computes_again: str | None = None
        """The name of the layer that a backward computes again now, if it does."""
        self._spent: list[weakref.ref[torch.Tensor]] = []
        """Device copies of weights that have got their gradients in the backward that runs, which frees its graph."""
        self._sent: list[Owner] = []
        """Those of leaves that have got their gradients in it, once for each gradient."""
        eps.backwards.call(at_end=self._free_spent, at_failure=self._keep_spent)

    def call_at_start(self, at_start: Callable[[ModelCall], None]) -> None:
        """Call this bound method when a call of the program has begun, as long as its object lives.

        Only a weak reference is kept, so that device memory of a detached engine is freed at once.
        """
        self._at_start = weakref.WeakMethod(at_start)

    @property
    def call(self) -> ModelCall | None:
        """The call of the model that this thread is inside of, if there is one."""
        call = self._call
        return call if call is not None and call.thread == threading.get_ident() else None

    def run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call `forward`, the original forward of `module`; a call nested in another one needs no preparation."""
        call = self.call
        if call is not None:
            self._settle_own(module)
            if call.makes_graph:
                args, kwargs = without_use_cache(module, args, kwargs)
            return call.nested(module, forward, args, kwargs)
        with self.entered(module, forward, args, kwargs) as call:
            containers = Containers((call.args, call.kwargs))
            output = forward(*call.args, **call.kwargs)
            return self._returned(output, containers, containers_of((args, kwargs)))

    def _returned(self, output: Any, containers: Containers, given: list[Any]) -> Any:
        """The return value for the program: what the model has written into its `containers` is in those that it was
        `given`, and where it returns one of its own, the program gets that one."""
        written = containers.written()
        numbers = {id(each): number for number, each in enumerate(containers.all)}

        def is_given(value: Any) -> bool:
            return id(value) in numbers

        def marked(value: Any) -> Any:
            return Same(numbers[id(value)]) if is_given(value) else value

        # Without its key-value caches, which are lists in some programs, the model has fewer of them.
        if (not written and not is_given(output)) or len(given) != len(containers.all):
            return self.leaving(output)
        output = pytree.tree_map(marked, output, is_leaf=is_given)
        output, written = self.leaving((output, written))
        write([(number, now) for number, now in written if given[number] is not containers.all[number]], given)
        return pytree.tree_map(lambda value: given[value.key] if isinstance(value, Same) else value, output)

    @staticmethod
    def _settle_own(module: nn.Module) -> None:
        """Wait for the weights of `module` itself: it may give them to an extension in C++, in which torch does not
        intercept the use of a held tensor."""
        if not torch.compiler.is_compiling():  # a compiled function is given tensors that are not held
            for leaf in tables_of(module)[0].values():
                if leaf is not None:
                    settle(leaf)

    def leaving(self, output: Any) -> Any:
        """The return value for the program: with `cmp` in fp32, and its gradients are multiplied by the loss scale, or
        by this rank's share."""
        factor = self.eps.output_factor()
        self.is_leaving = True
        try:
            if self.eps.copies.precision.is_mixed:
                output = in_fp32(output)
            return output if factor is None else with_gradients_times(factor, output)
        finally:
            self.is_leaving = False

    @contextmanager
    def entered(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Iterator[ModelCall]:
        """Inside, non-layer weights and tensor arguments are on the device; the masters are restored afterwards.

        Raises:
            RuntimeError: if a call of the model, or its backward, is running in another thread.
            ValueError: if another forward than that of the attached model has called `module`, or a layer in its
                recompute; inside, if the model needs an attention mask that the device cannot hold.
        """
        outer, self.outer = self.outer, None
        if outer is not None and outer is not module:
            raise ValueError(
                "a model under L2L must run the forward that it was attached with, which uploads its weights (that of "
                f"a {type(outer).__name__} was replaced); call hf_l2l.detach_l2l(model), replace it, and attach again"
            )
        assert self.call is None, "a call is already inside the model"
        memory, inputs, around = self.eps.ledger.on_device, list(leaves_of((args, kwargs))), self._round
        masks = impossible_masks_refused(inputs, self.device, memory.capacity)
        with self._outermost(module) if around is None else nullcontext(), masks, ExitStack() as at_end:
            # A call of a layer by the program has no beginning to replay, so its batch dimensions cannot be found.
            rows = None if module in self.eps.masters.layer_names else batch_rows((args, kwargs))
            is_plain = around is None and self._is_plain(rows)
            # Before `placed`, inside which device copies replace the masters.
            anchor = None if around is None else around.anchor
            if around is None and torch.is_grad_enabled() and not is_plain:
                anchor = anchor_of(self.eps.gradients)
            if torch.is_grad_enabled():
                warn_of_cache(module, args, kwargs)
                args, kwargs = without_use_cache(module, args, kwargs)
            given, factor = (args, kwargs), self.eps.output_factor()
            memory.begin_call(sum(t.numel() for t in inputs if isinstance(t, torch.Tensor)))
            with stream.span(self.device, "upload", "inputs"):
                args, kwargs = to_device((args, kwargs), self.device)
                if factor is not None:
                    args, kwargs = with_gradients_times(lambda: 1 / factor(), (args, kwargs))
                args, kwargs = self.eps.copies.precision.of_inputs(module, args, kwargs)
            weights = self._weights_of(module, at_end, is_plain=is_plain) if around is None else around.weights
            memory.holds(INPUTS, [t for t in leaves_of((args, kwargs)) if isinstance(t, torch.Tensor)])
            rng = compute_state.get_rng_state(self.device)
            if torch.is_grad_enabled():
                self.eps.vote.last_forward.remember(module, *given, lambda forward: self._replayed(rng, forward))
            call = self._call = ModelCall(module, forward, args, kwargs, rows, weights, rng, anchor, is_plain=is_plain)
            call.shared = around
            at_end.callback(self._end, call)
            with self._begun(call) if around is None else nullcontext():
                if around is not None:
                    call.at_end = around.at_end
                self._settle_own(module)
                yield call

    @contextmanager
    def _outermost(self, module: nn.Module) -> Iterator[None]:
        """Inside, this thread is in the model, of which it calls `module`."""
        with self.one_thread.in_model(), self.eps.timeline.inside("forward"), ExitStack() as at_end:
            if self.computes_again is not None:
                raise ValueError(
                    "a layer must not call modules that it does not have, since its backward computes it again when "
                    f"their weights are no longer on the device (got a call of a {type(module).__name__} in "
                    f"{self.computes_again}); let it have the module as an attribute of its own, or give it the output"
                )
            at_end.callback(self.eps.masters.end_call)
            self.eps.start_forward()
            yield

    def _weights_of(self, module: nn.Module, at_end: ExitStack, *, is_plain: bool) -> DeviceWeights:
        """The weights of the non-layer modules at and below `module`, until `at_end`."""
        # A layer that the program calls itself has no non-layer modules; the relay uploads it.
        owner = Owner(self, self.eps.masters.non_layer_unit(module))
        at_end.push(owner.call_ended)
        weights = self._plain_weights(module) if is_plain else self._upload(owner)
        at_end.callback(weights.settle)
        return weights

    @contextmanager
    def _begun(self, call: ModelCall) -> Iterator[None]:
        """Inside, the weights of `call` are in the places of the masters, and uploads of layers have begun."""
        memory, weights = self.eps.ledger.on_device, call.weights
        with weights.placed():  # buffers are uploaded here, before the weights
            memory.holds(SHELL, [*weights.leaves, *weights.buffers.tensors])
            memory.enter(KEPT_GRAPHS if call.is_plain else EMBEDDING)
            at_start = self._at_start() if self._at_start is not None and not call.is_plain else None
            if at_start is not None:
                at_start(call)
            yield

    def together(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """See `EagerParamServer.together`."""
        if self.call is not None:
            raise RuntimeError(
                "batches run together in calls of their own (got eps.together inside a call of the model); call it "
                "outside of the model"
            )
        # The last one first: a backward, which visits what was made last first, adds their gradients in their order.
        if (
            self.coroutines is None
            or not torch.is_grad_enabled()
            or self.eps.masters.runs_plainly
            or not self.runs_plainly
        ):
            return [function() for function in reversed(functions)][::-1]
        module = self.eps.model
        with self._outermost(module), ExitStack() as at_end:
            anchor = anchor_of(self.eps.gradients)
            weights = self._weights_of(module, at_end, is_plain=False)
            rng = compute_state.get_rng_state(self.device)
            call = ModelCall(module, None, (), {}, None, weights, rng, anchor)
            at_end.callback(self._end, call)
            with self._begun(call):
                self._round = call
                at_end.callback(setattr, self, "_round", None)
                return self.coroutines.run(functions)

    def _swap_call(self, call: ModelCall | None) -> ModelCall | None:
        """Another function runs, which is inside of `call`; returns that of the one before."""
        before, self._call = self._call, call
        return before

    def _end(self, call: ModelCall) -> None:
        """A call has returned, or raised."""
        self._call = None
        if call.at_end is not None:
            call.at_end(call)
        # A recompute of its embedding keeps the call, but not what it was given.
        call.args, call.kwargs, call.enclosing = (), {}, []

    def _is_plain(self, rows: int | None) -> bool:
        """Whether a call with so many rows, None if they are not known, runs as without L2L: as one ubatch through
        resident weights, whose layers keep their graphs."""
        is_one = rows is None or len(self.cuts.of(rows)) < 2
        return (
            is_one and self.runs_plainly and self.eps.masters.runs_plainly and not self.eps.masters.is_changed_for_call
        )

    def _plain_weights(self, module: nn.Module) -> DeviceWeights:
        """The parameters of the non-layer modules themselves, to which autograd adds gradients."""
        if torch.is_grad_enabled():
            self.eps.vote.reset()
            with without_interception():
                for p in self.eps.masters.parameters:
                    if p.grad is not None:  # autograd adds to it without asking what is pending for it
                        settle(p.grad)
        unit = self.eps.masters.non_layer_unit(module)
        return DeviceWeights(unit, unit.parameters, self.device, self.eps.copies.precision)

    @contextmanager
    def computing_again(self, name: str) -> Iterator[None]:
        """Inside, a backward computes the layer of this name again."""
        self.computes_again = name
        try:
            yield
        finally:
            self.computes_again = None

    @contextmanager
    def resumed(self, call: ModelCall) -> Iterator[None]:
        """Inside, which is a backward, this thread is in `call` again, with its weights, to recompute a part of it."""
        before, thread = self._call, call.thread
        self._call, call.thread = call, threading.get_ident()
        try:
            with call.weights.placed(keep_buffers=False):
                yield
        finally:
            self._call, call.thread = before, thread

    def _replayed(self, rng: compute_state.RngState, forward: Callable[[], Any]) -> Any:
        with compute_state.rng_state_kept(self.device):
            compute_state.set_rng_state(rng, self.device)
            return forward()

    def _upload(self, owner: Owner) -> DeviceWeights:
        _, unit = owner.get()
        copies, requires_grad, on_gradient = self.eps.copies, torch.is_grad_enabled(), self.sender(owner)
        if requires_grad:
            self.eps.expect(unit)
        if self.lane.is_stream and not stream.shares_host_memory(self.device):
            keeps, lane = self.keeps_copies, self.lane
            return NonLayerWeights(
                unit,
                copies,
                lane,
                keeps,
                requires_grad=requires_grad,
                on_gradient=on_gradient,
                on_last_use=owner.note_spent,
            )
        with stream.span(self.device, "upload", NON_LAYER):
            return uploaded(unit, self.device, copies, requires_grad=requires_grad, on_gradient=on_gradient)

    def note_spent(self, leaf: torch.Tensor) -> None:
        """A leaf of a backward has got its gradient."""
        if not graph_is_retained() and self._call is None:  # a call that runs may use it once more
            self._spent.append(weakref.ref(leaf))

    def _free_spent(self) -> None:
        """Free the memory of device copies at the end of a backward.

        A loss that the program keeps (`total = total + loss`) keeps the nodes of its graph, and the nodes that add to
        gradients keep their leaves: the weights would stay on the device with it. Logits that are not made yet still
        need theirs. Another part of the graph that has saved one, and has not run backward yet, gets torch's error
        about a tensor that was changed in place.
        """
        for owner in self._sent:
            owner.let_go()
        self._sent.clear()
        spent, self._spent[:] = list(self._spent), []
        with torch.inference_mode(False), torch.no_grad(), without_interception():
            for reference in spent:
                leaf: Any = reference()
                if leaf is not None and not has_readers(leaf):
                    leaf.set_(torch.empty(0, dtype=leaf.dtype, device=leaf.device))

    def _keep_spent(self) -> None:
        """The backward has failed, and the program may run parts of its graph again."""
        self._spent.clear()
        self._sent.clear()

    @staticmethod
    def sender(owner: Owner) -> OnGradient:
        def send(number: int, leaf: torch.Tensor) -> None:
            gradient, leaf.grad = leaf.grad, None
            shell, unit = owner.get()
            if not graph_is_retained():
                shell._sent.append(owner)
            master = unit.masters[number]
            with without_interception():
                trains = master.parameter.requires_grad
            # A node of the graph may take the weight and find no gradient for it. As in plain torch, what was frozen
            # after the forward gets none.
            if gradient is None or not trains:
                return
            if pending_of(leaf) is not None:
                raise RuntimeError(
                    "a large weight outside the layers must be used by the forward of its own module, or by functions "
                    f"of torch, so that it is uploaded first (got a gradient of {master.name}, which was used in "
                    "another way); call its module, or train this model without L2L"
                )
            shell.eps.receive_in_hook(master, gradient.to(master.dtype))

        return send
