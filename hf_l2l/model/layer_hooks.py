"""Forward hooks and pre-hooks of modules inside a layer, in its forward and in its recompute."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from hf_l2l.compat import NO_HOOKS, ModuleHooks, with_forward_hooks
from hf_l2l.runtime.tensors import tensors_within

Hook = Callable[..., Any]


class LayerHooks:
    """The hooks inside a layer as they were in one forward of it. Hooks of the layer itself run outside of it.

    In the recompute run those hooks that are still there, as they do with activation checkpointing, and of those that
    have been removed, the ones that changed something, or all if what they have collected gets gradients.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        """Of a forward that begins; `modules` are those of the layer, itself the first."""
        self._modules = modules[1:]
        self._then = {each: ModuleHooks.of(each) for each in with_forward_hooks(self._modules)}
        self._changing: set[tuple[nn.Module, int]] = set()
        """Modules and keys of the hooks that have returned a value, or written to what they were given."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, the forward runs."""
        with ExitStack() as stack:
            for module, hooks in self._then.items():
                before: dict[int, Hook] = {
                    k: Watched(h, self, module._forward_pre_hooks, k) for k, h in hooks.before.items()
                }
                after: dict[int, Hook] = {
                    k: Watched(h, self, module._forward_hooks, k) for k, h in hooks.after.items()
                }
                stack.enter_context(hooks._replace(before=before, after=after).put_in(module))
            yield

    def changes_something(self, module: nn.Module, key: int) -> None:
        """The hook with this `key` has returned a value, or written to its tensors."""
        self._changing.add((module, key))

    @contextmanager
    def put_back(self, *, collecting: bool = False) -> Iterator[None]:
        """Inside, the layer is recomputed. With `collecting`, all hooks run: gradients go to what they collect."""
        now = {each: ModuleHooks.of(each) for each in with_forward_hooks(self._modules)}
        with ExitStack() as stack:
            for module in {**self._then, **now}:
                then, there = self._then.get(module, NO_HOOKS), now.get(module, NO_HOOKS)
                if then != there:
                    before = {
                        k: h for k, h in then.before.items() if collecting or self._runs(module, k, there.before)
                    }
                    after = {k: h for k, h in then.after.items() if collecting or self._runs(module, k, there.after)}
                    stack.enter_context(then._replace(before=before, after=after).put_in(module))
            yield

    def _runs(self, module: nn.Module, key: int, there: dict[int, Hook]) -> bool:
        return key in there or (module, key) in self._changing


class Watched:
    """A hook during the forward, which tells whether it changes something."""

    def __init__(self, hook: Hook, hooks: LayerHooks, table: dict[int, Hook], key: int) -> None:
        """`table` is that of the module, in which the hook has this `key`."""
        self.hook = hook
        self._hooks, self._table, self._key = hooks, table, key

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        """Call the hook, unless it, or another one, has removed it."""
        if self._key not in self._table:
            return None
        before = [(t, t._version) for t in tensors_within(args) if not t.is_inference()]
        result = self.hook(module, *args)
        if result is not None or any(t._version != version for t, version in before):
            self._hooks.changes_something(module, self._key)
        return result


@contextmanager
def hooks_kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Remove the hooks that have been put on modules in the block, and put back those that have been removed: a call
    that ends with an exception leaves those behind that a program puts there for one call, and others run once."""
    before = [(each, ModuleHooks.of(each)) for each in modules]
    try:
        yield
    finally:
        for module, hooks in before:
            hooks.restore(module)


def kind_of_hooks(modules: Sequence[nn.Module]) -> Hashable:
    """Equal for calls of a layer with as many hooks inside."""
    hooked = with_forward_hooks(modules[1:])
    if not hooked:
        return ()
    numbers = {each: number for number, each in enumerate(modules)}
    return tuple([(numbers[each], len(each._forward_pre_hooks), len(each._forward_hooks)) for each in hooked])
