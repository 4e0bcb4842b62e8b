"""In which order layers are fetched ahead: what travels to the device while a layer computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

LayerT = TypeVar("LayerT")


def fetched_in_forward(last_time: Sequence[LayerT], number: int, layer: LayerT) -> LayerT | None:
    """What to fetch while `layer` computes in a forward sweep: the layer that followed it last time.

    A hint only: a layer that was not fetched ahead is uploaded when it is called.

    Args:
        last_time: the layers that the model called last time, in that order.
        number: of the call of `layer` in this forward, from 0.
        layer: the one that computes.

    Returns:
        None for the last one, and for a layer that was not called last time.
    """
    if not (number < len(last_time) and last_time[number] is layer):  # some models drop layers at random
        number = next((i for i, each in enumerate(last_time) if each is layer), len(last_time))
    return last_time[number + 1] if number + 1 < len(last_time) else None


def fetched_in_backward(called: Sequence[LayerT], number: int, lowest: int) -> LayerT | None:
    """What to fetch while a layer computes in a backward sweep: the layer that was called before it.

    Args:
        called: the layers that the forward has called so far, in that order.
        number: of the call, from 0.
        lowest: the number of the lowest call that the backward comes to; below it, nothing is trained.

    Returns:
        None for the lowest one.
    """
    return called[number - 1] if number > lowest else None
