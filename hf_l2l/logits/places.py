"""Where chunks of logits are computed: on the device of the model's code, or in turn on several devices.

The code of a model and autograd see the first device only. Another one has a copy of the head, and is sent the rows of
a chunk while it computes the one before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from hf_l2l.runtime import stream, wait_reasons


class Sent(NamedTuple):
    """Tensors that are where they are needed after a point; None if they were there."""

    tensors: list[torch.Tensor]
    point: stream.Point | None = None


class Place:
    """The first device: what is computed there is computed on the program's stream."""

    @contextmanager
    def computing(self, *sent: Sent) -> Iterator[None]:
        """What is launched in the block is computed here, after all that was sent has arrived."""
        yield

    def send(self, tensors: Sequence[torch.Tensor]) -> Sent:
        """Start to copy tensors of the first device to this one."""
        return Sent([*tensors])

    def send_back(self, tensor: torch.Tensor) -> Sent:
        """Start to copy what was computed here to the first device."""
        return Sent([tensor])


class OtherPlace(Place):
    """Another device, which computes beside the first one, on a stream of its own."""

    def __init__(self, first: torch.device, compute: stream.Lane) -> None:
        """`compute` is the lane on which the device computes layers, too, so that they share memory."""
        self.first, self.device = first, compute.device
        self._compute = compute
        self._there = stream.PeerLane(first, self.device)
        self._back = stream.PeerLane(self.device, first)

    @contextmanager
    def computing(self, *sent: Sent) -> Iterator[None]:
        """As of the first device."""
        with self._compute.entered():
            for each in sent:
                stream.wait(each.point, wait_reasons.ROWS_ARRIVED)
            yield

    def send(self, tensors: Sequence[torch.Tensor]) -> Sent:
        """As of the first device."""
        computed = stream.record(self.first)
        with self._compute.entered():
            rooms = [torch.empty_like(tensor, device=self.device) for tensor in tensors]
            free = stream.record(self.device)
        return _copied(self._there, tensors, rooms, computed, free)

    def send_back(self, tensor: torch.Tensor) -> Sent:
        """As of the first device."""
        with self._compute.entered():
            computed = stream.record(self.device)
        room = torch.empty_like(tensor, device=self.first)
        return _copied(self._back, [tensor], [room], computed, stream.record(self.first))


def _copied(
    lane: stream.PeerLane,
    tensors: Sequence[torch.Tensor],
    rooms: list[torch.Tensor],
    computed: stream.Point | None,
    free: stream.Point | None,
) -> Sent:
    with lane.entered(), torch.no_grad():
        stream.wait(computed, wait_reasons.GIVEN_COMPUTED)
        stream.wait(free, wait_reasons.ROWS_MEMORY_FREE)
        with stream.span(lane.target, stream.PEER, "head"):
            for tensor, room in zip(tensors, rooms, strict=True):
                room.copy_(tensor, non_blocking=True)
        # The copies run on the stream of the source; the allocator knows of neither side's use in it.
        stream.keep_until_done(lane.source, [*tensors, *rooms])
        return Sent(rooms, stream.record(lane.target))


def arrived(sent: Sent) -> torch.Tensor:
    """The tensor of `Place.send_back`: later work of the program's stream comes after its copy."""
    [tensor] = sent.tensors
    stream.wait(sent.point, wait_reasons.ROWS_ARRIVED)
    return tensor


FIRST = Place()
