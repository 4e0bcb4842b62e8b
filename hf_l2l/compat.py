"""Private names of torch and transformers that the package uses; no other module uses any.

The docstring of each function names them, and says what would replace them if they were removed. All exist in torch
2.11 to 2.13 and transformers 5.17 to 5.23, unless the docstring gives other versions.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import _weights_only_unpickler, nn
from torch._subclasses import fake_tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils import _python_dispatch
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FakeTensor: Any = fake_tensor.FakeTensor
FakeTensorMode: Any = fake_tensor.FakeTensorMode
"""Tensors without values, on any device, and the mode that makes them.

`torch._subclasses.fake_tensor`, which `torch.export` and torch's own estimates of memory use; else tensors on the meta
device, which know no other device and not all operations."""

without_interception: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass
"""Inside, operations on tensors of a subclass run without its `__torch_function__`.

`torch._C.DisableTorchFunctionSubclass`; else metadata would be read from records, which exist for most tensors."""

without_torch_function: Any = torch._C._disabled_torch_function_impl
"""As the `__torch_function__` of a subclass: its tensors are intercepted below autograd alone.

`torch._C._disabled_torch_function_impl`, as in torch's own subclasses; else a method that calls the function inside
`without_interception`."""

in_whole_backward: Callable[[], bool] = torch.autograd._is_checkpoint_valid
"""Whether the backward under way computes all gradients, not only those of `inputs=` or `torch.autograd.grad`.

`torch.autograd._is_checkpoint_valid`, which reentrant checkpointing uses; else a flag set by the anchor node
(`model_call`)."""

graph_is_retained: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether the backward under way was called with `retain_graph=True`.

`torch._C._autograd._get_current_graph_task_keep_graph`, which AOTAutograd uses; else graphs inside layers would stay
until the graph around them is freed."""

current_backward: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward that this thread is inside of, -1 outside.

`torch._C._current_graph_task_id`, which FSDP uses; else a thread-local set by the relay's nodes."""

RefusedPickleError: type[Exception] = cast(Any, _weights_only_unpickler).UnpicklingError
"""What `torch.load(..., weights_only=True)` raises of a file that is damaged, or asks for more than values.

`torch._weights_only_unpickler.UnpicklingError`, which is that of `pickle`; else that module would be imported."""


def is_without_sync() -> bool:
    """Whether a `DistributedDataParallel` calls the model now, inside its `no_sync()`.

    `DistributedDataParallel._get_active_ddp_module`, which torch.compile uses; else a search for the wrapper among the
    callers of the model."""
    active = DistributedDataParallel._get_active_ddp_module()
    return active is not None and not active.require_backward_grad_sync


def call_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Make torch call `callback` when the current backward is over; a failed one drops it without calling it.

    `Variable._execution_engine.queue_callback`, as in DDP and FSDP; else a hook on the root of the graph.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def version_kept(*tensors: torch.Tensor) -> AbstractContextManager[None]:
    """Inside, changes of `tensors` in place do not change their versions.

    `torch.autograd.grad_mode._unsafe_preserve_version_counter`, as in FSDP2; else attaching a model would be refused
    while a graph of it lives.
    """
    return cast(AbstractContextManager[None], _unsafe_preserve_version_counter(tensors))


def wrapper_tensor(kind: Any, like: torch.Tensor, device: torch.device) -> Any:
    """A tensor of the subclass `kind` without memory of its own, with the shape, strides and dtype of `like`
    (`Tensor._make_wrapper_subclass`, which torch's own subclasses use)."""
    return torch.Tensor._make_wrapper_subclass(
        kind, like.shape, strides=like.stride(), dtype=like.dtype, device=device
    )


def with_gradient_hooks(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of `parameters` that have gradient hooks.

    `Tensor._backward_hooks` and `_post_accumulate_grad_hooks`; no public function returns them.
    """
    with without_interception():
        return [p for p in parameters if p._backward_hooks or p._post_accumulate_grad_hooks]


def with_forward_hooks(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Those of `modules` whose calls run hooks (`Module._forward_hooks` and `_forward_pre_hooks`)."""
    return [module for module in modules if module._forward_hooks or module._forward_pre_hooks]


class ModuleHooks(NamedTuple):
    """The hooks that run when one module is called, by their keys, and which of them take arguments by keyword
    (`Module._forward_pre_hooks`, `_forward_hooks`, and the same names with `_with_kwargs`)."""

    before: dict[int, Callable[..., Any]]
    before_with_kwargs: dict[int, bool]
    after: dict[int, Callable[..., Any]]
    after_with_kwargs: dict[int, bool]

    @classmethod
    def of(cls, module: nn.Module) -> ModuleHooks:
        """Copies of the tables of `module` as they are now."""
        return cls(*(OrderedDict(getattr(module, name)) for name in _HOOK_TABLES))

    @contextmanager
    def put_in(self, module: nn.Module) -> Iterator[None]:
        """Inside, `module` has these hooks and no others."""
        before = [getattr(module, name) for name in _HOOK_TABLES]
        for name, table in zip(_HOOK_TABLES, self, strict=True):
            setattr(module, name, table)
        try:
            yield
        finally:
            for name, table in zip(_HOOK_TABLES, before, strict=True):
                setattr(module, name, table)

    def restore(self, module: nn.Module) -> None:
        """Give `module` these hooks, in its own tables, from which the handles of hooks remove them."""
        for name, hooks in zip(_HOOK_TABLES, self, strict=True):
            table = getattr(module, name)
            if table != hooks:
                table.clear()
                table.update(hooks)


_HOOK_TABLES = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
)
NO_HOOKS = ModuleHooks({}, {}, {}, {})


def saves_tensors_by_hooks() -> bool:
    """Whether `torch.autograd.graph.saved_tensors_hooks` are set, as inside activation checkpointing.

    `torch._C._autograd._top_saved_tensors_default_hooks`, which torch's own AOTAutograd uses.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def keeps_statistics(module: nn.Module) -> bool:
    """Whether `module` is a norm with running statistics (`torch.nn.modules.batchnorm._NormBase`), which kernels write
    without changing their version."""
    return isinstance(module, _NormBase)


def mixes_rows(module: nn.Module) -> bool:
    """Whether `module` normalizes over the rows of its batch (`torch.nn.modules.batchnorm._BatchNorm`)."""
    return isinstance(module, _BatchNorm)


def is_in_checkpoints(module: nn.Module, buffer: str) -> bool:
    """Whether the buffer with this name is in the state dict of `module` (`Module._non_persistent_buffers_set`)."""
    non_persistent: Any = module._non_persistent_buffers_set
    return all(buffer != name for name in non_persistent)


def has_later_step_hook(optimizer: torch.optim.Optimizer, hook: RemovableHandle) -> bool:
    """Whether a hook that runs before `optimizer.step()` was registered after this one.

    `Optimizer._optimizer_step_pre_hooks`, a dict in the order of calls; no public function returns it.
    """
    last: int = next(reversed(optimizer._optimizer_step_pre_hooks))
    return last != hook.id


def call_step_hook_last(optimizer: torch.optim.Optimizer, hook: RemovableHandle) -> None:
    """Make this hook run after all others that are registered now (`Optimizer._optimizer_step_pre_hooks`)."""
    cast(Any, optimizer._optimizer_step_pre_hooks).move_to_end(hook.id)


def unhooked_step(kind: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """The `step` of a class of optimizers, without torch's hooks for all optimizers.

    `step.hooked` and `__wrapped__`, set by `Optimizer.profile_hook_step`; else those hooks would run in trials, too.
    """
    step: Any = kind.step
    return cast(Callable[..., Any], step.__wrapped__ if getattr(step, "hooked", False) else step)


fused_adam: Callable[..., None] = torch._fused_adam_
fused_adamw: Callable[..., None] = torch._fused_adamw_
fused_sgd: Callable[..., None] = torch._fused_sgd_
"""The steps of torch's fused optimizers, of lists of parameters, gradients and state.

`torch._fused_adam_`, `_fused_adamw_` and `_fused_sgd_`; else `torch.optim.adam.adam` and `torch.optim.sgd.sgd`, which
call them, and take several times as long to do so as the step of a chunk takes."""


def hooks_of_all_steps() -> list[Callable[..., Any]]:
    """The hooks that run before or after the step of any optimizer.

    `torch.optim.optimizer._global_optimizer_pre_hooks` and `_global_optimizer_post_hooks`; else gradients would be
    made ready for such hooks in every step."""
    return [*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values()]


def is_profiling() -> bool:
    """Whether a profiler of torch runs in this process.

    `torch.autograd.profiler._is_profiler_enabled`; else each part of a step would be recorded for nobody, which takes
    a fifth of a millisecond."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def active_collector() -> Any:
    """transformers' context variable with the collector of the running model; None if its module is not imported.

    `transformers.utils.output_capturing._active_collector`; without it, captured outputs would not be split.
    """
    module = sys.modules.get("transformers.utils.output_capturing")
    return None if module is None else getattr(module, "_active_collector", None)


def mask_functions() -> Any:
    """transformers' table of functions that make attention masks, by the kind of attention; None if its module is not
    imported.

    `transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS`; without it, masks would not be refused in advance.
    """
    module = sys.modules.get("transformers.masking_utils")
    return None if module is None else getattr(module, "ALL_MASK_ATTENTION_FUNCTIONS", None)


@contextmanager
def fake_tensors_have_values() -> Iterator[None]:
    """Inside, transformers asks fake tensors for values, as it asks others, instead of assuming the worst.

    `transformers.utils.import_utils.is_fake_tensor`; without it, models on fake tensors would make attention masks
    that they do not need.
    """
    module: Any = sys.modules.get("transformers.utils.import_utils")
    before = getattr(module, "is_fake_tensor", None)
    if before is None:
        yield
        return
    module.is_fake_tensor = lambda tensor: False
    try:
        yield
    finally:
        module.is_fake_tensor = before


def leaf_variable(node: torch.autograd.graph.Node) -> torch.Tensor:
    """The leaf to whose gradient an `AccumulateGrad` node adds (`node.variable`; not in the type stubs)."""
    return cast(torch.Tensor, cast(Any, node).variable)


def written_by(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that a function of torch writes to, by the rule of its names: those of functions in place end with
    an underscore, or are `__iadd__` and the like; what others write to is called `out`."""
    name = getattr(func, "__name__", "")
    is_special = name.startswith("__i") and name not in ("__index__", "__invert__", "__int__", "__iter__")
    in_place = is_special or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    given = (*(args[:1] if in_place else ()), kwargs.get("out"))
    found = [each for one in given for each in (one if isinstance(one, list | tuple) else (one,))]
    return [each for each in found if isinstance(each, torch.Tensor)]


def storages_in_file(file: str) -> list[int]:
    """Where a file of `torch.save` has the bytes of each storage, in the order in which they were pickled.

    `torch._C.PyTorchFileReader`; else `torch.load` under `FakeTensorMode`, which torch's notes on serialization name
    for this (with `torch.serialization.skip_data`), and which takes a millisecond for each tensor."""
    reader: Any = torch._C.PyTorchFileReader(file)
    count = sum(name.startswith("data/") for name in reader.get_all_records())
    return [reader.get_record_offset(f"data/{number}") for number in range(count)]


def tables_of(module: nn.Module) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The tables of a module's parameters and submodules (`_parameters` and `_modules`)."""
    return module._parameters, module._modules


def is_compiled(module: nn.Module) -> bool:
    """Whether `module.compile()` was called (`Module._compiled_call_impl`; else such modules would be refused)."""
    return module._compiled_call_impl is not None


def drop_step_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Give `optimizer`, which shares its attributes with another one, empty tables of step hooks of its own.

    `Optimizer._optimizer_step_pre_hooks` and `_optimizer_step_post_hooks`.
    """
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()


def gloo_groups(name: str, rank: int, size: int, timeout: timedelta) -> Callable[[str], ProcessGroup]:
    """What makes process groups of `size` processes, of which this is number `rank`, each by a name of its own; all
    have to connect to each other within `timeout`. `name` is known to these processes alone. Unlike groups of
    `torch.distributed.new_group`, they are not ended by `destroy_process_group`, and other ranks do not call this.

    `torch.distributed.distributed_c10d._get_default_store`, and `ProcessGroupGloo`, which is public and has no
    documentation; else `new_group`, which all ranks call for all groups."""
    c10d: Any = dist
    store = dist.distributed_c10d._get_default_store()

    def made(of: str) -> ProcessGroup:
        group: ProcessGroup = c10d.ProcessGroupGloo(c10d.PrefixStore(f"{name}/{of}", store), rank, size, timeout)
        return group

    return made


def is_view_of_leaf(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a view of a leaf of the graph, as of a parameter.

    `Tensor._base`; else whether it has the storage of a parameter of the model."""
    base = tensor._base
    return base is not None and base.is_leaf


class ModeCounts(NamedTuple):
    """How many modes this thread is inside of."""

    of_functions: int
    of_dispatch: int

    @classmethod
    def now(cls) -> ModeCounts:
        """Those of now."""
        return cls(torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack())


class Modes(NamedTuple):
    """Modes of functions and of dispatch, and hooks of saved tensors; the innermost of each is the last."""

    of_functions: list[Any]
    of_dispatch: list[Any]
    hooks: list[tuple[Callable[..., Any], Callable[..., Any]]]


def take_modes(counts: ModeCounts) -> Modes:
    """End all hooks of saved tensors in this thread, and all modes but as many as `counts` has; returns them.

    torch has such functions for its own context managers alone, which have to end in turn.
    """
    found = Modes([], [], [])
    while (hooks := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        found.hooks.insert(0, hooks)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    while torch._C._len_torch_function_stack() > counts.of_functions:
        found.of_functions.insert(0, torch._C._pop_torch_function_stack())
    while torch._C._len_torch_dispatch_stack() > counts.of_dispatch:
        found.of_dispatch.insert(0, _python_dispatch._pop_mode())
    return found


def put_modes(modes: Modes) -> None:
    """Begin what `take_modes` has ended."""
    for hooks in modes.hooks:
        torch._C._autograd._push_saved_tensors_default_hooks(*hooks)
    for mode in modes.of_functions:
        torch._C._push_on_torch_function_stack(mode)
    for mode in modes.of_dispatch:
        _python_dispatch._push_mode(mode)
