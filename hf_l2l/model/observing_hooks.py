"""Forward hooks of modules inside layers that observe what these compute: features of a distillation, activations.

A layer runs ubatch by ubatch, without a graph, and once more in the backward. A hook inside it would be given pieces
that no gradient flows through, some of them twice. So it is called when the layer has run, once, with what it is given
without L2L: arguments and output of its module, with all rows, which leave the layer as its outputs do.

A hook that returns a value changes what its module gives, and has to run inside. That a hook does is seen when it is
called for the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from hf_l2l.compat import collects_for_transformers, forward_hooks_of, forward_hooks_replaced

Hook = Callable[..., Any]


@dataclass
class KnownHooks:
    """Which hooks of a layer do what, by their code: a program may make a new function of it for each call."""

    changing: set[object] = field(default_factory=set)
    """They change what their module returns."""
    observing: set[object] = field(default_factory=set)


class Observed(NamedTuple):
    """What one hook of one module is given. As a tuple, it is taken apart as the outputs of a layer are."""

    module: int
    """The number of the module in the layer."""
    key: int
    """The key of the hook in its module."""
    args: tuple[Any, ...]
    """The arguments of the module; those by keyword, if the hook takes them; the output."""


class ObservingHooks:
    """The hooks inside a layer that are called after it, as they were when one call of it began."""

    def __init__(self, modules: Sequence[nn.Module], known: KnownHooks) -> None:
        """`modules` are those of the layer, itself the first, whose own hooks torch calls outside of it."""
        self._modules, self._known = modules, known
        self._inside: dict[int, dict[int, tuple[Hook, bool]]] = {}
        """The number of each module with such hooks -> all its hooks by their keys: hook, and whether it takes
        arguments by keyword."""
        self.deferred: dict[tuple[int, int], Hook] = {}
        """Number of a module and key of a hook -> the hook that is called afterwards."""
        for number, module in enumerate(modules):
            if number == 0 or not module._forward_hooks:
                continue
            hooks = forward_hooks_of(module)
            those = {
                (number, key): hook
                for key, (hook, _) in hooks.items()
                if not collects_for_transformers(hook) and _code(hook) not in known.changing
            }
            if those:
                self._inside[number] = hooks
                self.deferred.update(those)

    @property
    def are_known(self) -> bool:
        """Whether all of them have been seen to observe only."""
        return all(_code(hook) in self._known.observing for hook in self.deferred.values())

    @contextmanager
    def collected(self) -> Iterator[list[Observed]]:
        """Inside, the layer runs without these hooks; yields what they are to be given, in the order of the calls."""
        taken: list[Observed] = []
        with ExitStack() as stack:
            for number, hooks in self._inside.items():
                instead = {
                    key: (partial(_take, taken, number, key) if (number, key) in self.deferred else hook, with_kwargs)
                    for key, (hook, with_kwargs) in hooks.items()
                }
                stack.enter_context(forward_hooks_replaced(self._modules[number], instead))
            yield taken

    def call(self, observed: Sequence[Observed]) -> bool:
        """Call the hooks. Returns False if one of them changes what its module returns: the layer has to run again.

        Raises:
            RuntimeError: if a hook does that which has only observed so far.
        """
        for number, key, args in observed:
            hook, module = self.deferred[number, key], self._modules[number]
            code = _code(hook)
            if hook(module, *args) is None:
                self._known.observing.add(code)
                continue
            if code in self._known.observing:
                raise RuntimeError(
                    "a forward hook of a module inside a layer must either always or never return a value, which "
                    f"decides where it is called (got one of a {type(module).__name__} that does so now, and did not "
                    "before); return the output where it is not to be changed"
                )
            self._known.changing.add(code)
            return False
        return True


def _take(taken: list[Observed], number: int, key: int, module: nn.Module, *args: Any) -> None:
    taken.append(Observed(number, key, args))


def _code(hook: Any) -> object:
    """What is equal for all functions that one definition makes."""
    while isinstance(hook, partial):
        hook = hook.func
    hook = getattr(hook, "__func__", hook)
    return getattr(hook, "__code__", type(hook))
