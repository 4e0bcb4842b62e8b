"""The tensors that hooks inside a layer collect in one call, as outputs of the call (see `model.hook_writes`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_l2l.model.batch_dims import BatchDims
from hf_l2l.model.hook_writes import Collected, HookState, HookWrites, as_they_were, key_of
from hf_l2l.model.layer_state import Known


@dataclass
class _Turn:
    """What hooks did in the forward of one ubatch."""

    state: HookState
    """What they found, and have changed."""
    structures: list[Any]
    """Of all that they collected."""
    carried: list[int]
    """Which of it are outputs."""
    is_split: bool
    """Whether the call has several ubatches."""


class CollectedOutputs:
    """Takes what hooks have collected in each ubatch of a call, and delivers it once.

    A tensor that is in several places is one output. It keeps neither tensors nor containers once they are delivered.
    """

    def __init__(self, modules: Sequence[nn.Module], known: Known) -> None:
        """Of a call of the layer with these `modules`; `known` is of the layer, and learns."""
        self._modules, self._known = modules, known
        self.begin()

    def begin(self) -> None:
        """A forward begins."""
        self.dims: list[int | None] = []
        """The batch dimensions of the outputs, of a call that is split."""
        self.have_graph: list[bool] = []
        """Of each output, whether a gradient flows through it."""
        self._turns: list[_Turn] = []
        self._first: list[Collected] = []
        self._numbers: list[list[int]] = []
        """Of each of these, the numbers of the outputs."""

    def forward(self, writes: HookWrites, known: Sequence[BatchDims | None] | None) -> list[torch.Tensor]:
        """The outputs of a ubatch that has run in the forward; what is no output stays as the hooks have written it.

        `known` are the batch dimensions of the tensors that trials have found; None for a call that is not split, of
        which all are outputs.
        """
        found, is_first = writes.collected(), not self._turns
        if known is not None:
            found = with_dimensions(found)
        self._known.collects |= bool(found)
        if is_first:
            carried = _that_fit(found, known)
            self._first = [found[number] for number in carried]
        else:
            carried = [i for i, one in enumerate(found) for first in self._first if _is_same_place(one, first)]
        self._turns.append(_Turn(writes.state(), [each.structure for each in found], carried, known is not None))
        taken = [found[number] for number in carried]
        writes.take_back([each.container for each in taken])
        numbers, tensors = _numbered(taken)
        if is_first:
            self._numbers = numbers
            self.have_graph = [tensor.requires_grad for tensor in tensors]
            of_all = dict(zip(map(id, _numbered(found)[1]), known or (), strict=False))
            dims = [of_all.get(id(tensor)) for tensor in tensors]
            self.dims = [None if each is None else each.dims[0] for each in dims]
            for each in self._first:
                each.tensors = []
        elif numbers != self._numbers:
            return []  # which is told as another number of outputs
        return [self._apart(tensor) for tensor in tensors]

    @contextmanager
    def as_in_forward(self, turn: int) -> Iterator[None]:
        """Inside, ubatch number `turn` is recomputed: hooks of a layer in which some collect find what they found."""
        with as_they_were(self._modules, self._turns[turn].state if self._known.collects else {}):
            yield

    def recompute(self, writes: HookWrites, turn: int) -> list[torch.Tensor]:
        """The outputs of a ubatch that has been recomputed; nothing is left of them where hooks put them. Empty if
        other ones were collected than in the forward."""
        found, then = writes.collected(), self._turns[turn]
        if then.is_split:
            found = with_dimensions(found)
        writes.take_back(None if self._known.collects else [each.container for each in found])
        if [each.structure for each in found] != then.structures:
            return []
        numbers, tensors = _numbered([found[number] for number in then.carried])
        return tensors if numbers == self._numbers else []

    def deliver(self, outputs: Sequence[torch.Tensor]) -> None:
        """Put the outputs, with all rows, where the hooks put them. It does nothing when it is called again: in a
        replay of the call."""
        first, self._first = self._first, []  # the containers will hold the graph of this call
        for each, numbers in zip(first, self._numbers, strict=False):
            each.deliver([outputs[number] for number in numbers])

    def _apart(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or a copy of one that shares memory with weights of the layer: others follow there."""
        return tensor.clone() if shares_memory(tensor, self._modules) else tensor


def with_dimensions(found: Sequence[Collected]) -> list[Collected]:
    """Those that can have rows: others, such as norms, come and go with the logs of a program."""
    return [each for each in found if all(tensor.dim() > 0 for tensor in each.tensors)]


def shares_memory(tensor: torch.Tensor, modules: Iterable[nn.Module]) -> bool:
    """Whether a tensor is in the memory of weights of `modules`."""
    memory = tensor.untyped_storage()._cdata
    weights = (p for module in modules for p in module._parameters.values() if p is not None)
    return any(p.layout is torch.strided and p.untyped_storage()._cdata == memory for p in weights)


def _that_fit(found: Sequence[Collected], known: Sequence[BatchDims | None] | None) -> list[int]:
    """The numbers of those whose tensors are all known to be put together, if as many were found as in trials."""
    numbers, tensors = _numbered(found)
    if known is not None and len(known) != len(tensors):
        return []
    return [i for i, each in enumerate(numbers) if known is None or all(known[n] is not None for n in each)]


def _is_same_place(one: Collected, other: Collected) -> bool:
    return key_of(one.container) == key_of(other.container) and one.structure == other.structure


def _numbered(found: Sequence[Collected]) -> tuple[list[list[int]], list[torch.Tensor]]:
    """The tensors, each once, and for each of `found` which of them it has."""
    tensors: dict[int, torch.Tensor] = {}
    numbers = []
    for each in found:
        for tensor in each.tensors:
            tensors.setdefault(id(tensor), tensor)
        places = {key: number for number, key in enumerate(tensors)}
        numbers.append([places[id(tensor)] for tensor in each.tensors])
    return numbers, list(tensors.values())
