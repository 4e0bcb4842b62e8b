"""Prefetch order: the layer that is uploaded while another one computes, in both sweeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

LayerT = TypeVar("LayerT")


def fetched_in_forward(last_time: Sequence[LayerT], number: int, layer: LayerT) -> LayerT | None:
    """The layer to upload while `layer` computes in a forward sweep: the one that followed it in the last forward.

    It is a hint only: a layer that was not prefetched is uploaded when it is called.

    Args:
        last_time: the layers that the model called in the last forward, in that order.
        number: the number of the call of `layer` in this forward, from 0.
        layer: the layer that computes.

    Returns:
        The layer; None after the last one, and after a layer that was not called in the last forward.
    """
    if not (number < len(last_time) and last_time[number] is layer):  # some models drop layers at random
        number = next((i for i, each in enumerate(last_time) if each is layer), len(last_time))
    return last_time[number + 1] if number + 1 < len(last_time) else None


def fetched_in_backward(called: Sequence[LayerT], number: int, lowest: int) -> LayerT | None:
    """The layer to upload while a layer computes in a backward sweep: the one that was called before it.

    Args:
        called: the layers that the forward has called so far, in that order.
        number: the number of the call, from 0.
        lowest: the number of the lowest call that the backward reaches; below it, nothing is trained.

    Returns:
        The layer; None for the lowest call.
    """
    return called[number - 1] if number > lowest else None
