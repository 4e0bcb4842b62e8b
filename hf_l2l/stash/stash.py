"""The stash: keeps the tensor arguments of layer calls until the backward sweep recomputes the layers.

"The forward pass [stashes] away only the output activations [...] in on-chip or off-chip device memory"
(arXiv:2002.05645, first text, section 3), and `stash="host"` is its equation 4: device memory that does not grow with
depth. Layer inputs are then downloaded while their layer computes, and uploaded one micro-batch ahead of their
recompute. `stash="disk"` does the same with memory of a mapped file, to and from which copies block the host. If the
boundary is on the host, too, the output of a layer is downloaded micro-batch by micro-batch: it is what the next layer
uploads, and what is kept of its input. Gradients of layer inputs pass in the same way.

Stashed tensors are saved tensors of autograd, so that they live exactly as long as the graph: a backward that uses
them frees them, as does discarding the batch; `retain_graph=True` keeps them. Autograd detects changes in place
between the two sweeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from hf_l2l.rows.host_rows import HostRows, Passing, host_of
from hf_l2l.runtime import stream, wait_reasons
from hf_l2l.stash.tiers import Tiers


@dataclass(slots=True)
class _Fetched:
    """Rows that are uploaded ahead, and the points from which on they may be uploaded, and used."""

    kept: torch.Tensor
    rows: torch.Tensor
    free: stream.Point | None
    uploaded: stream.Point | None = None


class Stash:
    """Keeps the tensor arguments of layer calls, on the device, in host memory or on disk.

    One instance serves one engine. If the stash is not on the device, each layer's own input is downloaded; tensors
    that several layers share (an attention mask, position embeddings, encoder states) stay on the device, where each
    exists once and not once per layer.
    """

    def __init__(self, tiers: Tiers, device: torch.device) -> None:
        """`tiers` says where tensors are kept, and has the memory for them."""
        self.tiers = tiers
        self.device = device
        self.lane = stream.Lane(device, "stash download")
        self._up = stream.Lane(device, "stash upload")
        """The link carries both directions at once."""
        self._ahead: dict[tuple[Any, ...], _Fetched] = {}
        self._late: list[_Fetched] = []
        """Those of them whose upload has not begun."""
        self._last: stream.Point | None = None
        """The end of all downloads submitted so far."""
        self._last_upload: stream.Point | None = None
        """The end of all uploads submitted so far."""
        self._arrivals: dict[int, dict[tuple[Any, ...], stream.Point | None]] = {}
        """Host memory -> rows of it that are being downloaded -> the point after which they are there."""
        self._sent: tuple[torch.Tensor, stream.Point | None] | None = None
        """The last rows that are being downloaded, which keeps their device memory."""
        # Tensor arguments of the layers of this forward, to find those that several layers share.
        self._seen: WeakIdKeyDictionary = WeakIdKeyDictionary()

    @property
    def travels(self) -> bool:
        """Whether rows can be uploaded ahead of their recompute."""
        return self.tiers.leave_device and self.lane.is_stream

    @property
    def blocks(self) -> bool:
        """Whether copies block the host although the device computes beside it."""
        return self.lane.is_stream and self.tiers.is_on_disk

    def start_forward(self) -> None:
        """Forget which tensors the layers of earlier forwards shared, and free surplus memory."""
        self.settle()
        self._seen = WeakIdKeyDictionary()
        self.tiers.start_forward()

    @contextmanager
    def keeping(self, tensors: Sequence[torch.Tensor], batched: Sequence[bool]) -> Iterator[list[torch.Tensor]]:
        """Stash `tensors` while the layer computes in the block; yields the stashed tensors, complete after the block.

        Only tensors that are `batched`, whose rows can be uploaded one ubatch at a time, are downloaded.
        """
        on_device = [t for t, rows in zip(tensors, batched, strict=True) if rows and host_of(t) is t]
        if not on_device or self.tiers.tier_of(on_device[0]) == "device":
            yield [host_of(t) for t in tensors]  # what passes through host memory is there already
            return
        complete = stream.record(self.device)
        kept = [self._place_for(t) if rows else t for t, rows in zip(tensors, batched, strict=True)]
        downloads = [(place, t) for place, t in zip(kept, tensors, strict=True) if place is not host_of(t)]
        # A copy that blocks the host is made when the device has been given the layer's work.
        if not self.blocks:
            self._download(downloads, complete)
        try:
            yield kept
            if self.blocks:
                self._download(downloads, complete)
        finally:
            # After this wait, the caller may write into the tensors, or free them.
            stream.wait(self._last, wait_reasons.INPUT_STASHED)

    def _place_for(self, tensor: torch.Tensor) -> torch.Tensor:
        """What is kept of `tensor`: where it is already, itself if layers share it, or memory to download it to."""
        if host_of(tensor) is not tensor:
            return host_of(tensor)
        shared = tensor in self._seen
        self._seen[tensor] = True
        return tensor if shared else self._memory_like(tensor)

    def _memory_like(self, like: torch.Tensor) -> torch.Tensor:
        """An uninitialised tensor in host memory, or in the file."""
        made = self.tiers.tensor_like(like)
        # What was downloaded to this memory before may have been other rows, whose arrivals say nothing of these.
        self._arrivals.pop(_memory(made), None)
        return made

    def _download(self, downloads: Sequence[tuple[torch.Tensor, torch.Tensor]], complete: stream.Point | None) -> None:
        """Copy to each first tensor the second one, which is computed when `complete` is reached."""
        with self.lane.entered(), torch.no_grad(), stream.span(self.device, "stash download", "layer input"):
            stream.wait(complete, wait_reasons.INPUT_COMPUTED)
            for place, tensor in downloads:
                place.copy_(tensor, non_blocking=self.lane.is_stream)
            self._last = stream.record(self.device)

    # ---- the boundary

    def rows_like(self, part: torch.Tensor, rows: int, passing: Passing | None = None) -> HostRows:
        """Uninitialised rows in host memory: so many along the first dimension, each like those of `part`.

        `passing` tells what becomes of an output of the model; a gradient has none.
        """
        like = torch.empty((rows, *part.shape[1:]), dtype=part.dtype, device="meta")
        return HostRows.of(self._memory_like(like), self.device, self, len(part), passing)

    def send(self, part: torch.Tensor, host: torch.Tensor) -> None:
        """Download `part`, rows that have been computed, to `host`, a view of rows of `rows_like`."""
        computed = stream.record(self.device)
        with self.lane.entered(), torch.no_grad(), stream.span(self.device, "stash download", "layer output"):
            stream.wait(computed, wait_reasons.OUTPUT_COMPUTED)
            host.copy_(part, non_blocking=self.lane.is_stream)
            self._last = stream.record(self.device)
        self._arrivals.setdefault(_memory(host), {})[_key(host)] = self._last
        # The memory of the rows before may be used again. By now their download has mostly ended.
        before, self._sent = self._sent, (part, self._last)
        if before is not None:
            stream.wait(before[1], wait_reasons.OUTPUT_DOWNLOADED)

    def fetch(self, kept: torch.Tensor) -> torch.Tensor:
        """Stashed rows on the device; `kept` is a stashed tensor, or a view of some of its rows."""
        if kept.device == self.device:
            return kept
        self._begin_late()
        fetched = self._ahead.pop(_key(kept), None)
        if fetched is None:
            fetched = self._room_for(kept)
            self._begin(fetched)
        stream.wait(fetched.uploaded, wait_reasons.ROWS_UPLOADED)
        return fetched.rows

    def fetch_ahead(self, kept: Sequence[torch.Tensor]) -> None:
        """Start to upload the rows that will be fetched next: at once, or, where that blocks the host, at the next
        fetch, when the device has been given what it computes before."""
        for tensor in kept:
            if tensor.device != self.device and _key(tensor) not in self._ahead:
                fetched = self._ahead[_key(tensor)] = self._room_for(tensor)
                self._late.append(fetched)
        if not self.blocks:
            self._begin_late()

    def _room_for(self, kept: torch.Tensor) -> _Fetched:
        # Its memory may be written when the device has done what it has been given by now, and not what comes next.
        return _Fetched(kept, torch.empty_like(kept, device=self.device), stream.record(self.device))

    def _begin_late(self) -> None:
        for fetched in self._late:
            self._begin(fetched)
        self._late.clear()

    def _begin(self, fetched: _Fetched) -> None:
        kept = fetched.kept
        with self._up.entered(), torch.no_grad():
            stream.wait(fetched.free, wait_reasons.ROWS_MEMORY_FREE)
            arrival = self._arrivals.get(_memory(kept), {}).get(_key(kept), self._last)
            stream.wait(arrival, wait_reasons.ROWS_DOWNLOADED)
            with stream.span(self.device, "stash upload", "layer input"):
                fetched.rows.copy_(kept, non_blocking=self._up.is_stream)
            fetched.uploaded = self._last_upload = stream.record(self.device)

    def settle(self) -> None:
        """Make the host wait until all copies have finished, and drop rows that were uploaded but not fetched."""
        stream.wait(self._last, wait_reasons.STASH_COPIES_FINISHED, host=True)
        stream.wait(self._last_upload, wait_reasons.STASH_COPIES_FINISHED, host=True)
        self._last = self._last_upload = self._sent = None
        self._ahead.clear()
        self._late.clear()
        self._arrivals.clear()
        self.tiers.settle()


def _key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Identifies the memory and layout of a tensor, as long as it lives."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _memory(tensor: torch.Tensor) -> int:
    """Identifies the memory that a host tensor is a view of, as long as that lives."""
    return tensor.untyped_storage().data_ptr()
