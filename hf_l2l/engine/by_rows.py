"""What a model computes before, between and after its layers, by ubatches where the boundary is on the host: the
embedding, the final norm, poolers, and functions of torch such as dropout.

A call computes the rows of one ubatch at a time, and once more in the backward. A layer does the same, but these do
not travel like one: their weights are with those of the other non-layer modules, and slots would be as large as the
vocabulary.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from hf_l2l.compat import saves_tensors_by_hooks, tables_of
from hf_l2l.engine.model_call import ModelCall
from hf_l2l.engine.recompute_check import CallCheck
from hf_l2l.engine.relay import Relay, let_go_of_engine, refuse_second_backward
from hf_l2l.engine.splitting import ERRORS_OF_MODELS, buffers_kept
from hf_l2l.engine.trials import WithoutDropout, same_results
from hf_l2l.eps.pending import settle
from hf_l2l.model.batch_dims import Ubatch, cannot_split
from hf_l2l.model.kept_state import KeptState
from hf_l2l.model.layer_state import Known, LayerState, as_if_not_run
from hf_l2l.rows.functions import BY_ROWS, rows_of, unchanged
from hf_l2l.rows.host_rows import HostRows, Passing, host_of, put_rows, runs_by_rows, uploaded_rows
from hf_l2l.rows.row_modules import parts_have_hooks
from hf_l2l.rows.weight_sums import Reading, WeightSums
from hf_l2l.runtime import compute_state
from hf_l2l.runtime.backward_callbacks import RaisedIn
from hf_l2l.runtime.compute_state import AutocastState, RngState
from hf_l2l.runtime.tensors import flatten
from hf_l2l.stash.stash import Stash


@dataclass(slots=True)
class _Call:
    """One call of a module, or of a function of torch: how to run it on some rows. Of the call of the model, it needs
    the weights."""

    root: ModelCall
    name: str
    forward: Callable[..., Any]
    leaves: list[Any]
    """The arguments, flattened; tensors are replaced by None."""
    positions: list[int]
    """Of the tensors among them."""
    has_rows: list[bool]
    spec: pytree.TreeSpec
    ubatches: list[Ubatch]
    autocast: AutocastState
    passing: Passing
    rng: list[RngState | None] = field(default_factory=list)
    """Per ubatch, the state of the generators before it ran; None if it drew no random numbers."""
    state: LayerState = field(default_factory=lambda: LayerState([], Known(draws={False: False})))
    """What the forward computes with beside arguments, weights and torch's generators; of a function, nothing."""
    check: CallCheck | None = None
    """Compares its recompute with its forward; None if this call is not checked."""

    def rows(self, tensors: Sequence[torch.Tensor], ubatch: Ubatch) -> list[torch.Tensor]:
        """The rows `ubatch` of its tensor arguments, where they are."""
        pairs = zip(map(host_of, tensors), self.has_rows, strict=True)
        return [t[slice(*ubatch)] if has_rows else t for t, has_rows in pairs]

    def rows_of_turn(self, tensors: Sequence[torch.Tensor], turn: int) -> list[torch.Tensor]:
        """The rows in host memory that ubatch number `turn` needs; none if there is no such ubatch."""
        if turn >= len(self.ubatches):
            return []
        rows = zip(self.rows(tensors, self.ubatches[turn]), self.has_rows, strict=True)
        return [t for t, has_rows in rows if has_rows]

    def execute(self, rows: Sequence[torch.Tensor]) -> Any:
        """Run it on these tensor arguments."""
        leaves = list(self.leaves)
        for position, tensor in zip(self.positions, rows, strict=True):
            leaves[position] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        with self.autocast.entered():
            return self.forward(*args, **kwargs)


class ByRows:
    """Runs calls of non-layer modules as the shell does, but by ubatches where the boundary is on the host: those of
    input embeddings, and those that are given what a layer, or another such call, has left there."""

    def __init__(self, relay: Relay, embeddings: Collection[nn.Module]) -> None:
        """Beside `relay`, whose stash, boundary and cuts it shares."""
        self.relay = relay
        self.shell = relay.shell
        self.embeddings = embeddings
        self._is_inside = False
        """Whether a call by ubatches runs now, whose parts run in it."""
        self._known: weakref.WeakKeyDictionary[nn.Module, Known] = weakref.WeakKeyDictionary()
        """Module -> what its forwards by ubatches have shown of it."""
        self._checked: weakref.WeakKeyDictionary[nn.Module, dict[Any, float | None]] = weakref.WeakKeyDictionary()
        """By kind of call, the bytes of the result for each element of the first argument with rows; None for calls
        that cannot be run by ubatches."""
        relay.boundary.compute_by_rows(self.function)

    def run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call `forward`, the original forward of `module`."""
        call = self._root()
        if call is not None and call.module is not module and torch.is_grad_enabled():
            waits = any(runs_by_rows(each) for each in (*args, *kwargs.values()))
            if waits or module in self.embeddings:
                forward = partial(self._run, call, module, forward)
        return self.shell.run(module, forward, args, kwargs)

    def _root(self) -> ModelCall | None:
        """The call of the model, if something may be computed by ubatches now."""
        call = self.shell.call
        if call is None or call.replay is not None or self._is_inside:
            return None
        # Activation checkpointing in the model repeats a part in the backward, outside of the call, and must find
        # the same graph.
        return None if saves_tensors_by_hooks() else call

    def _run(self, root: ModelCall, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        passing = self.relay.boundary.after(module, self.relay.is_in_forward)
        arguments, spec = flatten((args, kwargs))
        call = None
        if not (passing is None or parts_have_hooks(module) or cannot_split(arguments, kwargs)):
            call = self._call(root, forward, arguments, spec, passing)
        # A list may have an entry per row.
        lists = [len(each) for each in (*args, *kwargs.values()) if isinstance(each, list | tuple)]
        if call is None or call.ubatches[-1][1] in lists:
            return forward(*args, **kwargs)
        call.name = type(module).__name__
        tensors = [arguments[i] for i in call.positions]
        weights = _weights_of(module)
        with self.inside():
            if self._passes_on(module, call, tensors):
                known = self._known.setdefault(module, Known())
                call.state = LayerState(list(module.modules()), known)
                call.check = self.relay.check.of_call(
                    known,
                    (module.training, call.autocast),
                    module,
                    call.name,
                    ubatches=len(call.ubatches),
                    device=self.relay.device,
                    dtypes=call.autocast.enabled_dtypes,
                )
                return _Node.apply(call, self, len(tensors), *tensors, *weights)  # type: ignore[no-untyped-call]
        return forward(*args, **kwargs)

    def function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function of torch (`BY_ROWS`) of arguments of which some wait; NotImplemented if all rows are needed."""
        root = self._root()
        if root is None or not BY_ROWS[func](args, kwargs):
            return NotImplemented
        if unchanged(func, args, kwargs):
            return args[0]
        arguments, spec = flatten((args, kwargs))
        for leaf in arguments:
            if isinstance(leaf, torch.Tensor):
                settle(leaf)  # a weight that is held
        name = getattr(func, "__name__", str(func))
        # The same function in the same module is the same place in the model, as far as can be seen.
        passing = self.relay.boundary.after(root.enclosing[-1].module, self.relay.is_in_forward, name)
        tensors = [leaf for leaf in arguments if isinstance(leaf, torch.Tensor)]
        has_rows = rows_of(tensors, next(t for t in tensors if isinstance(t, HostRows) and t.is_waiting))
        if passing is None or has_rows is None:
            return NotImplemented
        call = self._call(root, func, arguments, spec, passing, has_rows)
        if call is None:
            return NotImplemented
        call.name = name
        with self.inside():
            return _Node.apply(call, self, len(tensors), *tensors)  # type: ignore[no-untyped-call]

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Inside, a call runs by ubatches, and its parts run in it."""
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False

    def _call(
        self,
        root: ModelCall,
        forward: Callable[..., Any],
        arguments: list[Any],
        spec: Any,
        passing: Passing,
        has_rows: list[bool] | None = None,
    ) -> _Call | None:
        """The call by ubatches; None if there is one ubatch only, or if its rows are not known. Which tensors have
        rows is found by their sizes if it is not given."""
        positions = [i for i, leaf in enumerate(arguments) if isinstance(leaf, torch.Tensor)]
        tensors = [arguments[i] for i in positions]
        waiting = next((len(t) for t in tensors if isinstance(t, HostRows) and t.is_waiting and t.dim()), None)
        rows = root.rows if waiting is None else waiting
        if rows is None or root.rows is None or rows % root.rows:
            return None
        # Tokens may be flattened with their rows; those of one row are adjacent.
        parts = [(a * rows // root.rows, b * rows // root.rows) for a, b in self.relay.cuts.of(root.rows)]
        is_clear = True
        if has_rows is None:
            has_rows = [t.dim() > 0 and t.shape[0] == rows for t in tensors]
            is_clear = all(has or t.dim() < 2 or t.shape[0] == 1 for has, t in zip(has_rows, tensors, strict=True))
        if len(parts) < 2 or not any(has_rows) or not is_clear:
            return None
        leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in arguments]
        autocast = AutocastState.current(self.relay.device)
        return _Call(root, "", forward, leaves, positions, has_rows, spec, parts, autocast, passing)

    def _passes_on(self, module: nn.Module, call: _Call, tensors: list[torch.Tensor]) -> bool:
        """Whether the module can be run by ubatches, and the result of an embedding is large enough for the host.

        Found once per kind of call. What is computed only for some values, such as padding, cannot be found in a batch
        that has none.
        """
        kinds = self._checked.setdefault(module, {})
        kind = (
            module.training,
            str(call.spec),
            tuple(map(_kind, call.leaves)),
            tuple(call.has_rows),
            tuple((t.dtype, t.dim(), t.requires_grad) for t in tensors),
        )
        elements = tensors[call.has_rows.index(True)].numel()
        if kind not in kinds:
            num_bytes = self._bytes_by_ubatches(module, call, tensors)
            kinds[kind] = None if num_bytes is None else num_bytes / elements
        by_element = kinds[kind]
        if by_element is None or any(isinstance(t, HostRows) for t in tensors):
            return by_element is not None
        is_given = not any(t.requires_grad for t in tensors)
        return is_given and by_element * elements >= call.passing.fewest_bytes

    def _bytes_by_ubatches(self, module: nn.Module, call: _Call, tensors: list[torch.Tensor]) -> int | None:
        """Bytes of the result; None if that is not one tensor, if a row of it needs other rows, if the module leaves
        tensors in attributes, or if it reads weights that train and are not its own.

        Two ubatches are compared with the same rows at once.
        """
        first, second, *_ = call.ubatches
        parts = list(module.modules())

        def run(ubatch: Ubatch) -> Any:
            rows = zip(call.rows(tensors, ubatch), tensors, strict=True)
            return call.execute([uploaded_rows(t, of).detach() for t, of in rows])

        try:
            with (
                compute_state.all_rng_states_kept(self.relay.device),
                buffers_kept(parts),
                as_if_not_run(parts),
                WithoutDropout(),
            ):
                before = KeptState(parts)
                with compute_state.graph_without_tensors(), Reading() as reading:
                    one = run(first)
                written = before.changed()
                before.put_back(written)
                if written or reading.is_special:
                    return None
                if not (isinstance(one, torch.Tensor) and one.is_floating_point() and one.shape[:1] == (first[1],)):
                    return None
                if not _leaves_below(one) <= set(_weights_of(module)):
                    return None
                with torch.no_grad():
                    both = run((0, second[1]))
                    joined = torch.cat([one, run(second)])
        except torch.OutOfMemoryError:
            raise
        except ERRORS_OF_MODELS:  # it does not run on some of the rows
            return None
        return one.nbytes // first[1] * call.ubatches[-1][1] if same_results([both], [joined]) else None


def _kind(leaf: Any) -> object:
    """What a check depends on of an argument that is no tensor."""
    return (type(leaf), leaf) if isinstance(leaf, bool | int | float | str | torch.dtype) else type(leaf)


def _leaves_below(tensor: torch.Tensor) -> set[torch.Tensor]:
    """The leaves of the graph of `tensor`, which get a gradient in its backward."""
    found, waiting, seen = set[torch.Tensor](), [tensor.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found.add(leaf)
        waiting += [following for following, _ in node.next_functions]
    return found


def _weights_of(module: nn.Module) -> list[torch.Tensor]:
    """The device copies of the weights of `module`, uploaded; each once."""
    tables = (tables_of(each)[0] for each in module.modules())
    weights = list(dict.fromkeys(w for table in tables for w in table.values() if w is not None))
    for weight in weights:
        settle(weight)
    return weights


class _Node(torch.autograd.Function):
    """One call by ubatches in the autograd graph. Its inputs are the tensor arguments, and then the weights."""

    @staticmethod
    def forward(ctx: Any, call: _Call, owner: ByRows, count: int, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.call, ctx.engine, ctx.count = call, owner, count
        arguments, weights = [host_of(t) for t in tensors[:count]], tensors[count:]
        ctx.from_host = [kept is not t for kept, t in zip(arguments, tensors, strict=False)]
        ctx.save_for_backward(*arguments, *weights)
        stash, device = owner.relay.stash, owner.relay.device
        waiting = [kept.nbytes for kept, from_host in zip(arguments, ctx.from_host, strict=True) if from_host]
        whole: Any = None
        # In grad mode, as the recompute runs.
        with owner.shell.one_thread.in_layer(), compute_state.graph_without_tensors():
            for turn, ubatch in enumerate(call.ubatches):
                rows = [stash.fetch(t).detach() for t in call.rows(arguments, ubatch)]
                stash.fetch_ahead(call.rows_of_turn(arguments, turn + 1))
                before = compute_state.get_rng_state(device)
                with call.state.ubatch():
                    found = call.execute(rows).detach()
                if call.check is not None:
                    call.check.forward(turn, [found])
                call.rng.append(before if compute_state.get_rng_state(device) != before else None)
                if whole is None:
                    whole = _rows_for(found, call, stash, max(waiting, default=0))
                put_rows(found, whole, slice(*ubatch))
        call.state.end_forward()
        result: torch.Tensor = whole
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_second_backward(ctx)
        call, owner, relay, count = ctx.call, ctx.engine, ctx.engine.relay, ctx.count
        saved = ctx.saved_tensors  # once: activation checkpointing gives them once
        needed = ctx.needs_input_grad[3:]
        inputs = _Inputs(call, relay.stash, saved[:count], needed[:count], ctx.from_host)
        shared = list(inputs.shared.values())
        sums = WeightSums([*saved[count:], *shared], [*needed[count:], *(t.requires_grad for t in shared)])
        with (
            relay.eps.backwards.joined(),
            relay.eps.timeline.inside("backward"),
            RaisedIn("the backward of", call.name),
            relay.shell.one_thread.in_layer(),
            compute_state.rng_state_kept(relay.device),
            relay.shell.resumed(call.root),
            owner.inside(),
            call.state.put_back(),
        ):
            for turn, (ubatch, rng) in enumerate(zip(call.ubatches, call.rng, strict=True)):
                rows = relay.stash.fetch(host_of(gradient)[slice(*ubatch)])
                leaves = inputs.leaves(ubatch)
                following = [host_of(gradient)[slice(*each)] for each in call.ubatches[turn + 1 : turn + 2]]
                relay.stash.fetch_ahead(following + call.rows_of_turn(saved[:count], turn + 1))
                if rng is not None:
                    compute_state.set_rng_state(rng, relay.device)
                call.state.set_generators(turn)
                with torch.enable_grad(), sums:
                    outputs = call.execute(leaves)
                if call.check is not None:
                    call.check.recompute(turn, [outputs])
                found = sums.add(outputs, rows, [leaves[i] for i in inputs.needed])
                inputs.collect(found, ubatch)
        results = sums.results()
        of_shared = dict(zip(inputs.shared, results[len(saved) - count :], strict=True))
        of_inputs = [of_shared.get(i, inputs.total.get(i)) for i in range(count)]
        let_go_of_engine(ctx)
        return None, None, None, *of_inputs, *results[: len(saved) - count]


def _rows_for(part: torch.Tensor, call: _Call, stash: Stash, largest: int) -> torch.Tensor:
    """Memory for all rows of the result, of which `part` is the first ubatch: in host memory, but on the device if it
    is small beside what it is made of, which has `largest` bytes."""
    rows = call.ubatches[-1][1]
    if 2 * part.nbytes * rows < largest * len(part):
        return part.new_empty(rows, *part.shape[1:])
    return stash.rows_like(part, rows, call.passing)


class _Inputs:
    """Makes leaves of the tensor arguments of one call, ubatch by ubatch, and collects their gradients."""

    def __init__(
        self,
        call: _Call,
        stash: Stash,
        kept: Sequence[torch.Tensor],
        needed: Sequence[bool],
        from_host: Sequence[bool],
    ) -> None:
        """`kept` are all tensor arguments, of which some are `needed` and some came `from_host`, where their gradients
        go, too."""
        self._call, self._stash, self._kept, self._from_host = call, stash, kept, from_host
        self.shared = {
            i: stash.fetch(kept[i]).detach().requires_grad_(needed[i])
            for i, has_rows in enumerate(call.has_rows)
            if not has_rows
        }
        """The arguments without rows: a leaf for all ubatches."""
        self.needed = [i for i, each in enumerate(needed) if each and i not in self.shared]
        """The arguments with rows that need a gradient."""
        self.total: dict[int, torch.Tensor] = {}
        """Their gradients."""

    def leaves(self, ubatch: Ubatch) -> list[torch.Tensor]:
        """The tensor arguments of one ubatch, on the device, as leaves of a new graph."""
        rows = self._call.rows(self._kept, ubatch)
        return [
            self.shared[i] if i in self.shared else self._stash.fetch(t).detach().requires_grad_(i in self.needed)
            for i, t in enumerate(rows)
        ]

    def collect(self, gradients: Sequence[torch.Tensor], ubatch: Ubatch) -> None:
        """Copy the gradients of one ubatch's leaves, in the order of `needed`, to their rows of `total`."""
        for i, gradient in zip(self.needed, gradients, strict=True):
            if i not in self.total and self._from_host[i]:
                self.total[i] = self._stash.rows_like(gradient, self._call.ubatches[-1][1])
            elif i not in self.total:
                self.total[i] = gradient.new_empty(self._kept[i].shape)
            put_rows(gradient, self.total[i], slice(*ubatch))
