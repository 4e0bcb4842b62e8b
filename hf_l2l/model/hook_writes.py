"""What forward hooks inside a layer collect: tensors that they put into lists, dicts, attributes and globals.

A hook runs for each ubatch, in trials and in the recompute. What it has put somewhere is taken away after each run;
after the layer call, the outputs of its node are put there once, with their gradients and all rows, as what the layer
writes into containers among its arguments is (see `container_writes`). Found is what the code of a hook names: its
closure, the object that it is a method of, defaults, and global variables.
"""

from __future__ import annotations

import inspect
from collections import UserDict, deque
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hf_l2l.compat import has_forward_hooks
from hf_l2l.model.container_writes import Contents, Same, contents_of, difference, put, write_into
from hf_l2l.model.layer_hooks import Watched
from hf_l2l.runtime.tensors import flatten

HookState = list[tuple[Any, Contents]]
"""Containers, and what was in them at one moment."""

MOST_ENTRIES = 1000
"""Of a list or dict; longer ones are not looked through: a log, or a dataset."""

_OTHERS = ("torch", "transformers", "hf_l2l")
"""Packages whose hooks and functions collect nothing for a loss, or have ways of their own."""


class Variables(MutableMapping[str, Any]):
    """Some variables of an object or of a Python module."""

    def __init__(self, table: dict[str, Any], names: frozenset[str]) -> None:
        """Those of `table`, which has all of them, that have one of the `names`."""
        self._table, self._names = table, names

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        return self._table[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._table[name] = value

    def __delitem__(self, name: str) -> None:
        del self._table[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if name in self._table)

    def __len__(self) -> int:
        return sum(name in self._table for name in self._names)


@dataclass
class Collected:
    """What hooks have put into one container in one run."""

    container: Any
    leaves: list[Any]
    """The contents, flattened; `Same` stands for what was there, and None for each tensor."""
    spec: pytree.TreeSpec
    positions: list[int]
    """Those of the tensors."""
    tensors: Sequence[torch.Tensor]
    only_tensors: bool
    """Whether nothing else has been put there."""

    @classmethod
    def of(cls, container: Any, contents: Contents) -> Collected:
        """Of a container that has these contents now."""
        leaves, spec = flatten(contents)
        positions = [number for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        only = all(leaf is None or isinstance(leaf, torch.Tensor | Same) for leaf in leaves)
        tensors = [leaves[number] for number in positions]
        static = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return cls(container, static, spec, positions, tensors, only)

    def deliver(self, tensors: Sequence[torch.Tensor]) -> None:
        """Put the contents there, with other `tensors`."""
        leaves = list(self.leaves)
        for position, tensor in zip(self.positions, tensors, strict=True):
            leaves[position] = tensor
        write_into(self.container, pytree.tree_unflatten(leaves, self.spec))


@contextmanager
def as_they_were(state: HookState) -> Iterator[None]:
    """Inside, containers have the contents of `state`; afterwards those of before the block."""
    now = [(container, contents_of(container)) for container, _ in state]
    try:
        for container, contents in state:
            put(container, contents)
        yield
    finally:
        for container, contents in now:
            put(container, contents)


class HookWrites:
    """What the hooks inside a layer put into containers in one run of it."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        """Made before the run; `modules` are those of the layer, itself the first, whose own hooks run outside."""
        self._containers = _reached_by_hooks(modules)
        self._before = [contents_of(each) for each in self._containers]

    def collected(self) -> list[Collected]:
        """Those containers into which tensors have been put, in a fixed order."""
        found = [Collected.of(container, now) for container, _, now in self._changed()]
        return [each for each in found if each.tensors]

    def take_back(self, containers: Sequence[Any] | None = None) -> HookState:
        """Give these containers, by default all, the contents that they had before the run. Returns which others have
        changed, and what was in them."""
        others = []
        for container, before, _ in self._changed():
            if containers is None or any(container is each for each in containers):
                put(container, before)
            else:
                others.append((container, before))
        return others

    def _changed(self) -> list[tuple[Any, Contents, Contents]]:
        pairs = zip(self._containers, self._before, strict=True)
        found = ((container, before, difference(before, contents_of(container))) for container, before in pairs)
        return [(container, before, now) for container, before, now in found if now is not None]


def _reached_by_hooks(modules: Sequence[nn.Module]) -> list[Any]:
    with_hooks = [each for each in modules[1:] if has_forward_hooks(each)]
    if not with_hooks:
        return []
    reach = _Reach(modules)
    for module in with_hooks:
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            reach.hook(hook.hook if isinstance(hook, Watched) else hook)
    return reach.found


class _Reach:
    """Finds the lists, dicts and variables that the code of hooks names."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        """The attributes of `modules` are left out: see `kept_state` and `layer_state`."""
        self.found: list[Any] = []
        self._modules = {id(each) for each in modules}
        self._seen: set[tuple[int, frozenset[str]]] = set()

    def hook(self, hook: Any) -> None:
        self._value(hook, frozenset())

    def _value(self, value: Any, names: frozenset[str]) -> None:
        """Go through a value that code with these `names` has."""
        key = id(value), names
        if key in self._seen or id(value) in self._modules:
            return
        self._seen.add(key)
        if isinstance(value, partial):
            for each in (value.func, *value.args, *value.keywords.values()):
                self._value(each, names)
        elif isinstance(value, MethodType):
            self._value(value.__func__, names)
            if isinstance(value.__func__, FunctionType):
                self._value(value.__self__, _names(value.__func__.__code__))
        elif isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, list | deque | dict | UserDict):
            self._container(value, names)
        elif isinstance(value, tuple):
            for each in value:
                self._value(each, names)
        elif isinstance(value, type):
            self._class(value, names)
        elif not isinstance(value, ModuleType | torch.Tensor):
            self._object(value, names)

    def _function(self, function: FunctionType) -> None:
        if _is_of_others(function):
            return
        names = _names(function.__code__)
        self._variables(function.__globals__, names)
        for cell in function.__closure__ or ():
            try:
                inner = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            self._value(inner, names)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._value(default, names)

    def _container(self, container: Any, names: frozenset[str]) -> None:
        if len(container) > MOST_ENTRIES:
            return
        if not any(container is each for each in self.found):
            self.found.append(container)
        for each in container.values() if isinstance(container, dict | UserDict) else container:
            self._value(each, names)

    def _object(self, value: Any, names: frozenset[str]) -> None:
        if _is_of_others(type(value)) and not isinstance(value, nn.Module):
            return
        table = getattr(value, "__dict__", None)
        if isinstance(table, dict):
            self._variables(table, names)
        for method in self._class(type(value), names | {"__call__"}):
            self._value(value, _names(method.__code__))

    def _class(self, kind: type, names: frozenset[str]) -> list[FunctionType]:
        """Go through what code with these `names` has of a class; returns the methods."""
        found = [inspect.getattr_static(kind, name, None) for name in sorted(names)]
        methods = [each for each in found if isinstance(each, FunctionType) and not _is_of_others(each)]
        for method in methods:
            self._function(method)
        for each in found:
            if isinstance(each, list | deque | dict | UserDict):
                self._container(each, names)
        return methods

    def _variables(self, table: dict[str, Any], names: frozenset[str]) -> None:
        self.found.append(Variables(table, names))
        for name in sorted(names):
            if name in table:
                self._value(table[name], names)


def _is_of_others(kind: Any) -> bool:
    return str(getattr(kind, "__module__", "")).partition(".")[0] in _OTHERS


@cache
def _names(code: CodeType) -> frozenset[str]:
    """The attributes and global variables that code names, with the functions inside of it."""
    inner = (_names(each) for each in code.co_consts if isinstance(each, CodeType))
    return frozenset(code.co_names).union(*inner)
