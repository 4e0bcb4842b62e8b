"""The shell: the non-layer modules (embeddings, pooler, final norm, heads) and their buffers.

Their weights and buffers are uploaded at the start of each call of the model by the program, except resident weights,
which are on the device already. During the call, device
copies replace those of all non-layer modules below the called module. Hooks on single modules would not be enough,
since encoders and losses read weights without calling the module that has them.
"""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hf_l2l.compat import graph_is_retained, is_compiled, tables_of, version_kept, without_interception
from hf_l2l.device.device_weights import DeviceWeights, OnGradient, as_leaves, uploaded
from hf_l2l.engine.model_call import ModelCall, OneThread, anchor_of
from hf_l2l.eps.masters import MasterUnit
from hf_l2l.eps.pending import Pending, hold_all, let_go, pending_of, settle
from hf_l2l.eps.server import EagerParamServer
from hf_l2l.eps.weight_copies import Copies
from hf_l2l.logits.deferred import has_readers
from hf_l2l.memory.dense_masks import impossible_masks_refused
from hf_l2l.memory.device_memory import EMBEDDING, INPUTS, KEPT_GRAPHS, SHELL
from hf_l2l.model.batch_dims import RowCuts, batch_rows
from hf_l2l.model.caches import warn_of_cache, without_use_cache
from hf_l2l.model.container_writes import Containers, Same, containers_of, write
from hf_l2l.model.precision import in_fp32
from hf_l2l.optim.loss_scale import with_gradients_times
from hf_l2l.runtime import compute_state, stream, wait_reasons
from hf_l2l.runtime.flat_memory import elements
from hf_l2l.runtime.observer import NON_LAYER
from hf_l2l.runtime.tensors import leaves_of, parts_of, to_device

try:
    from hf_l2l.engine.stacks import Stacks
except ImportError:  # without greenlet, batches run one after the other
    Stacks = None  # type: ignore[assignment, misc]

T = TypeVar("T")


class _Uploads:
    """The uploads of the weights of one call. It refers to no device tensor, so each is freed with its last use."""

    def __init__(
        self, unit: MasterUnit, copies: Copies, lane: stream.Lane, *, keeps_copies: bool, makes_graph: bool
    ) -> None:
        self._unit, self._copies, self._lane = unit, copies, lane
        self._keeps_copies, self._makes_graph = keeps_copies, makes_graph
        self._compute = stream.current(lane.device)
        # The allocator may hand out memory that work on the compute stream still uses.
        self._allocated = stream.record(lane.device)
        self._ends: dict[int, stream.Point | None] = {}
        """The number of each weight whose upload has begun -> the end of its upload."""
        self._sources: list[torch.Tensor] = []
        """What is being uploaded; 16-bit copies that are not kept would be freed."""
        self.layer_calls = 0
        """How many layers the call has called so far."""
        self._used: dict[int, int] = {}
        """The number of each weight that was used -> how many layers had been called then."""
        self._is_over = False
        """True after the call; a program may still use a weight that it has kept."""

    def begin(self, number: int, leaf: torch.Tensor) -> None:
        """Upload weight `number` to `leaf`, if that has not begun."""
        if number in self._ends:
            return
        places = parts_of(leaf)
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            without_interception(),
            version_kept(*places),  # for whoever looks, the weight has had its values from the beginning
        ):
            with ExitStack() as at_errors:
                at_errors.callback(self._end_copies)  # those that were submitted before the error
                for place, source in self._copied(number, places):
                    with self._lane.entered(), stream.span(self._lane.device, "upload", NON_LAYER):
                        stream.wait(self._allocated, wait_reasons.WEIGHTS_MEMORY_FREE)
                        place.copy_(source, non_blocking=self._lane.is_stream)
                at_errors.pop_all()
            self._ends[number] = self._lane.record()
            if self._keeps_copies and len(places) == 1:
                self._copies.keep_on_device(self._unit.masters[number], leaf)

    def _end_copies(self) -> None:
        stream.wait(self._lane.record(), wait_reasons.MASTERS_READ, host=True)

    def _copied(self, number: int, places: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Parts of weight `number` on the device, and what is uploaded to them: a weight that is being updated, piece
        by piece. Waits for the update, before the lane gets the work."""
        parts = self._unit.part_numbers[number]
        found = None if len(parts) > 1 or self._keeps_copies else self._copies.being_updated(self._unit, parts[0])
        if found is None:
            sources = [self._copies.of_one(self._unit, part) for part in parts]
            self._sources += sources
            yield from zip(places, sources, strict=True)
            return
        source, update = found
        self._sources.append(source)
        place, source = elements(places[0]), elements(source)
        for piece, (begin, end) in enumerate(itertools.pairwise((0, *update.pieces))):
            update.wait_for_piece(piece)
            yield place[begin:end], source[begin:end]

    def finish(self, number: int, leaf: torch.Tensor) -> None:
        """Make the device wait for weight `number`, which is used now."""
        self.begin(number, leaf)
        end = self._ends[number]
        stream.wait(end, wait_reasons.WEIGHTS_UPLOADED)
        if stream.current(self._lane.device) != self._compute:  # the program uses it in a stream of its own
            with stream.entered(self._lane.device, self._compute):
                stream.wait(end, wait_reasons.WEIGHTS_UPLOADED)
        if self._is_over:
            self.settle()
        else:
            self._used[number] = self.layer_calls

    def settle(self) -> None:
        """The call is over: end all uploads that have begun before anybody writes to what they read."""
        if not self._is_over:
            self._is_over = True
            for number, master in enumerate(self._unit.masters):
                master.first_use = self._used.get(number, math.inf)
        last = next(reversed(self._ends.values()), None)
        # The memory of a weight that was not used after all is freed in the order of the compute stream.
        stream.wait(last, wait_reasons.WEIGHTS_UPLOADED)
        if self._makes_graph:
            self._copies.leave_reading([self._unit.masters[number] for number in self._ends], last, self._sources)
        else:
            stream.wait(last, wait_reasons.MASTERS_READ, host=True)
        self._sources.clear()


class _FirstUse(Pending):
    """What is pending for a large weight of the non-layer modules on the device: its upload."""

    guards_grad = False

    def __init__(self, uploads: _Uploads, number: int) -> None:
        self._uploads, self._number = uploads, number

    def before_look(self, tensor: torch.Tensor) -> None:
        """Reading the version waits for nothing."""

    def before_values(self, tensor: torch.Tensor) -> None:
        """Using the values waits for the upload, on the device."""
        self._uploads.finish(self._number, tensor)
        let_go(tensor, self)


class NonLayerWeights(DeviceWeights):
    """The weights of the non-layer modules of one call, on the lane.

    Small ones are uploaded first, and nothing computes before. A large one (an embedding, a head) is held (see
    `pending`) and uploaded at the latest at its first use, which waits for its upload alone; if the call does not use
    it, it is not uploaded. torch does not see how an extension in C++ uses the weight of a module that is not called:
    a gradient of a large one that was not uploaded is an error.
    """

    def __init__(
        self,
        unit: MasterUnit,
        copies: Copies,
        lane: stream.Lane,
        keeps_copies: bool = False,
        *,
        requires_grad: bool,
        on_gradient: OnGradient,
        on_last_use: Callable[[torch.Tensor], None],
    ) -> None:
        """Allocate device tensors for `unit`, except those that `keeps_copies` has left there. In a backward,
        `on_last_use` is called with those whose memory nothing else has, when they have got their gradients."""
        with torch.inference_mode(False), torch.no_grad(), without_interception():
            there = [copies.on_device(unit, number, kept=keeps_copies) for number in range(len(unit.likes))]
            parts = [
                torch.empty_like(like, device=lane.device, requires_grad=False) if part is None else part
                for part, like in zip(there, unit.likes, strict=True)
            ]
            leaves = as_leaves(unit, parts)
            for number in unit.trained if requires_grad else ():
                leaf = leaves[number].requires_grad_()
                leaf.register_post_accumulate_grad_hook(partial(on_gradient, number))
                if not keeps_copies and there[unit.part_numbers[number][0]] is None:
                    leaf.register_post_accumulate_grad_hook(on_last_use)
        super().__init__(unit, leaves, lane.device, copies.precision)
        self.uploads = _Uploads(unit, copies, lane, keeps_copies=keeps_copies, makes_graph=requires_grad)
        travels = [n for n, parts_of_it in enumerate(unit.part_numbers) if there[parts_of_it[0]] is None]
        self._small = [number for number in travels if not unit.masters[number].is_large]
        self._large = [number for number in travels if unit.masters[number].is_large]
        hold_all([(leaves[number], _FirstUse(self.uploads, number)) for number in self._large])

    def upload_first(self) -> None:
        """See `DeviceWeights`."""
        for number in self._small:
            self.uploads.begin(number, self.leaves[number])
        for number in self._small[-1:]:  # the lane makes uploads in order
            self.uploads.finish(number, self.leaves[number])
        if any(map(is_compiled, self.unit.modules)):  # a compiled function cannot take held tensors
            for number in self._large:
                settle(self.leaves[number])
        self._upload_large(0)

    def upload_ahead(self, layer_calls: int) -> None:
        """See `DeviceWeights`; the last forward tells when each large weight is used."""
        self.uploads.layer_calls = layer_calls
        self._upload_large(layer_calls + 1)

    def _upload_large(self, layer_calls: int) -> None:
        """Begin the uploads of large weights that the last forward used when it had called so many layers."""
        masters = self.unit.masters
        for number in sorted(self._large, key=lambda number: masters[number].first_use):
            master = masters[number]
            # A later use waits for an update itself: first, the device gets the work of the next layer.
            if master.first_use <= layer_calls and (layer_calls == 0 or not master.is_updating):
                self.uploads.begin(number, self.leaves[number])

    def settle(self) -> None:
        """See `DeviceWeights`."""
        self.uploads.settle()


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
        self.stacks: Stacks[Any] | None = None if Stacks is None else Stacks(device, self._swap_call)
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
            self.stacks is None
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
                return self.stacks.run(functions)

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
