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
    """Bytes of the masters that are trained, in whole pages."""
    state: int
    """Bytes of the optimizer's state, in whole pages."""
    frozen: int = 0
    """Bytes of the other masters, in whole pages."""

    @property
    def in_layer(self) -> bool:
        """Whether it is a layer."""
        return self.order >= 1 and self.order.is_integer()

    @property
    def num_bytes(self) -> int:
        """Bytes of all."""
        return self.weights + self.state + self.frozen

    def used(self, *, is_update: bool) -> list[tuple[str, int]]:
        """What an update uses, or a sweep: names and bytes."""
        last = ("state", self.state) if is_update else ("frozen", self.frozen)
        return [(name, size) for name, size in (("weights", self.weights), last) if size]


class StateTraffic(NamedTuple):
    """Bytes that a step reads from the disk and writes to it, through a window of so many."""

    window: int = 0
    read: int = 0
    written: int = 0
    read_alone: int = 0
    """Of what is read: in sweeps beside which nothing is updated."""


def updated_together(
    model: nn.Module, masters: Mapping[Any, torch.Tensor], layers: Sequence[nn.Module]
) -> list[tuple[float, dict[torch.Tensor, torch.Tensor]]]:
    """Parameters and their masters by the update that they have together: of a layer, of a large one in no layer, or
    of the small ones there; each with its place in the order of the updates. See `state_parts` for the arguments."""
    groups: dict[tuple[float, str], dict[torch.Tensor, torch.Tensor]] = {}
    for parameter, found in parameters_in(model, layers).items():
        if parameter in masters:
            is_large = found.layer_number == 0 and parameter.numel() >= LARGE
            key = (found.layers_before + 0.5, found.name) if is_large else (float(found.layer_number), "")
            groups.setdefault(key, {})[parameter] = masters[parameter]
    return [(order, part) for (order, _), part in sorted(groups.items(), key=lambda each: each[0])]


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
    return [
        StatePart(
            order,
            _pages(Layout(master for p, master in part.items() if p.requires_grad).num_bytes),
            _pages(moments(set(part))),
            _pages(Layout(master for p, master in part.items() if not p.requires_grad).num_bytes),
        )
        for order, part in updated_together(model, masters, layers)
    ]


def state_traffic(
    parts: Sequence[StatePart], layers: int, *, reads_masters: bool, stays: int, updates: str = "serial"
) -> StateTraffic:
    """What a step reads and writes, once steps repeat.

    Args:
        parts: in the order in which they are updated.
        layers: how many layers the window has room for.
        reads_masters: whether sweeps read masters, and not copies of them in memory.
        stays: so many layers, the last of the forward, are not read again for the backward.
        updates: when parts are updated, `eps_update` without "auto": right before the forward uses them ("deferred"),
            beside the backward ("eager"), or after it ("serial").
    """
    sizes = [part.num_bytes for part in parts]
    largest = max([part.num_bytes for part in parts if part.in_layer], default=0)
    limit, reserve = window_bytes(sizes, largest, layers)
    recent: Recent[tuple[StatePart, str]] = Recent()
    changed: dict[tuple[StatePart, str], int] = {}
    read = written = alone = 0
    for _ in range(3):
        read = written = alone = 0
        for part, is_update, is_beside in _uses(parts, reads_masters=reads_masters, stays=stays, updates=updates):
            for name, size in part.used(is_update=is_update):
                key = part, name
                if key not in recent:
                    written += sum(changed.pop(k, 0) for k in recent.drop_oldest(max(0, limit - reserve - size)))
                    read += size
                    alone += 0 if is_beside else size
                recent.touch(key, size)
                if is_update:
                    changed[key] = size
    return StateTraffic(min(limit, sum(sizes)), read, written, alone)


def _uses(
    parts: Sequence[StatePart], *, reads_masters: bool, stays: int, updates: str
) -> Iterator[tuple[StatePart, bool, bool]]:
    """Parts in the order in which a step uses them, whether to update them, and whether some are updated then."""
    of_layers = [part for part in parts if part.in_layer]
    follows = updates == "deferred"
    for part in parts if follows else ():
        if part.weights:
            yield part, True, True
        if reads_masters:
            yield part, False, True
    if reads_masters:
        yield from ((part, False, False) for part in parts if not follows)
        yield from ((part, False, updates == "eager") for part in reversed(of_layers[: len(of_layers) - stays]))
    yield from ((part, True, True) for part in parts if part.weights and not follows)


def _pages(num_bytes: int) -> int:
    """In whole pages; nothing takes none."""
    return -(-num_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
