"""The stash: keeps the tensor arguments of layer calls until the backward sweep recomputes the layers.

"The forward pass [stashes] away only the output activations [...] in on-chip or off-chip device memory"
(arXiv:2002.05645, first text, section 3), and `stash="host"` is its equation 4: device memory that does not grow with
depth. Layer inputs are then downloaded while their layer computes, and uploaded one micro-batch ahead of their
recompute. If the boundary is on the host, too, the output of a layer is downloaded micro-batch by micro-batch: it is
what the next layer uploads, and what is kept of its input. Gradients of layer inputs pass in the same way.

Stashed tensors are saved tensors of autograd, so that they live exactly as long as the graph: a backward that uses
them frees them, as does discarding the batch; `retain_graph=True` keeps them. Autograd detects changes in place
between the two sweeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from hf_l2l.config import StashPlace
from hf_l2l.eps.host_memory import HostMemory
from hf_l2l.rows.host_rows import HostRows, host_of
from hf_l2l.runtime import stream, wait_reasons
from hf_l2l.runtime.flat_memory import Room
from hf_l2l.runtime.tensors import tensor_bytes


def _nothing() -> None:
    pass


class _Fetched(NamedTuple):
    """Rows that are being uploaded, and the point after which they may be used."""

    kept: torch.Tensor
    rows: torch.Tensor
    uploaded: stream.Point | None


class Stash:
    """Keeps the tensor arguments of layer calls, on the device or in host memory.

    One instance serves one engine. With `place="host"` each layer's own input is downloaded; tensors that several
    layers share (an attention mask, position embeddings, encoder states) stay on the device, where each exists once
    and not once per layer.
    """

    def __init__(self, place: StashPlace, device: torch.device, memory: HostMemory, *, rooms: int = 1) -> None:
        """The first layer input allocates host memory for `rooms` of them; later ones allocate more as needed."""
        self.place = place
        self.device = device
        self.lane = stream.Lane(device, "stash download")
        self._up = stream.Lane(device, "stash upload")
        """The link carries both directions at once."""
        self._memory = memory
        self._first_rooms = rooms
        self._rooms: list[Room] = []
        self._most_rooms = 0
        """The most rooms that have been in use at once."""
        self._ahead: dict[tuple[Any, ...], _Fetched] = {}
        self._last: stream.Point | None = None
        """The end of all downloads submitted so far."""
        self._last_upload: stream.Point | None = None
        """The end of all uploads submitted so far."""
        self._arrivals: dict[tuple[Any, ...], stream.Point | None] = {}
        """Rows that are being downloaded -> the point after which they are there; those before are there already."""
        self._sent: tuple[torch.Tensor, stream.Point | None] | None = None
        """The last rows that are being downloaded, which keeps their device memory."""
        # Tensor arguments of the layers of this forward, to find those that several layers share.
        self._seen: WeakIdKeyDictionary = WeakIdKeyDictionary()

    @property
    def travels(self) -> bool:
        """Whether rows can be uploaded ahead of their recompute."""
        return self.place == "host" and self.lane.is_stream

    def host_bytes(self) -> int:
        """Bytes of the rooms in host memory, in use or free; what passes between layers there is among them."""
        return sum(room.num_bytes for room in self._rooms)

    def start_forward(self) -> None:
        """Forget which tensors the layers of earlier forwards shared, and free the smallest of the surplus rooms."""
        self.settle()
        self._seen = WeakIdKeyDictionary()
        spare = len(self._rooms) - self._most_rooms
        if spare > 0:
            free = sorted((room for room in self._rooms if room.is_free), key=lambda room: room.num_bytes)
            self._rooms = [room for room in self._rooms if room not in free[:spare]]

    @contextmanager
    def keeping(self, tensors: Sequence[torch.Tensor], batched: Sequence[bool]) -> Iterator[list[torch.Tensor]]:
        """Stash `tensors` while the layer computes in the block; yields the stashed tensors, complete after the block.

        Only tensors that are `batched`, whose rows can be uploaded one ubatch at a time, are downloaded.
        """
        if self.place == "device" or stream.shares_host_memory(self.device):
            yield list(tensors)
            return
        waiting = [isinstance(t, HostRows) and t.is_waiting for t in tensors]
        if all(waiting[i] or not rows for i, rows in enumerate(batched)):
            yield [host_of(t) for t in tensors]
            return
        complete = stream.record(self.device)
        with self.lane.entered():
            stream.wait(complete, wait_reasons.INPUT_COMPUTED)
            with stream.span(self.device, "stash download", "layer input"):
                kept = [self._to_host(t) if rows else t for t, rows in zip(tensors, batched, strict=True)]
            self._last = stream.record(self.device)
        try:
            yield kept
        finally:
            # After this wait, the caller may write into the tensors, or free them.
            stream.wait(self._last, wait_reasons.INPUT_STASHED)

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if host_of(tensor) is not tensor:
            return host_of(tensor)
        shared = tensor in self._seen
        self._seen[tensor] = True
        if shared:
            return tensor
        if not self.lane.is_stream:
            return tensor.detach().to(stream.HOST, copy=True)
        with torch.no_grad():
            return self._room(tensor_bytes([tensor])).tensor_like(tensor).copy_(tensor, non_blocking=True)

    # ---- the boundary

    def rows_like(self, part: torch.Tensor, rows: int, made_real: Callable[[], None] = _nothing) -> HostRows:
        """Uninitialised rows in host memory: so many along the first dimension, each like those of `part`.

        `made_real` is called when something needs all of them on the device.
        """
        like = torch.empty((rows, *part.shape[1:]), dtype=part.dtype, device="meta")
        if self.lane.is_stream:
            host = self._room(tensor_bytes([like])).tensor_like(like)
        else:
            host = torch.empty_like(like, device=stream.HOST)
        return HostRows.of(host, self.device, self.fetch, made_real)

    def send(self, part: torch.Tensor, host: torch.Tensor) -> None:
        """Download `part`, rows that have been computed, to `host`, a view of rows of `rows_like`."""
        computed = stream.record(self.device)
        with self.lane.entered(), torch.no_grad(), stream.span(self.device, "stash download", "layer output"):
            stream.wait(computed, wait_reasons.OUTPUT_COMPUTED)
            host.copy_(part, non_blocking=self.lane.is_stream)
            self._last = self._arrivals[_key(host)] = stream.record(self.device)
        # The memory of the rows before may be used again. By now their download has mostly ended.
        before, self._sent = self._sent, (part, self._last)
        if before is not None:
            stream.wait(before[1], wait_reasons.OUTPUT_DOWNLOADED)

    def _room(self, num_bytes: int) -> Room:
        """The smallest free room that is large enough, or a new one.

        The lane may copy into it without a wait of its own. A download into it before was made by the lane itself. An
        upload from it has ended when the device computed with its rows, and the lane waits for what the device
        computes now. Rows that are uploaded and not fetched yet keep their room.
        """
        fitting = [room for room in self._rooms if room.num_bytes >= num_bytes and room.is_free]
        if fitting:
            return min(fitting, key=lambda room: room.num_bytes)
        if self._rooms:
            self._rooms += self._memory.new_rooms(1, _rounded_up(num_bytes))
        else:
            self._rooms += self._memory.new_rooms(self._first_rooms, num_bytes)
        self._memory.warn_once()
        return self._rooms[-1]

    def fetch(self, kept: torch.Tensor) -> torch.Tensor:
        """Stashed rows on the device; `kept` is a stashed tensor, or a view of some of its rows."""
        if kept.device == self.device:
            return kept
        fetched = self._ahead.pop(_key(kept), None) or self._start_fetch(kept)
        stream.wait(fetched.uploaded, wait_reasons.ROWS_UPLOADED)
        return fetched.rows

    def fetch_ahead(self, kept: Sequence[torch.Tensor]) -> None:
        """Start to upload the rows that will be fetched next."""
        for tensor in kept:
            if tensor.device != self.device and _key(tensor) not in self._ahead:
                self._ahead[_key(tensor)] = self._start_fetch(tensor)

    def _start_fetch(self, kept: torch.Tensor) -> _Fetched:
        rows = torch.empty_like(kept, device=self.device)
        free = stream.record(self.device)
        with self._up.entered(), torch.no_grad():
            stream.wait(free, wait_reasons.ROWS_MEMORY_FREE)
            stream.wait(self._arrivals.get(_key(kept), self._last), wait_reasons.ROWS_DOWNLOADED)
            with stream.span(self.device, "stash upload", "layer input"):
                rows.copy_(kept, non_blocking=self._up.is_stream)
            self._last_upload = stream.record(self.device)
        return _Fetched(kept, rows, self._last_upload)

    def settle(self) -> None:
        """Make the host wait until all copies have finished, and drop rows that were uploaded but not fetched."""
        stream.wait(self._last, wait_reasons.STASH_COPIES_FINISHED, host=True)
        stream.wait(self._last_upload, wait_reasons.STASH_COPIES_FINISHED, host=True)
        self._last = self._last_upload = self._sent = None
        self._ahead.clear()
        self._arrivals.clear()
        self._most_rooms = max(self._most_rooms, sum(not room.is_free for room in self._rooms))


def _rounded_up(num_bytes: int) -> int:
    """Up to a quarter more bytes, in four sizes for each power of two: while batches slowly become longer, few of them
    need larger rooms, which are page-locked in the midst of a step."""
    size = 1 << max(0, num_bytes.bit_length() - 3)
    return -(-num_bytes // size) * size


def _key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Identifies the memory and layout of a tensor, as long as it lives."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
