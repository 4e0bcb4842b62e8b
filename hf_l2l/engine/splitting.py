"""Splitting: finds how a layer call can be split into ubatches, and checks the result before it is used.

The batch dimensions of the arguments are found by running the beginning of the model's call with its batch doubled.
Those of the outputs are found, and the independence of rows is checked, by running the layer on two ubatches.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hf_l2l.compat import mixes_rows
from hf_l2l.engine.model_call import ModelCall, Replay, Replayed
from hf_l2l.engine.trials import Trial
from hf_l2l.model.batch_dims import (
    BatchDims,
    MixedRows,
    NoConsistentSplit,
    NotCut,
    RowCuts,
    Split,
    Ubatch,
    batch_rows,
    call_key,
    cannot_split,
    compare_shapes,
    doubled,
)
from hf_l2l.model.captured_outputs import CapturedOutputs
from hf_l2l.model.kept_state import tensors_put_back
from hf_l2l.model.layer_hooks import kind_of_hooks
from hf_l2l.model.layer_state import as_if_not_run
from hf_l2l.model.precision import in_fp32
from hf_l2l.model.units import LayerUnit
from hf_l2l.rows.host_rows import host_of, uploaded_rows
from hf_l2l.runtime import compute_state, stream
from hf_l2l.runtime.tensors import have_cache, narrow, to_device

Execute = Callable[[Sequence[torch.Tensor]], Trial]

ERRORS_OF_MODELS = (RuntimeError, ValueError, TypeError, LookupError, AssertionError, AttributeError)
"""What the code of a model raises when it is run with a number of rows that it does not expect."""


@dataclass(frozen=True)
class _Learned:
    """How calls of one kind are split."""

    level: int
    """The number of the enclosing call that has the rows; 0 for the root."""
    inputs: BatchDims
    outputs: BatchDims
    collected: tuple[BatchDims | None, ...]
    """Of each tensor that hooks inside the layer collect; None for one that is not put together."""


class Splitter:
    """Decides, for each layer call of one model, into which ubatches it is split.

    The batch dimensions are found once per kind of call (`batch_dims.call_key`). Calls of a kind that cannot be split
    run with the whole device batch, with one warning; if the batch was merged, they raise `NotCut`.
    """

    def __init__(self, cuts: RowCuts, device: torch.device) -> None:
        self.cuts = cuts
        self.device = device
        self._known: dict[object, _Learned | str] = {}
        """Kind of call -> how it is split, or the reason why it is not."""
        self._warned: set[str] = set()
        self._has_mixed_rows = False
        """Whether rows of a layer were seen to influence each other. In others the sample may not show it."""

    def split_for(
        self,
        root: ModelCall,
        unit: LayerUnit,
        leaves: Sequence[Any],
        spec: pytree.TreeSpec,
        kwargs: Mapping[str, Any],
        tensors: Sequence[torch.Tensor],
        execute: Execute,
    ) -> Split | None:
        """The split of this call, or None to run it as one ubatch.

        Args:
            root: the running call of the model, whose beginning is replayed for a new kind of layer call.
            unit: the layer.
            leaves, spec: the layer's arguments, flattened; `tensors` are the tensors among them.
            kwargs: its arguments by keyword.
            execute: runs the layer once on other tensors; what it leaves in attributes and buffers stays.
        """
        layer, rows = unit.module, root.rows
        if rows is None:
            self._runs_whole(layer, "the rows of the model's batch are not known", warns=False)
            return None
        ubatches = self.cuts.of(rows)
        if len(ubatches) < 2:
            return None
        reason = cannot_split(leaves, kwargs)
        if reason is not None:
            # A cache is expected in generation: no warning.
            self._runs_whole(layer, reason, warns=not have_cache(leaves))
            return None
        inside = tuple([type(each.module) for each in root.enclosing])
        hooks = kind_of_hooks(unit.modules)
        key = call_key(unit, spec, leaves, rows), CapturedOutputs().keys, inside, root.makes_graph, hooks
        if key not in self._known:
            try:
                _refuse_batch_statistics(layer)
                with as_if_not_run(unit.modules) as has_changed, buffers_kept(unit.modules):
                    self._known[key] = self._learn(root, spec, tensors, _not_reading(execute, has_changed))
                _refuse_kept_state([] if root.makes_graph else unit.keeps.written)
            except NoConsistentSplit as error:
                self._known[key] = str(error)
        known = self._known[key]
        if isinstance(known, str):
            self._runs_whole(layer, known)
            return None
        if known.level > 0:
            enclosing = root.enclosing[known.level]
            rows = batch_rows((enclosing.args, enclosing.kwargs))
            ubatches = [] if rows is None else self.cuts.of(rows)
            if rows is None or len(ubatches) < 2:
                return None
        if not known.inputs.fits(tensors, rows):
            self._runs_whole(layer, f"its arguments do not hold a whole number of entries for each of {rows} rows")
            return None
        return Split(rows, ubatches, known.inputs, known.outputs, known.collected)

    def _runs_whole(self, layer: nn.Module, reason: str, *, warns: bool = True) -> None:
        """A call runs with the whole device batch. If that was merged, batch by batch is better.

        Raises:
            NotCut: if it was merged.
        """
        name = type(layer).__name__
        if self.cuts.merged:
            raise NotCut(f"calls of {name} cannot be cut into micro-batches: {reason}")
        if warns and name not in self._warned:
            self._warned.add(name)
            what = f"ubatch_size={self.cuts.size} has no effect on calls of {name}"
            if self.cuts.size is None:  # nobody has asked for micro-batches but the devices
                what = f"the devices take turns in calls of {name}, which cannot be cut into micro-batches"
            warnings.warn(
                f"{what}: {reason}. They run with the whole device batch at once; lower the device batch if that does "
                "not fit",
                stacklevel=2,
            )

    def _learn(
        self, root: ModelCall, spec: pytree.TreeSpec, tensors: Sequence[torch.Tensor], execute: Execute
    ) -> _Learned:
        """Find the batch dimensions from the root, or else from the nearest enclosing call whose arguments carry rows.

        The root of a model of several modalities may not run with its batch doubled: images are packed into one
        sequence. The call of its language model, which has one row per text, does.

        Raises:
            NoConsistentSplit: if none is consistent; with the reason of the root.
        """
        assert root.rows is not None
        try:
            return self._learn_from(root, 0, root.rows, spec, tensors, execute)
        except NoConsistentSplit as error:
            reason = error
        if self._has_mixed_rows:
            raise reason
        for level in reversed(range(1, len(root.enclosing))):
            nearest = root.enclosing[level]
            rows = batch_rows((nearest.args, nearest.kwargs))
            for anywhere in (False, True):
                try:
                    if rows is not None and len(self.cuts.of(rows)) > 1:
                        return self._learn_from(root, level, rows, spec, tensors, execute, anywhere=anywhere)
                except NoConsistentSplit:
                    continue
                except torch.OutOfMemoryError:
                    raise
                except ERRORS_OF_MODELS:  # the layer itself does not run with the rows that were assumed
                    continue
        raise reason

    def _learn_from(
        self,
        root: ModelCall,
        level: int,
        rows: int,
        spec: pytree.TreeSpec,
        tensors: Sequence[torch.Tensor],
        execute: Execute,
        *,
        anywhere: bool = False,
    ) -> _Learned:
        twice = self._arguments_of_doubled_batch(root, level, rows, spec, anywhere=anywhere)
        inputs = compare_shapes([t.shape for t in tensors], twice, rows, 2 * rows)
        if all(dim is None for dim in inputs.dims):
            raise NoConsistentSplit(f"none of its arguments has the {rows} rows of the model's batch")
        try:
            return _Learned(level, inputs, *self._check(inputs, tensors, rows, execute))
        except MixedRows:
            self._has_mixed_rows |= level == 0  # what is assumed at other levels may be wrong itself
            raise

    def _arguments_of_doubled_batch(
        self, root: ModelCall, level: int, rows: int, spec: pytree.TreeSpec, *, anywhere: bool
    ) -> list[torch.Size]:
        """The shapes of this layer call's tensor arguments if the batch of an enclosing call were concatenated with
        itself.

        A smaller batch may give other arguments: without padded rows, a mask becomes None. The replay runs the
        non-layer modules on the host, where the larger batch needs no device memory.
        """
        start = root.enclosing[level]
        replay = Replay(root, start.first, spec)
        given = to_device((start.args, start.kwargs), stream.HOST)
        if root.weights.precision.is_mixed:
            given = in_fp32(given)  # they were cast for the device; the replay computes with the masters
        args, kwargs = doubled(given, rows, anywhere=anywhere)
        modules = [*root.module.modules()]  # their code may leave something in layers, or count its calls
        enclosing, root.enclosing = root.enclosing, root.enclosing[: level + 1]
        root.replay = replay
        try:
            with (
                torch.no_grad(),
                compute_state.all_rng_states_kept(self.device),
                root.weights.masters_back(),
                buffers_kept(root.weights.unit.modules),
                tensors_put_back(modules),
                as_if_not_run(modules),
            ):
                compute_state.set_rng_state(root.rng, self.device)  # so that LayerDrop drops the same layers
                start.forward(*args, **kwargs)
        except Replayed as reached:
            return reached.shapes
        except torch.OutOfMemoryError:
            raise
        except ERRORS_OF_MODELS as error:
            raise NoConsistentSplit(f"the model does not run with its batch doubled ({error})") from error
        finally:
            root.replay, root.enclosing = None, enclosing
        raise NoConsistentSplit("the call is not made again when the model's batch is doubled")

    def _check(
        self, inputs: BatchDims, tensors: Sequence[torch.Tensor], rows: int, execute: Execute
    ) -> tuple[BatchDims, tuple[BatchDims | None, ...]]:
        """The batch dimensions of the outputs, and of what hooks have collected, after checking that two ubatches give
        the same results as at once.

        Two and not all, since the whole device batch may not fit. The results differ if rows are not laid out as
        assumed, or influence each other.
        """
        first_two = self.cuts.of(rows)[:2]
        few = first_two[-1][1]
        # Of tensors in host memory, only these rows are uploaded.
        some = inputs.rows_of([host_of(t) for t in tensors], rows, 0, few)
        sample = [uploaded_rows(t, of) for t, of in zip(some, tensors, strict=True)]
        try:
            at_once = execute(sample)
            parts = [(u, execute(inputs.rows_of(sample, few, *u))) for u in first_two]
        except torch.OutOfMemoryError:
            raise
        except ERRORS_OF_MODELS as error:
            execute(tensors)  # which raises an error that does not depend on the rows
            raise NoConsistentSplit(f"it does not run with some of its rows ({error})") from error
        outputs = _compare(at_once.outputs, [(ubatch, part.outputs) for ubatch, part in parts], few)
        return outputs, _compare_collected(at_once, parts, few)


def _compare(
    at_once: Sequence[torch.Tensor], parts: Sequence[tuple[Ubatch, Sequence[torch.Tensor]]], rows: int
) -> BatchDims:
    """The batch dimensions of tensors with so many `rows`, after comparing them with those of ubatches.

    Raises:
        NoConsistentSplit: if there are none; MixedRows if the values differ.
    """
    (start, stop), first = parts[0]
    dims = compare_shapes([t.shape for t in at_once], [t.shape for t in first], rows, stop - start)
    for (start, stop), part in parts:
        if len(part) != len(at_once):
            raise NoConsistentSplit(f"{len(at_once)} outputs at once and {len(part)} in ubatches")
        for whole, piece, dim in zip(at_once, part, dims.dims, strict=True):
            if not close_enough(narrow(whole, dim, rows, start, stop), piece):
                raise MixedRows("its rows give different results in ubatches than all at once")
    return dims


def _compare_collected(
    at_once: Trial, parts: Sequence[tuple[Ubatch, Trial]], rows: int
) -> tuple[BatchDims | None, ...]:
    """The batch dimension of each tensor that hooks have collected; None for one that is left as the hooks of each
    ubatch write it: it is not made of the rows of ubatches, or is beside other values that differ."""
    if any(len(part.collected) != len(at_once.collected) for _, part in parts):
        return ()
    found: dict[int, BatchDims | None] = {}
    for number, whole in enumerate(at_once.collected):
        pieces = [(ubatch, part.collected[number]) for ubatch, part in parts]
        are_alike = all(each.is_like(whole) for _, each in pieces)
        for place, tensor in enumerate(whole.tensors):
            try:
                dims = _compare([tensor], [(u, each.tensors[place : place + 1]) for u, each in pieces], rows)
            except NoConsistentSplit:
                dims = None
            has_rows = dims is not None and (dims.dims[0] is not None or whole.weights[place])
            found.setdefault(id(tensor), dims if has_rows and are_alike else None)
    return tuple(found.values())


def _refuse_batch_statistics(layer: nn.Module) -> None:
    """Raise NoConsistentSplit for layers that mix rows in training only: `_check` may run in evaluation mode."""
    for module in layer.modules():
        if mixes_rows(module) and module.training:
            raise NoConsistentSplit(f"it normalizes over the rows of the batch (a {type(module).__name__})")


def _refuse_kept_state(written: list[tuple[nn.Module, str]]) -> None:
    """Raise NoConsistentSplit for a layer that keeps tensors between calls, as some do for generation."""
    if written:
        names = ", ".join(f"{type(module).__name__}.{name}" for module, name in written)
        raise NoConsistentSplit(f"it keeps tensors of all rows from one call to the next ({names})")


def _not_reading(execute: Execute, has_changed: Callable[[], bool]) -> Execute:
    """`execute`, which raises MixedRows for a layer that reads what it has left in attributes or buffers: another run
    on the same rows gives other bits. `has_changed` tells whether it leaves anything."""

    def run(tensors: Sequence[torch.Tensor]) -> Trial:
        found = execute(tensors)
        if has_changed() and not all(map(torch.equal, found.outputs, execute(tensors).outputs)):
            raise MixedRows("it reads what its calls before have left in its attributes or buffers")
        return found

    return run


@contextmanager
def buffers_kept(modules: list[nn.Module]) -> Iterator[None]:
    """Restore the buffers of `modules` after the block, whether it wrote to them or replaced them."""
    kept = [(m._buffers, n, b, b.clone()) for m in modules for n, b in m._buffers.items() if b is not None]
    try:
        yield
    finally:
        for slots, name, buffer, value in kept:
            slots[name] = buffer
            if not torch.equal(buffer, value):
                buffer.copy_(value)


def close_enough(expected: torch.Tensor, result: torch.Tensor) -> bool:
    """Whether two results of the same computation differ by rounding only, relative to the largest value."""
    if expected.shape != result.shape:
        return False
    if not expected.is_floating_point():
        return torch.equal(expected, result)
    # Half the digits must agree: the order of sums depends on the number of rows, and autocast rounds inside.
    precision = torch.bfloat16 if torch.is_autocast_enabled(expected.device.type) else expected.dtype
    finite = expected.isfinite()
    if not torch.equal(finite, result.isfinite()):
        return False
    expected, result = expected.masked_fill(~finite, 0).double(), result.masked_fill(~finite, 0).double()
    scale = expected.abs().max().item() if expected.numel() else 0.0
    return bool(
        ((expected - result).abs().max().item() if expected.numel() else 0.0) <= scale * _half_digits(precision)
    )


def _half_digits(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps ** 0.5)
