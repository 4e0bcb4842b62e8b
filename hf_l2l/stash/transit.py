"""`Transit`: what the stashes of all devices of an engine share: when rows are where they go to, and the streams
between devices."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence

import torch

from hf_l2l.rows.host_rows import HostRows, Keeper, Passing
from hf_l2l.runtime import stream
from hf_l2l.stash.arrivals import Arrivals

_Kind = tuple[torch.Size, torch.dtype]


class Transit:
    """Memory for rows on any of the devices, and the way there."""

    def __init__(
        self, devices: Sequence[torch.device], compute: Mapping[torch.device, stream.Lane] | None = None
    ) -> None:
        """Of the first of `devices`, all tensors that pass between layers say that they are. `compute` has the lanes
        on which layers compute, for several."""
        self.devices = devices
        self.has_several = len(devices) > 1
        pairs = itertools.permutations(devices, 2)
        self.indirect = {p for p in pairs if not (stream.copies_directly(*p) and stream.arrives_as_sent(*p))}
        """Pairs of devices between which rows pass through page-locked memory of the host."""
        self.arrivals = Arrivals()
        self._outside: weakref.ref[Keeper] | None = None
        self._compute = compute or {}
        self._last: dict[torch.device, _Kind] = {}
        """Shape and dtype of the memory that was last allocated."""
        self._reserved: dict[tuple[torch.device, _Kind], tuple[torch.Tensor, stream.Point | None]] = {}
        """Memory for what a device will be sent, which may be written after the point."""
        self._lanes: dict[tuple[torch.device, torch.device], stream.PeerLane] = {}

    def moves_outside(self, keeper: Keeper) -> None:
        """The stash of the first device, the first to be made, moves rows for the code of the model between layers."""
        self._outside = self._outside or weakref.ref(keeper)

    def lane(self, source: torch.device, target: torch.device) -> stream.PeerLane:
        """The streams for copies from one device to another."""
        if (source, target) not in self._lanes:
            self._lanes[source, target] = stream.PeerLane(source, target)
        return self._lanes[source, target]

    def is_direct(self, source: torch.device, target: torch.device) -> bool:
        """Whether rows pass from one device to another without the host; within one device they do."""
        return source == target or (source, target) not in self.indirect

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype, place: torch.device, like: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Memory on a device for rows that come there, in the order of the dimensions of `like`."""
        # Memory of an evaluation in inference mode must not be what a training then writes to.
        with self._compute[place].entered(), torch.inference_mode(False):
            if like is not None:
                memory, free = torch.empty_like(like, device=place), stream.record(place)
            else:
                kind = self._last[place] = torch.Size(shape), dtype
                reserved = self._reserved.pop((place, kind), None)
                memory, free = reserved or (torch.empty(shape, dtype=dtype, device=place), stream.record(place))
        self.arrivals.begin(memory, free)
        return memory

    def reserve(self, place: torch.device) -> None:
        """Before a device is given the work of a layer: allocate memory for what its next layer will be sent, most
        likely of the same kind as what it was sent last.

        The allocator may hand out memory that work on the compute stream still uses, so what is sent waits for that
        work: for this layer, too, if the memory were allocated later.
        """
        kind = self._last.get(place)
        if kind is not None and (place, kind) not in self._reserved:
            self.forget_reserved(place)
            with self._compute[place].entered(), torch.inference_mode(False):
                self._reserved[place, kind] = torch.empty(*kind[:1], dtype=kind[1], device=place), stream.record(place)

    def reserved_memory(self) -> list[torch.Tensor]:
        """Memory for what devices will be sent."""
        return [memory for memory, _ in self._reserved.values()]

    def forget_reserved(self, place: torch.device | None = None) -> None:
        """Nothing more is sent to the device, or to any."""
        for each in [each for each in self._reserved if place is None or each[0] == place]:
            del self._reserved[each]

    def rows_of(self, memory: torch.Tensor, step: int, passing: Passing | None) -> HostRows:
        """`memory` as what passes between layers; `step` entries of its first dimension are moved at once."""
        keeper = None if self._outside is None else self._outside()
        assert keeper is not None, "the stash of the first device lives as long as the engine"
        return HostRows.of(memory, self.devices[0], keeper, step, passing)
