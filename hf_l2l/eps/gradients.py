"""Gradient sums: their download from the device to `p.grad`, and their norms.

Downloads are overlapped with the computation of the next layer. Norms are computed on the device, where memory is
fast, and again on the host if a gradient is used in between. They travel before their gradients: the end of
`backward()` waits for the last norm, and a gradient that is still being downloaded then, as that of an embedding, is
waited for at the first use of its values, which mostly is its update.
Clipping gives the same bits as `torch.nn.utils.clip_grad_norm_`: the norm is computed first; a gradient may be scaled
at its next use, which mostly is the update of the weights in the background.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from hf_l2l.compat import leaf_variable, without_interception
from hf_l2l.eps.host_memory import HostMemory, SmallTensors
from hf_l2l.eps.masters import Master, Masters, MasterUnit
from hf_l2l.eps.pending import (
    Landed,
    Pending,
    PendingSum,
    can_hold,
    hold,
    hold_all,
    is_like,
    let_go,
    norm_of,
    pending_of,
    settle,
)
from hf_l2l.runtime import stream, wait_reasons
from hf_l2l.runtime.backward_callbacks import Backwards
from hf_l2l.runtime.flat_memory import elements

Sums = Sequence[tuple[Master, torch.Tensor]]
"""Masters, and a gradient sum for each."""

_CHUNK = 2**20  # elements of a host sum that are on the device at once while a new sum is added to it
ROUNDED_AT_ONCE = 2**23  # elements of a sum that are on the device in 16 bits at once


class _Download(NamedTuple):
    """A copy of a sum from the device to the host."""

    on_host: torch.Tensor
    on_device: torch.Tensor
    """As many elements; both have one dimension. The host may have them in 16 bits."""
    pieces: Sequence[int] = ()
    """The ends of pieces of which it is known when each has arrived."""

    def _rounded(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Pieces on the host, on the device, and rounded on the device; one of the last kind exists at a time."""
        pieces = self.on_host.split(ROUNDED_AT_ONCE), self.on_device.split(ROUNDED_AT_ONCE)
        return ((place, wide, wide.to(place.dtype)) for place, wide in zip(*pieces, strict=True))

    def round(self) -> None:
        """Give the sum on the device the values that the host will have."""
        if self.on_host.dtype != self.on_device.dtype:
            for _, wide, rounded in self._rounded():
                wide.copy_(rounded)

    def start(self) -> list[stream.Point]:
        """Submit the copy to the current stream. Returns the points after which each piece has arrived."""
        found: list[stream.Point] = []
        for begin, end in itertools.pairwise((0, *(self.pieces or [len(self.on_host)]))):
            _Download(self.on_host[begin:end], self.on_device[begin:end])._submit()
            arrived = stream.record(self.on_device.device) if self.pieces else None
            found += [] if arrived is None else [arrived]
        return found

    def _submit(self) -> None:
        if self.on_host.dtype == self.on_device.dtype:
            self.on_host.copy_(self.on_device, non_blocking=True)
        else:
            for place, _, rounded in self._rounded():
                place.copy_(rounded, non_blocking=True)


class _LateSum(NamedTuple):
    """A sum in `p.grad`, or taken by an update, that is still being downloaded."""

    total: torch.Tensor
    """Kept, so that its memory is not freed before."""
    landed: Landed
    handle: RemovableHandle | None = None
    """The hook of autograd's node for the parameter, which waits for it: a graph that was made before may add to it,
    and does not ask what is pending. A graph that is made later uses the parameter, which is held for its master."""

    def end(self) -> None:
        """Wait for it."""
        self.landed.wait()
        if self.handle is not None:
            self.handle.remove()

    @classmethod
    def of(cls, master: Master, total: torch.Tensor, landed: Landed) -> _LateSum:
        """The record of a sum that whoever uses it must wait for."""
        with without_interception():  # which is no use of the values
            handle = get_gradient_edge(master.parameter).node.register_prehook(lambda *_: landed.wait())
        master.landing = landed
        return cls(total, landed, handle)


def _end_landing(late: list[_LateSum]) -> None:
    """Wait for these sums."""
    for each in late:
        each.end()
    late.clear()


class Gradients:
    """Receives the gradient sums of one model and holds them in `p.grad`."""

    def __init__(
        self,
        device: torch.device,
        masters: Masters,
        memory: HostMemory,
        backwards: Backwards,
        others: Sequence[torch.device] = (),
    ) -> None:
        """Of the layers that run on `device`, and on `others` in turn."""
        self.device = device
        self.masters = masters
        self.memory = memory
        self.lane = self._new_lane(device)
        """Of the first device."""
        self._lanes = {device: self.lane, **{each: self._new_lane(each) for each in others}}
        """Of each device that layers run on."""
        self.adds_apart = self.lane.is_stream
        """Whether autograd must not add to sums: they are being downloaded, or other processes have them, too."""
        self.backwards = backwards
        self._arriving: dict[Master, Landed | None] = {}
        """Masters whose sums are being downloaded in this backward -> when they have been; None for those that stay on
        the device."""
        self._norms: list[tuple[list[Master], torch.Tensor]] = []
        """Masters, and the norms of their sums: host tensors, which are complete when this backward is over."""
        self._norms_sent: dict[torch.device, stream.Point | None] = {}
        """Device -> the point after which all norms that it has sent are on the host."""
        self._late: list[_LateSum] = []
        """Sums in `p.grad` that were being downloaded at the end of the last backward."""
        # Their memory may be freed with this object; at the end of the process, or of a forked one, nobody waits.
        weakref.finalize(self, _end_landing, self._late).atexit = False
        self.norm_memory = SmallTensors(memory, "norms of gradients")
        self._task: int | None = None
        """The backward that `_held` belongs to."""
        self._held: list[tuple[torch.Tensor, PendingSum]] = []
        """Gradients that this backward may add to."""
        self._added_at_end: list[tuple[Master, torch.Tensor]] = []
        """Masters and gradients that are added by the thread of the program: those that autograd computed for a loss
        which uses a master directly, and those of resident masters that cannot be added element by element."""
        self._handles: list[RemovableHandle] = []
        backwards.call(at_end=self._publish, at_failure=self._discard)

    @staticmethod
    def _new_lane(device: torch.device) -> stream.Lane:
        return stream.Lane(device, "download", runs_kernels=True)  # which add, round and take norms

    def lane_of(self, device: torch.device) -> stream.Lane:
        """The lane that downloads gradients from one of several devices."""
        return self._lanes[device]

    def _submitted(self) -> list[stream.Point]:
        """The ends of all downloads submitted so far."""
        return [point for lane in self._lanes.values() if (point := lane.record()) is not None]

    @torch.no_grad()
    def receive(self, sums: Sums, unit: MasterUnit | None = None, flat: torch.Tensor | None = None) -> None:
        """Add sums to what `p.grad` holds, by the end of this backward; see `EagerParamServer.receive`."""
        of = sums[0][0].parameter if sums else ""
        if not self.lane.is_stream:
            is_here = stream.shares_host_memory(self.device)
            with stream.span(self.device, "download", of), without_interception():
                for master, gradient in sums:
                    stays = is_here or master.is_resident
                    self._add_to_grad(master, gradient if stays else stream.download(gradient))
            return
        task = self.backwards.join()
        if task != self._task:
            self._hold_gradients(task)
        device = next((each.device for _, each in sums if each.device in self._lanes), self.device)
        complete = stream.record(device)
        others = [point for point in self._submitted() if point.device != device] if self._adds(sums) else []
        with self.lane_of(device).entered(), without_interception():
            stream.wait(complete, wait_reasons.GRADIENTS_COMPUTED)
            for point in others:  # gradients of the same master come from several devices
                stream.wait(point, wait_reasons.GRADIENT_DOWNLOADED, on=device)
            with stream.span(device, "norm" if sums and sums[0][0].is_resident else "download", of):
                whole = None if unit is None or flat is None else self._received_layer(sums, unit, flat)
                if whole is not None:
                    totals, downloads = sums, [whole]
                else:
                    stream.keep_until_done(device, map(itemgetter(1), sums))
                    totals = [(m, self._received(m, g)) for m, g in self._without_odd(sums)]
                    downloads = [
                        _Download(elements(m.arriving), elements(total), m.pieces)
                        for m, total in totals
                        if m.arriving is not None and not m.is_resident
                    ]
                for each in downloads:
                    each.round()  # first: the norms must be those of the rounded values on the host
            with stream.span(device, "norm", of):
                self._send_norms(totals)
                self._norms_sent[device] = stream.record(device)
            if downloads:
                with stream.span(device, "download", of):
                    pieces = [point for each in downloads for point in each.start()]
                end = stream.record(device)
                assert end is not None, "a device with lanes has streams"
                landed = Landed(end, tuple(pieces) if len(sums) == 1 else ())
                self._arriving.update((m, landed) for m, _ in totals if not m.is_resident)

    @staticmethod
    def _adds(sums: Sums) -> bool:
        """Whether a sum is added to one that is still being downloaded."""
        return any([master.arriving is not None for master, _ in sums])

    def _hold_gradients(self, task: int) -> None:
        """Hold every gradient that the backward `task` may add to, until it is over: after a failure, the program must
        not use them before torch's thread for the device has left the backward, too."""
        self._task = task
        self.end_landing()
        with without_interception():
            gradients = [p.grad for p in self.masters.parameters if p.requires_grad and p.grad is not None]
        for gradient in gradients:
            self._hold(gradient)

    def _hold(self, gradient: torch.Tensor) -> None:
        pending = pending_of(gradient)
        if can_hold(gradient) and not (isinstance(pending, PendingSum) and pending.arrives_at is not None):
            settle(gradient)  # applies a pending clipping factor first
            arriving = PendingSum(arrives_at=self)
            hold(gradient, arriving)
            self._held.append((gradient, arriving))

    def keep_apart(self, nodes: Callable[[], Iterable[torch.autograd.graph.Node]]) -> None:
        """Take gradients of masters from autograd, which would add them to sums without waiting for their downloads.

        These are the gradients of a loss that uses a master directly. They are added when the backward is over.

        Args:
            nodes: returns the nodes that add to the gradients of masters; none of them has run in this backward.
        """
        with without_interception():
            if not self.adds_apart or all([p.grad is None for p in self.masters.parameters]):
                return
            for node in nodes():
                p = leaf_variable(node)
                if p.grad is not None:
                    take = partial(self._take_from_autograd, self.masters.of(p))
                    self._handles.append(node.register_prehook(take))

    def _take_from_autograd(self, master: Master, gradients: tuple[torch.Tensor | None, ...]) -> tuple[None] | None:
        if gradients[0] is None:
            return None
        self._added_at_end.append((master, gradients[0]))
        return (None,)

    def _received_layer(self, sums: Sums, unit: MasterUnit, flat: torch.Tensor) -> _Download | None:
        """The download of all gradients of a layer in one copy.

        Returns:
            None if that is not possible: a parameter has a gradient from before, to which this one is added, or the
            program still holds the host memory of an earlier one.
        """
        block = unit.gradient_block
        rooms = [master.gradient_room for master, _ in sums]
        flat_on_host = None if block is None or len(rooms) != len(block.layout.pieces) else block.flat
        if block is None or flat_on_host is None or not all([room is not None and room.is_free for room in rooms]):
            return None
        if any([master.arriving is not None or master.parameter.grad is not None for master, _ in sums]):
            return None
        for (master, _), room, piece in zip(sums, rooms, block.layout.pieces, strict=True):
            assert room is not None, "checked above"
            master.arriving = room.tensor_of(piece)
            self._arriving[master] = None
        stream.keep_until_done(flat.device, [flat])
        if not unit.gradients_are_rounded:
            return _Download(flat_on_host, flat)
        return _Download(flat_on_host.view(block.layout.pieces[0].dtype), flat.view(sums[0][1].dtype))

    def _without_odd(self, sums: Sums) -> Sums:
        """Those of `sums` that can be added element by element. The others, which are sparse, or whose `p.grad` is of
        another kind that the program has set, are added to that: on the host, or, of resident masters, at the end of
        the backward."""
        plain = [(master, gradient) for master, gradient in sums if self._is_plain(master, gradient)]
        if len(plain) == len(sums):
            return sums
        usual = {master for master, _ in plain}
        odd = [(master, gradient) for master, gradient in sums if master not in usual]
        self._added_at_end += [(master, gradient) for master, gradient in odd if master.is_resident]
        on_host = [(master, gradient) for master, gradient in odd if not master.is_resident]
        if on_host:
            self._publish(in_backward=True)  # what has been submitted so far
        for master, gradient in on_host:
            self._add_to_grad(master, gradient.to(stream.HOST))
        return plain

    @staticmethod
    def _is_plain(master: Master, gradient: torch.Tensor) -> bool:
        total = master.parameter.grad if master.arriving is None else master.arriving
        like, device = master.gradient_like, gradient.device if master.is_resident else stream.HOST
        is_plain = gradient.layout is torch.strided and gradient.stride() == like.stride()
        return is_plain and (total is None or is_like(total, like, device))

    def _received(self, master: Master, gradient: torch.Tensor) -> torch.Tensor:
        """Take one gradient, on the lane: an existing sum is added to it on the device. Returns the sum, there, which
        is to be downloaded to `master.arriving`, unless it stays."""
        if master.is_resident:
            return self._received_resident(master, gradient)
        grad = master.parameter.grad
        total = grad if master.arriving is None else master.arriving
        self._arriving.setdefault(master)
        if total is None:
            master.arriving = self.memory.gradient_like(master)
        else:
            if total is grad:
                self._hold(total)  # it may have become p.grad after the backward began
            master.arriving = total
            for new, held in zip(elements(gradient).split(_CHUNK), elements(total).split(_CHUNK), strict=True):
                new.add_(held.to(gradient.device, non_blocking=True))
        return gradient

    def _received_resident(self, master: Master, gradient: torch.Tensor) -> torch.Tensor:
        """`_received` for a master whose gradient stays on the device; it is added on the lane, before its norm."""
        grad = master.parameter.grad
        total = grad if master.arriving is None else master.arriving
        self._arriving.setdefault(master)
        if total is None:
            total = gradient
        else:
            if total is grad:
                self._hold(total)  # it may have become p.grad after the backward began
            total.add_(gradient)
        master.arriving = total
        return total

    def _send_norms(self, totals: Sums) -> None:
        """Compute the norms of the gradients in these pairs and start to download them, on the lane; a copy per dtype.

        This is done layer by layer: norms kept on the device until the end of the backward would grow with depth.
        """
        by_dtype: dict[torch.dtype, tuple[list[Master], list[torch.Tensor]]] = {}
        for master, gradient in totals:
            masters, gradients = by_dtype.setdefault(gradient.dtype, ([], []))
            masters.append(master)
            gradients.append(gradient)
        for masters, gradients in by_dtype.values():
            norms = torch.stack(torch._foreach_norm(gradients))
            on_host = self.norm_memory.tensor_like(norms, 8 * len(self.masters.parameters))
            on_host.copy_(norms, non_blocking=True)
            self._norms.append((masters, on_host))

    def take(self, masters: Iterable[Master]) -> tuple[Sums, dict[Master, torch.Tensor], list[Landed]]:
        """Take the sums of `masters` before they become `p.grad`, which is None from now on.

        Returns:
            masters that have a sum, and the sums; master -> the norm of its sum; and when all of them have been
            downloaded.
        """
        taken: list[tuple[Master, torch.Tensor]] = []
        norms: dict[Master, torch.Tensor] = {}
        with without_interception():
            for master in masters:
                p, total = master.parameter, master.arriving
                if total is not None and p.grad is not None and p.grad is not total:
                    continue  # autograd has set p.grad itself: both are added later, and used in `step()`
                if total is None:
                    total = p.grad
                    if total is None:
                        continue
                    norms[master] = master.taken_norm = norm_of(total, p.dtype)
                master.arriving = None
                pending = pending_of(total)
                if isinstance(pending, PendingSum) and pending.arrives_at is not None:
                    let_go(total, pending)
                p.grad = None
                taken.append((master, total))
        among = {master for master, _ in taken}
        arriving = {landed: None for m in self._arriving if m in among and (landed := self._arriving[m])}
        # The update waits for them; but if it fails, or never runs, their memory must not be freed before.
        while self._late and stream.is_reached(self._late[0].landed.point):
            self._late.pop(0).end()
        self._late += [_LateSum(t, landed) for m, t in taken if (landed := self._arriving.get(m)) is not None]
        self._arriving = {master: landed for master, landed in self._arriving.items() if master not in among}
        for alike, on_host in self._norms:
            norms.update((m, norm) for m, norm in zip(alike, on_host.unbind(), strict=True) if m in among)
        return taken, norms, list(arriving)

    @torch.no_grad()
    def _publish(self, *, in_backward: bool = False) -> None:
        """Wait for the norms of this backward so far, and add the sums to `p.grad`. A sum that is all of its `p.grad`
        may still be downloaded then."""
        norms, self._norms = self._norms, []
        arrived, self._arriving = self._arriving, {}
        added: list[tuple[Master, torch.Tensor]] = []
        if not in_backward:
            added, self._added_at_end = self._added_at_end, []
        shared = {master for master, _ in added}
        # All that needs no values of gradients is done first, while the last of them are downloaded.
        kept = [torch.empty_like(on_host) for _, on_host in norms]
        norm_of_each = {
            master: norm
            for (masters, _), vector in zip(norms, kept, strict=True)
            for master, norm in zip(masters, vector.unbind(), strict=True)
        }
        with without_interception():
            totals = [(m, total) for m in arrived if (total := m.arriving) is not None]
            new = [(m, total) for m, total in totals if m.parameter.grad is None or m.parameter.grad is total]
            known = {
                m: PendingSum(norm_of_each.pop(m), total._version)
                for m, total in new
                if m in norm_of_each and m not in shared
            }
        assert len(totals) == len(arrived), "a sum that is being downloaded has its memory"
        for point in self._norms_sent.values():
            stream.wait(point, wait_reasons.NORMS_DOWNLOADED, host=True)
        self._norms_sent.clear()
        for vector, (_, on_host) in zip(kept, norms, strict=True):
            vector.copy_(on_host)
        self.norm_memory.drop()
        self._let_go()
        if in_backward:
            self._wait_until_landed(arrived.values())
        else:
            self._wait_until_landed(landed for m, landed in arrived.items() if m not in known)
            self._land_later([(m, t, landed, known[m]) for m, t in new if m in known and (landed := arrived[m])])
        with without_interception():
            for master, total in new:
                if master.parameter.grad is None:  # a thread of autograd may have set it while this one waited
                    self._add_to_grad(master, total)
            pending: list[tuple[torch.Tensor, Pending]] = []
            for master, total in totals:
                master.arriving = None
                if master.parameter.grad is total:
                    pending += [(total, known[master])] if master in known else []
                    continue
                shared.update([master] if master.parameter.grad is not None else [])
                self._wait_until_landed([arrived[master]])
                self._add_to_grad(master, total)
            for master, gradient in added:
                self._add_to_grad(master, gradient)
            for master, norm in norm_of_each.items():
                grad = master.parameter.grad
                if grad is None:  # an eager update has used the gradient in this backward
                    master.taken_norm = norm
                elif master not in shared:
                    pending.append((grad, PendingSum(norm, grad._version)))
            hold_all(pending)

    @staticmethod
    def _wait_until_landed(sums: Iterable[Landed | None]) -> None:
        """Wait until sums are on the host."""
        for landed in dict.fromkeys(sums):
            if landed is not None:
                landed.wait()

    def _land_later(self, sums: Iterable[tuple[Master, torch.Tensor, Landed, PendingSum]]) -> None:
        """Let those of these sums that are not on the host yet be waited for by whoever uses them first."""
        is_there: dict[Landed, bool] = {}
        for master, total, landed, pending in sums:
            if landed not in is_there:
                is_there[landed] = stream.is_reached(landed.point)
            if is_there[landed]:
                continue
            if not (master.can_be_held and can_hold(total)):
                self._wait_until_landed([landed])
                continue
            pending.landed = landed
            self._late.append(_LateSum.of(master, total, landed))
            hold(master.parameter, master)

    def end_landing(self) -> None:
        """Wait for the sums of earlier backwards: their memory may be given to other sums, or be freed."""
        _end_landing(self._late)

    def _add_to_grad(self, master: Master, gradient: torch.Tensor) -> None:
        """Add `gradient` (on the host) to `p.grad`, or set it; to be called under `without_interception`."""
        p = master.parameter
        grad = p.grad
        if grad is not None:
            settle(grad)
            if grad.is_sparse and not gradient.is_sparse:
                gradient, p.grad = gradient + grad, None  # a dense gradient from now on, as autograd would make it
            else:
                grad += gradient  # added in the wider dtype of the two, and rounded once
                return
        dtype = gradient.dtype if gradient.is_sparse else master.gradient_like.dtype
        if dtype != p.dtype:
            p.grad_dtype = None  # any dtype: torch then accepts this gradient, and tensors computed from it
        p.grad = gradient.to(dtype) if gradient.dtype == p.dtype else gradient

    def _discard(self) -> None:
        """Forget the sums of a backward that failed. Any thread may call this, while the program already continues:
        nothing is written to `p.grad`."""
        for point in self._submitted():
            stream.wait(point, wait_reasons.FAILED_DOWNLOADS_FINISHED, host=True)
        self._let_go()
        for master in self._arriving:
            master.arriving = None
        self._arriving.clear()
        self._norms_sent.clear()
        self._added_at_end.clear()
        self._norms.clear()
        self.norm_memory.drop()

    def wait(self) -> None:
        """Wait for all downloads submitted so far."""
        for point in self._submitted():
            stream.wait(point, wait_reasons.GRADIENT_DOWNLOADED, host=True)

    def wait_for_failed(self) -> None:
        """Wait for a backward that has failed, and for its downloads; after that all gradients may be used."""
        self.backwards.wait_until_over()
        self.wait()
        self._let_go()

    def _let_go(self) -> None:
        """Stop holding gradients: the backward is over, and they may be used."""
        held, handles = self._held, self._handles
        self._task, self._held, self._handles = None, [], []
        for handle in handles:
            handle.remove()
        for gradient, arriving in held:
            let_go(gradient, arriving)
