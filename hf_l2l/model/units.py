"""Units: the modules whose weights travel together, and what is known of them once and for all.

A layer is a unit, and so are the non-layer modules (the shell) below the module that a program calls. What every call
needs to know of a unit is found when the unit is made; `is_current` tells cheaply whether that still holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate, chain, pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_l2l.compat import tables_of, without_interception
from hf_l2l.model.kept_state import Kept
from hf_l2l.model.layer_state import Known
from hf_l2l.model.precision import Precision
from hf_l2l.runtime.flat_memory import Layout
from hf_l2l.runtime.tensors import is_quantized, on_meta

PARAMETRIZING = ("ParamWrapper",)
"""Modules that register parametrizations of a weight during their forward: PEFT's adapters of experts."""

LARGE = 2**20
"""Elements of a parameter from which on it is updated and uploaded by itself, if it is in no layer."""
_ALIGNED = 2**17
_MOST_PIECES = 64


def pieces_of(count: int) -> list[int]:
    """The ends of the pieces in which so many elements of a parameter in no layer are downloaded, updated and
    uploaded, so that these overlap: at most 64, of `LARGE` elements or more. They begin where an update may be cut."""
    size = max(LARGE, -(-count // (_MOST_PIECES * _ALIGNED)) * _ALIGNED)
    return [*range(size, count, size), count]


class ParameterPlace(NamedTuple):
    """Where a module keeps one parameter: under `name` in its table of parameters."""

    table: dict[str, Any]
    name: str
    number: int
    """Of the parameter, in the unit."""


class InModel(NamedTuple):
    """What a parameter is in a model."""

    name: str
    place: int
    """In the order of the model's parameters, from 0."""
    layer_number: int
    """From 1, in the order of the layers; 0 for one in no layer. Tied: the first one."""
    layers_before: int
    """The highest number of a layer of parameters up to this one."""


def parameters_in(model: nn.Module, layers: Iterable[nn.Module]) -> dict[torch.Tensor, InModel]:
    """The parameters of a model, in their order."""
    numbers: dict[torch.Tensor, int] = {}
    for number, layer in enumerate(layers, start=1):
        for p in layer.parameters():
            numbers.setdefault(p, number)  # a tied parameter belongs to its first layer
    found: dict[torch.Tensor, InModel] = {}
    highest = 0
    for place, (name, p) in enumerate(model.named_parameters()):
        number = numbers.get(p, 0)
        highest = max(highest, number)
        found[p] = InModel(name, place, number, highest)
    return found


class LayerUnit:
    """One layer, or the non-layer modules that one call uses."""

    def __init__(self, module: nn.Module, modules: Iterable[nn.Module], name: str, precision: Precision) -> None:
        """Of these `modules`, of which `module` is called; `name` is what errors and traces call the unit."""
        self.module = module
        self.name = name
        self.modules = list(modules)
        self.classes = tuple([type(each) for each in self.modules])
        self.parameters: list[nn.Parameter] = []
        """Each once, in the order of `nn.Module.parameters`."""
        self.places: list[ParameterPlace] = []
        """Of all parameters; a tied one has several."""
        numbers: dict[nn.Parameter, int] = {}
        for each in self.modules:
            for name, parameter in each._parameters.items():
                if parameter is not None:
                    number = numbers.setdefault(parameter, len(numbers))
                    self.places.append(ParameterPlace(each._parameters, name, number))
        self.parameters.extend(numbers)
        self.has_quantized = any(map(is_quantized, numbers))
        """Whether a parameter of it consists of several tensors."""
        self.with_buffers = [each for each in self.modules if each._buffers]
        self.parametrizes = any(kind.__name__ in PARAMETRIZING for kind in self.classes)
        """Whether it registers parametrizations during its forward, which sets a weight to itself."""
        self.keeps = Kept()
        self.known = Known()
        self.drawing_modes: set[bool] = set()
        """The values of `module.training` with which it has been seen to draw random numbers."""
        with without_interception():
            travel = [precision.of_parts(p) for p in self.parameters]
            self.parts = [part for parts in travel for part, _ in parts]
            """What travels to the device, with the parameters in their order: each is one part, except quantized ones,
            which are several tensors (see `parts_of`). Writes to them are seen by their versions; a quantized weight
            that is given other tensors has to be another parameter."""
            self.owners = [number for number, parts in enumerate(travel) for _ in parts]
            """The number of the parameter of each part."""
            ends = [0, *accumulate(map(len, travel))]
            self.part_numbers = [range(start, stop) for start, stop in pairwise(ends)]
            """The numbers of the parts of each parameter."""
            self.dtypes = [dtype for parts in travel for _, dtype in parts]
            """In which each part travels."""
            self.likes = [
                part if dtype == part.dtype else on_meta(part, dtype)
                for part, dtype in zip(self.parts, self.dtypes, strict=True)
            ]
            """Tensors with dtype, shape and strides of what travels; their values are not read."""
            self._kinds = _kinds(self.parameters)
            self._strided = [p for p in self.parameters if p.layout is torch.strided]
            self._strides = [*map(torch.Tensor.stride, self._strided)]
            self.trained = [number for number, p in enumerate(self.parameters) if p.requires_grad]
            """The numbers of the parameters that require a gradient."""
        self.layout = Layout(self.likes)
        """Of what travels, in one piece of memory."""
        self.gradient_layout = Layout(self.parameters[number] for number in self.trained)
        """Of the gradient sums of the trained parameters."""
        self._tables = [table for each in self.modules for table in tables_of(each)]
        self._members = [*_members(self._tables)]
        """The parameters and submodules in these tables; held, so that no other object gets the identity of one."""
        self._identities = [*map(id, self._members)]
        self._lengths = [*map(len, self._tables)]
        self._buffer_counts = [len(each._buffers) for each in self.modules]

    @property
    def is_trained(self) -> bool:
        """Whether a parameter of it requires a gradient."""
        return bool(self.trained)

    def has_its_parameters(self) -> bool:
        """Whether the module of a layer still has the parameters that it had, wherever in it and in any order."""
        if self._has_its_tables():
            return True
        return {*map(id, self.module.parameters())} == {*map(id, self.parameters)}

    def _has_its_tables(self) -> bool:
        tables = self._tables
        return [*map(len, tables)] == self._lengths and [*map(id, _members(tables))] == self._identities

    def is_current(self) -> bool:
        """Whether all that is known of the unit still holds: its parameters, submodules and number of buffers, and
        the shapes, dtypes and `requires_grad` of the parameters."""
        with without_interception():
            return (
                self._has_its_tables()
                and _kinds(self.parameters) == self._kinds
                and [*map(torch.Tensor.stride, self._strided)] == self._strides
                and [len(each._buffers) for each in self.modules] == self._buffer_counts
            )

    def versions(self) -> list[int]:
        """The version of each part now, whatever is pending for it."""
        with without_interception():
            return [part._version for part in self.parts]


def _members(tables: list[Mapping[str, Any]]) -> Iterable[Any]:
    return chain.from_iterable([table.values() for table in tables])


def _kinds(parameters: Iterable[torch.Tensor]) -> list[tuple[Any, ...]]:
    """Shape, dtype, layout and `requires_grad` of each."""
    return [*map(_kind, parameters)]


_kind = attrgetter("shape", "dtype", "layout", "requires_grad")
