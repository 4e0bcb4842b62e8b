"""Private names of torch and transformers that the package uses: the only place that calls them.

Each has the versions in which it was seen (torch 2.11 to 2.13, transformers 5.17 to 5.23 where nothing else is said)
and what would replace it if it went.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils.hooks import RemovableHandle

without_interception: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass
"""Inside, operations on tensors of a subclass run without its `__torch_function__`.

`torch._C.DisableTorchFunctionSubclass`; else a metadata record beside each tensor, which the package mostly has."""

in_whole_backward: Callable[[], bool] = torch.autograd._is_checkpoint_valid
"""Whether the backward under way computes all gradients, not only those of `inputs=` or `torch.autograd.grad`.

`torch.autograd._is_checkpoint_valid`, which reentrant checkpointing goes by; else a flag set by the anchor node."""

current_backward: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward that this thread is inside of, -1 outside.

`torch._C._current_graph_task_id`, which FSDP goes by; else a thread-local set by the relay's nodes."""


def call_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Let torch call `callback` when the backward under way is over; a failed one drops it without calling it.

    `Variable._execution_engine.queue_callback`, as in DDP and FSDP; else a hook on the root of the graph.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def version_kept(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Inside, changes of `tensor` in place do not count as a new version.

    `torch.autograd.grad_mode._unsafe_preserve_version_counter`, as in FSDP2; else refusing to attach a model of which
    a graph lives.
    """
    return cast(AbstractContextManager[None], _unsafe_preserve_version_counter(tensor))


def with_gradient_hooks(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those of `parameters` on whose gradients hooks were registered.

    `Tensor._backward_hooks` and `_post_accumulate_grad_hooks`; nothing public tells.
    """
    with without_interception():
        return [p for p in parameters if p._backward_hooks or p._post_accumulate_grad_hooks]


def keeps_statistics(module: nn.Module) -> bool:
    """Whether `module` is a norm with running statistics (`torch.nn.modules.batchnorm._NormBase`), which its kernels
    write without a new version."""
    return isinstance(module, _NormBase)


def mixes_rows(module: nn.Module) -> bool:
    """Whether `module` normalizes over the rows of its batch (`torch.nn.modules.batchnorm._BatchNorm`)."""
    return isinstance(module, _BatchNorm)


def is_in_checkpoints(module: nn.Module, buffer: str) -> bool:
    """Whether the state dict of `module` has its buffer of this name (`Module._non_persistent_buffers_set`)."""
    non_persistent: Any = module._non_persistent_buffers_set
    return all(buffer != name for name in non_persistent)


def has_later_step_hook(optimizer: torch.optim.Optimizer, hook: RemovableHandle) -> bool:
    """Whether a hook that runs before `optimizer.step()` was registered after this one.

    `Optimizer._optimizer_step_pre_hooks`, a dict in the order of calls; nothing public tells.
    """
    last: int = next(reversed(optimizer._optimizer_step_pre_hooks))
    return last != hook.id


def call_step_hook_last(optimizer: torch.optim.Optimizer, hook: RemovableHandle) -> None:
    """Let this hook run after all others that are registered now."""
    cast(Any, optimizer._optimizer_step_pre_hooks).move_to_end(hook.id)


def unhooked_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The `step` of an optimizer's class without the hooks that torch keeps for all optimizers.

    `step.hooked` and `__wrapped__`, set by `Optimizer.profile_hook_step`; else those hooks run in trials, too.
    """
    step: Any = type(optimizer).step
    return cast(Callable[..., Any], step.__wrapped__ if getattr(step, "hooked", False) else step)


def active_collector() -> Any:
    """transformers' context variable with the collector of the running model, None where that module is not in use.

    `transformers.utils.output_capturing._active_collector`; without it, captured outputs would not be split.
    """
    module = sys.modules.get("transformers.utils.output_capturing")
    return None if module is None else getattr(module, "_active_collector", None)


def leaf_variable(node: torch.autograd.graph.Node) -> torch.Tensor:
    """The leaf that an `AccumulateGrad` node adds to (`node.variable`; not in the stubs)."""
    return cast(torch.Tensor, cast(Any, node).variable)


def tables_of(module: nn.Module) -> tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]:
    """Where a module keeps its parameters, its submodules and its buffers (`_parameters`, `_modules`, `_buffers`)."""
    return module._parameters, module._modules, module._buffers


def drop_step_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Leave `optimizer`, which shares its attributes with another one, without hooks of its step.

    `Optimizer._optimizer_step_pre_hooks` and `_optimizer_step_post_hooks`.
    """
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
