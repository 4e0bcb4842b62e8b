"""Swaps the weights and buffers of modules for their device copies during a call.

The parameters of the model are the fp32 masters in host memory. During a call, copies on the execution device replace
them in the modules' tables; after the call the masters are restored, even if the call raised. `relay` uses this for
layers, whose copies `slots` makes, and `shell` for the non-layer modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_l2l.compat import keeps_statistics, version_kept, without_interception
from hf_l2l.eps.masters import Master, MasterUnit
from hf_l2l.eps.pending import hold_all
from hf_l2l.eps.weight_copies import Copies
from hf_l2l.model.precision import Precision
from hf_l2l.runtime import stream
from hf_l2l.runtime.observer import NON_LAYER
from hf_l2l.runtime.tensors import is_quantized, rebuilt, sent

_STAGED = 16 * 2**20
"""Bytes up to which a buffer is uploaded from a page-locked copy: attention masks of 2,048 tokens have 4 MiB."""

OnGradient = Callable[[int, torch.Tensor], None]
"""Called in a backward when a leaf has got a gradient, with the number of its parameter in the unit, and the leaf."""


class DeviceWeights:
    """Device copies of the parameters of one unit.

    The copies are leaves of the graph: after backwards through them, each `grad` is a gradient sum (arXiv:2002.05645,
    algorithm 2: gradients are summed over the ubatches on the device).
    """

    def __init__(
        self, unit: MasterUnit, leaves: Sequence[torch.Tensor], device: torch.device, precision: Precision
    ) -> None:
        """`leaves` has one leaf per parameter of `unit`, in the order of the unit."""
        self.unit = unit
        self.leaves = leaves
        self.device = device
        self.precision = precision

    def upload_first(self) -> None:
        """Begin to upload what the call uses before its first layer."""

    def upload_ahead(self, layer_calls: int) -> None:
        """The call has called so many layers: begin to upload what it uses after the next one."""

    def settle(self) -> None:
        """The call is over: wait for all uploads."""

    def take_gradients(self) -> list[tuple[Master, torch.Tensor]]:
        """Take the gradient sums out of the leaves: pairs of master and sum, in the dtype of the master."""
        taken: list[tuple[Master, torch.Tensor]] = []
        for master, leaf in zip(self.unit.masters, self.leaves, strict=True):
            gradient = leaf.grad
            if gradient is not None:
                leaf.grad = None
                taken.append((master, gradient.to(master.dtype)))
        return taken

    @contextmanager
    def placed(self, *, keep_buffers: bool = True) -> Iterator[None]:
        """Inside, the modules read the device copies instead of the masters.

        Buffers are copied, too. Writes of the modules into them are copied back to the host if `keep_buffers` is True
        (a forward), and discarded otherwise (a recompute, whose writes have already been made by the forward).
        """
        places, leaves = self.unit.places, self.leaves
        before = [table.get(name) for table, name, _ in places]
        layer = None if self.unit.name == NON_LAYER else self.unit.name
        buffers = self.buffers = _DeviceBuffers(
            self.unit.with_buffers, self.device, keep=keep_buffers, precision=self.precision, layer=layer
        )
        try:
            for table, name, number in places:
                table[name] = leaves[number]
            buffers.place()
            # Where memory is shared, a weight that is set to itself would count as changed.
            with version_kept(*leaves) if self.unit.parametrizes else nullcontext():
                yield
        finally:
            # The masters; or the weights of a call that runs, if its program runs a backward in the midst of it.
            for (table, name, _), found in zip(places, before, strict=True):
                table[name] = found
            buffers.restore()

    @contextmanager
    def masters_back(self) -> Iterator[None]:
        """Within `placed`: inside, the modules read the masters and the host's buffers again.

        Resident masters are downloaded for that.
        """
        masters = [master for master in self.unit.masters if master.copy_is_right or master.is_there]
        right = [(master, master.copy_is_right, master.is_there, master.uses) for master in masters]
        with torch.no_grad():
            values = [stream.download(m.parameter) if m.is_resident else m.parameter for m in self.unit.masters]
        of_masters = [(table, name, values[number]) for table, name, number in self.unit.places]
        on_host: list[tuple[dict[str, Any], str, Any]] = [*of_masters, *(copy.place for copy in self.buffers.copies)]
        on_device = [table.get(name) for table, name, _ in on_host]
        try:
            for table, name, tensor in on_host:
                table[name] = tensor
            yield
        finally:
            for (table, name, _), replaced in zip(on_host, on_device, strict=True):
                table[name] = replaced
            # The modules have only read them. A copy that was renewed now may already be part of a graph.
            hold_all([(master.parameter, master) for master in masters])
            for master, has_copy, is_there, uses in right:
                master.copy_is_right, master.is_there, master.uses = has_copy, is_there, uses


def as_parameter(tensor: torch.Tensor) -> nn.Parameter:
    """`tensor`, detached, as modules keep their weights: code in a layer may move a weight to another of its modules,
    and what is no parameter would stay there as an ordinary attribute."""
    return nn.Parameter(tensor.detach(), requires_grad=False)


def as_leaves(unit: MasterUnit, parts: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """What stands in the modules for the parameters of `unit`; `parts` are its parts on the device."""
    if not unit.has_quantized:
        return [nn.Parameter(part.detach(), requires_grad=False) for part in parts]
    remaining = iter(parts)
    made = [rebuilt(p, remaining) for p in unit.parameters]
    # What an adapter has rebuilt is a parameter already, whose attributes a detached tensor would not have.
    kept = [is_quantized(p) and isinstance(each, nn.Parameter) for p, each in zip(unit.parameters, made, strict=True)]
    return [each if keep else as_parameter(each) for each, keep in zip(made, kept, strict=True)]


def uploaded(
    unit: MasterUnit,
    device: torch.device,
    copies: Copies,
    *,
    requires_grad: bool,
    on_gradient: OnGradient | None = None,
) -> DeviceWeights:
    """Upload the weights of `unit`, on the compute stream: its masters, or their 16-bit copies."""
    parts = copies.of_unit(unit).tensors
    # Autograd refuses tensors that were created under inference mode.
    with torch.inference_mode(False), torch.no_grad(), without_interception():
        if not stream.shares_host_memory(device):
            resident = [unit.masters[owner].is_resident for owner in unit.owners]
            parts = [p if is_there else stream.upload(p, device) for p, is_there in zip(parts, resident, strict=True)]
        leaves = as_leaves(unit, parts)
        if requires_grad:
            for number in unit.trained:
                leaf = leaves[number].requires_grad_()
                if on_gradient is not None:
                    leaf.register_post_accumulate_grad_hook(partial(on_gradient, number))
    return DeviceWeights(unit, leaves, device, copies.precision)


class _BufferPlace(NamedTuple):
    """The table and the name under which a module keeps one buffer, and that buffer, which may be None."""

    table: dict[str, Any]
    name: str
    buffer: Any


class _BufferCopy(NamedTuple):
    """The device copy of one buffer, and what tells whether the module has written to it."""

    place: _BufferPlace
    copy: torch.Tensor | None
    version: int
    written_unseen: bool


class _DeviceBuffers:
    """Device copies of the buffers of some modules."""

    def __init__(
        self,
        modules: Iterable[nn.Module],
        device: torch.device,
        *,
        keep: bool,
        precision: Precision,
        layer: str | None = None,
    ) -> None:
        """`keep` says whether the host's buffers get what the modules write; `layer` names the layer of the modules,
        and is None for those in no layer."""
        self.keep = keep
        self.layer = layer
        self.precision = precision
        self.copies: list[_BufferCopy] = []
        # Where memory is shared, the modules write to the buffers themselves, so that no copies are needed.
        if not modules or (keep and stream.shares_host_memory(device) and not precision.is_mixed):
            return
        made: dict[torch.Tensor | None, torch.Tensor | None] = {None: None}
        with torch.inference_mode(False), torch.no_grad(), stream.span(device, "upload", "buffers"):
            for module in modules:
                # Batch norm kernels write running statistics without changing the version counter.
                unseen = keeps_statistics(module) and module.training
                for name, buffer in module._buffers.items():
                    if buffer not in made:
                        assert buffer is not None
                        dtype = precision.of_buffer(module, name, buffer)
                        made[buffer] = sent(buffer.detach(), device, dtype, _STAGED, copy=True)
                    place = _BufferPlace(module._buffers, name, buffer)
                    self.copies.append(_BufferCopy(place, made[buffer], _version(made[buffer]), unseen))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The copies."""
        return [each.copy for each in self.copies if each.copy is not None]

    def place(self) -> None:
        for (table, name, _), copy, _, _ in self.copies:
            table[name] = copy

    def restore(self) -> None:
        """Restore the host buffers; with `keep`, with the values that the call wrote or assigned."""
        if not self.copies:
            return
        rounded: list[str] = []
        with torch.no_grad():
            for (table, name, buffer), copy, version, unseen in self.copies:
                now = table.get(name)
                table[name] = buffer
                if not self.keep:
                    continue
                if now is copy and (copy is None or not (unseen or copy._version != version)):
                    continue
                dtype = None if copy is None or copy.dtype == buffer.dtype else copy.dtype
                if dtype is not None and self.layer is not None:
                    rounded.append(f"{name} of {self.layer}")
                if now is copy:
                    buffer.copy_(copy)
                    # It may accumulate small numbers, which 16 bits would round away. In a layer it has one dtype in
                    # all calls, since the recompute of this one follows.
                    if dtype is not None and self.layer is None:
                        self.precision.keep(buffer)
                else:  # the module assigned another tensor to its buffer
                    table[name] = None if now is None else stream.download(now.detach())
                    if now is not None and now.dtype == dtype:
                        table[name] = table[name].to(buffer.dtype)
        self.precision.warn_of_rounded(rounded)


def _version(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor._version
