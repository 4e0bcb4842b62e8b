"""The masters of a model: one record per parameter with everything that the EPS knows of it, and the units they form.

No other part of the EPS keeps a map of its own from parameters to something.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from contextlib import nullcontext

import torch
from torch import nn

from hf_l2l.compat import with_gradient_hooks, without_interception
from hf_l2l.eps.pending import Pending, can_hold, let_go, let_go_all
from hf_l2l.model.precision import Precision
from hf_l2l.model.stacks import shell_modules
from hf_l2l.model.units import LayerUnit
from hf_l2l.optim.layerwise_step import gradient_hook_error
from hf_l2l.report.timeline import Timeline
from hf_l2l.runtime import wait_reasons
from hf_l2l.runtime.flat_memory import Piece, Room
from hf_l2l.runtime.tensors import on_meta
from hf_l2l.runtime.worker import Task

NON_LAYER = "what is in no layer"


class Update:
    """An update of some masters on a thread of the worker."""

    def __init__(self, task: Task, timeline: Timeline, *, in_step: bool) -> None:
        self.task = task
        self.timeline = timeline
        self.in_step = in_step
        """Whether this is an eager update, and `optimizer.step()` has not been called yet."""
        self.made = False
        """True after the update has succeeded."""

    def wait(self) -> None:
        """Wait until the update is over; raises what `Task.wait` raises."""
        with nullcontext() if self.task.done else self.timeline.waiting_for_eps(self.task.what):
            self.task.wait(wait_reasons.WEIGHTS_UPDATED)


class Master(Pending):
    """What the EPS knows of one parameter: the fp32 weights in host memory and all that belongs to them.

    The parameter is held for its record (`pending`) while an update of it is under way, and while it has a 16-bit
    copy that is right as long as its values are not used.
    """

    guards_grad = False
    """Whether reading `p.grad` raises: an eager update has used the gradient, and the step is not over."""

    def __init__(self, parameter: torch.Tensor, gradient_like: torch.Tensor) -> None:
        self.parameter = parameter
        self.name = "a parameter"
        self.dtype = parameter.dtype
        self.can_be_held = can_hold(parameter)
        self.part = 0
        """The number of its layer in the order of the model, from 1; 0 for one in no layer. Tied: its first layer."""
        self.update: Update | None = None
        """The one under way, the one that failed, or the eager one of this step."""

        self.gradient_like = gradient_like
        """A tensor with dtype, shape and strides of its gradient on the host; its values are not read."""
        self.gradient_room: Room | None = None
        """Registered memory for its gradient."""
        self.gradient_piece: Piece | None = None
        """Which tensor lies there."""
        self.arriving: torch.Tensor | None = None
        """The host tensor that will be its `grad` when this backward is over, or be added to it; or that is its
        `grad` already and gets more."""
        self.taken_norm: torch.Tensor | None = None
        """The norm (0-dim, host) of a gradient that an eager update took before it was in `p.grad`."""
        self.calls, self.arrivals = 0, 0
        """Of this step: calls in the graph that may give it a gradient, and those of which it has arrived."""

        self.copy: torch.Tensor | None = None
        """The copy that travels in its place, in the dtype of the device."""
        self.copy_is_right = False
        """Whether the copy was made from the values of now, unless the version says otherwise."""
        self.copy_version = 0
        """Of the parameter, when the copy was made."""
        self.copy_room: Room | None = None
        """Registered memory for the copy."""

        self.address: int | None = None
        """Where it lay when it was moved to registered memory, or refused."""
        self.refused_bytes = 0
        """Of it or its copy, that lie in ordinary memory since the device refused to register more."""

    @property
    def is_updating(self) -> bool:
        """Whether an update of it is under way."""
        return self.update is not None and not self.update.task.done

    def before_look(self, tensor: torch.Tensor) -> None:
        """Reading the version waits until the update is done."""
        update = self.update
        if update is not None:
            update.wait()

    def before_values(self, tensor: torch.Tensor) -> None:
        """Using values waits until the update is done. The use may be a write, and not every write counts as a new
        version: those of fused optimizers do not, nor those through `.data`. So the copy is made anew after it."""
        self.before_look(tensor)
        self.copy_is_right = False
        if not self.guards_grad:
            let_go(tensor, self)

    def before_grad(self, tensor: torch.Tensor) -> None:
        """An eager update has used the gradient."""
        if self.update is not None:
            self.update.task.check()
        raise RuntimeError(
            "eps_update='eager' has used this gradient during backward, and there is no p.grad any more; use "
            "eps.grad_norm() for the norm, and eps_update='deferred' to clip, change or drop gradients"
        )

    @staticmethod
    def end_update(masters: Iterable[Master]) -> None:
        """An update has succeeded and its step is over: ordinary parameters again, unless they have copies."""
        ordinary: list[tuple[torch.Tensor, Pending]] = []
        for master in masters:
            master.update, master.guards_grad = None, False
            if not master.copy_is_right:
                ordinary.append((master.parameter, master))
        let_go_all(ordinary)


class MasterUnit(LayerUnit):
    """A unit whose parameters have records."""

    masters: list[Master]
    """In the order of `parameters`."""

    @property
    def trained_masters(self) -> list[Master]:
        """Those that require a gradient."""
        return [self.masters[number] for number in self.trained]

    @property
    def is_updating(self) -> bool:
        """Whether an update of its masters is under way."""
        return any(not update.task.done for update in {m.update for m in self.masters} if update is not None)

    def wait(self) -> None:
        """Wait until no update of its masters is under way."""
        for update in {m.update for m in self.masters}:
            if update is not None:
                update.wait()


class Masters:
    """The records of one model, and its units: layers, and the non-layer modules below each module that is called."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module] = (), precision: Precision | None = None) -> None:
        self.model = model
        self.precision = precision or Precision(model)
        self.layers = list(layers)
        self.changes = 0
        """How often the model was found changed: other parameters, shapes, or other ones that are trained."""
        self.parameters: list[torch.Tensor] = []
        """In the order of the model."""
        self._records: dict[torch.Tensor, Master] = {}
        self._units: dict[nn.Module, MasterUnit] = {}
        """By layer, or by the module that is called."""
        self.layer_names: dict[nn.Module, str] = {}
        """Layer -> its name, in the order of the model."""
        self.refresh()

    def refresh(self) -> None:
        """Look whether the model is as it was found. To be called where masters stand in their places."""
        before = len(self._units)
        self._units = {module: unit for module, unit in self._units.items() if unit.is_current()}
        if before and len(self._units) == before:
            return
        self.changes += 1
        modules = {module: name for name, module in self.model.named_modules()}
        self.layer_names = {layer: modules.get(layer, type(layer).__name__) for layer in self.layers}
        self.parameters = list(self.model.parameters())
        names: dict[torch.Tensor, str] = {p: name for name, p in self.model.named_parameters()}
        parts: dict[torch.Tensor, int] = {}
        for number, layer in enumerate(self.layers, start=1):
            for p in layer.parameters():
                parts.setdefault(p, number)  # a tied one belongs to the first
        with without_interception():
            for parameter, name in names.items():
                master = self.of(parameter)
                master.name, master.part, master.dtype = name, parts.get(parameter, 0), parameter.dtype
                if master.gradient_like.shape != parameter.shape:
                    master.gradient_like = on_meta(parameter, self.precision.of_gradient(parameter))
                    master.gradient_room = None
        if torch.is_grad_enabled():  # without, other tensors may stand in their places for one call
            self._records = {p: m for p, m in self._records.items() if p in names or m.is_updating}
        for unit in self._units.values():
            unit.masters = [self.of(p) for p in unit.parameters]
        for module in (*self.layers, self.model):
            self.unit(module)

    def unit(self, module: nn.Module) -> MasterUnit:
        """The unit of a layer, or of the non-layer modules at and below `module`."""
        unit = self._units.get(module)
        if unit is None:
            name = self.layer_names.get(module)
            modules = shell_modules(module, self.layers) if name is None else module.modules()
            unit = self._units[module] = MasterUnit(module, modules, name or NON_LAYER, self.precision)
            unit.masters = [self.of(p) for p in unit.parameters]
        return unit

    def non_layer_unit(self, module: nn.Module) -> MasterUnit:
        """The unit of the non-layer modules at and below `module`; an empty one for a layer."""
        if module not in self.layer_names:
            return self.unit(module)
        unit = MasterUnit(module, (), NON_LAYER, self.precision)
        unit.masters = []
        return unit

    def of(self, parameter: torch.Tensor) -> Master:
        """The record of a parameter, made where the model had it only for a while."""
        master = self._records.get(parameter)
        if master is None:
            like = on_meta(parameter, self.precision.of_gradient(parameter))
            master = self._records[parameter] = Master(parameter, like)
        return master

    def of_all(self, parameters: Iterable[torch.Tensor]) -> list[Master]:
        """Their records."""
        return [self._records.get(p) or self.of(p) for p in parameters]

    def all(self) -> list[Master]:
        """Those of the model, in its order."""
        records = self._records
        return [records[p] for p in self.parameters]

    def parts(self, masters: Iterable[Master]) -> list[tuple[str, list[Master]]]:
        """`masters` as the next forward needs them: those in no layer, then layer by layer, each with its name."""
        found: dict[int, list[Master]] = {}
        for master in masters:
            found.setdefault(master.part, []).append(master)
        names = [NON_LAYER, *self.layer_names.values()]
        return [(names[number], found[number]) for number in sorted(found)]

    def refuse_gradient_hooks(self) -> None:
        """Raise ValueError if a parameter has a hook that would never run."""
        hooked = with_gradient_hooks(self.parameters)
        if hooked:
            raise ValueError(gradient_hook_error(self.of(hooked[0]).name))

    def release(self) -> None:
        """Forget all parameters. Nothing refers to one any more: torch swaps none to which something does."""
        self._records, self._units, self.parameters, self.layers = {}, {}, [], []
        self.precision.release()


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, *, wide: bool = False) -> None:
    """Raise ValueError if `optimizer` cannot update the masters of `model` (see `EagerParamServer.wrap`), which are to
    be in more than 16 bits where `wide` says so."""
    name = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"the optimizer must step without a closure, which would run the model inside the update (got "
            f"{name}); use one that takes gradients, such as torch.optim.AdamW"
        )
    masters: dict[torch.Tensor, str] = {p: n for n, p in model.named_parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    strange = [p for p in held if p not in masters]
    if strange:
        raise ValueError(
            f"the optimizer must hold parameters of the model only (got {name} with {len(strange)} others of "
            f"{len(held)}, the first of shape {list(strange[0].shape)}); build it from model.parameters() after "
            "the model has its final parameters, and with the model on the host"
        )
    short = [masters[p] for p in held if p.requires_grad and p.is_floating_point() and p.itemsize < 4]
    if wide and short:
        raise ValueError(
            f"parameters that train must be float32 with cmp (got {short[0]} in 16 bits, which was frozen when the "
            "model was attached); call hf_l2l.detach_l2l(model), and attach it again"
        )
    hooked = with_gradient_hooks(masters)
    if hooked:
        raise ValueError(gradient_hook_error(masters[hooked[0]]))
