"""The embedding by ubatches: it computes the rows of one ubatch at a time, and once more in the backward.

A layer does the same, but an embedding does not travel like one: its weights are with those of the other non-layer
modules, and its slots would be as large as the vocabulary. The gradient of a table of embeddings is summed by rows
into one tensor for all ubatches.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from hf_l2l.compat import keeps_statistics, tables_of
from hf_l2l.engine.layer_call import WithoutDropout, same_results
from hf_l2l.engine.model_call import ModelCall
from hf_l2l.engine.relay import Relay
from hf_l2l.engine.splitting import ERRORS_OF_MODELS, buffers_kept
from hf_l2l.eps.pending import settle
from hf_l2l.model.batch_dims import Ubatch, ubatches
from hf_l2l.rows.boundary import Passing
from hf_l2l.rows.host_rows import host_of
from hf_l2l.runtime import compute_state
from hf_l2l.runtime.backward_callbacks import RaisedIn
from hf_l2l.runtime.compute_state import AutocastState, RngState
from hf_l2l.runtime.tensors import flatten


def input_embeddings(modules: Collection[nn.Module], layers: Iterable[nn.Module]) -> set[nn.Module]:
    """Those of `modules`, which are outside the layers, that make of inputs what the first layer takes.

    As far as models say so: their input embeddings, and the modules around them that are called so.
    """
    found: set[nn.Module] = set()
    for module in modules:
        ask: Any = getattr(module, "get_input_embeddings", None)
        try:
            table = None if ask is None else ask()
        except (NotImplementedError, AttributeError):  # of a model whose parts have them
            continue
        if isinstance(table, nn.Module) and table in modules:
            found.add(table)
    parts = [each for each in modules if type(each).__name__.endswith("Embeddings")]
    found.update(each for each in parts if not found.isdisjoint(each.modules()))
    inner = set(layers)
    return {m for m in found if inner.isdisjoint(m.modules()) and all(map(_runs_by_rows, m.modules()))}


def _runs_by_rows(module: nn.Module) -> bool:
    """Whether rows can be computed, and the gradients of those of a table added, one by one."""
    if isinstance(module, nn.Embedding):
        return not (module.max_norm or module.scale_grad_by_freq or module.sparse)
    return not keeps_statistics(module)


@dataclass(slots=True)
class _Call:
    """One call of an embedding: how to run it on some rows. Of the call of the model, it needs the weights."""

    root: ModelCall
    module: nn.Module
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

    def execute(self, tensors: Sequence[torch.Tensor], ubatch: Ubatch) -> Any:
        """Run the embedding on the rows `ubatch`."""
        leaves = list(self.leaves)
        for position, tensor, has_rows in zip(self.positions, tensors, self.has_rows, strict=True):
            leaves[position] = tensor[slice(*ubatch)] if has_rows else tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        with self.autocast.entered():
            return self.forward(*args, **kwargs)


class InputEmbeddings:
    """Runs the calls of input embeddings: as the shell runs other modules, but by ubatches where the boundary is on
    the host, which is where the result goes."""

    def __init__(self, relay: Relay, ubatch_size: int | None) -> None:
        """Beside `relay`, whose stash and boundary it shares."""
        self.relay = relay
        self.shell = relay.shell
        self.ubatch_size = ubatch_size
        self._is_inside = False
        """Whether an embedding runs now, whose parts are embeddings, too."""
        self._whole: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Those that cannot be run by ubatches."""
        self._bytes: weakref.WeakKeyDictionary[nn.Module, float] = weakref.WeakKeyDictionary()
        """Of the result of each that can be, for each element of its first argument with rows."""

    def run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call `forward`, the original forward of `module`."""
        call = self.shell.call
        if (
            call is not None
            and call.module is not module
            and call.replay is None
            and torch.is_grad_enabled()
            and not (self._is_inside or module in self._whole)
        ):
            forward = partial(self._run, call, module, forward)
        return self.shell.run(module, forward, args, kwargs)

    def _run(self, root: ModelCall, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._inside():
            arguments, spec = flatten((args, kwargs))
            call = self._call(root, module, forward, arguments, spec)
            if call is None:
                return forward(*args, **kwargs)
            tensors = [arguments[i] for i in call.positions]
            weights = _weights_of(module)
            if not self._passes_on(call, tensors):
                return forward(*args, **kwargs)
            return _Node.apply(call, self, len(tensors), *tensors, *weights)  # type: ignore[no-untyped-call]

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False

    def _call(
        self, root: ModelCall, module: nn.Module, forward: Callable[..., Any], arguments: list[Any], spec: Any
    ) -> _Call | None:
        """The call by ubatches; None if there is one ubatch only, or if the result stays on the device."""
        passing = self.relay.boundary.after(module, self.relay.is_in_forward)
        rows = root.rows
        if passing is None or rows is None or self.ubatch_size is None or rows <= self.ubatch_size:
            return None
        positions = [i for i, leaf in enumerate(arguments) if isinstance(leaf, torch.Tensor)]
        tensors = [arguments[i] for i in positions]
        has_rows = [t.dim() > 0 and t.shape[0] == rows for t in tensors]
        is_clear = all(has or t.dim() < 2 or t.shape[0] == 1 for has, t in zip(has_rows, tensors, strict=True))
        if not any(has_rows) or not is_clear or any(t.requires_grad for t in tensors):
            return None
        leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in arguments]
        parts, autocast = ubatches(rows, self.ubatch_size), AutocastState.current(self.relay.device)
        return _Call(root, module, forward, leaves, positions, has_rows, spec, parts, autocast, passing)

    def _passes_on(self, call: _Call, tensors: list[torch.Tensor]) -> bool:
        """Whether the embedding can be run by ubatches, and its result is large enough for the host."""
        module, elements = call.module, tensors[call.has_rows.index(True)].numel()
        if module not in self._bytes and module not in self._whole:
            num_bytes = self._bytes_by_ubatches(call, tensors)
            if num_bytes is None:
                self._whole.add(module)
            else:
                self._bytes[module] = num_bytes / elements
        return module in self._bytes and self._bytes[module] * elements >= call.passing.fewest_bytes

    def _bytes_by_ubatches(self, call: _Call, tensors: list[torch.Tensor]) -> int | None:
        """Bytes of the result; None if that is not one tensor, if a row of it needs other rows, or if the embedding
        reads weights that train and are not its own.

        Two ubatches are compared with the same rows at once.
        """
        first, second, *_ = call.ubatches
        parts = list(call.module.modules())
        try:
            with compute_state.rng_state_kept(self.relay.device), buffers_kept(parts), WithoutDropout():
                with compute_state.graph_without_tensors(), _Reading() as reading:
                    one = call.execute(tensors, first)
                if reading.is_special:
                    return None
                if not (isinstance(one, torch.Tensor) and one.is_floating_point() and one.shape[:1] == (first[1],)):
                    return None
                if not _leaves_below(one) <= set(_weights_of(call.module)):
                    return None
                with torch.no_grad():
                    both = call.execute(tensors, (0, second[1]))
                    joined = torch.cat([one, call.execute(tensors, second)])
        except torch.OutOfMemoryError:
            raise
        except ERRORS_OF_MODELS:  # it does not run on some of the rows
            return None
        return one.nbytes // first[1] * call.ubatches[-1][1] if same_results([both], [joined]) else None


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
    """One call of an embedding in the autograd graph. Its inputs are the arguments, and then the weights."""

    @staticmethod
    def forward(ctx: Any, call: _Call, owner: InputEmbeddings, count: int, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.call, ctx.owner, ctx.count = call, owner, count
        ctx.save_for_backward(*tensors)
        stash, device = owner.relay.stash, owner.relay.device
        whole: Any = None
        # In grad mode, as the recompute runs.
        with owner.shell.one_thread.in_layer(), compute_state.graph_without_tensors():
            for ubatch in call.ubatches:
                before = compute_state.get_rng_state(device)
                rows = call.execute(tensors[:count], ubatch).detach()
                call.rng.append(before if compute_state.get_rng_state(device) != before else None)
                if whole is None:
                    whole = stash.rows_like(rows, call.ubatches[-1][1], call.passing.made_real)
                stash.send(rows, host_of(whole)[slice(*ubatch)])
        result: torch.Tensor = whole
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call, relay = ctx.call, ctx.owner.relay
        saved = ctx.saved_tensors  # once: activation checkpointing gives them once
        tensors, weights = saved[: ctx.count], saved[ctx.count :]
        needed = ctx.needs_input_grad[3 + ctx.count :]
        sums = _Sums(weights, needed)
        with (
            relay.eps.backwards.joined(),
            relay.eps.timeline.inside("backward"),
            RaisedIn("the backward of", type(call.module).__name__),
            relay.shell.one_thread.in_layer(),
            compute_state.rng_state_kept(relay.device),
            relay.shell.resumed(call.root),
            ctx.owner._inside(),
        ):
            for turn, (ubatch, rng) in enumerate(zip(call.ubatches, call.rng, strict=True)):
                rows = relay.stash.fetch(host_of(gradient)[slice(*ubatch)])
                following = call.ubatches[turn + 1 : turn + 2]
                relay.stash.fetch_ahead([host_of(gradient)[slice(*each)] for each in following])
                if rng is not None:
                    compute_state.set_rng_state(rng, relay.device)
                with torch.enable_grad(), sums:
                    outputs = call.execute(tensors, ubatch)
                sums.add(outputs, rows)
        return None, None, None, *(None for _ in tensors), *sums.results()


class _Sums(TorchFunctionMode):
    """The gradients of the weights of an embedding, summed over the ubatches; inside, tables are read so that rows of
    their gradients are added to one tensor."""

    def __init__(self, weights: Iterable[torch.Tensor], needed: Iterable[bool]) -> None:
        super().__init__()
        self._weights = list(weights)
        self._needed = [w for w, needs in zip(self._weights, needed, strict=True) if needs]
        self._totals: dict[torch.Tensor, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.embedding:
            read = _read(*args, **kwargs)
            if read is not None and any(each is read.table for each in self._needed):
                return _Rows.apply(read.ids, read.table, self._total(read.table), read.padding)  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)

    def _total(self, weight: torch.Tensor) -> torch.Tensor:
        if weight not in self._totals:
            # Sums of 16-bit gradients are fp32.
            dtype = torch.float32 if weight.itemsize < 4 else weight.dtype
            self._totals[weight] = torch.zeros(weight.shape, dtype=dtype, device=weight.device)
        return self._totals[weight]

    def add(self, outputs: torch.Tensor, gradient: torch.Tensor) -> None:
        """Run backward from the outputs of one ubatch."""
        if not (self._needed and outputs.requires_grad):
            return
        found = torch.autograd.grad(outputs, self._needed, gradient, allow_unused=True)
        for weight, each in zip(self._needed, found, strict=True):
            if each is not None:
                self._total(weight).add_(each)

    def results(self) -> list[torch.Tensor | None]:
        """The sums, in the order and the dtypes of the weights."""
        return [self._totals[w].to(w.dtype) if w in self._totals else None for w in self._weights]


class _Read(NamedTuple):
    """What is read of a table of embeddings: the rows `ids`, of which those with the number `padding` do not train."""

    ids: torch.Tensor
    table: torch.Tensor
    padding: int | None


def _read(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> _Read | None:
    """What `torch.nn.functional.embedding` reads; None if rows of the gradient cannot be added one by one."""
    return None if max_norm or scale_grad_by_freq or sparse else _Read(input, weight, padding_idx)


class _Reading(TorchFunctionMode):
    """Notes whether a table is read in a way in which rows of its gradient cannot be added one by one."""

    is_special = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.embedding and _read(*args, **kwargs) is None:
            self.is_special = True
        return func(*args, **kwargs)


class _Rows(torch.autograd.Function):
    """Reads a table of embeddings, and adds to the sum of its gradients by rows."""

    @staticmethod
    def forward(
        ctx: Any, ids: torch.Tensor, table: torch.Tensor, total: torch.Tensor, padding: int | None
    ) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.total, ctx.padding = total, padding
        return torch.embedding(table, ids)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None, None]:
        [ids] = ctx.saved_tensors
        total, ids = ctx.total, ids.reshape(-1)
        rows = gradient.reshape(len(ids), -1).to(total.dtype)
        if ctx.padding is not None:
            rows = rows.masked_fill((ids == ctx.padding % len(total))[:, None], 0)
        total.index_add_(0, ids, rows)
        return None, None, None, None
