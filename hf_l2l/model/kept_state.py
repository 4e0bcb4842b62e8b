"""Tensors that a layer keeps from one call to the next, in attributes of its modules.

A recompute would read what the forward has left there, and a micro-batch what the one before it has left. So a layer
that reads such tensors cannot train layer to layer, nor one that keeps them where another layer could read them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hf_l2l.compat import is_view_of_leaf
from hf_l2l.runtime.tensors import tensors_within

STARTED_ANEW = {"RecurrentGemmaRglru": ("recurrent_states",)}
"""Class -> attributes that it writes in every call, and reads in generation alone; elsewhere they are multiplied by
zero. They have their values back after a forward that trains: the next batch may have other rows."""

_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that every module has: its tables of parameters, buffers, submodules and hooks."""

Place = tuple[nn.Module, str]


ATTACHMENT = "_l2l"
"""The attribute of an attached model that holds what it is attached to."""


@dataclass
class Kept:
    """Which attributes of a layer its forward writes tensors to."""

    places: list[Place] | None = None
    """Those of its first forward that trains; None before that."""
    started_anew: list[Place] = field(default_factory=list)
    """Those that have their values back after each run."""
    written: list[Place] = field(default_factory=list)
    """Those of its last trial."""


class KeptState:
    """What the attributes of some modules hold at one moment."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._values = {module: _attributes(module) for module in modules}
        held = [value for values in self._values.values() for value in values.values()]
        self._contents = {id(each): copy.copy(each) for each in held if isinstance(each, list | dict)}
        self._tensors = {
            (module, name): _tensors(value)
            for module, values in self._values.items()
            for name, value in values.items()
            if not _holds_weights(value)
        }

    def changed(self) -> list[Place]:
        """The attributes that hold other tensors now, or tensors that have been written to."""
        now = KeptState(self._values)._tensors
        places = dict.fromkeys([*self._tensors, *now])
        return [place for place in places if not _same(self._tensors.get(place, []), now.get(place, []))]

    def from_outside(self) -> list[Place]:
        """The attributes with tensors of a graph that the modules have not made themselves. (Views of weights, and
        weights that a hook of torch computes anew, are theirs.)"""
        return [
            place
            for place, tensors in self._tensors.items()
            if any(t.grad_fn is not None and not is_view_of_leaf(t) for t, _ in tensors)
            and not is_made_before_each_use(*place)
        ]

    def put_back(self, places: Iterable[Place]) -> None:
        """Give these attributes the values that they had, lists and dicts their contents. An object stays as it is."""
        for module, name in places:
            if name not in self._values[module]:
                vars(module).pop(name, None)
                continue
            value = vars(module)[name] = self._values[module][name]
            contents = self._contents.get(id(value))
            if isinstance(value, list) and contents is not None:
                value[:] = contents
            elif isinstance(value, dict) and contents is not None:
                value.clear()
                value.update(contents)


def known_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers of a model, and the ordinary tensors that its modules have in attributes, as views of
    weights may be."""
    attributes = [each for module in model.modules() for each in tensors_within(_attributes(module))]
    return [*model.parameters(), *model.buffers(), *(each for each in attributes if type(each) is torch.Tensor)]


def is_tensor(place: Place) -> bool:
    """Whether the attribute is a tensor, and no object or container, which other layers may have, too."""
    module, name = place
    return isinstance(vars(module).get(name), torch.Tensor)


def is_started_anew(place: Place) -> bool:
    """Whether the attribute is one of `STARTED_ANEW`."""
    module, name = place
    return name in STARTED_ANEW.get(type(module).__name__, ())


def is_made_before_each_use(module: nn.Module, name: str) -> bool:
    """Whether a hook of `torch.nn.utils` computes the attribute before each forward of the module: a weight that is
    normalized or pruned."""
    hooks = [h for h in module._forward_pre_hooks.values() if type(h).__module__.startswith("torch.nn.utils")]
    return any(name in (getattr(hook, "name", None), getattr(hook, "_tensor_name", None)) for hook in hooks)


@contextmanager
def tensors_put_back(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Give all attributes with tensors their values back after the block."""
    state = KeptState(modules)
    try:
        yield
    finally:
        state.put_back(state.changed())


@contextmanager
def kept_as_it_was(places: Iterable[Place]) -> Iterator[None]:
    """Give these attributes their values back after the block."""
    before = [(module, name, vars(module)[name]) for module, name in places]
    try:
        yield
    finally:
        for module, name, value in before:
            vars(module)[name] = value


def _attributes(module: nn.Module) -> dict[str, Any]:
    """All attributes but those of every module, and hooks and functions, through which the engine would be reached."""
    return {
        name: value
        for name, value in vars(module).items()
        if name not in _OF_MODULES and name not in ("_hf_hook", ATTACHMENT) and not callable(value)
    }


def _holds_weights(value: Any) -> bool:
    """Whether an attribute is a list of weights, which are no values of an earlier call: recurrent modules of torch
    find those again that the call has."""
    tensors = list(tensors_within(value)) if isinstance(value, list) else []
    return bool(tensors) and all(isinstance(each, nn.Parameter) for each in tensors)


def _tensors(value: Any) -> list[tuple[torch.Tensor, int]]:
    """The tensors in an attribute, with their versions."""
    return [(t, 0 if t.is_inference() else t._version) for t in tensors_within(value)]


def _same(one: list[tuple[torch.Tensor, int]], two: list[tuple[torch.Tensor, int]]) -> bool:
    return len(one) == len(two) and all(a is b and v == w for (a, v), (b, w) in zip(one, two, strict=True))
