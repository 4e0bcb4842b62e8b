"""The Accelerate hook of layer-to-layer execution, and what it puts in the place of a module's own methods.

It sits on every module. On a layer it hands calls to the relay, which runs all ubatches of the device batch through
it; on any other module to the shell, which brings the non-layer modules to the device if the call comes from outside.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from accelerate.hooks import ModelHook
from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_l2l.engine.shell import Shell
from hf_l2l.runtime import stream
from hf_l2l.runtime.tensors import leaves_of, to_device

REPLACED = ("_apply", "__getstate__", "generate")
"""Methods of a module, besides its forward, that something else stands in for while it is attached."""


class Runner(Protocol):
    """Runs the calls of hooked modules: the relay for layers, the shell for non-layer modules."""

    def run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any: ...


class Replacement:
    """Stands in for a bound method of a module."""

    __slots__ = ("module", "original")  # no dict: transformers would copy it when it wraps the object

    def __init__(self, module: nn.Module, original: Callable[..., Any]) -> None:
        self.module = module
        self.original = original


def bound_method(module: nn.Module, name: str) -> types.MethodType:
    """The method `name` of a module's class, bound to it. Pickles of attached models from before 0.1.0 use it."""
    return types.MethodType(getattr(type(module), name), module)


class _Forward(Replacement):
    __slots__ = ("runner",)

    def __init__(self, module: nn.Module, original: Callable[..., Any], runner: Runner) -> None:
        super().__init__(module, original)
        self.runner = runner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.runner.run(self.module, self.original, args, kwargs)


class _PlainState(Replacement):
    """Stands in for `Module.__getstate__`: a deep copy or pickle has no hook, and has the forward from before the
    model was attached. Accelerate's own forward cannot be pickled, and hooks refer to locks and threads."""

    __slots__ = ()
    left_out = ("_hf_hook", "_old_forward", "_original_forward", "forward", *REPLACED)

    def __call__(self) -> Any:
        state = self.original()
        if not isinstance(state, dict):
            return state
        plain = {k: v for k, v in state.items() if k not in self.left_out}
        module: Any = self.module
        # What the instance had of its own, in the place of the method of its class.
        for name, replacement in (("forward", module._old_forward), ("generate", vars(module).get("generate"))):
            if isinstance(replacement, Replacement) and replacement.original != bound_method(module, name):
                plain[name] = replacement.original
        return plain


class _Generate(Replacement):
    """Stands in for `generate`: for its duration the model says that it is on the execution device, where its outputs
    are. Inputs go there, and results go back to where the inputs were."""

    __slots__ = ("device",)

    def __init__(self, module: nn.Module, original: Callable[..., Any], device: torch.device) -> None:
        super().__init__(module, original)
        self.device = device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_host = bool(given) and all(tensor.device == stream.HOST for tensor in given)
        args, kwargs = to_device((args, kwargs), self.device)
        with self._on_the_device():
            result = self.original(*args, **kwargs)
        return to_device(result, stream.HOST) if on_host else result

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """For `inspect.signature`."""
        return self.original

    @contextmanager
    def _on_the_device(self) -> Iterator[None]:
        kind, device = type(self.module), self.device
        if not isinstance(getattr(kind, "device", None), property):
            yield
            return
        members = {"device": property(lambda _: device), "__module__": kind.__module__}
        self.module.__class__ = type(kind.__name__, (kind,), members)
        try:
            yield
        finally:
            self.module.__class__ = kind


class L2LHook(ModelHook):  # type: ignore[misc]  # accelerate ships no types
    """Passes calls of a module to a runner, and guards the module while it is attached."""

    def __init__(self, runner: Runner, device: torch.device) -> None:
        self.runner = runner
        self.device = device

    def init_hook(self, module: nn.Module) -> nn.Module:
        replaced: Any = module
        if not isinstance(replaced._old_forward, _Forward):  # transformers adds the hook again to resized embeddings
            replaced._old_forward = _Forward(module, replaced._old_forward, self.runner)
            replaced._apply = _MoveGuard(module, replaced._apply, self.device)
            replaced.__getstate__ = _PlainState(module, replaced.__getstate__)
            if callable(getattr(type(module), "generate", None)):
                replaced.generate = _Generate(module, replaced.generate, self.device)
        return module

    def detach_hook(self, module: nn.Module) -> nn.Module:
        replaced: Any = module
        for name in ("_old_forward", *REPLACED):
            if isinstance(vars(replaced).get(name), Replacement):  # not of a module that it forwards attributes of
                setattr(replaced, name, vars(replaced)[name].original)
        return module


class _MoveGuard(Replacement):
    """Stands in for `Module._apply`, with which `.to()`, `.cuda()`, `.half()` and the like change parameters."""

    def __init__(self, module: nn.Module, original: Callable[..., Any], device: torch.device) -> None:
        super().__init__(module, original)
        self.device = device

    def __call__(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        for tensor in (next(self.module.parameters(), None), next(self.module.buffers(), None)):
            if tensor is None:
                continue
            asked = fn(torch.empty(0, dtype=tensor.dtype))
            if asked.dtype != tensor.dtype:
                raise ValueError(
                    f"a model under L2L keeps the dtype of its master weights (got a move from {tensor.dtype} to "
                    f"{asked.dtype}); call hf_l2l.detach_l2l(model) first"
                )
            if asked.device not in (stream.HOST, self.device):
                raise ValueError(
                    f"a model under L2L lives on the host and runs on {self.device} (got a move to {asked.device}); "
                    "call hf_l2l.detach_l2l(model) first"
                )
            if asked.device == self.device != stream.HOST:
                return self.module  # the engine uploads layers itself
        if any(p.device != stream.HOST for p in self.module.parameters()):
            return self.module  # resident weights stay where they are
        moved: nn.Module = self.original(fn, recurse)
        return moved


class CallWatch:
    """Hooks around the calls of an attached model, which check it, and tell the shell where the program is. A copy or
    pickle of it does nothing."""

    def __init__(self, shell: Shell | None, check: Callable[[], None] | None = None) -> None:
        self.shell = shell
        self.check = check
        self.forwards: dict[nn.Module, Any] = {}
        """Those of the hooks, by the module that is watched."""

    def handles(self, model: nn.Module) -> list[RemovableHandle]:
        """Watch `model`; returns what ends that."""
        self.forwards[model] = vars(model).get("forward")
        return [
            model.register_forward_pre_hook(self.before),
            model.register_forward_hook(self.after, always_call=True),
        ]

    def before(self, module: nn.Module, args: Any) -> None:
        if self.shell is not None and self.check is not None:
            self.check()
            # A forward that is not the one of the hook may call it, as those that autocast wraps do, or bypass it.
            self.shell.outer = module if vars(module).get("forward") is not self.forwards.get(module) else None

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.shell is not None:
            self.shell.outer = None

    def __reduce__(self) -> tuple[Any, ...]:
        return CallWatch, (None,)
