"""What a layer computes with beside its arguments, its weights and torch's generators.

A recompute must find what the forward has found. What can be put back, is: plain attributes of the modules, such as a
mode, a counter or a temperature; hooks; the generators of Python and NumPy, and those of torch that a module has of
its own; and buffers that the layer itself writes to. What cannot is found by `engine.recompute_check`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_l2l.compat import keeps_statistics
from hf_l2l.model.hook_writes import HookWrites
from hf_l2l.model.layer_hooks import LayerHooks, hooks_kept
from hf_l2l.runtime.compute_state import ProgramRng

_OF_MODULES = (frozenset(vars(nn.Module())) | {"_hf_hook", "_old_forward", "forward"}) - {"training"}
"""Attributes that every module has, its tables of parameters, buffers, submodules and hooks, and those through which
calls reach the engine. The mode of a module is like any other attribute."""


@dataclass
class Known:
    """What the forwards of a layer have shown of it, by mode: training (True) or evaluation."""

    draws: dict[bool, bool] = field(default_factory=dict)
    """Whether it draws random numbers that are not of torch's default generators."""
    buffers: dict[bool, list[tuple[nn.Module, str]]] = field(default_factory=dict)
    """The buffers that it writes to."""
    collects: bool = False
    """Whether hooks inside the layer have put tensors into containers: see `hook_writes`."""
    calls: dict[Hashable, int] = field(default_factory=dict)
    """Kind of call -> how many of them have been made for a backward."""


class LayerState:
    """The state of a layer in one forward, for its recompute."""

    def __init__(self, modules: Sequence[nn.Module], known: Known) -> None:
        """Made before the forward; `known` is of the layer, and learns."""
        self._modules, self._known = modules, known
        self._mode = bool(modules) and modules[0].training
        self._attributes = Attributes(modules)
        self._generators = _own_generators(modules) if known.draws.get(self._mode, True) else []
        self._buffers = _Buffers(modules, known.buffers.get(self._mode))
        self._others: list[tuple[nn.Module, str, torch.Tensor, int]] = []
        """The buffers that it has only read, and their versions."""
        self._parts: list[nn.Module | None] = []
        """The submodules of its modules."""
        self._draws: list[Draws | None] = []
        """Of each ubatch, what the generators were before it; None if it has drawn nothing from them."""
        self._hooks = LayerHooks(modules)

    @contextmanager
    def ubatch(self) -> Iterator[None]:
        """Inside, the forward of one ubatch runs."""
        if not self._known.draws.get(self._mode, True):
            with self._hooks.watched():
                yield
            return
        before = Draws.now(self._generators)
        with self._hooks.watched():
            yield
        self._draws.append(before if Draws.now(self._generators).moved_since(before) else None)

    def end_forward(self) -> None:
        """The forward is over: learn what it has drawn and written."""
        self._attributes.let_go_of_tensors()
        self._known.draws.setdefault(self._mode, False)
        self._known.draws[self._mode] |= any(draws is not None for draws in self._draws)
        self._known.buffers[self._mode] = written = self._buffers.keep_written()
        self._parts = self._parts_now()
        self._others = [
            (each, name, buffer, 0 if buffer.is_inference() else buffer._version)
            for each in self._modules
            if each._buffers
            for name, buffer in each._buffers.items()
            if buffer is not None and (each, name) not in written
        ]

    @contextmanager
    def put_back(self, *, collecting: bool = False) -> Iterator[None]:
        """Inside, attributes, buffers and hooks are those of the forward; afterwards, and generators too, those of
        before the block. With `collecting`, all hooks run."""
        with ExitStack() as stack:
            if any(draws is not None for draws in self._draws):
                stack.callback(Draws.now(self._generators).set, self._generators)
            stack.enter_context(self._attributes.put_back())
            stack.enter_context(self._buffers.put_back())
            stack.enter_context(self._others_put_back())
            stack.enter_context(self._hooks.put_back(collecting=collecting))
            yield

    def _parts_now(self) -> list[nn.Module | None]:
        return [part for each in self._modules if each._modules for part in each._modules.values()]

    @contextmanager
    def _others_put_back(self) -> Iterator[None]:
        parts = self._parts_now()
        if [*map(id, parts)] != [*map(id, self._parts)]:
            raise RuntimeError(
                "a layer must have the same submodules in its forward and its backward, which computes it again (some "
                f"of a {type(self._modules[0]).__name__} were replaced in between); replace them after backward()"
            )
        replaced = []
        for module, name, buffer, version in self._others:
            if not buffer.is_inference() and buffer._version != version:
                raise RuntimeError(
                    "a buffer of a layer must not change between its forward and its backward, which computes it "
                    f"again ({type(module).__name__}.{name} was changed in place); change it after backward(), or put "
                    "another tensor in its place"
                )
            if module._buffers.get(name) is not buffer:
                replaced.append((module._buffers, dict(module._buffers), name, buffer))
        try:
            for table, _, name, buffer in replaced:
                table[name] = buffer
            yield
        finally:
            for table, now, name, _ in replaced:
                if name in now:
                    table[name] = now[name]
                else:
                    del table[name]

    def set_generators(self, turn: int) -> None:
        """Set the generators as they were in the forward before ubatch number `turn`, if it drew from them."""
        draws = self._draws[turn] if self._draws else None
        if draws is not None:
            draws.set(self._generators)


class Attributes:
    """The plain attributes of some modules at one moment. Tensors are not among them: see `kept_state`."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._tables = [vars(module) for module in modules]
        self._then = [dict(table) for table in self._tables]

    def let_go_of_tensors(self) -> None:
        """Keep no tensors that have been replaced by now: an attribute may hold the last output."""
        for number in self._differing():
            self._then[number] = _plain(self._then[number])

    def _changed(self) -> list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
        """Tables with other attributes than then; the values of then and those of now."""
        found = []
        for number in self._differing():  # asked first, since mostly nothing has changed
            table = self._tables[number]
            plain, now = _plain(self._then[number]), _plain(table)
            if plain.keys() != now.keys() or any(plain[name] is not now[name] for name in now):
                found.append((table, plain, now))
        return found

    def _differing(self) -> list[int]:
        """The numbers of tables that have not the same objects in the same order as then."""
        return [
            number
            for number, (table, then) in enumerate(zip(self._tables, self._then, strict=True))
            if len(table) != len(then) or not all(map(is_, table.values(), then.values()))
        ]

    def have_changed(self) -> bool:
        """Whether an attribute has another value now."""
        return bool(self._changed())

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Inside, the attributes have the values of then; afterwards those of before the block."""
        changed = self._changed()
        for table, then, _ in changed:
            _set(table, then)
        try:
            yield
        finally:
            for table, _, now in changed:
                _set(table, now)

    def restore(self) -> None:
        """Give the attributes the values of then."""
        for table, then, _ in self._changed():
            _set(table, then)


def _plain(table: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in table.items() if k not in _OF_MODULES and not isinstance(v, torch.Tensor)}


def _set(table: dict[str, Any], values: dict[str, Any]) -> None:
    for name in _plain(table).keys() - values.keys():
        del table[name]
    table.update(values)


@contextmanager
def as_if_not_run(modules: Sequence[nn.Module]) -> Iterator[Callable[[], bool]]:
    """After the block, plain attributes of the modules, their hooks and what these have put into containers, and
    generators of their own, are what they were before. Yields what tells whether attributes or buffers have changed so
    far."""
    attributes, buffers, writes = Attributes(modules), _Buffers(modules, None), HookWrites(modules)
    with own_generators_kept(modules), hooks_kept(modules):
        try:
            yield lambda: attributes.have_changed() or bool(buffers.written())
        finally:
            attributes.restore()
            writes.take_back()


@contextmanager
def own_generators_kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Restore the generators that modules have of their own after the block."""
    states = [(each, each.get_state()) for each in _own_generators(modules)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


class Draws(NamedTuple):
    """The state of generators beside torch's default ones."""

    program: ProgramRng
    """Python's and NumPy's."""
    own: list[torch.Tensor]
    """Of those that modules have of their own."""

    @classmethod
    def now(cls, generators: Sequence[torch.Generator]) -> Draws:
        """The state as it is now."""
        return cls(ProgramRng.now(), [each.get_state() for each in generators])

    def moved_since(self, before: Draws) -> bool:
        """Whether something has been drawn since `before`."""
        pairs = zip(self.own, before.own, strict=True)
        moved = self.program.moved_since(before.program) - {"torch"}
        return bool(moved) or any(not torch.equal(one, two) for one, two in pairs)

    def set(self, generators: Sequence[torch.Generator]) -> None:
        """Set the generators to this state."""
        random.setstate(self.program.python)
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None and self.program.numpy is not None:
            numpy.random.set_state(self.program.numpy)
        for generator, state in zip(generators, self.own, strict=True):
            generator.set_state(state)


def _own_generators(modules: Sequence[nn.Module]) -> list[torch.Generator]:
    found = (value for module in modules for value in vars(module).values() if isinstance(value, torch.Generator))
    return list({id(each): each for each in found}.values())


class _Buffer(NamedTuple):
    """A buffer of a module, and its version and value at one moment."""

    module: nn.Module
    name: str
    buffer: torch.Tensor
    version: int
    value: torch.Tensor


class _Buffers:
    """Values of buffers before a forward."""

    def __init__(self, modules: Sequence[nn.Module], written: list[tuple[nn.Module, str]] | None) -> None:
        """Of those that the layer is known to have `written`; None: of all."""
        if written is None:
            written = [(module, name) for module in modules for name in module._buffers]
        self._values = [
            _Buffer(module, name, buffer, buffer._version, buffer.clone())
            for module, name in written
            if (buffer := module._buffers.get(name)) is not None
        ]

    def written(self) -> list[_Buffer]:
        """Those that have been written to since."""
        return [
            each
            for each in self._values
            if each.module._buffers.get(each.name) is not each.buffer
            or each.buffer._version != each.version
            or (keeps_statistics(each.module) and each.module.training)  # whose kernels do not change versions
        ]

    def keep_written(self) -> list[tuple[nn.Module, str]]:
        """Keep the values of those alone that the forward has written to; returns which they are."""
        self._values = self.written()
        return [(each.module, each.name) for each in self._values]

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Inside, the buffers have these values."""
        now = [(each.module._buffers, each.name, each.module._buffers.get(each.name)) for each in self._values]
        try:
            for each in self._values:
                each.module._buffers[each.name] = each.value
            yield
        finally:
            for table, name, buffer in now:
                table[name] = buffer
