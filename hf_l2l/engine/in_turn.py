"""Which of several devices runs a layer call, and what it must not do there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hf_l2l.device.layer_device import LayerDevice
from hf_l2l.engine.layer_call import LayerCall
from hf_l2l.eps.masters import MasterUnit
from hf_l2l.rows.host_rows import HostRows
from hf_l2l.runtime.tensors import is_cache, tensors_within


def device_of(
    devices: Sequence[LayerDevice], unit: MasterUnit, number: int, arguments: Sequence[Any] = ()
) -> LayerDevice:
    """The device that runs call number `number`, of `unit`: in turn, but where what stays of the unit is, and the
    first one if an argument is an object with tensors, which are there.

    Raises:
        ValueError: if weights stay on another device than such tensors.
    """
    stays = unit.place.is_resident or unit.place.keeps_weights
    found, first = devices[(unit.place.number if stays else number) % len(devices)], devices[0]
    if found is first or not any(holds_tensors(each) for each in arguments):
        return found
    if stays:
        raise ValueError(
            f"a layer whose weights stay on {found.device} must not be given an object that holds tensors of "
            f"{first.device} (got one as an argument of {unit.name}); let no weights of layers stay, or use "
            "one device"
        )
    return first


def holds_tensors(argument: Any) -> bool:
    """Whether it is an object with tensors; the tensors of a key-value cache are where its layer is."""
    if isinstance(argument, torch.Tensor) or is_cache(argument):
        return False
    return next(iter(tensors_within(argument)), None) is not None


@contextmanager
def refusing_writes_to_copies(
    call: LayerCall, tensors: Sequence[torch.Tensor], given: Sequence[torch.Tensor]
) -> Iterator[None]:
    """Refuse that a layer writes into its arguments `given`, if they are copies of `tensors` of the first device,
    which the code of the model reads afterwards.

    Raises:
        RuntimeError: if it has done so.
    """
    pairs = zip(tensors, given, strict=True)
    copied = [there for t, there in pairs if not isinstance(t, HostRows) and there.device != t.device]
    before = versions(copied)
    yield
    if versions(copied) != before:
        raise RuntimeError(
            "on several devices, a layer must not change its arguments in place, since it is given copies (got a "
            f"{type(call.layer).__name__} that does); make it change a copy, or use one device"
        )


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How often each has been changed in place; not known of tensors of inference mode."""
    return [0 if t.is_inference() else t._version for t in tensors]
