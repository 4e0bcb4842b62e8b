"""The seconds of a step of several hosts, between which gradient sums and new weights pass.

Each host sends the sums of a layer to their owners while the layers before it run backward, and new weights while the
next forward runs. Of n bytes per layer, (h - 1)/h leave each of h hosts, and as many come, in each direction once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class HostsLoad(NamedTuple):
    """A step of one host, once steps repeat."""

    forward: float
    """Seconds that it computes."""
    backward: float
    layers: Sequence[int]
    """Bytes of the gradient sums of each layer, in the order of the forward, and last those of what is outside the
    layers. New weights are as many in fp32."""


def hosts_seconds(load: HostsLoad, hosts: int, bandwidth: float) -> float:
    """Seconds of forward and backward of `hosts` hosts, each of which sends and receives `bandwidth` bytes per second.

    Layers are taken as equally long. A layer of the next forward begins when its weights have come, which cross the
    network one after the other from the step on.
    """
    *layers, outside = load.layers
    share = (hosts - 1) / hosts / bandwidth
    there = outside * share
    done = there
    for num_bytes in layers:
        there += num_bytes * share
        done = max(done, there) + load.forward / len(layers)
    return backward_seconds(load, hosts, bandwidth) + done


def backward_seconds(load: HostsLoad, hosts: int, bandwidth: float) -> float:
    """Seconds of the backward alone: the sums of a layer cross the network when it has been computed and those of the
    layer after it have crossed; those of what is outside come last."""
    *layers, outside = load.layers
    share = (hosts - 1) / hosts / bandwidth
    computed = crossed = 0.0
    for num_bytes in reversed(layers):
        computed += load.backward / len(layers)
        crossed = max(computed, crossed) + num_bytes * share
    return max(computed, crossed) + outside * share
