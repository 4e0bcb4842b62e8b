"""What was traced of a model: its pieces, its layer calls, and one forward and backward of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


@dataclass(eq=False)
class Piece:
    """Bytes that a part of the model allocates on the device, and its floating-point operations."""

    forward_peak: int = 0
    """The most at once in the forward, its results included."""
    kept: int = 0
    """Kept for the backward, without results that go to a layer."""
    backward_peak: int = 0
    """The most at once in the backward; what is kept, and gradients of what it got from a layer, are included."""
    forward_flops: int = 0
    backward_flops: int = 0


@dataclass(eq=False)
class TracedLayer(Piece):
    """One kind of layer call; its forward keeps no graph, and its backward begins with the forward in grad mode."""

    graph: int = 0
    """Kept by the graph of its forward in grad mode, its results included."""
    leaves: Sequence[Any] = ()
    """What it is given: a `Given` in the place of each tensor."""
    spec: Any = None
    """The structure of its arguments."""


class Given(NamedTuple):
    """A tensor that a layer is given, without values."""

    shape: torch.Size
    dtype: torch.dtype
    needs_gradient: bool


class Argument(NamedTuple):
    """A tensor argument of a layer call."""

    memory: int
    """Identifies its memory, which layers may share."""
    num_bytes: int
    shape: torch.Size
    needs_gradient: bool
    is_mask: bool
    """Whether it is a dense attention mask."""


@dataclass(eq=False)
class Output:
    """A tensor that a layer call returns."""

    memory: int
    num_bytes: int
    is_new: bool
    """False for an argument that is returned as it is."""
    has_gradient: bool = False
    """Whether a gradient comes to it from what is computed outside the layers."""
    kept: bool = False
    """Whether the graph of what is computed outside the layers keeps it."""


class TracedCall(NamedTuple):
    """A layer call."""

    number: int
    """Of the layer, in the order of the model."""
    layer: TracedLayer
    arguments: list[Argument]
    outputs: list[Output]
    in_graph: bool
    """Whether a backward reaches it: it trains, or something below it does."""


class Arrived(NamedTuple):
    """A gradient of a weight that the first piece reads."""

    numel: int
    num_bytes: int
    is_added: bool
    """Whether it is added to one that has waited (see `Traced.late`)."""


@dataclass(eq=False)
class Traced:
    """One forward and backward of a model."""

    pieces: list[Piece]
    """What is computed before the first layer, between layers, and after the last one, the loss included: one more
    than there are layer calls."""
    calls: list[TracedCall]
    """The layer calls in order; those of one kind have the same `layer`."""
    of_last: int
    """Bytes of the gradients of weights that the last piece alone reads."""
    leaves_last: int
    """Of these, bytes of the one that comes last."""
    late: int
    """Bytes of gradients that wait, from the backward of the last piece on, for those of earlier pieces: of weights
    that both read, as a tied head."""
    first: list[Arrived]
    """Gradients that come in the backward of the first piece, in their order."""
    rows: int
    """Rows of the inputs."""
    inputs: int
    """Bytes of the inputs on the device."""
    kept_inputs: int
    """Bytes of those that the graph keeps."""
    left: int
    """Bytes that earlier pieces still keep when the backward of the last one is over, without arguments of layers."""
    head: int = 0
    """Bytes of the hidden states that the head is given, if it is traced apart."""
    besides: tuple[torch.Size, int] = (torch.Size(), 0)
    """Shape and bytes of the largest rows of a table of embeddings that code of the model still has while layers run,
    beside what it gives to them."""

    @property
    def head_is_done_in_forward(self) -> bool:
        """Whether the forward of a head in chunks computes its gradients, too: the backward has no product of logits,
        and fewer operations."""
        last = self.pieces[-1]
        return last.forward_flops > last.backward_flops


def graph_bytes(whole: Traced, part: Traced, number: int) -> int:
    """Bytes that the graphs of all micro-batches of a layer call keep, of which `part` is one. What has no rows, such
    as weights that autocast has cast, is in each of them."""
    large, small = (each.calls[number].layer.graph for each in (whole, part))
    if part.rows == whole.rows:
        return large
    of_row = (large - small) / (whole.rows - part.rows)
    count = -(-whole.rows // part.rows)
    return round(count * (small - part.rows * of_row) + whole.rows * of_row)


def most_of_last(traced: Traced, *, in_forward: bool) -> int:
    """The most that the last piece holds of its own in its forward, or in its backward: it frees what earlier pieces
    have kept for their forward only."""
    *earlier, last = traced.pieces
    freed = sum(piece.kept for piece in earlier) - traced.left
    return (last.forward_peak if in_forward else last.backward_peak) + freed
