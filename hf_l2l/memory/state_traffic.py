"""Masters and optimizer state on disk (`state_tier="disk"`): the window of host memory that they pass through, and
what a step reads and writes."""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import nn

from hf_l2l.model.units import LARGE, parameters_in
from hf_l2l.runtime.flat_memory import Layout

KeyT = TypeVar("KeyT", bound=Hashable)


class Recent(Generic[KeyT]):
    """What is in memory, by its last use: the rule by which the window and its estimate decide."""

    def __init__(self) -> None:
        self._sizes: OrderedDict[KeyT, int] = OrderedDict()
        self.num_bytes = 0

    def __contains__(self, key: KeyT) -> bool:
        return key in self._sizes

    def touch(self, key: KeyT, num_bytes: int) -> None:
        """`key`, of so many bytes, is used now."""
        if key not in self._sizes:
            self._sizes[key] = num_bytes
            self.num_bytes += num_bytes
        self._sizes.move_to_end(key)

    def drop_oldest(self, most: int, keep: Collection[KeyT] = ()) -> list[KeyT]:
        """Drop what has not been used for longest, and is not to be kept, until at most so many bytes are left.

        Returns what was dropped.
        """
        dropped: list[KeyT] = []
        for key in [key for key in self._sizes if key not in keep]:
            if self.num_bytes <= most:
                break
            self.num_bytes -= self._sizes.pop(key)
            dropped.append(key)
        return dropped


def window_bytes(parts: Sequence[int], layer: int, layers: int) -> tuple[int, int]:
    """Bytes of the window, and how many of them are for what is being written or read ahead.

    Args:
        parts: bytes of masters and state of each part.
        layer: those of the largest layer.
        layers: how many layers there is room for.
    """
    return max(layers * layer, max(parts, default=0) + layer), layer


class StatePart(NamedTuple):
    """What is updated together: a layer, a large parameter in no layer, or the small ones in none."""

    order: float
    """The number of the layer, from 1 on; 0 for the small ones, and half a number more than the layers before a large
    one."""
    weights: int
    """Bytes of the masters, in whole pages."""
    state: int
    """Bytes of the optimizer's state, in whole pages."""

    @property
    def in_layer(self) -> bool:
        """Whether it is a layer."""
        return self.order >= 1 and self.order.is_integer()


class StateTraffic(NamedTuple):
    """Bytes that a step reads from the disk and writes to it, through a window of so many."""

    window: int = 0
    read: int = 0
    written: int = 0


def state_parts(
    model: nn.Module,
    masters: Mapping[Any, torch.Tensor],
    layers: Sequence[nn.Module],
    moments: Callable[[set[torch.Tensor]], int],
) -> list[StatePart]:
    """The parts of a model, in the order in which they are updated.

    Args:
        model: it may be on the meta device.
        masters: parameters whose masters are on the host, and shape and dtype of these.
        layers: those of the model.
        moments: tells the bytes of the optimizer's state of some parameters.
    """
    groups: dict[tuple[float, str], dict[torch.Tensor, torch.Tensor]] = {}
    for parameter, found in parameters_in(model, layers).items():
        if parameter in masters:
            is_large = found.layer_number == 0 and parameter.numel() >= LARGE
            key = (found.layers_before + 0.5, found.name) if is_large else (float(found.layer_number), "")
            groups.setdefault(key, {})[parameter] = masters[parameter]
    return [
        StatePart(order, _pages(Layout(part.values()).num_bytes), _pages(moments(set(part))))
        for (order, _), part in sorted(groups.items(), key=lambda each: each[0])
    ]


def state_traffic(parts: Sequence[StatePart], layers: int, *, reads_masters: bool, stays: int) -> StateTraffic:
    """What a step reads and writes, once steps repeat.

    Args:
        parts: in the order in which they are updated.
        layers: how many layers the window has room for.
        reads_masters: whether sweeps read masters, and not copies of them in memory.
        stays: so many layers, the last of the forward, are not read again for the backward.
    """
    sizes = [part.weights + part.state for part in parts]
    largest = max([part.weights + part.state for part in parts if part.in_layer], default=0)
    limit, reserve = window_bytes(sizes, largest, layers)
    recent: Recent[tuple[StatePart, str]] = Recent()
    changed: set[tuple[StatePart, str]] = set()
    read = written = 0
    for _ in range(3):
        read = written = 0
        for part, kind in _uses(parts, reads_masters=reads_masters, stays=stays):
            for key in [(part, "weights")] if kind == "sweep" else [(part, "weights"), (part, "state")]:
                size = part.weights if key[1] == "weights" else part.state
                if key not in recent:
                    leaving = recent.drop_oldest(max(0, limit - reserve - size))
                    written += sum(p.weights if k == "weights" else p.state for p, k in leaving if (p, k) in changed)
                    changed.difference_update(leaving)
                    read += size
                recent.touch(key, size)
                if kind == "update":
                    changed.add(key)
    return StateTraffic(min(limit, sum(sizes)), read, written)


def _uses(parts: Sequence[StatePart], *, reads_masters: bool, stays: int) -> Iterator[tuple[StatePart, str]]:
    """Parts in the order in which a step uses them, by a "sweep" or an "update"."""
    of_layers = [part for part in parts if part.in_layer]
    if reads_masters:
        yield from ((part, "sweep") for part in parts)
        yield from ((part, "sweep") for part in reversed(of_layers[: len(of_layers) - stays]))
    yield from ((part, "update") for part in parts)


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
