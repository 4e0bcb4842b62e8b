"""Gradient sums on their way from the device to `p.grad`, their norms, and clipping.

Sums leave the device while it computes the next layer; the end of `backward()` waits for the last of them. Their norms
are taken on the device, where memory is fast, and are taken again on the host if a gradient is used in between.
Clipping is to the bit what `torch.nn.utils.clip_grad_norm_` does: the norm comes first; multiplying a gradient may be
left to its next use, which mostly is the update of the weights in the background.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from hf_l2l.compat import current_backward, leaf_variable, without_interception
from hf_l2l.eps.host_memory import HostMemory
from hf_l2l.eps.masters import Master, Masters
from hf_l2l.eps.pending import Pending, can_hold, hold, hold_all, let_go, pending_of, settle
from hf_l2l.runtime import stream, wait_reasons
from hf_l2l.runtime.backward_callbacks import Backwards
from hf_l2l.runtime.flat_memory import Room, elements

Sums = Sequence[tuple[Master, torch.Tensor]]
"""Masters, and a gradient sum for each."""

_CHUNK = 2**20  # elements of a host sum that are on the device at once while a new one is added to it


class Gradients:
    """Receives the gradient sums of one model and holds them in `p.grad`."""

    def __init__(self, device: torch.device, masters: Masters, memory: HostMemory, backwards: Backwards) -> None:
        self.device = device
        self.masters = masters
        self.memory = memory
        self.lane = stream.Lane(device, "download")
        self.backwards = backwards
        self._arriving: list[Master] = []
        """Those with a sum that arrives in this backward."""
        self._norms: list[tuple[list[Master], torch.Tensor]] = []
        """Masters, and the norms of their sums: host tensors, which are there when this backward is over."""
        self._rooms: list[Room] = []
        """For norms that arrive."""
        self._task: int | None = None
        """The backward that `_held` is of."""
        self._held: list[tuple[torch.Tensor, Sum]] = []
        """Gradients that this backward may add to."""
        self._of_losses: list[tuple[Master, torch.Tensor]] = []
        """Masters that a loss uses itself, and the gradients that autograd makes of that."""
        self._handles: list[RemovableHandle] = []
        backwards.call(at_end=self._publish, at_failure=self._discard)

    @torch.no_grad()
    def receive(self, sums: Sums) -> None:
        """Add sums to what `p.grad` holds, by the end of this backward; see `EagerParamServer.receive`."""
        of = sums[0][0].parameter if sums else ""
        if not self.lane.is_stream:
            with stream.span(self.device, "download", of), without_interception():
                for master, gradient in sums:
                    self._add_to_grad(master, stream.download(gradient))
            return
        task = self.backwards.join()
        if task != self._task:
            self._hold_gradients(task)
        complete = stream.record(self.device)
        with self.lane.entered(), without_interception():
            stream.wait(complete, wait_reasons.GRADIENTS_COMPUTED)
            with stream.span(self.device, "download", of):
                stream.keep_until_done(self.device, [g for _, g in sums if g.layout is torch.strided])
                totals = [(master, gradient) for master, gradient in sums if self._receive(master, gradient)]
            with stream.span(self.device, "norm", of):
                self._send_norms(totals)

    def _hold_gradients(self, task: int) -> None:
        """Hold every gradient that the backward `task` may add to, until it is over: a program that continues after a
        failure uses none of them before the device's thread has left the backward, too."""
        self._task = task
        with without_interception():
            gradients = [p.grad for p in self.masters.parameters if p.requires_grad and p.grad is not None]
        for gradient in gradients:
            self._hold(gradient)

    def _hold(self, gradient: torch.Tensor) -> None:
        pending = pending_of(gradient)
        if can_hold(gradient) and not (isinstance(pending, Sum) and pending.arrives_at is not None):
            settle(gradient)  # it may still have to be scaled
            arriving = Sum(arrives_at=self)
            hold(gradient, arriving)
            self._held.append((gradient, arriving))

    def keep_apart(self, nodes: Iterable[torch.autograd.graph.Node]) -> None:
        """Let autograd itself add nothing to gradients that sums are on their way to: it would not wait for those.

        What it makes of a loss that uses a master itself is added when the backward is over.

        Args:
            nodes: those that would add to the gradients of masters; none of them has run in this backward.
        """
        with without_interception():
            if not self.lane.is_stream or all([p.grad is None for p in self.masters.parameters]):
                return
            for node in nodes:
                p = leaf_variable(node)
                if p.grad is not None:
                    take = partial(self._take_from_autograd, self.masters.of(p))
                    self._handles.append(node.register_prehook(take))

    def _take_from_autograd(self, master: Master, gradients: tuple[torch.Tensor | None, ...]) -> tuple[None] | None:
        if gradients[0] is None:
            return None
        self._of_losses.append((master, gradients[0]))
        return (None,)

    def _receive(self, master: Master, gradient: torch.Tensor) -> bool:
        """Start to download one gradient, on the lane; where there is a sum already, it is added to that first.

        False if it did not go that way, and is in `p.grad` already.
        """
        grad, like = master.parameter.grad, master.gradient_like
        total = grad if master.arriving is None else master.arriving
        # Sparse ones, and a gradient of another kind that the user put there, are added on the host.
        is_plain = gradient.layout is torch.strided and gradient.stride() == like.stride()
        if not is_plain or (total is not None and not _is_like(total, like)):
            self._publish()
            self._add_to_grad(master, gradient.to(stream.HOST))
            return False
        if master.arriving is None:
            self._arriving.append(master)
        if total is None:
            master.arriving = total = self.memory.gradient_like(master)
        else:
            if total is grad:
                self._hold(total)  # it may have come to its place since the backward began
            master.arriving = total
            for new, held in zip(elements(gradient).split(_CHUNK), elements(total).split(_CHUNK), strict=True):
                new.add_(held.to(self.device, non_blocking=True))
        if total.dtype == gradient.dtype:
            total.copy_(gradient, non_blocking=True)
        else:
            rounded = gradient.to(total.dtype)
            total.copy_(rounded, non_blocking=True)
            gradient.copy_(rounded)  # for its norm, which is that of what the host gets
        return True

    def _send_norms(self, totals: Sums) -> None:
        """Take the norms of the gradients in these pairs and start to download them, on the lane; one copy per dtype.

        At once: what stays on the device until the backward is over grows with depth.
        """
        by_dtype: dict[torch.dtype, tuple[list[Master], list[torch.Tensor]]] = {}
        for master, gradient in totals:
            masters, gradients = by_dtype.setdefault(gradient.dtype, ([], []))
            masters.append(master)
            gradients.append(gradient)
        for masters, gradients in by_dtype.values():
            norms = torch.stack(torch._foreach_norm(gradients))
            landing = self._room(norms.numel() * norms.element_size()).tensor_like(norms)
            landing.copy_(norms, non_blocking=True)
            self._norms.append((masters, landing))

    def _room(self, num_bytes: int) -> Room:
        """Host memory that is free: mostly that which the same norms had in the last backward."""
        number = len(self._norms)
        for room in self._rooms[number : number + 1]:
            if room.num_bytes >= num_bytes and room.is_free:
                return room
        (room,) = self.memory.new_rooms(1, num_bytes)
        self._rooms[number : number + 1] = [room]
        return room

    def take(self, masters: Iterable[Master]) -> tuple[Sums, dict[Master, torch.Tensor], stream.Point | None]:
        """Take the sums of `masters` before they are in `p.grad`, which is None from now on.

        Returns:
            masters that have a sum, and the sums; master -> the norm of its sum; and the point at which all of them
            have landed.
        """
        taken: list[tuple[Master, torch.Tensor]] = []
        norms: dict[Master, torch.Tensor] = {}
        with without_interception():
            for master in masters:
                p, total = master.parameter, master.arriving
                if total is not None and p.grad is not None and p.grad is not total:
                    continue  # what autograd itself put there is added when this one has landed; `step()` finds both
                if total is None:
                    total = p.grad
                    if total is None:
                        continue
                    norms[master] = master.taken_norm = norm_of(total, p.dtype)
                master.arriving = None
                pending = pending_of(total)
                if isinstance(pending, Sum) and pending.arrives_at is not None:
                    let_go(total, pending)
                p.grad = None
                taken.append((master, total))
        among = {master for master, _ in taken}
        self._arriving = [master for master in self._arriving if master not in among]
        for alike, landing in self._norms:
            norms.update((m, norm) for m, norm in zip(alike, landing.unbind(), strict=True) if m in among)
        return taken, norms, self.lane.record()

    @torch.no_grad()
    def _publish(self) -> None:
        """Wait for what has been received, and add it to `p.grad`."""
        norms, self._norms = self._norms, []
        if self._arriving or norms:
            stream.wait(self.lane.record(), wait_reasons.ALL_GRADIENTS_DOWNLOADED, host=True)
        arrived, self._arriving = self._arriving, []
        of_losses, self._of_losses = self._of_losses, []
        self._let_go()
        shared = {master for master, _ in of_losses}
        with without_interception():
            for master in arrived:
                p, total, master.arriving = master.parameter, master.arriving, None
                assert total is not None, "a sum that arrives has its memory"
                if p.grad is None and total.dtype == p.dtype:
                    p.grad = total
                elif p.grad is not total:
                    shared.update([master] if p.grad is not None else [])
                    self._add_to_grad(master, total)
            for master, gradient in of_losses:
                self._add_to_grad(master, gradient)
            known: list[tuple[torch.Tensor, Pending]] = []
            for masters, landing in norms:
                for master, norm in zip(masters, landing.clone().unbind(), strict=True):
                    grad = master.parameter.grad
                    if grad is None:  # it has been updated in this backward
                        master.taken_norm = norm
                    elif master not in shared:
                        known.append((grad, Sum(norm, grad._version)))
            hold_all(known)

    def _add_to_grad(self, master: Master, gradient: torch.Tensor) -> None:
        """Make `gradient` (host) the gradient of the parameter, or add it to that; without interception."""
        p = master.parameter
        grad = p.grad
        if grad is not None:
            settle(grad)
            if grad.is_sparse and not gradient.is_sparse:
                gradient, p.grad = gradient + grad, None  # dense from now on, as autograd has it
            else:
                grad += gradient  # in the longer dtype of the two, and rounded once
                return
        dtype = gradient.dtype if gradient.is_sparse else master.gradient_like.dtype
        if dtype != p.dtype:
            p.grad_dtype = None  # any: torch takes this one, and what others make of it
        p.grad = gradient.to(dtype) if gradient.dtype == p.dtype else gradient

    def _discard(self) -> None:
        """Forget what a backward that failed had received. This is called in any thread, after the program has
        continued: nothing is written to `p.grad`."""
        stream.wait(self.lane.record(), wait_reasons.FAILED_DOWNLOADS_FINISHED, host=True)
        self._let_go()
        for master in self._arriving:
            master.arriving = None
        self._arriving.clear()
        self._of_losses.clear()
        self._norms.clear()

    def wait(self) -> None:
        """Wait for what has been sent."""
        stream.wait(self.lane.record(), wait_reasons.GRADIENT_DOWNLOADED, host=True)

    def wait_for_failed(self) -> None:
        """Wait for a backward that has failed, and for what it has sent; all gradients may be used then."""
        self.backwards.wait_until_over()
        self.wait()
        self._let_go()

    def _let_go(self) -> None:
        """The backward is over: its gradients may be used."""
        held, handles = self._held, self._handles
        self._task, self._held, self._handles = None, [], []
        for handle in handles:
            handle.remove()
        for gradient, arriving in held:
            let_go(gradient, arriving)

    def total_norm(self) -> torch.Tensor:
        """The norm of all gradients as if they were one vector, as `torch.nn.utils` takes it.

        Of the norms of the single gradients, stacked in the order of the model; a 0-dim host tensor. Those that were
        taken count.
        """
        norms: list[torch.Tensor] = []
        with without_interception():
            for master in self.masters.all():
                p = master.parameter
                if master.taken_norm is not None:
                    norms.append(master.taken_norm)
                elif (grad := p.grad) is not None:
                    pending = grad.__dict__.get("_l2l_pending")
                    if isinstance(pending, Sum) and pending.norm is not None and pending.version == grad._version:
                        norms.append(pending.norm)
                    else:
                        norms.append(norm_of(grad, p.dtype))
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.tensor(0.0)

    def clip(self, total_norm: torch.Tensor, max_norm: float, *, later: bool) -> None:
        """Scale the gradients, whose norm is `total_norm` (0-dim, on the host), so that it is at most `max_norm`.

        With `later`, each of them when its values are used next.
        """
        factor = torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)
        if factor == 1.0:
            return  # and not if it is nan
        with without_interception(), torch.no_grad():
            for p in self.masters.parameters:
                grad = p.grad
                if grad is None:
                    continue
                pending = grad.__dict__.get("_l2l_pending")
                if later and isinstance(pending, Sum) and pending.may_be_scaled:
                    pending.norm, pending.factor, pending.may_be_scaled = None, factor, False
                    continue
                settle(grad)
                if later and can_hold(grad):
                    hold(grad, Sum(factor=factor))
                else:
                    grad.mul_(factor)


_scaling = threading.Lock()


class Sum(Pending):
    """What is pending for a gradient sum in `p.grad`: a norm that is right until the sum is used, a factor that it is
    multiplied by before, or a backward that may add to it."""

    guards_grad = False

    def __init__(
        self,
        norm: torch.Tensor | None = None,
        version: int | None = None,
        *,
        factor: torch.Tensor | None = None,
        arrives_at: Gradients | None = None,
    ) -> None:
        self.norm = norm
        self.version = version
        """Of the sum when its norm was taken: autograd itself writes to gradients without a word."""
        self.factor = factor
        self.arrives_at = arrives_at
        self.may_be_scaled = factor is None and arrives_at is None

    def before_values(self, tensor: torch.Tensor) -> None:
        if self.arrives_at is not None:
            if current_backward() != -1:
                self.arrives_at.wait()
                return
            self.arrives_at.wait_for_failed()  # the backward has failed, and the program continues
        with _scaling:  # another thread may use it at the same time
            factor, self.factor = self.factor, None
            if factor is not None:
                with without_interception(), torch.no_grad():
                    tensor.mul_(factor)
        let_go(tensor, self)


def norm_of(gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The norm of one gradient, as it is now, computed in `dtype`: a 0-dim host tensor."""
    pending = pending_of(gradient)
    if isinstance(pending, Sum) and pending.norm is None:
        settle(gradient)
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    norm: torch.Tensor = torch.linalg.vector_norm(values, dtype=None if values.dtype == dtype else dtype)
    return norm


def _is_like(total: torch.Tensor, like: torch.Tensor) -> bool:
    """Whether a gradient `like` this can be added to `total` element by element in the order of memory."""
    return (
        total.layout is torch.strided
        and total.dtype == like.dtype
        and total.stride() == like.stride()
        and total.device == stream.HOST
        and can_hold(total)
    )
