"""Batch dimensions of a layer's arguments.

They are found by doubling the batch and checking which sizes double, never by comparing sizes with the batch size:
DeBERTa-v2's relative embeddings may have as many rows as the batch, and must not be split.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hf_l2l.model.caches import map_cache
from hf_l2l.model.units import LayerUnit
from hf_l2l.runtime.tensors import have_cache, is_cache, is_opaque, leaves_of, map_tensors, narrow


def cannot_split(leaves: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """The reason why arguments with these leaves cannot be split into ubatches, or None if they can be."""
    packed = next((name for name, value in kwargs.items() if value is not None and name.startswith("cu_seq")), None)
    if packed is not None:
        return f"it is given sequences packed into one ({packed})"
    if have_cache(leaves):
        return "it is given a key-value cache"
    for leaf in leaves:
        if is_opaque(leaf):
            return f"it is given a {type(leaf).__name__}, whose rows are unknown"
    return None


@dataclass(frozen=True)
class BatchDims:
    """The batch dimension of each tensor (None: the tensor is shared by all rows).

    A dimension may hold several entries per row, as in flattened (rows x tokens) inputs; entries of one row are
    adjacent.
    """

    dims: tuple[int | None, ...]

    def rows_of(self, tensors: Sequence[torch.Tensor], rows: int, start: int, stop: int) -> list[torch.Tensor]:
        """Views of rows `start` to `stop` of tensors with `rows` rows; tensors without rows are returned whole."""
        return [narrow(t, d, rows, start, stop) for t, d in zip(tensors, self.dims, strict=True)]

    def fits(self, tensors: Sequence[torch.Tensor], rows: int) -> bool:
        """Whether every batch dimension holds a whole number of entries per row."""
        return all(d is None or t.shape[d] % rows == 0 for t, d in zip(tensors, self.dims, strict=True))


Ubatch = tuple[int, int]
"""The rows (start, stop) of one micro-batch."""


def ubatches(rows: int, ubatch_size: int) -> list[Ubatch]:
    """The row ranges of the inner loop; the last one may be shorter."""
    return [(start, min(start + ubatch_size, rows)) for start in range(0, rows, ubatch_size)]


def even_ubatches(rows: int, parts: int) -> list[Ubatch]:
    """The row ranges of so many parts, or of one for each row if there are fewer. The first ones may have one row
    more: what is made for the first ubatch is large enough for all."""
    count = min(parts, rows)
    size, more = divmod(rows, count) if count else (0, 0)
    stops = accumulate((size + (number < more) for number in range(count)), initial=0)
    return list(pairwise(stops))


class NotCut(RuntimeError):
    """Batches were merged whose rows cannot be computed apart; the text gives the reason. Nothing has been trained."""


class RowCuts:
    """Where the rows of a model's batch are cut into ubatches: after every `size` rows, and, if it was merged of
    several batches, between those."""

    def __init__(self, size: int | None, parts: int = 1) -> None:
        """Without a `size`, a batch is cut into so many `parts`, or into its rows if these are fewer."""
        self.size = size
        self.parts = parts
        self.merged: tuple[int, ...] = ()
        """The rows of each batch that was merged; none if the batch is one."""

    @staticmethod
    def parts_for(devices: int) -> int:
        """The ubatches of a batch for so many devices, if nobody says how large they are: two for each of several,
        since with one they would take turns."""
        return 2 * devices if devices > 1 else 1

    @staticmethod
    def parts_of_each(parts: int, batches: int) -> int:
        """Of so many merged batches, each is cut into as many parts."""
        return -(-parts // batches)

    @contextmanager
    def between(self, rows: Sequence[int]) -> Iterator[None]:
        """Inside, the model's batch is merged of batches with so many rows each; without any, of a single one.

        A call whose rows are others, or that cannot be cut, raises NotCut.
        """
        before, self.merged = self.merged, tuple(rows)
        try:
            yield
        finally:
            self.merged = before

    def of(self, rows: int) -> list[Ubatch]:
        """The row ranges of the inner loop; one if all rows run at once.

        Raises:
            NotCut: if the batch was merged, and has another number of rows.
        """
        if self.merged and sum(self.merged) != rows:
            raise NotCut(f"a part of the model is called with {rows} rows for a batch of {sum(self.merged)}")
        batches = self.merged or (rows,)
        parts = self.parts_of_each(self.parts, len(batches))
        starts = accumulate(batches, initial=0)
        return [
            (start + a, start + b)
            for start, count in zip(starts, batches, strict=False)
            for a, b in (ubatches(count, self.size) if self.size else even_ubatches(count, parts))
        ]


@dataclass(frozen=True)
class Split:
    """How the tensors of a layer call are cut into ubatches, and its outputs joined."""

    rows: int
    ubatches: list[Ubatch]
    inputs: BatchDims
    outputs: BatchDims
    collected: tuple[BatchDims | None, ...] = ()
    """Of each tensor that hooks inside the layer collect; None for one that is not put together."""

    def input_rows(self, tensors: Sequence[torch.Tensor], ubatch: Ubatch) -> list[torch.Tensor]:
        """Views of the rows `ubatch` of the tensor arguments; those without rows as they are."""
        return self.inputs.rows_of(tensors, self.rows, *ubatch)

    def rows_of_input(self, tensor: torch.Tensor, number: int, ubatch: Ubatch) -> torch.Tensor:
        """A view of the rows `ubatch` of something like tensor argument `number`."""
        return narrow(tensor, self.inputs.dims[number], self.rows, *ubatch)

    def gradient_rows(self, gradient: torch.Tensor, number: int, ubatch: Ubatch) -> torch.Tensor | None:
        """The rows `ubatch` of the gradient of output `number`. One without rows was taken from the first ubatch,
        which gets its whole gradient; None for the others."""
        dim = self.outputs.dims[number]
        if dim is None:
            return gradient if ubatch[0] == 0 else None
        return narrow(gradient, dim, self.rows, *ubatch)

    def rows_of_output(self, tensor: torch.Tensor, number: int, ubatch: Ubatch) -> torch.Tensor:
        """A view of the rows `ubatch` of something like output number `number`, one with rows."""
        return narrow(tensor, self.outputs.dims[number], self.rows, *ubatch)

    def all_rows(self, out: torch.Tensor, number: int, ubatch: Ubatch) -> list[int]:
        """The shape with all rows of output number `number`, one with rows, of which `out` is that of one ubatch."""
        shape, dim = list(out.shape), self.outputs.dims[number]
        assert dim is not None
        shape[dim] = shape[dim] // (ubatch[1] - ubatch[0]) * self.rows
        return shape


class NoConsistentSplit(Exception):
    """The batch dimensions were not found; the text gives the reason."""


class MixedRows(NoConsistentSplit):
    """Ubatches give other results than the whole batch."""


def compare_shapes(shapes: Sequence[torch.Size], other: Sequence[torch.Size], rows: int, other_rows: int) -> BatchDims:
    """The batch dimensions, from the shapes of tensors with `rows` rows and with `other_rows` rows.

    Raises:
        NoConsistentSplit: if a size is not proportional to the rows, or two sizes of one tensor changed.
    """
    if len(shapes) != len(other):
        raise NoConsistentSplit(f"{len(shapes)} tensors for {rows} rows and {len(other)} for {other_rows}")
    dims: list[int | None] = []
    for shape, other_shape in zip(shapes, other, strict=True):
        changed = [d for d, (a, b) in enumerate(zip(shape, other_shape, strict=False)) if a != b]
        if len(shape) != len(other_shape) or len(changed) > 1:
            raise NoConsistentSplit(
                f"a tensor is {list(shape)} for {rows} rows and {list(other_shape)} for {other_rows}"
            )
        dim = changed[0] if changed else None
        if dim is not None and (shape[dim] * other_rows != other_shape[dim] * rows or shape[dim] % rows):
            raise NoConsistentSplit(
                f"a tensor is {list(shape)} for {rows} rows and {list(other_shape)} for {other_rows}"
            )
        dims.append(dim)
    return BatchDims(tuple(dims))


def batch_rows(args: tuple[tuple[Any, ...], dict[str, Any]]) -> int | None:
    """The number of rows in a model's inputs: the most common size of the first dimension of its tensors.

    Among equally common sizes it is the largest: position ids may have one row for all. Tensors inside containers
    count only if no argument is a tensor: labels of object detection are a dict per row, with a tensor per object.
    """
    positional, by_name = args
    own = [value for value in (*positional, *by_name.values()) if isinstance(value, torch.Tensor) and value.dim() > 0]
    found = own or [leaf for leaf in leaves_of(args) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
    sizes = Counter(tensor.shape[0] for tensor in found)
    return max(sizes, key=lambda size: (sizes[size], size), default=None)


def doubled(args: Any, rows: int, *, anywhere: bool = False) -> Any:
    """The inputs `args` with the batch concatenated with itself, also lists with a number or text for each row; caches
    with content are copied.

    With `anywhere`, the only dimension of that size counts as the batch of a tensor whose first one has another size.
    """

    def of_tensor(tensor: torch.Tensor) -> torch.Tensor:
        dims = [dim for dim, size in enumerate(tensor.shape) if size == rows]
        if dims and (dims[0] == 0 or (anywhere and len(dims) == 1)):
            return torch.cat([tensor, tensor], dims[0])
        return tensor

    def of_rows(value: Any) -> bool:
        kinds = int | float | str
        return type(value) is list and len(value) == rows and all(isinstance(each, kinds) for each in value)

    def of_leaf(leaf: Any) -> Any:
        if of_rows(leaf):
            return leaf * 2
        return map_cache(of_tensor, leaf) if is_cache(leaf) else leaf

    without_tensors = pytree.tree_map(of_leaf, args, is_leaf=lambda value: is_cache(value) or of_rows(value))
    return map_tensors(of_tensor, without_tensors)


def call_key(unit: LayerUnit, spec: pytree.TreeSpec, leaves: Sequence[Any], rows: int) -> tuple[object, ...]:
    """A key that is equal for layer calls that split alike.

    It consists of the classes of the layer and of all modules in it (other outputs are captured of dense layers than
    of layers with experts), the structure of the arguments (including which are None), and per tensor its rank, dtype
    and which sizes are one or equal to the rows, so that a tensor that gains rows is not mistaken for a shared one.
    """

    def kind(leaf: Any) -> object:
        if isinstance(leaf, torch.Tensor):
            return leaf.dtype, tuple([(size == 1, size == rows) for size in leaf.shape])
        # Numbers may differ between calls; flags and strings decide what is computed.
        return (type(leaf), leaf) if isinstance(leaf, bool | str) else type(leaf)

    return unit.classes, unit.module.training, spec, tuple([kind(leaf) for leaf in leaves])
