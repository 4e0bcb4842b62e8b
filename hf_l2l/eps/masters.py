"""The masters of a model: one record per parameter, with all that the EPS knows about it, and units of masters.

A unit is a layer, or the non-layer modules of one call. Other parts of the EPS keep no maps by parameter of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter, itemgetter

import torch
from torch import nn

from hf_l2l.compat import with_gradient_hooks, without_interception
from hf_l2l.eps.pending import Landed, Pending, Saving, Update, can_hold, let_go, let_go_all, secure
from hf_l2l.model.precision import Precision
from hf_l2l.model.residency import STREAMED, LayerPlace, refuse_misplaced
from hf_l2l.model.stacks import shell_modules
from hf_l2l.model.units import LARGE, InModel, LayerUnit, parameters_in, pieces_of
from hf_l2l.optim.layer_optimizers import gradient_hook_error
from hf_l2l.runtime import stream, wait_reasons
from hf_l2l.runtime.flat_memory import Block, BlockPart, Room
from hf_l2l.runtime.observer import NON_LAYER
from hf_l2l.runtime.tensors import on_meta, parts_of

_META = torch.device("meta")

FUNCTIONAL_CALL = (
    "torch.func.functional_call, which replaces them for one call, is for torch.no_grad() only under L2L: write the "
    "values into the parameters, or train this model without L2L"
)


class Reads:
    """Uploads that forwards have not waited for."""

    def __init__(self) -> None:
        self.ends: list[tuple[stream.Point, list[torch.UntypedStorage]]] = []
        """Their ends, and the memory that they read, which is not freed before. (The tensors themselves would keep the
        model.)"""

    def wait(self) -> None:
        """Wait for all of them."""
        ends, self.ends = self.ends, []
        for end, _ in ends:
            stream.wait(end, wait_reasons.MASTERS_READ, host=True)


class Master(Pending):
    """The record of one parameter, which is the master: fp32 weights in host memory, or, if resident, on the device.

    The parameter is held for its record (see `pending`) while an update of it is under way, while it is saved in the
    background, and while it has a 16-bit copy, or one that stays on the device, which are valid as long as the
    parameter's values are not used.
    """

    guards_grad = False
    """True if reading `p.grad` raises: an eager update has used the gradient, and the step is not over."""

    def __init__(self, parameter: torch.Tensor, precision: Precision) -> None:
        self.parameter = parameter
        self.parts = parts_of(parameter)
        """The tensors that it consists of: itself, unless it is quantized."""
        self.name, self.layer_number = "a parameter", 0
        self.place, self.layers_before = sys.maxsize, 0
        """See `InModel`; the first is greater than those of all that the model has."""
        self.first_use = 0.0
        """For a large one in no layer: how many layers the last forward had called at its first use; else inf."""
        self.can_be_held = can_hold(parameter)
        self.is_resident = parameter.device not in (stream.HOST, _META)
        """Whether it is on the device, where it is updated: nothing of it travels."""
        self.dtype = parameter.dtype
        self.owner = 0
        """The rank that updates it, of those that train the model together."""
        self.saving: Saving | None = None
        """What must have its values before they change."""
        self.update: Update | None = None
        """Its update that is under way or has failed, or the eager update of this step."""

        self.gradient_like = self._gradient_like(precision)
        """A tensor with dtype, shape and strides of its gradient in `p.grad`; its values are not read."""
        self.gradient_part: BlockPart | None = None
        self.gradient_room: Room | None = None
        """The place of its gradient in page-locked memory, and that memory."""
        self.arriving: torch.Tensor | None = None
        """The host tensor that its gradient sum is downloaded into. At the end of this backward it becomes `p.grad`,
        or is added to that, or it is `p.grad` already."""
        self.landing: Landed | None = None
        """When the last sum in `p.grad` that a backward did not wait for is on the host."""
        self.taken_norm: torch.Tensor | None = None
        """The norm (0-dim, host) of a gradient that an eager update took before it was in `p.grad`."""
        self.calls, self.arrivals = 0, 0
        """Counts of this step: calls in the graph that may give it a gradient, and calls whose gradients arrived."""

        self.copy: torch.Tensor | None = None
        """The copy that is uploaded instead of it, in the dtype of the device."""
        self.copy_is_right = False
        """True if the copy has the current values, provided that `copy_version` is the current version."""
        self.copy_version = 0
        """Version of the parameter when the copy was made."""

        self.uses = 0
        """Counts what may have changed its values: updates, and uses by the program since a copy was made."""
        self.is_there = False
        """Whether the device has a copy that was made after the last of them."""
        self.device_copy: tuple[torch.Tensor, int, int] | None = None
        """Of one in no layer: that copy, in the dtype of the device, with `uses` and version when it was made."""

        self.reads: Reads | None = None
        """The uploads that forwards have not waited for, if it is among those that are uploaded."""

        self.copy_room: Room | None = None
        """Page-locked memory for the copy."""
        self.upload_parts: list[BlockPart | None] = [None] * len(self.parts)
        """The places in page-locked memory of what is uploaded: its parts, which were moved there, or its copy."""
        self.address: int | None = None
        """The address of its first part after it was moved to page-locked memory, or left where it was."""
        self.refused_bytes = 0
        """Its bytes if it or its copy is pageable, since the device refused to page-lock more."""

    @property
    def is_large(self) -> bool:
        """Whether it is updated and uploaded by itself, if it is in no layer. What cannot be held never is: nothing
        would tell its first use."""
        return self.gradient_like.numel() >= LARGE and self.can_be_held

    @property
    def pieces(self) -> list[int]:
        """The ends of the pieces in which it travels and is updated, in elements; none if it does as a whole."""
        found = pieces_of(self.gradient_like.numel()) if self.is_large and self.layer_number == 0 else []
        return found if len(found) > 1 else []

    def found_in_model(self, found: InModel, precision: Precision) -> None:
        """The model has the parameter here; its shape, dtype or strides may have changed."""
        self.name, self.place, self.layer_number, self.layers_before = found
        self.dtype = self.parameter.dtype
        parts = parts_of(self.parameter)
        if len(parts) != len(self.parts) or any(new is not old for new, old in zip(parts, self.parts, strict=True)):
            self.parts, self.upload_parts, self.address = parts, [None] * len(parts), None
        like = self._gradient_like(precision)
        if (like.shape, like.dtype, like.stride()) != (
            self.gradient_like.shape,
            self.gradient_like.dtype,
            self.gradient_like.stride(),
        ):
            self.gradient_like, self.gradient_part, self.gradient_room = like, None, None

    def _gradient_like(self, precision: Precision) -> torch.Tensor:
        p = self.parameter
        with without_interception():  # gradients wait in 16 bits to save memory of the host
            return on_meta(p, p.dtype if self.is_resident else precision.of_gradient(p))

    @property
    def is_updating(self) -> bool:
        """Whether an update of it is under way."""
        update = self.update  # which a thread of the worker may set to None meanwhile
        return update is not None and not update.task.done

    def wait(self) -> None:
        """Wait until no update of it is under way."""
        update = self.update
        if update is not None:
            update.wait()

    def before_look(self, tensor: torch.Tensor) -> None:
        """Reading the version waits until the update is done."""
        self.wait()

    def before_values(self, tensor: torch.Tensor) -> None:
        """Using the values waits until the update is done. The use may be a write that does not change the version (a
        fused optimizer, or `.data`), so the copy must be renewed after it."""
        self.before_look(tensor)
        landing, self.landing = self.landing, None
        if landing is not None:
            landing.wait()  # autograd may add to it in this graph
        self.wait_until_read()  # the use may be a write
        secure([self])
        self.is_changing()
        self.copy_is_right = False
        if not self.guards_grad:
            let_go(tensor, self)

    def wait_until_read(self) -> None:
        """Wait for an upload of it that a forward has not waited for."""
        reads, self.reads = self.reads, None
        if reads is not None:
            reads.wait()

    def is_changing(self) -> None:
        """Its values may become others: no copy that the device has is right from now on."""
        self.are_changing([self])

    def before_grad(self, tensor: torch.Tensor) -> None:
        """Using `p.grad` raises RuntimeError: an eager update has used the gradient."""
        update = self.update
        if update is not None:
            update.task.check()
        raise RuntimeError(
            "eps_update='eager' has used this gradient during backward, so that p.grad does not exist any more; use "
            "eps.grad_norm() for the norm, and eps_update='deferred' to clip, change or drop gradients"
        )

    @staticmethod
    def are_changing(masters: Iterable[Master]) -> None:
        """`is_changing` for each."""
        for master in masters:
            master.uses += 1
            master.is_there = False

    @staticmethod
    def end_update(masters: Iterable[Master]) -> None:
        """Make `masters` ordinary parameters again, except those with a valid copy. Called when their update has
        succeeded and its step is over."""
        masters = list(masters)
        for master in masters:
            master.guards_grad = False
        let_go_all([(m.parameter, m) for m in masters if not (m.copy_is_right or m.is_there)])
        # Last: as long as there is an update, other threads wait for it, and do not hold or let go meanwhile.
        for master in masters:
            master.update = None


class MasterUnit(LayerUnit):
    """A unit with the records of its parameters."""

    def __init__(
        self,
        module: nn.Module,
        modules: Iterable[nn.Module],
        name: str,
        precision: Precision,
        record: Callable[[torch.Tensor], Master],
        place: LayerPlace = STREAMED,
    ) -> None:
        """See `LayerUnit`; `record` gives the record of a parameter, and `place` says what of a layer stays on the
        device."""
        super().__init__(module, modules, name, precision)
        self.place = place
        self.masters = [record(p) for p in self.parameters]
        """In the order of `parameters`."""
        self.upload_block: Block | None = None
        """Host memory that holds all that is uploaded of it, in the order of `layout`; None if it lies apart."""
        self.gradient_block: Block | None = None
        """Host memory for all its gradients, element by element in the order of `gradient_layout`; None if they lie
        apart."""
        self.gradients_are_rounded = False
        """Whether all of them are float32 on the device, and bfloat16 in that memory."""

    @property
    def trained_masters(self) -> list[Master]:
        """The masters that require a gradient."""
        return [self.masters[number] for number in self.trained]

    @property
    def is_updating(self) -> bool:
        """Whether an update of its masters is under way."""
        return any(not update.task.done for update in {m.update for m in self.masters} if update is not None)

    def wait(self) -> None:
        """Wait until no update of its masters is under way."""
        for update in filter(None, {m.update for m in self.masters}):
            update.wait()


class Masters:
    """The records of one model, and its units: layers, and the non-layer modules below each called module."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module] = (),
        precision: Precision | None = None,
        places: Mapping[nn.Module, LayerPlace] | None = None,
    ) -> None:
        """`places` says what of each layer stays on the device; None: nothing."""
        self.model = model
        self._places = places or {}
        self.precision = precision or Precision(model)
        self.layers = list(layers)
        self.changes = 0
        """Counts changes of the model found by `refresh`: parameters, their shapes, or which of them are trained."""
        self.parameters: list[torch.Tensor] = []
        """The parameters, in the order of the model."""
        self.in_order_of_model = False
        """Whether updates have the order of the model, which all ranks know, and not that of the last forward."""
        self.has_resident, self.has_streamed = False, True
        """Whether parameters are on the device, and whether some are on the host."""
        self.runs_plainly = False
        """Whether all parameters are resident, and layers compute with them and keep their graphs."""
        self._records: dict[torch.Tensor, Master] = {}
        self._units: dict[nn.Module, MasterUnit] = {}
        """The called module, which may be a layer -> its unit."""
        self.layer_names: dict[nn.Module, str] = {}
        """Layer -> its name, in the order of the model."""
        self._units_of_call: dict[nn.Module, MasterUnit] | None = None
        """The units of a call without gradients that found the model changed; None for other calls."""
        self._rebuild()

    def start_call(self) -> None:
        """A call of the model begins: update records and units if the model has changed.

        Without gradients, `torch.func.functional_call` may have replaced the parameters for this call only. So the
        call gets units of its own, and the records stay those of the step that is under way.

        Raises:
            ValueError: with gradients, if other tensors than parameters stand in their places.
        """
        self._units_of_call = None
        is_current = all([unit.is_current() for unit in self._units.values()])
        if not torch.is_grad_enabled():
            self._units_of_call = None if is_current else {}
        elif not is_current:
            self._refuse_replaced()
            self._rebuild()
        elif len(self._records) > len(self.parameters):
            self._drop_unused()

    def end_call(self) -> None:
        """The call of the model is over: forget its own units."""
        self._units_of_call = None

    @property
    def is_changed_for_call(self) -> bool:
        """Whether the call under way has units of its own."""
        return self._units_of_call is not None

    def _refuse_replaced(self) -> None:
        for strange in (p for p in self.model.parameters() if not isinstance(p, nn.Parameter)):
            raise ValueError(
                "the weights of a model that trains under L2L must be its own parameters, where gradients arrive (got "
                f"a {type(strange).__name__} of shape {list(strange.shape)} in place of one); {FUNCTIONAL_CALL}"
            )

    def _rebuild(self) -> None:
        """Make the records and units of the model as it is."""
        self.changes += 1
        modules = {module: name for name, module in self.model.named_modules()}
        self.layer_names = {layer: modules.get(layer, type(layer).__name__) for layer in self.layers}
        self.parameters = list(self.model.parameters())
        for parameter, found in parameters_in(self.model, self.layers).items():
            self.of(parameter).found_in_model(found, self.precision)
        residency = {master.is_resident for master in self.all()}
        self.has_resident, self.has_streamed = True in residency, residency != {True}
        self._drop_unused()
        before = self._units
        self._units = {module: unit for module, unit in before.items() if unit.is_current()}
        for module in (*self.layers, self.model):
            unit = self.unit(module)
            if module in self.layer_names:
                misplaced = (m.name for m in unit.masters if m.is_resident != unit.place.is_resident)
                refuse_misplaced(unit.name, unit.place, misplaced)
            if module in before:
                unit.drawing_modes, unit.known = before[module].drawing_modes, before[module].known
        keeps_graphs = all(unit.place.keeps_graph for unit in self.layer_units)
        self.runs_plainly = keeps_graphs and not self.has_streamed and not self.precision.is_mixed

    def _drop_unused(self) -> None:
        """Drop the records of parameters that the model has no more, unless a step with them is under way."""
        known = set(self.parameters)
        self._records = {p: m for p, m in self._records.items() if p in known or m.is_updating or m.guards_grad}

    def unit(self, module: nn.Module) -> MasterUnit:
        """The unit of a layer, or of the non-layer modules at and below `module`."""
        units = self._units if self._units_of_call is None else self._units_of_call
        unit = units.get(module)
        if unit is None:
            name = self.layer_names.get(module)
            modules = shell_modules(module, self.layers) if name is None else module.modules()
            record = self.of if self._units_of_call is None else self._of_call
            place = self._places.get(module, STREAMED)
            unit = units[module] = MasterUnit(module, modules, name or NON_LAYER, self.precision, record, place)
        return unit

    @property
    def layer_units(self) -> list[MasterUnit]:
        """The units of all layers, whatever the call under way uses."""
        return [self._units[layer] for layer in self.layers]

    def non_layer_unit(self, module: nn.Module) -> MasterUnit:
        """The unit of the non-layer modules at and below `module`; an empty one for a layer."""
        if module in self.layer_names:
            return MasterUnit(module, (), NON_LAYER, self.precision, self.of)
        return self.unit(module)

    def _of_call(self, parameter: torch.Tensor) -> Master:
        """The record of a parameter, or one for this call only."""
        return self._records.get(parameter) or Master(parameter, self.precision)

    def of(self, parameter: torch.Tensor) -> Master:
        """The record of a parameter, which is made if the parameter is not known yet."""
        master = self._records.get(parameter)
        if master is None:
            master = self._records[parameter] = Master(parameter, self.precision)
        return master

    def of_all(self, parameters: Iterable[torch.Tensor]) -> list[Master]:
        """The records of `parameters`, in the same order."""
        return [self._records.get(p) or self.of(p) for p in parameters]

    def all(self) -> list[Master]:
        """The records of all parameters, in the order of the model."""
        records = self._records
        return [records[p] for p in self.parameters]

    def on_host(self) -> list[Master]:
        """The records of the parameters in host memory, in the order of the model."""
        return [master for master in self.all() if not master.is_resident]

    def parts(self, masters: Iterable[Master]) -> list[tuple[str, list[Master]]]:
        """Group `masters` in the order in which the next forward needs them, with names; in a group, in the order of
        the model.

        First the small parameters of non-layer modules, then their large ones (an embedding, a head), each alone, and
        layers, in the order of their first use (see `in_order_of_model`).
        """
        found: dict[tuple[float, str], list[Master]] = {}
        for master in sorted(masters, key=attrgetter("place")):
            number: float = master.layer_number
            alone = ""
            if number == 0 and master.is_large:
                number = (master.layers_before if self.in_order_of_model else master.first_use) + 0.5
                alone = master.name
            found.setdefault((number, alone), []).append(master)
        names = [NON_LAYER, *self.layer_names.values()]
        in_order = sorted(found, key=itemgetter(0))
        return [(key[1] or names[found[key][0].layer_number], found[key]) for key in in_order]

    def refuse_gradient_hooks(self) -> None:
        """Raise ValueError if a parameter has a gradient hook, which would never run."""
        for hooked in with_gradient_hooks(self.parameters):
            raise ValueError(gradient_hook_error(self.of(hooked).name))

    def release(self) -> None:
        """Forget all parameters: torch cannot swap a parameter while other objects refer to it."""
        self._records, self._units, self.parameters, self.layers, self._places = {}, {}, [], [], {}
        self.precision.release()
