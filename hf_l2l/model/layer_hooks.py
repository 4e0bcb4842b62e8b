"""Forward hooks and pre-hooks of modules inside a layer, in its forward and in its recompute."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn

from hf_l2l.compat import NO_HOOKS, ModuleHooks, has_forward_hooks
from hf_l2l.runtime.tensors import tensors_within

Hook = Callable[..., Any]


class LayerHooks:
    """The hooks inside a layer as they were in one forward of it. Hooks of the layer itself run outside of it.

    In the recompute run those hooks that are still there, as they do with activation checkpointing, and of those that
    have been removed, the ones that changed something: what others have collected they would collect twice.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        """Of a forward that begins; `modules` are those of the layer, itself the first."""
        self._modules = modules[1:]
        self._then = {each: ModuleHooks.of(each) for each in self._modules if has_forward_hooks(each)}
        self._changing: set[tuple[nn.Module, int]] = set()
        """Modules and keys of the hooks that have returned a value, or written to what they were given."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, the forward runs."""
        with ExitStack() as stack:
            for module, hooks in self._then.items():
                watched = hooks._replace(
                    before={k: partial(self._call, module._forward_pre_hooks, k, h) for k, h in hooks.before.items()},
                    after={k: partial(self._call, module._forward_hooks, k, h) for k, h in hooks.after.items()},
                )
                stack.enter_context(watched.put_in(module))
            yield

    def _call(self, table: dict[int, Hook], key: int, hook: Hook, module: nn.Module, *args: Any) -> Any:
        if key not in table:  # another hook, or an earlier call of it, has removed it
            return None
        before = [(t, t._version) for t in tensors_within(args) if not t.is_inference()]
        result = hook(module, *args)
        if result is not None or any(t._version != version for t, version in before):
            self._changing.add((module, key))
        return result

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Inside, the layer is recomputed."""
        now = {each: ModuleHooks.of(each) for each in self._modules if has_forward_hooks(each)}
        with ExitStack() as stack:
            for module in {**self._then, **now}:
                then, there = self._then.get(module, NO_HOOKS), now.get(module, NO_HOOKS)
                if then != there:
                    before = {k: h for k, h in then.before.items() if self._runs(module, k, there.before)}
                    after = {k: h for k, h in then.after.items() if self._runs(module, k, there.after)}
                    stack.enter_context(then._replace(before=before, after=after).put_in(module))
            yield

    def _runs(self, module: nn.Module, key: int, there: dict[int, Hook]) -> bool:
        return key in there or (module, key) in self._changing


@contextmanager
def no_hooks_left(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Remove the hooks that have been put on modules in the block: a call that ends with an exception leaves those
    behind that a program puts there for one call."""
    before = [(each, ModuleHooks.of(each)) for each in modules]
    try:
        yield
    finally:
        for module, hooks in before:
            for then, now in ((hooks.before, module._forward_pre_hooks), (hooks.after, module._forward_hooks)):
                for key in now.keys() - then.keys():
                    del now[key]


def kind_of_hooks(modules: Sequence[nn.Module]) -> Hashable:
    """Equal for calls of a layer with as many hooks inside."""
    return tuple(
        [
            (number, len(each._forward_pre_hooks), len(each._forward_hooks))
            for number, each in enumerate(modules)
            if number > 0 and has_forward_hooks(each)
        ]
    )
