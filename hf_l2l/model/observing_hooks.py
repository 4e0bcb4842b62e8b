"""Forward hooks of modules inside layers that observe what these compute: features of a distillation, activations.

A layer runs ubatch by ubatch, without a graph, and once more in the backward. A hook inside it would be given pieces
that no gradient flows through, some of them twice. So it is called when the layer has run, once, with what it is given
without L2L: arguments and output of its module, with all rows, which leave the layer as its outputs do.

A hook that returns a value changes what its module gives, and has to run inside, and so does one that puts a hook on a
tensor, whose gradient is known inside alone. This is seen when the hook is called for the first time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hf_l2l.compat import ModuleHooks, collects_for_transformers, with_gradient_hooks

Hook = Callable[..., Any]


class Observed(NamedTuple):
    """What one hook of one module is given. As a tuple, it is taken apart as the outputs of a layer are."""

    module: int
    """The number of the module in the layer."""
    key: int
    """The key of the hook in its module."""
    args: tuple[Any, ...]
    """The arguments of the module; those by keyword, if the hook takes them; the output."""


class HookChanges(Exception):
    """A hook that was called after its layer has to run inside."""


class ObservingHooks:
    """The hooks inside a layer that are called after it, as they were when one call of it began."""

    def __init__(self, modules: Sequence[nn.Module], changing: set[object]) -> None:
        """`modules` are those of the layer, itself the first, whose own hooks torch calls outside of it. Hooks with a
        code in `changing`, which gains those that are found out, run inside: a program may make a new function of one
        code for each call."""
        self._modules, self._changing = modules, changing
        self._all: dict[int, ModuleHooks] = {}
        """The number of each module with such hooks -> all its hooks."""
        self._given: list[weakref.ref[torch.Tensor]] = []
        """What hooks were given that has a gradient."""
        self.deferred: dict[tuple[int, int], Hook] = {}
        """Number of a module and key of a hook -> the hook that is called afterwards."""
        for number, module in enumerate(modules):
            if number == 0 or not module._forward_hooks:
                continue
            hooks = ModuleHooks.of(module)
            those = {
                (number, key): hook
                for key, hook in hooks.after.items()
                if not collects_for_transformers(hook) and _code(hook) not in changing
            }
            if those:
                self._all[number] = hooks
                self.deferred.update(those)

    @property
    def kind(self) -> Hashable:
        """Equal for calls of layers of the same classes with as many outputs for hooks."""
        return tuple([number for number, _ in self.deferred])

    @contextmanager
    def collected(self) -> Iterator[list[Observed]]:
        """Inside, the layer runs without these hooks; yields what they are to be given, in the order of the calls."""
        taken: list[Observed] = []
        with ExitStack() as stack:
            for number, hooks in self._all.items():
                after = {
                    key: partial(_take, taken, number, key) if (number, key) in self.deferred else hook
                    for key, hook in hooks.after.items()
                }
                stack.enter_context(hooks._replace(after=after).put_in(self._modules[number]))
            yield taken

    def call(self, observed: Sequence[Observed]) -> None:
        """Call the hooks.

        Raises:
            HookChanges: if one of them changes what its module returns, or a gradient: the layer has to run again.
            RuntimeError: if that is so after others have been called, which would be called twice.
        """
        for count, (number, key, args) in enumerate(observed):
            hook, module = self.deferred[number, key], self._modules[number]
            given = [t for t in pytree.tree_leaves(args) if isinstance(t, torch.Tensor) and t.requires_grad]
            self._given += [weakref.ref(t) for t in given]
            if hook(module, *args) is None and not with_gradient_hooks(given):
                continue
            self._changing.add(_code(hook))
            if count > 0:
                raise RuntimeError(
                    "forward hooks inside a layer that change an output or a gradient must be called before those "
                    f"that observe outputs, when the model meets them for the first time (got one of a "
                    f"{type(module).__name__} that does, after others); call the model again: now it is known"
                )
            raise HookChanges

    def refuse_kept_gradients(self) -> None:
        """Raise RuntimeError if the program wants to keep the gradient of a tensor that a hook was given."""
        for reference in self._given:
            tensor = reference()
            if tensor is not None and tensor.retains_grad:
                raise RuntimeError(
                    "the gradient of a tensor that a module inside a layer computed cannot be kept, since the layer "
                    "is computed again (got retain_grad() of one that a forward hook was given); put a hook on the "
                    "tensor in the forward hook, tensor.register_hook(...), which is given the gradient"
                )


def _take(taken: list[Observed], number: int, key: int, module: nn.Module, *args: Any) -> None:
    taken.append(Observed(number, key, args))


def _code(hook: Any) -> object:
    """What is equal for all functions that one definition makes."""
    while isinstance(hook, partial):
        hook = hook.func
    hook = getattr(hook, "__func__", hook)
    return getattr(hook, "__code__", type(hook))
