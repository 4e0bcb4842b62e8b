"""The stash: keeps the tensor arguments of layer calls until the backward sweep recomputes the layers.

"The forward pass [stashes] away only the output activations [...] in on-chip or off-chip device memory"
(arXiv:2002.05645, first text, section 3), and `stash="host"` is its equation 4: device memory that does not grow with
depth. Layer inputs are then downloaded while their layer computes, and uploaded one micro-batch ahead of their
recompute. `stash="disk"` does the same with memory of a mapped file, to and from which copies block the host. If the
boundary is on the host, too, the output of a layer is downloaded micro-batch by micro-batch: it is what the next layer
uploads, and what is kept of its input. Gradients of layer inputs pass in the same way. Between devices, both pass
micro-batch by micro-batch to the memory of the device that needs them next.

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

from hf_l2l.rows.host_rows import HostRows, Passing
from hf_l2l.runtime import stream, wait_reasons
from hf_l2l.runtime.observer import HERE, Rows
from hf_l2l.stash.arrivals import key
from hf_l2l.stash.tiers import Tiers
from hf_l2l.stash.transit import Transit


@dataclass(slots=True)
class _Fetched:
    """Rows that are uploaded ahead, and the points from which on they may be uploaded, and used."""

    kept: torch.Tensor
    of: Rows
    rows: torch.Tensor
    free: stream.Point | None
    uploaded: stream.Point | None = None


class Stash:
    """Keeps the tensor arguments of the layer calls of one device, there, in host memory or on disk.

    If the stash is not on the device, each layer's own input is downloaded; tensors that several layers share (an
    attention mask, position embeddings, encoder states) stay on the device, where each exists once and not once per
    layer.
    """

    def __init__(self, tiers: Tiers, device: torch.device, transit: Transit | None = None) -> None:
        """`tiers` says where tensors are kept, and has the memory for them; `transit` is that of all devices."""
        self.tiers = tiers
        self.device = device
        self.transit = transit or Transit([device])
        self.transit.moves_outside(self)
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
        self._sent: tuple[torch.Tensor, stream.Point | None] | None = None
        """The last rows that are being sent, which keeps their device memory."""
        # Tensor arguments of the layers of this forward, to find those that several layers share.
        self._seen: WeakIdKeyDictionary = WeakIdKeyDictionary()

    @property
    def travels(self) -> bool:
        """Whether rows can be fetched ahead of their recompute."""
        return (self.tiers.leave_device or self.transit.has_several) and self.lane.is_stream

    @property
    def blocks(self) -> bool:
        """Whether copies block the host although the device computes beside it."""
        return self.lane.is_stream and self.tiers.is_on_disk

    def start_forward(self) -> None:
        """Forget which tensors the layers of earlier forwards shared, and free surplus memory."""
        self._seen = WeakIdKeyDictionary()
        self.tiers.start_forward()

    @contextmanager
    def keeping(self, tensors: Sequence[torch.Tensor], batched: Sequence[bool]) -> Iterator[list[torch.Tensor]]:
        """Stash `tensors` while the layer computes in the block; yields the stashed tensors, complete after the block.

        Only tensors that are `batched`, whose rows can be uploaded one ubatch at a time, are downloaded.
        """
        on_device = [t for t, rows in zip(tensors, batched, strict=True) if rows and t.device == self.device]
        if not on_device or self.tiers.tier_of(on_device[0]) == "device":
            yield list(tensors)  # what passes through host memory is there already
            return
        complete = stream.record(self.device)
        kept = [self._place_for(t) if rows else t for t, rows in zip(tensors, batched, strict=True)]
        downloads = [(place, t) for place, t in zip(kept, tensors, strict=True) if place is not t]
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
        if tensor.device != self.device:
            return tensor
        shared = tensor in self._seen
        self._seen[tensor] = True
        return tensor if shared else self.tiers.tensor_like(tensor)

    def _download(self, downloads: Sequence[tuple[torch.Tensor, torch.Tensor]], complete: stream.Point | None) -> None:
        """Copy to each first tensor the second one, which is computed when `complete` is reached."""
        arrivals = self.transit.arrivals
        with (
            self.lane.entered(),
            torch.no_grad(),
            stream.span(self.device, "stash download", Rows("input", HERE.layer)),
        ):
            stream.wait(complete, wait_reasons.INPUT_COMPUTED)
            for place, tensor in downloads:
                arrivals.begin(place)
                for point in arrivals.of(tensor):  # it may come from another device
                    stream.wait(point, wait_reasons.ROWS_ARRIVED, on=self.device)
                for free in arrivals.free(place):  # another device may have read what was there
                    stream.wait(free, wait_reasons.ROWS_MEMORY_FREE, on=self.device)
                place.copy_(tensor, non_blocking=self.lane.is_stream)
            if self.transit.has_several:  # some were not allocated for the compute stream
                stream.keep_until_done(self.device, [tensor for _, tensor in downloads])
            self._last = stream.record(self.device)
            for place, _ in downloads:
                arrivals.add(place, self._last)

    # ---- what passes between layers

    def rows_like(self, part: torch.Tensor, rows: int, passing: Passing | None = None) -> HostRows:
        """Uninitialised rows in host memory: so many along the first dimension, each like those of `part`.

        `passing` tells what becomes of an output of the model; a gradient has none.
        """
        return self.room(part, (rows, *part.shape[1:]), stream.HOST, passing)

    def room(
        self, part: torch.Tensor, shape: Sequence[int], place: torch.device, passing: Passing | None = None
    ) -> HostRows:
        """Uninitialised memory in `place`, the host or a device, for rows of which `part` are the first; in the host
        if the device cannot copy to `place` directly."""
        if place == stream.HOST or not self.transit.is_direct(self.device, place):
            memory = self.tiers.tensor_like(torch.empty(shape, dtype=part.dtype, device="meta"))
            self.transit.arrivals.begin(memory)
        else:
            memory = self.transit.allocate(shape, part.dtype, place)
        return self._rows_of(memory, len(part) if part.dim() else 1, passing)

    def rewrite(self, host: torch.Tensor) -> None:
        """See `host_rows.Keeper`."""
        self.transit.arrivals.reopen(host)

    def _rows_of(self, memory: torch.Tensor, step: int, passing: Passing | None) -> HostRows:
        made = self.transit.rows_of(memory, step, passing)
        made.rows.made_on = self.device
        return made

    def send(self, part: torch.Tensor, host: torch.Tensor, what: str = "output") -> None:
        """Copy `part`, rows that have been computed, to `host`, a view of rows of `rows_like` or `room`. To the layer
        that runs they are `what`."""
        arrivals = self.transit.arrivals
        computed = stream.record(self.device)
        if host.device == self.device and self.transit.has_several:
            host.copy_(part)
            arrivals.add(host, stream.record(self.device))
            return
        to_host = host.device == stream.HOST
        lane = self.lane if to_host else self.transit.lane(self.device, host.device)
        row = self.lane.row if to_host else stream.PEER
        with lane.entered(), torch.no_grad(), stream.span(self.device, row, Rows(what, HERE.layer)):
            stream.wait(computed, wait_reasons.OUTPUT_COMPUTED)
            for free in arrivals.free(host):
                stream.wait(free, wait_reasons.ROWS_MEMORY_FREE, on=self.device)
            host.copy_(part, non_blocking=self.lane.is_stream)
            point = stream.record(self.device if to_host else host.device)
            if to_host:
                self._last = point
            else:  # unread rows may be freed while they are on their way
                stream.keep_until_done(self.device, [host])
            arrivals.add(host, point)
        # The memory of the rows before may be used again. By now their copy has mostly ended.
        before, self._sent = self._sent, (part, point)
        if before is not None:
            stream.wait(before[1], wait_reasons.OUTPUT_DOWNLOADED, on=self.device)

    def pass_on(
        self, whole: torch.Tensor, place: torch.device, passing: Passing | None = None, what: str = "output"
    ) -> HostRows:
        """`whole`, which the device is computing, for what is computed next in `place`, the host or a device. To the
        layer that runs it is `what`."""
        if place == self.device:
            self.transit.arrivals.begin(whole)
            self.transit.arrivals.add(whole, stream.record(self.device))
            return self._rows_of(whole, max(1, len(whole) if whole.dim() else 1), passing)
        made = self.room(whole, whole.shape, place, passing)
        self.send(whole, made.rows.host, what)
        return made

    def fetch(self, kept: torch.Tensor, what: str = "input") -> torch.Tensor:
        """Stashed rows on the device; `kept` is a stashed tensor, or a view of some of its rows. To the layer that
        runs they are `what`."""
        if kept.device == self.device:
            if self.transit.has_several:
                for point in self.transit.arrivals.of(kept):
                    stream.wait(point, wait_reasons.ROWS_ARRIVED, on=self.device)
                # The model may read them on another stream than the one they were allocated for.
                stream.keep_until_done(self.device, [kept])
            return kept
        self._begin_late()
        fetched = self._ahead.pop(key(kept), None)
        if fetched is None:
            fetched = self._room_for(kept, Rows(what, HERE.layer))
            self._begin(fetched)
        stream.wait(fetched.uploaded, wait_reasons.ROWS_UPLOADED)
        return fetched.rows

    def fetch_ahead(self, kept: Sequence[torch.Tensor], of: Rows | None = None) -> None:
        """Start to upload the rows that will be fetched next: at once, or, where that blocks the host, at the next
        fetch, when the device has been given what it computes before. They are what `of` says, by default the input of
        the layer that runs."""
        for tensor in kept:
            if tensor.device != self.device and key(tensor) not in self._ahead:
                fetched = self._ahead[key(tensor)] = self._room_for(tensor, of or Rows("input", HERE.layer))
                self._late.append(fetched)
        if not self.blocks:
            self._begin_late()

    def _room_for(self, kept: torch.Tensor, of: Rows) -> _Fetched:
        # Its memory may be written when the device has done what it has been given by now, and not what comes next.
        return _Fetched(kept, of, torch.empty_like(kept, device=self.device), stream.record(self.device))

    def _begin_late(self) -> None:
        for fetched in self._late:
            self._begin(fetched)
        self._late.clear()

    def _begin(self, fetched: _Fetched) -> None:
        kept, arrivals = fetched.kept, self.transit.arrivals
        from_host = kept.device == stream.HOST
        lane = self._up if from_host else self.transit.lane(kept.device, self.device)
        with lane.entered(), torch.no_grad():
            stream.wait(fetched.free, wait_reasons.ROWS_MEMORY_FREE)
            # The host itself reads rows that are not contiguous, to give them to the device as one piece.
            reads_itself = from_host and not kept.is_contiguous()
            for point in arrivals.of(kept):
                stream.wait(point, wait_reasons.ROWS_DOWNLOADED, host=reads_itself, on=self.device)
            with stream.span(self.device, "stash upload" if from_host else stream.PEER, fetched.of):
                fetched.rows.copy_(kept, non_blocking=self._up.is_stream)
            fetched.uploaded = stream.record(self.device)
            if from_host:
                self._last_upload = fetched.uploaded
            else:
                stream.keep_until_done(kept.device, [kept, fetched.rows])
            if self.transit.has_several:
                arrivals.was_read(kept, fetched.uploaded)

    def settle(self) -> None:
        """Make the host wait until all copies from and to host memory have finished, and drop rows that were uploaded
        but not fetched."""
        stream.wait(self._last, wait_reasons.STASH_COPIES_FINISHED, host=True)
        stream.wait(self._last_upload, wait_reasons.STASH_COPIES_FINISHED, host=True)
        if self._sent is not None and self._sent[1] is not self._last:  # it goes to a device
            stream.wait(self._sent[1], wait_reasons.OUTPUT_DOWNLOADED, on=self.device)
        self._last = self._last_upload = self._sent = None
        self._ahead.clear()
        self._late.clear()
        self.tiers.settle()
