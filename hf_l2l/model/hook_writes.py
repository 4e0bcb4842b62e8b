"""What forward hooks inside a layer collect: tensors that they put into lists, dicts, attributes and other variables.

A hook runs for each ubatch, in trials and in the recompute. What it has put somewhere is taken away after each run;
after the layer call, the outputs of its node are put there once, with their gradients and all rows, as what the layer
writes into containers among its arguments is (see `container_writes`). Found is what the code of a hook names: its
closure, the object that it is a method of, defaults, and global variables. What is not found stays where the hook has
put it, and a backward through it is refused.
"""

from __future__ import annotations

import inspect
import sys
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Hashable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from types import BuiltinMethodType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hf_l2l.compat import with_forward_hooks
from hf_l2l.model.container_writes import Contents, Same, contents_of, difference, put, write_into
from hf_l2l.model.layer_hooks import Watched
from hf_l2l.runtime.tensors import flatten

MOST_ENTRIES, MOST_VALUES, DEEPEST = 1000, 10_000, 8
"""Entries of a list or dict; longer ones are not looked through: a log, or a dataset. Values that are looked at in
all, and how deep one is inside another."""

_LISTS, _DICTS = (list, deque), (dict, OrderedDict, defaultdict, UserDict)
"""Subclasses of these may be written to in ways of their own, and are left out."""

_PLAIN = {int, float, bool, str, type(None), torch.Tensor}

_OTHERS = (sys.stdlib_module_names - {"types", "argparse"}) | {"torch", "transformers", "hf_l2l"}
"""Packages whose objects and functions are not gone through: they collect nothing for a loss, have ways of their own,
or change for other reasons than a hook, as locks and queues do."""

_MISSING: Any = object()
"""Stands for a key that was not there."""


@dataclass(frozen=True)
class Change:
    """What takes back a change of a container. It has neither the container nor what stays in it: these will hold what
    is put there later, the graph of the call that keeps this."""

    entries: dict[Any, Any] | None
    """Of a mapping, the entries that have changed, as they were; `_MISSING` stands for those that were added."""
    start: int = 0
    tail: Sequence[Any] = ()
    """Of a list, the first index that has changed, and what was there and after it."""

    @classmethod
    def of(cls, before: Contents, now: Contents) -> Change:
        """From the contents `before` and `now`, which may have `Same` for what was there."""
        if isinstance(now, dict):
            assert isinstance(before, dict), "the same container as before"
            changed = [key for key, value in now.items() if not (isinstance(value, Same) and value.key == key)]
            gone = before.keys() - now.keys()
            return cls({key: before.get(key, _MISSING) for key in (*changed, *gone)})
        pairs = enumerate(now)
        start = next((i for i, value in pairs if not (isinstance(value, Same) and value.key == i)), len(now))
        return cls(None, start, tuple(before)[start:])

    def undo(self, container: Any) -> None:
        """Take the change back, in a container of the same kind."""
        if self.entries is None and not isinstance(container, MutableMapping):
            put(container, [*contents_of(container)[: self.start], *self.tail])
        elif self.entries is not None and isinstance(container, MutableMapping):
            for key, value in self.entries.items():
                if value is not _MISSING:
                    container[key] = value
                elif key in container:
                    del container[key]


HookState = dict[Hashable, Change]
"""The keys of containers -> how they have changed."""


class Variables(MutableMapping[str, Any]):
    """Some variables of an object or of a Python module."""

    def __init__(self, table: dict[str, Any], names: frozenset[str]) -> None:
        """Those of `table`, which has all of them, that have one of the `names`."""
        self.key = id(table), names
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


class Cells(MutableMapping[str, Any]):
    """The variables of functions around a function (`nonlocal`)."""

    def __init__(self, function: FunctionType) -> None:
        self.key = id(function), "cells"
        self._cells: dict[str, CellType] = dict(
            zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        )

    def __getitem__(self, name: str) -> Any:
        try:
            return self._cells[name].cell_contents
        except ValueError:  # not assigned yet
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        self._cells[name].cell_contents = value

    def __delitem__(self, name: str) -> None:
        del self._cells[name].cell_contents

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._cells if name in self)

    def __contains__(self, name: object) -> bool:
        try:
            self._cells[name].cell_contents  # type: ignore[index]  # noqa: B018
        except (KeyError, ValueError):
            return False
        return True

    def __len__(self) -> int:
        return len(list(iter(self)))


def key_of(container: Any) -> Hashable:
    """What is equal for the same list or dict, and for the same variables of the same object or function."""
    return container.key if isinstance(container, Variables | Cells) else id(container)


@dataclass
class Collected:
    """What hooks have put into one container in one run."""

    container: Any
    leaves: list[Any]
    """The contents, flattened; `Same` stands for what was there, and None for each tensor."""
    spec: pytree.TreeSpec
    positions: list[int]
    """Those of the tensors."""
    tensors: list[torch.Tensor]
    weights: list[bool] = field(default_factory=list)
    """Of a trial: which of them are weights of the layer, or views of these."""

    @classmethod
    def of(cls, container: Any, contents: Contents) -> Collected | None:
        """Of a container that has these contents now; None if no tensors have been put there, or such as cannot be
        put together."""
        try:
            leaves, spec = flatten(contents)
        except RecursionError:  # a container that holds itself
            return None
        positions = [number for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors = [leaves[number] for number in positions]
        if not tensors or any(tensor.layout is not torch.strided for tensor in tensors):
            return None
        static = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return cls(container, static, spec, positions, tensors)

    @property
    def structure(self) -> list[tuple[Any, bool]]:
        """Equal for runs that collect alike: where something has been put, and whether it is a tensor. What was there
        before does not matter, nor its number."""
        is_list = not isinstance(self.container, MutableMapping)
        paths = pytree.tree_flatten_with_path(pytree.tree_unflatten(range(len(self.leaves)), self.spec))[0]
        new = [(path, i) for path, i in paths if not isinstance(self.leaves[i], Same)]
        return [(path[1:] if is_list else path, i in self.positions) for path, i in new]

    @property
    def _new(self) -> list[Any]:
        return [leaf for leaf in self.leaves if not isinstance(leaf, Same)]

    def is_like(self, other: Collected) -> bool:
        """Whether another run has put the same there, tensors apart."""
        try:
            return self.structure == other.structure and bool(self._new == other._new)
        except (RuntimeError, ValueError, TypeError):  # values that cannot be compared, such as arrays
            return False

    def deliver(self, tensors: Sequence[torch.Tensor]) -> None:
        """Put the contents there, with other `tensors`."""
        leaves = list(self.leaves)
        for position, tensor in zip(self.positions, tensors, strict=True):
            leaves[position] = tensor
        write_into(self.container, pytree.tree_unflatten(leaves, self.spec))


class HookWrites:
    """What the hooks inside a layer put into containers in one run of it."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        """Made before the run; `modules` are those of the layer, itself the first, whose own hooks run outside."""
        self.containers = _reached_by_hooks(modules)
        self._before = [contents_of(each) for each in self.containers]

    def changed(self) -> list[tuple[Any, Contents, Contents]]:
        """Containers that have other contents than before, what these were, and what they are. Those are left out into
        which a hook has put a tensor whose own gradient it asks for: the one of the recompute has it."""
        pairs = zip(self.containers, self._before, strict=True)
        found = ((container, before, difference(before, contents_of(container))) for container, before in pairs)
        return [(container, before, now) for container, before, now in found if now is not None and not _retain(now)]

    def collected(self) -> list[Collected]:
        """What has been put into containers with tensors, in a fixed order."""
        found = (Collected.of(container, now) for container, _, now in self.changed())
        return [each for each in found if each is not None]

    def take_back(self, containers: Sequence[Any] | None = None) -> None:
        """Give these containers, by default all, the contents that they had before the run."""
        for container, before, _ in self.changed():
            if containers is None or any(container is each for each in containers):
                put(container, before)

    def state(self) -> HookState:
        """How containers have changed."""
        return {key_of(container): Change.of(before, now) for container, before, now in self.changed()}


def _retain(contents: Contents) -> bool:
    values = contents.values() if isinstance(contents, dict) else contents
    return any(isinstance(value, torch.Tensor) and value.retains_grad for value in values)


@contextmanager
def as_they_were(modules: Sequence[nn.Module], state: HookState) -> Iterator[None]:
    """Inside, what has changed in containers that hooks reach is taken back; afterwards they are as before."""
    now: dict[Hashable, tuple[Any, Contents]] = {}
    missing = dict(state)
    try:
        there: list[Any] = _reached_by_hooks(modules) if missing else []
        while there := [each for each in there if key_of(each) in missing]:
            for each in there:
                now[key_of(each)] = each, contents_of(each)
                missing.pop(key_of(each)).undo(each)
            there = _reached_by_hooks(modules)  # which may be others now
        yield
    finally:
        for each, contents in reversed(now.values()):
            put(each, contents)


def _reached_by_hooks(modules: Sequence[nn.Module]) -> list[Any]:
    with_hooks = with_forward_hooks(modules[1:])
    if not with_hooks:
        return []
    reach = _Reach(modules)
    for module in with_hooks:
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            reach.value(hook.hook if isinstance(hook, Watched) else hook, frozenset(), 0)
    return list(reach.found.values())


class _Reach:
    """Finds the lists, dicts and variables that the code of hooks names."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        """The attributes of `modules` are left out: see `kept_state` and `layer_state`."""
        self.found: dict[Hashable, Any] = {}
        """The key of each container -> the container."""
        self._seen: set[tuple[int, frozenset[str]]] = set()
        self._modules = {id(each) for each in modules}

    def value(self, value: Any, names: frozenset[str], depth: int) -> None:
        """Go through a value that code with these `names` has."""
        key, kind = (id(value), names), type(value)
        if kind in _PLAIN:
            return
        if key in self._seen or id(value) in self._modules or depth > DEEPEST or len(self._seen) > MOST_VALUES:
            return
        self._seen.add(key)
        if kind is partial:
            for each in (value.func, *value.args, *value.keywords.values()):
                self.value(each, names, depth)
        elif kind is MethodType:
            self.value(value.__func__, names, depth)
            if isinstance(value.__func__, FunctionType):
                self.value(value.__self__, _names(value.__func__.__code__), depth)
        elif kind is BuiltinMethodType:  # such as `features.append`
            self.value(value.__self__, names, depth)
        elif kind is FunctionType:
            self._function(value, depth)
        elif kind in _LISTS or kind in _DICTS:
            self._container(value, names, depth)
        elif issubclass(kind, tuple):
            for each in value:
                self.value(each, names, depth + 1)
        elif issubclass(kind, type):
            self._class(value, names, depth)
        elif not issubclass(kind, ModuleType | torch.Tensor):
            self._object(value, names, depth)

    def _function(self, function: FunctionType, depth: int) -> None:
        if _is_of_others(function):
            return
        names = _names(function.__code__)
        self._variables(function.__globals__, names, depth)
        if function.__closure__:
            cells = Cells(function)
            self.found[cells.key] = cells
            for each in cells.values():
                self.value(each, names, depth + 1)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.value(default, names, depth + 1)

    def _container(self, container: Any, names: frozenset[str], depth: int) -> None:
        if len(container) > MOST_ENTRIES:
            return
        self.found[id(container)] = container
        for each in list(container.values() if type(container) in _DICTS else container):
            self.value(each, names, depth + 1)

    def _object(self, value: Any, names: frozenset[str], depth: int) -> None:
        kind = type(value)
        if _is_of_others(kind):
            return
        table = vars(value) if hasattr(kind, "__dictoffset__") and kind.__dictoffset__ else None
        if isinstance(table, dict):
            self._variables(table, names, depth)
        calls = {"__call__", "forward"} if issubclass(kind, nn.Module) else {"__call__"}
        for method in self._class(kind, names | calls, depth):
            self.value(value, _names(method.__code__), depth + 1)

    def _class(self, kind: type, names: frozenset[str], depth: int) -> list[FunctionType]:
        """Go through what code with these `names` has of a class, and of those above it; returns the methods."""
        tables = [vars(base) for base in inspect.getmro(kind) if not _is_of_others(base)]
        found = [table[name] for table in tables for name in sorted(names & table.keys())]
        found = [each.fget if isinstance(each, property) else each for each in found]
        methods = [each for each in found if isinstance(each, FunctionType)]
        for method in methods:
            self._function(method, depth + 1)
        for each in found:
            if type(each) in _LISTS or type(each) in _DICTS:
                self._container(each, names, depth + 1)
        return methods

    def _variables(self, table: dict[str, Any], names: frozenset[str], depth: int) -> None:
        variables = Variables(table, names)
        self.found[variables.key] = variables
        for name in sorted(names & table.keys()):
            self.value(table[name], names, depth + 1)


def _is_of_others(kind: Any) -> bool:
    return str(getattr(kind, "__module__", "")).partition(".")[0] in _OTHERS


@cache
def _names(code: CodeType) -> frozenset[str]:
    """The attributes and global variables that code names, with the functions inside of it."""
    inner = (_names(each) for each in code.co_consts if isinstance(each, CodeType))
    return frozenset(code.co_names).union(*inner)
