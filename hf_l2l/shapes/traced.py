"""What a model allocates on the device, piece by piece, found by running it without values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from hf_l2l.compat import FakeTensorMode
from hf_l2l.logits.chunks import FEWEST_ROWS
from hf_l2l.logits.heads import OutputEmbeddings, output_embeddings
from hf_l2l.memory.dense_masks import dense_masks
from hf_l2l.model.precision import Precision, in_fp32, let_heads_return_fp32
from hf_l2l.model.stacks import find_stacks, shell_modules
from hf_l2l.runtime.compute_state import AutocastState
from hf_l2l.runtime.stream import HOST
from hf_l2l.runtime.tensors import flatten, leaves_of, tensor_bytes
from hf_l2l.shapes.autocast import autocast_region
from hf_l2l.shapes.fake_memory import FakeMemory, counted
from hf_l2l.shapes.inputs import rows_of
from hf_l2l.shapes.losses import loss_of, told_failures
from hf_l2l.shapes.pieces import Argument, Arrived, Given, Output, Piece, Traced, TracedCall, TracedLayer
from hf_l2l.shapes.shadow import like, shadow
from hf_l2l.shapes.tables import Plain, Tables, configs_of


class Tracer:
    """Runs a model without values."""

    def __init__(
        self,
        model: nn.Module,
        precision: Precision,
        *,
        layer_classes: tuple[str, ...] | None = None,
        chunk_rows: int | None = FEWEST_ROWS,
        fuses: Callable[..., bool] = lambda q, k, v, mask, dropout: dropout == 0,
        autocast: torch.dtype | None = None,
    ) -> None:
        """Of a copy of `model`, which may be on any device; its forward is run under autocast in a dtype, if one is
        given, and returns fp32. Logits are made for chunks of so many rows, or, with None, for all."""
        self._fake = FakeTensorMode()
        with self._fake:
            self.model = shadow(model, precision)
        self._precision = precision
        self._fuses, self._autocast = fuses, autocast
        self.layers = [layer for stack in find_stacks(self.model, layer_classes) for layer in stack.layers]
        if precision.is_mixed:
            let_heads_return_fp32(self.model, self.layers)
        self._run: _Run | None = None
        self._apart, self._answer = False, True
        for number, layer in enumerate(self.layers):
            layer.forward = partial(self._layer, number, layer, layer.forward)
        heads = output_embeddings(list(shell_modules(self.model, self.layers)))
        if chunk_rows is not None:
            runner = OutputEmbeddings(Plain(), chunk_rows)
            for head in heads:
                head.forward = partial(self._head, runner, head, head.forward)
        for p in self.model.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self._arrived)
        for module in self.model.modules():
            for config in configs_of(module):
                if getattr(config, "use_cache", None):
                    config.use_cache = False

    def trace(self, inputs: Mapping[str, torch.Tensor], *, by_rows: bool = False) -> Traced:
        """One forward and backward of `inputs`; the model must compute a loss.

        Args:
            inputs: arguments of the model.
            by_rows: the rows are those of one micro-batch, between which host memory passes all that is not in a
                layer. Tables of embeddings get no gradient here, since rows are added to one for all; and the head is
                given hidden states whose memory does not count.
        """
        try:
            return self._traced(inputs, by_rows)
        except ValueError as error:
            # A check of values, such as that of labels, may raise for the one answer, and not for the other.
            self._answer = not self._answer
            with suppress(ValueError):
                return self._traced(inputs, by_rows)
            raise error

    def _traced(self, inputs: Mapping[str, torch.Tensor], by_rows: bool) -> Traced:
        self._apart, rows = by_rows, rows_of(self.model, inputs)
        with self._fake:
            fakes = {name: like(t, t.dtype) for name, t in inputs.items()}
            _, given = self._precision.of_inputs(self.model, (), fakes)
        with counted(self._fake, self._fuses, true_or_false=self._answer) as memory:
            memory.leave_out([*self.model.parameters(), *self.model.buffers(), *leaves_of(given)])
            run = self._run = _Run(memory)
            with told_failures(self.model), Tables(apart=by_rows) as run.tables, torch.enable_grad():
                with autocast_region(self._autocast):
                    outputs = self.model(**given)
                # As Accelerate does, outside autocast; deferred logits stay so.
                loss = loss_of(outputs if self._autocast is None else in_fp32(outputs))
                del outputs
                whole = tensor_bytes(leaves_of(given))
                memory_of = [(StorageWeakRef(t.untyped_storage()), t.nbytes) for t in leaves_of(given)]
                del fakes, given
                kept = sum(size for each, size in memory_of if not each.expired())
                run.end(loss)
            self._run = None
        return Traced(run.pieces, run.calls, *run.gradients(), rows, whole, kept, run.left, run.head, run.besides)

    def _head(self, runner: Any, head: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._apart and len(args) == 1:
            assert self._run is not None
            args = (self._run.given_to_head(args[0]),)
        return runner.run(head, forward, args, kwargs)

    def _arrived(self, parameter: torch.Tensor) -> None:
        assert self._run is not None
        self._run.arrived(parameter)

    def _layer(self, number: int, layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        assert self._run is not None
        return self._run.layer(number, layer, forward, args, kwargs)


class _Run:
    """One forward and backward."""

    def __init__(self, memory: FakeMemory) -> None:
        self.memory = memory
        self.pieces: list[Piece] = [Piece()]
        self.calls: list[TracedCall] = []
        self.left = 0
        self.head = 0
        self.tables: Tables | None = None
        self.besides = torch.Size(), 0
        self._kinds: dict[Any, tuple[TracedLayer, Any, list[Any]]] = {}
        self._roots: list[list[torch.Tensor]] = []
        """Per piece, what it gives to the layer after it, if that has a graph."""
        self._seen: set[int] = set()
        self._fired: list[dict[torch.Tensor, int]] = []
        """Of each piece, from the last one, the weights that got a gradient, and its bytes."""
        self._given: dict[int, torch.UntypedStorage] = {}
        """Memory of arguments, kept so that no other gets its identity."""
        self._returned: list[tuple[Output, StorageWeakRef]] = []
        self._start = memory.begin()

    def given_to_head(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the head reads instead of `hidden`."""
        self.head = hidden.nbytes
        with self.memory.not_counting():
            found = torch.empty_like(hidden, requires_grad=True)
        # What comes before the head is one more piece.
        self._end_piece([hidden])
        self._begin_piece()
        return found

    def arrived(self, parameter: torch.Tensor) -> None:
        """A gradient has been computed, and leaves the device."""
        if self._fired:
            assert parameter.grad is not None
            self._fired[-1][parameter] = parameter.grad.nbytes
        parameter.grad = None

    def gradients(self) -> tuple[int, int, int, list[Arrived]]:
        """`Traced.of_last`, `Traced.leaves_last`, `Traced.late` and `Traced.first`."""
        last, *earlier = self._fired
        own = [size for p, size in last.items() if not any(p in each for each in earlier)]
        first = [Arrived(p.numel(), size, p in last) for p, size in self._fired[-1].items()]
        return sum(own), own[-1] if own else 0, sum(last.values()) - sum(own), first

    def layer(self, number: int, layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call of the layer of this number."""
        leaves, spec = flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._end_piece(tensors)
        kinds = [(t.shape, t.dtype, t.requires_grad) if isinstance(t, torch.Tensor) else type(t) for t in leaves]
        key = type(layer), tuple((p.shape, p.dtype, p.requires_grad) for p in layer.parameters()), str(spec), *kinds
        if key not in self._kinds:
            self._kinds[key] = self._measured(forward, leaves, spec)
        traced, out_spec, results = self._kinds[key]
        self._given.update((t.untyped_storage()._cdata, t.untyped_storage()) for t in tensors)
        if self.tables is not None:
            self.besides = max(self.besides, self.tables.largest_besides(self._given), key=lambda each: each[1])
        masks = {id(t) for t in dense_masks(tensors)}
        arguments = [
            Argument(t.untyped_storage()._cdata, t.nbytes, t.shape, t.requires_grad, id(t) in masks) for t in tensors
        ]
        outputs: list[Output] = []
        in_graph = any(t.requires_grad for t in (*tensors, *layer.parameters()))
        returned = [self._returning(each, tensors, outputs, in_graph) for each in results]
        self.calls.append(TracedCall(number, traced, arguments, outputs, in_graph))
        self._begin_piece()
        return pytree.tree_unflatten(returned, out_spec)

    def _returning(self, result: Any, tensors: list[torch.Tensor], outputs: list[Output], in_graph: bool) -> Any:
        """What the layer returns for `result` (see `_result`)."""
        if not isinstance(result, _Unchanged | torch.Tensor):
            return result
        is_new = isinstance(result, torch.Tensor)
        source = result if isinstance(result, torch.Tensor) else tensors[result.number].detach()
        anchor = torch.empty(0, requires_grad=in_graph and source.is_floating_point())
        output = Output(0, source.nbytes, is_new)
        with self.memory.not_counting():
            tensor: torch.Tensor = _Returned.apply(output, source, anchor)  # type: ignore[no-untyped-call]
        memory = tensor.untyped_storage()
        output.memory = memory._cdata
        outputs.append(output)
        self._returned.append((output, StorageWeakRef(memory)))
        return tensor

    def _begin_piece(self) -> None:
        self.pieces.append(Piece())
        self._start = self.memory.begin()

    def _end_piece(self, given: Sequence[torch.Tensor]) -> None:
        piece, memory = self.pieces[-1], self.memory
        piece.forward_peak, piece.forward_flops = memory.peak - self._start, memory.flops
        roots = [t for t in {id(t): t for t in given}.values() if t.grad_fn is not None and id(t) not in self._seen]
        self._seen.update(map(id, roots))
        self._roots.append(roots)
        # Arguments of layers are counted apart, and what layers have returned is not counted here.
        memories = {t.untyped_storage()._cdata: t.untyped_storage() for t in given}
        apart = sum(memory.counted(m) for key, m in memories.items() if key not in self._given)
        piece.kept = memory.live - self._start - apart

    def _measured(self, forward: Any, leaves: list[Any], spec: Any) -> tuple[TracedLayer, Any, list[Any]]:
        """The layer, the structure of what it returns, and its values (see `_returning`)."""
        memory, traced = self.memory, TracedLayer(spec=spec)
        traced.leaves = [
            Given(t.shape, t.dtype, t.requires_grad) if isinstance(t, torch.Tensor) else t for t in leaves
        ]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

        def call(with_graph: bool) -> tuple[list[Any], Any]:
            given = [
                leaf.detach().requires_grad_(with_graph and leaf.requires_grad)
                if isinstance(leaf, torch.Tensor)
                else leaf
                for leaf in leaves
            ]
            args, kwargs = pytree.tree_unflatten(given, spec)
            with autocast_now.entered():  # as the engine does, without a cache of cast weights
                return flatten(forward(*args, **kwargs))

        start, autocast_now = memory.begin(), AutocastState.current(HOST)
        with torch.no_grad():
            outputs, out_spec = call(False)
        traced.forward_peak, traced.forward_flops = memory.peak - start, memory.flops
        numbers = {t.untyped_storage()._cdata: number for number, t in enumerate(tensors)}
        with memory.not_counting():
            results = [_result(out, numbers) for out in outputs]
        del outputs
        start = memory.begin()
        outputs, _ = call(True)
        traced.graph = memory.live - start
        roots = [out for out in outputs if isinstance(out, torch.Tensor) and out.requires_grad]
        if roots:
            with memory.not_counting():
                gradients = [torch.empty_like(root) for root in roots]
            with autocast_region(None):
                torch.autograd.backward(roots, gradients)
        traced.backward_peak, traced.backward_flops = memory.peak - start, memory.flops
        return traced, out_spec, results

    def end(self, loss: torch.Tensor) -> None:
        """The forward is over: run the backward of each piece."""
        self._end_piece([])
        for output, reference in self._returned:
            output.kept = output.memory not in self._given and not reference.expired()
        memory = self.memory
        for piece, roots in zip(reversed(self.pieces), reversed([*self._roots[:-1], [loss]]), strict=True):
            start = memory.begin() - piece.kept
            self._fired.append({})
            if roots:
                with memory.not_counting():
                    gradients = [torch.empty_like(root) for root in roots]
                torch.autograd.backward(roots, gradients)
            piece.backward_peak, piece.backward_flops = memory.peak - start, memory.flops
            if piece is self.pieces[-1]:
                self.left = memory.live - sum(map(memory.counted, self._given.values()))


class _Unchanged(NamedTuple):
    """A layer returns its tensor argument of this number."""

    number: int


def _result(output: Any, numbers: Mapping[int, int]) -> Any:
    """A tensor to make one like, the number of the argument that is returned unchanged, or another value."""
    if not isinstance(output, torch.Tensor):
        return output
    number = numbers.get(output.untyped_storage()._cdata)
    return torch.empty_like(output) if number is None else _Unchanged(number)


class _Returned(torch.autograd.Function):
    """What a layer returns: like in the engine, the result of a node of the graph, and no leaf that it would keep."""

    @staticmethod
    def forward(ctx: Any, output: Output, source: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        ctx.output = output
        made = torch.empty_like(source) if output.is_new else source.view_as(source)
        if not anchor.requires_grad:
            ctx.mark_non_differentiable(made)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        ctx.output.has_gradient = True
        return None, None, None
