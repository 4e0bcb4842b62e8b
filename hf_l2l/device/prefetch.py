"""Which layer is uploaded while another one computes, and when its upload is given to the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar

from torch import nn

from hf_l2l.device.layer_device import LayerDevice
from hf_l2l.eps.masters import MasterUnit
from hf_l2l.eps.server import EagerParamServer
from hf_l2l.runtime.backward_callbacks import RaisedIn

LayerT = TypeVar("LayerT")


class Prefetch:
    """Uploads layers ahead on one or several devices.

    It is a hint: a layer that was not prefetched is uploaded when it is called.
    """

    def __init__(self, devices: Sequence[LayerDevice], eps: EagerParamServer, *, is_on: bool) -> None:
        """For `devices` that run the layers in turn; nothing is uploaded ahead unless it `is_on`."""
        self._devices = devices
        self._eps = eps
        self._is_on = is_on

    def begin(self, layers: Sequence[nn.Module]) -> None:
        """A call of the model begins, which will call these layers, as far as is known: upload the first one of each
        device. Weights that an update has changed are not reused."""
        units = [self._eps.masters.unit(layer) for layer in layers]
        for number, at in enumerate(self._devices):
            first = next((unit for unit in units[number :: len(self._devices)] if not unit.place.is_resident), None)
            if at.weight_slots is not None:
                at.weight_slots.forget(self._eps.masters.layer_units)
                if self._is_on and first is not None and first.is_updating and len(self._devices) > 1:
                    at.ahead = first  # while layers before it run on other devices
                elif self._is_on and first is not None and not first.is_updating:
                    with RaisedIn("the upload of", first.name):
                        at.weight_slots.prefetch(first)

    def after(self, order: Sequence[nn.Module], number: int, layer: nn.Module) -> MasterUnit | None:
        """The layer to upload while `layer`, call number `number`, computes in a forward sweep. It may be updated as
        long as resident layers compute: only the last one before it waits for the update."""
        unit, count = self._eps.masters.unit, len(self._devices)

        def travels(other: nn.Module) -> bool:
            return other is not layer and not unit(other).place.is_resident

        fetched = fetched_in_forward(order, number, layer, travels, count)
        direct = fetched_in_forward(order, number, layer, devices=count)
        if fetched is None or (unit(fetched).is_updating and direct is not fetched):
            return None
        return unit(fetched)

    @contextmanager
    def during(self, at: LayerDevice, unit: MasterUnit | None) -> Iterator[None]:
        """Upload `unit`, overlapped with the work of another layer, which the block gives to its device."""
        slots, at.ahead = at.weight_slots, None
        if slots is None or unit is None or not self._is_on:
            yield
            return
        if len(self._devices) > 1 and unit.is_updating:
            # Other devices have layers to run whose weights are there: those are given their work first.
            at.ahead = unit
            yield
            return
        # Inside the block, a layer may make the host wait for the device, so the upload is submitted first. But an
        # upload from pageable memory, or of weights that are being updated, blocks the host itself; then the device
        # gets its work first.
        first = self._eps.memory.is_locked and not unit.is_updating
        if not first:
            yield
        with RaisedIn("the upload of", unit.name):
            slots.prefetch(unit)
        if first:
            yield

    def late(self) -> None:
        """Begin the uploads of layers that were being updated when another layer of their device ran."""
        for at in self._devices:
            unit, slots = at.ahead, at.weight_slots
            if unit is not None and slots is not None and not unit.is_updating:
                at.ahead = None
                with RaisedIn("the upload of", unit.name), at.running(draws=False):
                    slots.prefetch(unit)


def fetched_in_forward(
    last_time: Sequence[LayerT],
    number: int,
    layer: LayerT,
    travels: Callable[[LayerT], bool] = lambda _: True,
    devices: int = 1,
) -> LayerT | None:
    """The layer to upload while `layer` computes in a forward sweep: the next one on its device that travels.

    It is a hint only: a layer that was not prefetched is uploaded when it is called.

    Args:
        last_time: the layers that the model called in the last forward, in that order.
        number: the number of the call of `layer` in this forward, from 0.
        layer: the layer that computes.
        travels: whether a layer is uploaded at all.
        devices: how many devices run layers in turn.

    Returns:
        The layer; None after the last one, and after a layer that was not called in the last forward.
    """
    if not (number < len(last_time) and last_time[number] is layer):  # some models drop layers at random
        number = next((i for i, each in enumerate(last_time) if each is layer), len(last_time))
    return next(filter(travels, islice(last_time, number + devices, None, devices)), None)


def fetched_in_backward(
    called: Sequence[LayerT],
    number: int,
    lowest: int,
    travels: Callable[[LayerT], bool] = lambda _: True,
    devices: int = 1,
) -> LayerT | None:
    """The layer to upload while a layer computes in a backward sweep: the last one called before it on its device that
    travels.

    Args:
        called: the layers that the forward has called so far, in that order.
        number: the number of the call, from 0.
        lowest: the number of the lowest call that the backward reaches; below it, nothing is trained.
        travels: whether a layer is uploaded at all.
        devices: how many devices run layers in turn.

    Returns:
        The layer; None for the lowest call.
    """
    return next(filter(travels, (called[i] for i in range(number - devices, lowest - 1, -devices))), None)
