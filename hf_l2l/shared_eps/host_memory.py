"""Masters, their 16-bit copies and gradient sums in memory that all ranks map: they exist once per host."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import accumulate

import torch

from hf_l2l.compat import version_kept, without_interception
from hf_l2l.eps.host_memory import HostMemory, Plan, Progress, gradient_layout, unseen
from hf_l2l.eps.masters import Master, Masters
from hf_l2l.eps.pending import SCALING, PendingSum, hold, pending_of
from hf_l2l.model.kept_state import known_tensors
from hf_l2l.ranks.shared_pages import SharedPages, return_freed_memory
from hf_l2l.ranks.team import Team
from hf_l2l.runtime import stream
from hf_l2l.runtime.flat_memory import ALIGNMENT, Layout, Room, block_of, placed
from hf_l2l.runtime.tensors import is_plain, is_quantized, sharing_memory


class SharedMemory(HostMemory):
    """Allocates the memory that the ranks share; all of them make the same calls.

    When a model is attached, the values are those of rank 0, as in DistributedDataParallel.
    """

    def __init__(self, device: torch.device, masters: Masters, progress: Progress = unseen, *, team: Team) -> None:
        super().__init__(device, masters, progress)
        self.team = team
        self._mapped: list[SharedPages] = []
        """What is shared, for as long as masters are in it."""
        self._has_buffers = False
        self._of_gradients: list[SharedPages] = []

    def adopt(self) -> None:
        """Move parameters that are new, or have other memory now, to shared memory; they stay the same objects.

        Raises:
            ValueError: if a parameter cannot be moved.
        """
        with ExitStack() as at_errors:
            if not self._has_buffers:  # in `attach_l2l`, after which there would be nothing to detach
                at_errors.callback(self._move_back)
                at_errors.callback(self.team.give_up)
            self._adopt()
            at_errors.pop_all()

    def _adopt(self) -> None:
        masters = self.masters.on_host()
        with without_interception():
            new = {m for m in masters if m.address != m.parts[0].data_ptr()}
        if new:
            # A layer is placed as a whole, so that it stays one block after one of its parameters has changed.
            new.update(
                m for unit in self.masters.layer_units if not new.isdisjoint(unit.masters) for m in unit.masters
            )
            self._refuse_unmovable(new)
            self._place_all([self._plan(group, set()) for group in self._groups(new)])
        if not self._has_buffers:
            self._has_buffers = True
            self._take_buffers_of_first_rank()
        if new or self._blocks_found_at != self.masters.changes:
            self._blocks_found_at = self.masters.changes
            for unit in self.masters.layer_units:
                unit.upload_block = block_of([part for m in unit.masters for part in m.upload_parts], unit.layout)

    def _refuse_unmovable(self, new: set[Master]) -> None:
        sharing = sharing_memory(known_tensors(self.masters.model))
        for master in (m for m in self.masters.on_host() if m in new):
            p = master.parameter
            if not sharing.isdisjoint(master.parts) or not (is_plain(p) or is_quantized(p)):
                raise ValueError(
                    "the ranks of a host share parameters, each of which needs memory of its own (got "
                    f"{master.name}, a {type(p).__name__} whose memory is also that of another tensor, or of another "
                    "process); clone it, or train in one process"
                )

    def _place_all(self, plans: Sequence[Plan]) -> None:
        """Move masters to shared memory, and give places there to the 16-bit copies that travel instead of them."""
        travels = self._shared([plan.layout for plan in plans], "what is uploaded")
        for pages in self._mapped[-1:]:
            self.lock(pages)
            self._is_refused |= not pages.locked
        wide = [[m for m in plan.group if m in plan.copied] for plan in plans]
        masters = self._shared([Layout(p for m in group for p in m.parts) for group in wide], "masters")
        for plan, (pages, at), group, (own_pages, own_at) in zip(plans, travels, wide, masters, strict=True):
            for (master, number), (part, room) in zip(plan.chosen, placed(pages, plan.layout, at), strict=True):
                master.upload_parts[number] = part
                if master in plan.copied:
                    master.copy_room, master.copy = room, room.tensor_of(part.piece)
                else:
                    self._move(master.parts[number], room.tensor_of(part.piece))
            parts = [p for m in group for p in m.parts]
            for p, (part, room) in zip(parts, placed(own_pages, Layout(parts), own_at), strict=True):
                self._move(p, room.tensor_of(part.piece))
            for master in plan.group:
                master.address = master.parts[0].data_ptr()
            self._make_copies(plan.copied)
        self.team.barrier("the values of rank 0 are in the memory of all ranks")
        return_freed_memory()
        self.warn_once()

    @torch.no_grad()
    def _make_copies(self, masters: Iterable[Master]) -> None:
        """Let 16-bit copies have the values of rank 0. From then on owners renew them, also if they use none."""
        with without_interception():
            for master in masters:
                p, copy = master.parameter, master.copy
                if copy is None:
                    continue
                if self.team.leads:
                    copy.copy_(p)
                master.copy_version, master.copy_is_right = p._version, True
                hold(p, master)

    def _shared(self, layouts: Iterable[Layout], what: str) -> Iterator[tuple[SharedPages, int]]:
        """New shared memory for these layouts: the pages, and where in them each begins."""
        starts = [0, *accumulate(-(-layout.num_bytes // ALIGNMENT) * ALIGNMENT for layout in layouts)]
        pages = self.team.share(starts[-1], what)
        self._mapped.append(pages)
        return iter([(pages, start) for start in starts[:-1]])

    @torch.no_grad()
    def _move(self, master: torch.Tensor, to: torch.Tensor) -> None:
        """Give `master` the memory of `to`, which gets its values on rank 0."""
        with without_interception(), version_kept(master):
            if self.team.leads:
                to.copy_(master)
                self._take_from_first_host([to])
            master.set_(to)  # type: ignore[call-overload]

    def _take_from_first_host(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give tensors of the first rank of this host the values of rank 0."""
        if self.team.counterparts is not None:
            given = [each for each in tensors if each.numel()]
            self.team.counterparts.broadcast(given, 0, "the values of rank 0 come to the other hosts")

    @torch.no_grad()
    def _take_buffers_of_first_rank(self) -> None:
        """Give the buffers, of which each rank keeps its own, the values of rank 0."""
        buffers = [b for b in dict.fromkeys(self.masters.model.buffers()) if b.layout is torch.strided]
        layout = Layout(buffers)
        pages = self.team.share(layout.num_bytes, "buffers")
        values = layout.views(pages.bytes_at(0, layout.num_bytes))
        if self.team.leads:
            for buffer, shared in zip(buffers, values, strict=True):
                shared.copy_(buffer)
            self._take_from_first_host(values)
        self.team.barrier("rank 0 has shared its buffers")
        if self.team.rank != 0:
            for buffer, shared in zip(buffers, values, strict=True):
                if not torch.equal(buffer, shared):
                    buffer.copy_(shared)

    def take_gradients(self) -> None:
        """Share memory for one gradient sum per trainable parameter, if that has not been done."""
        if self._gradients_placed_at == self.masters.changes:
            return
        self._gradients_placed_at = self.masters.changes
        missing = {m for m in self.masters.on_host() if m.parameter.requires_grad and m.gradient_room is None}
        if not missing:
            return
        groups = self._groups(missing)
        layouts = [gradient_layout(group) for group in groups]
        for group, layout, (pages, at) in zip(groups, layouts, self._shared(layouts, "gradient sums"), strict=True):
            for master, (part, room) in zip(group, placed(pages, layout, at), strict=True):
                master.gradient_part, master.gradient_room = part, room
        self._of_gradients.append(self._mapped[-1])

    def lock_gradients(self) -> None:
        """Page-lock the gradient sums for the device, which writes them itself."""
        for pages in self._of_gradients:
            if pages.locked is None:
                self.lock(pages)
        self.warn_once()

    def lock(self, pages: SharedPages) -> None:
        """Page-lock shared memory for the device, as far as that is possible."""
        if stream.can_page_lock(self.device):
            self._pages.add(pages)
            pages.lock(self.device)

    def _move_back(self) -> None:
        if self._mapped:  # else nothing has been moved
            self.release()

    def release(self) -> None:
        """Move the masters to ordinary memory of this rank."""
        for master in self.masters.on_host():
            for part in master.parts:
                with torch.no_grad(), without_interception(), version_kept(part):
                    part.set_(part.detach().clone())  # type: ignore[call-overload]
        for pages in self._mapped:
            pages.unlock()
        stream.forget_refusal(self.device)


class Totals(dict[Master, torch.Tensor]):
    """The tensor in which the sum of each master is, made once. (A plain dict cannot be referred to weakly.)"""

    def __init__(self) -> None:
        super().__init__()
        self._rooms: dict[Master, Room] = {}

    def of(self, master: Master) -> torch.Tensor:
        """The shared sum of a master: the same tensor each time."""
        total = self.get(master)
        if total is None:
            part, room = master.gradient_part, master.gradient_room
            assert part is not None and room is not None, "allocated before the first forward"
            total = self[master] = room.tensor_of(part.piece)
            self._rooms[master] = room
        return total

    def forget_changed(self, masters: Sequence[Master]) -> None:
        """Forget the sums of all but these masters, and of those that have other memory for it now."""
        kept = {m for m in masters if m.gradient_room is not None and self._rooms.get(m) is m.gradient_room}
        for master in {*self._rooms} - kept:
            del self._rooms[master]
            self.pop(master, None)


class SharedSum(PendingSum):
    """The norm of a sum in `p.grad`, and a factor to multiply it by before it is used. The program cannot write to it:
    each rank would."""

    def __init__(self, norm: torch.Tensor, version: int, sums: Totals, master: Master) -> None:
        """`sums` are the tensors in which the sums of ranks are, that of `master` among them."""
        super().__init__(norm, version)
        # A sum that referred to itself would never be freed: what p.grad refers to is hidden from the collector.
        self._sums, self._master = weakref.ref(sums), weakref.ref(master)
        self._of, self._owner = master.name, master.owner
        self.last_version = version
        """Of the sum when the engine wrote to it last; writes by autograd itself are not intercepted."""

    def before_values(self, tensor: torch.Tensor) -> None:
        """Scale a copy that this rank alone has; the memory of all ranks is never written by the program."""
        with SCALING:  # another thread may use the gradient at the same time
            factor, self.factor = self.factor, None
            if factor is None:
                return
            sums, master = self._sums(), self._master()
            if sums is not None and master is not None:
                sums.pop(master, None)  # it is in no shared memory any more
            with without_interception(), torch.no_grad():
                tensor.set_(tensor * factor)  # type: ignore[call-overload]
                self.last_version = tensor._version

    def before_write(self, tensor: torch.Tensor) -> None:
        raise RuntimeError(
            "p.grad of several ranks is one tensor in shared memory, to which each of them would write (got an "
            "operation that changes it, as torch.nn.utils.clip_grad_norm_ does); clip with "
            "eps.clip_grad_norm_(max_norm), and drop gradients with zero_grad(set_to_none=True)"
        )


def put_sum(master: Master, total: torch.Tensor, norm: torch.Tensor, sums: Totals, team: Team) -> None:
    """Let `p.grad` of a master be the sum of all ranks, whose norm (0-dim, host) is known."""
    p = master.parameter
    if total.dtype != p.dtype:
        p.grad_dtype = None  # any dtype
    p.grad = total
    kind = SharedSum if master.owner in team.near else FarSum
    pending = kind(norm, total._version, sums, master)
    pending.norm_decides = team.counterparts is not None
    hold(total, pending)


def refuse_changed_sum(master: Master) -> None:
    """Raise RuntimeError if a backward has written to the sum in `p.grad`, as each rank has, in the same memory."""
    grad = master.parameter.grad
    pending = None if grad is None else pending_of(grad)
    if grad is not None and isinstance(pending, SharedSum) and grad._version != pending.last_version:
        raise RuntimeError(
            "a loss of several ranks that uses parameters directly is part of one backward with the model's (got a "
            f"backward of its own, which has added to p.grad of {master.name} once for each rank); add both losses "
            "before backward()"
        )


def refuse_clipped_sum(grad: torch.Tensor) -> None:
    """Raise RuntimeError if the sum in `p.grad`, to which a backward adds now, is to be scaled when it is used."""
    pending = pending_of(grad)
    if isinstance(pending, SharedSum) and pending.factor is not None:
        raise RuntimeError(
            "several ranks clip gradients once, after the last backward of a step (got a backward between "
            "clip_grad_norm_ and optimizer.step()); clip in the last micro-step alone"
        )


class FarSum(SharedSum):
    """The norm of a sum that another host has: the values in `p.grad` are none."""

    def before_values(self, tensor: torch.Tensor) -> None:
        raise RuntimeError(
            "with several hosts, each has the gradient sums of the parameters that its ranks update (got a use of "
            f"p.grad of {self._of}, which rank {self._owner} updates); use eps.grad_norm() and "
            "eps.clip_grad_norm_(max_norm)"
        )
