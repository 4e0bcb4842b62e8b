"""Tensors that a layer keeps from one call to the next, in attributes of its modules.

A recompute would read what the forward has left there, and a micro-batch what the one before it has left. No gradient
flows through them, either. So a layer that reads such tensors cannot train layer to layer; one that only writes them
finds, in each run, what was there before.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that every module has: its tables of parameters, buffers, submodules and hooks."""

_CONTAINERS = (list, tuple, set, Mapping)


class KeptState:
    """What the attributes of some modules hold at one moment."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._values = [_attributes(module) for module in self._modules]
        containers = [v for each in self._values for v in each.values() if isinstance(v, dict | list)]
        self._contents = [(container, copy.copy(container)) for container in containers]
        self._tensors = [{name: _tensors(value) for name, value in each.items()} for each in self._values]

    def changed(self) -> list[tuple[nn.Module, str]]:
        """The attributes that hold other tensors now, or tensors that have been written to."""
        found = []
        for module, before in zip(self._modules, self._tensors, strict=True):
            now = {name: _tensors(value) for name, value in _attributes(module).items()}
            names = [n for n in {**before, **now} if not _same(before.get(n, []), now.get(n, []))]
            found += [(module, name) for name in names]
        return found

    def put_back(self, besides: Iterable[tuple[nn.Module, str]] = ()) -> None:
        """Give the attributes the values that they had, all `besides` these."""
        kept = set(besides)
        for module, before in zip(self._modules, self._values, strict=True):
            for name in _attributes(module).keys() - before.keys():
                delattr(module, name)
            for name, value in before.items():
                if (module, name) not in kept:
                    vars(module)[name] = value
        for container, contents in self._contents:
            if isinstance(container, dict):
                container.clear()
                container.update(contents)
            else:
                container[:] = contents


@contextmanager
def kept_as_it_was(places: Iterable[tuple[nn.Module, str]]) -> Iterator[None]:
    """Give these attributes their values back after the block; one that was not there is removed."""
    places = list(places)
    before = [vars(module).get(name, _MISSING) for module, name in places]
    try:
        yield
    finally:
        for (module, name), value in zip(places, before, strict=True):
            if value is _MISSING:
                vars(module).pop(name, None)
            else:
                vars(module)[name] = value


_MISSING = object()


def is_in_container(module: nn.Module, name: str) -> bool:
    """Whether the attribute is a container, which other layers may have, too."""
    return isinstance(vars(module).get(name), _CONTAINERS)


def _attributes(module: nn.Module) -> dict[str, Any]:
    kinds = (torch.Tensor, type(None), *_CONTAINERS)
    return {k: v for k, v in vars(module).items() if k not in _OF_MODULES and isinstance(v, kinds)}


def _tensors(value: Any) -> list[tuple[torch.Tensor, int]]:
    """The tensors in an attribute, itself or a container of tensors, with their versions."""
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, _CONTAINERS) else [value]
    return [(t, 0 if t.is_inference() else t._version) for t in inside if isinstance(t, torch.Tensor)]


def _same(one: list[tuple[torch.Tensor, int]], two: list[tuple[torch.Tensor, int]]) -> bool:
    return len(one) == len(two) and all(a is b and v == w for (a, v), (b, w) in zip(one, two, strict=True))
