"""Gradient sums of several ranks: each lands in shared memory, and its owner adds those of all ranks.

A sum over ranks has the bits of one process that accumulates the same batches one after the other: the ranks are
added in their order, each as a whole.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from hf_l2l.across_devices.choice import Reduction
from hf_l2l.across_hosts.sums import of_all_hosts
from hf_l2l.compat import without_interception
from hf_l2l.eps.gradients import Gradients, Sums
from hf_l2l.eps.masters import Master, Masters, MasterUnit
from hf_l2l.ranks.messages import LATE, REDUCED
from hf_l2l.ranks.team import Team
from hf_l2l.report.timeline import SUMS, Timeline
from hf_l2l.runtime import stream, wait_reasons
from hf_l2l.runtime.backward_callbacks import Backwards
from hf_l2l.runtime.worker import EngineFailedError
from hf_l2l.shared_eps.host_memory import SharedMemory, Totals, put_sum, refuse_clipped_sum
from hf_l2l.shared_eps.items import Item, Items
from hf_l2l.shared_eps.landing import DeviceLanding, Landing, bits_of, in_slots, kept_with, landing_for, refuse_sparse
from hf_l2l.shared_eps.reduction import Reducer


class SharedGradients(Gradients):
    """Receives the gradient sums of this rank, and holds those of all ranks in `p.grad`."""

    memory: SharedMemory

    def __init__(
        self,
        device: torch.device,
        masters: Masters,
        memory: SharedMemory,
        backwards: Backwards,
        others: Sequence[torch.device] = (),
        *,
        team: Team,
        timeline: Timeline,
    ) -> None:
        super().__init__(device, masters, memory, backwards, others)
        self.adds_apart = True
        self.team = team
        self.reduction: Reduction | None = None
        """Where gradients are added; given when the options of all ranks are known to be the same."""
        self.threads = 1  # that add gradients on the host; given when it is known how many cores each rank has
        self._timeline = timeline
        self.items: Items | None = None
        self._landing: Landing | DeviceLanding | None = None
        self._reducer: Reducer | None = None
        self._placed_at = 0
        """`masters.changes` when items and slots were made."""
        self._private: dict[Master, torch.Tensor] = {}
        """Gradients of this backward that cannot land yet: host tensors, complete at the end of the lanes' work."""
        self._continuing: set[Master] = set()
        """Masters that had a sum before this backward."""
        self._next = 0
        """How many items of the order have landed, or been passed over."""
        self._completed: dict[int, None] = {}
        """Numbers of the items in the order in which their gradients were complete."""
        self._roots = 0
        """Calls of the model since the last backward ended."""
        self._backwards = 0
        self._has_begun = False
        self._sums = Totals()
        self._taken: set[Master] = set()
        """Masters whose sums updates of this backward use."""
        self._failed = False
        self._at_sums: weakref.WeakMethod[Callable[[], None]] | None = None
        self.norms: torch.Tensor | None = None
        """Shared memory: the norm of each gradient sum by the number of its parameter in the model."""

    def call_at_sums(self, at_sums: Callable[[], None]) -> None:
        """Call this bound method at the end of a backward, when this rank has added its share, as long as its object
        lives."""
        self._at_sums = weakref.WeakMethod(at_sums)

    # ---- before a backward

    def start_call(self) -> None:
        """A call of the model begins whose graph may have a backward.

        Raises:
            EngineFailedError: if a backward of this rank has failed, for which the others wait.
        """
        self._refuse_failed()
        if self._placed_at != self.masters.changes:
            self._placed_at = self.masters.changes
            self._make_items()
        self._roots += 1

    def _refuse_failed(self) -> None:
        if self._failed:
            raise EngineFailedError(
                "a backward of this rank has failed, and the other ranks have ended: a batch cannot be left out on "
                "one rank alone. Start all ranks again, from the last checkpoint"
            )

    def _make_items(self) -> None:
        self._sums.forget_changed(self.masters.on_host())
        norms, old = self.norms, {} if self._reducer is None else self._reducer.numbers
        self._close()
        self.items = Items(self.masters)
        slot_bytes = self.items.slot_bytes
        sums = None if self.reduction is None else self.reduction.sums(slot_bytes)
        if sums is not None:
            self.memory.lock_gradients()
        self._landing = landing_for(self.team, slot_bytes, self.memory, self.lane, on_device=sums is not None)
        count = len(self.masters.parameters)
        pages = self.team.share(8 * count, "norms of gradients")
        self.norms = pages.bytes_at(0, 8 * count).view(torch.float64)
        numbers = {master: number for number, master in enumerate(self.masters.all())}
        for master in (m for m in self._sums if m.owner == self.team.rank and m in old):
            assert norms is not None, "made with the items"
            self.norms[numbers[master]] = norms[old[master]]  # sums of earlier backwards of this step stay
        works = partial(self._timeline.host_works, row=SUMS)
        self._reducer = Reducer(
            self.team, self._landing, self._sums.of, numbers, self.norms, works, sums, threads=self.threads
        )

    def expect(self, unit: MasterUnit, calls: int) -> None:
        """So many calls more of `unit` are in a graph, from which its masters may get gradients."""
        for item in self._found[0].of_unit(unit):
            item.calls += calls

    @property
    def _found(self) -> tuple[Items, Reducer]:
        assert self.items is not None and self._reducer is not None, "made before the first forward"
        return self.items, self._reducer

    # ---- in a backward

    @torch.no_grad()
    def receive(self, sums: Sums, unit: MasterUnit | None = None, flat: torch.Tensor | None = None) -> None:
        """Take gradients of one call of a layer, or one of another parameter; see `EagerParamServer.receive`."""
        self.backwards.join()
        self._begin()
        items = self._found[0]
        refuse_sparse(sums)
        touched = items.of_unit(unit) if unit is not None else [items.of[master] for master, _ in sums]
        for item in touched:
            item.arrivals += 1
            if self._is_complete(item):
                self._completed[item.number] = None
        device = next((each.device for _, each in sums if each.device in self._lanes), self.device)
        complete = stream.record(device) if self.lane.is_stream else None
        lane = self.lane_of(device) if self.lane.is_stream else self.lane
        of = sums[0][0].parameter if sums else ""
        alone = touched[0] if len(touched) == 1 else None
        direct = alone is not None and alone is not items.small and self._is_next(alone, unit is not None)
        number_and_slot = self._slot(alone) if direct and alone is not None else None
        with lane.entered(), without_interception(), stream.span(device, "download", of):
            stream.wait(complete, wait_reasons.GRADIENTS_COMPUTED)
            for point in self._submitted() if self._private else ():  # what is added to may come from another device
                stream.wait(point, wait_reasons.GRADIENT_DOWNLOADED, on=device)
            if self.lane.is_stream:
                stream.keep_until_done(device, [flat] if flat is not None else [gradient for _, gradient in sums])
            if number_and_slot is not None and alone is not None:
                in_one = flat if [master for master, _ in sums] == alone.masters else None
                self._land_from(alone, dict(sums), in_one, number_and_slot, lane)
            else:
                for master, gradient in sums:
                    self._keep(master, gradient)
        self._advance()

    def _begin(self) -> None:
        """The first gradients of a backward have come."""
        self._refuse_failed()
        self._found[1].check()
        if self._has_begun:
            return
        self._has_begun = True
        with without_interception():
            for master in self.masters.on_host():
                grad = master.parameter.grad
                if grad is not None and grad is not self._sums.get(master):
                    raise RuntimeError(
                        f"p.grad of several ranks is made by backward (got a gradient of {master.name} that the "
                        "program has set); call zero_grad(set_to_none=True) before backward"
                    )
                if grad is not None:
                    self._continuing.add(master)
                    refuse_clipped_sum(grad)

    def _is_next(self, item: Item, of_layer: bool) -> bool:
        """Whether all items before it have landed, so that the gradients can land as they come; lands those that
        need not be waited for."""
        expected = item.calls if of_layer else self._roots
        if item.arrivals != 1 or expected > 1 or item.has_landed or not self._private.keys().isdisjoint(item.masters):
            return False
        order = self._found[0].order
        place = order.index(item, self._next)
        if any(each.calls > each.arrivals for each in order[self._next : place]):
            return False
        for each in order[self._next : place]:
            self._land(each)
        self._next = place + 1
        return True

    def _land_from(
        self,
        item: Item,
        gradients: dict[Master, torch.Tensor],
        flat: torch.Tensor | None,
        number_and_slot: tuple[int, torch.Tensor],
        lane: stream.Lane,
    ) -> None:
        """Start to download all gradients of an item to the slot of this rank, on the lane, which is entered."""
        item.has_landed = True
        more = item.calls > item.arrivals if item.is_layer else self._roots > 1
        bits = bits_of(item, gradients.keys() & set(item.masters), self._continuing, more=more)
        for landed in in_slots(item, gradients, flat, bits, lane, number_and_slot, partial(self._slot, item)):
            self._found[1].land(landed)

    def _slot(self, item: Item) -> tuple[int, torch.Tensor]:
        """This rank's next slot, and the number of its use."""
        why = f"the ranks add up gradients, before those of {item.name}"
        with self._timeline.waiting_for_eps(why):
            return self._found[1].slot(why)

    def _keep(self, master: Master, gradient: torch.Tensor) -> None:
        """Add a gradient to what this rank alone has of it, on the lane."""
        before, room = self._private.get(master), partial(self._memory_like, master, gradient.dtype)
        self._private[master] = kept_with(before, gradient, room, is_stream=self.lane.is_stream)

    def _memory_like(self, master: Master, dtype: torch.dtype) -> torch.Tensor:
        """Host memory for a gradient that cannot land yet. Small ones of no layer never can at once: theirs is
        page-locked, in the memory for norms, which ranks take on the host."""
        like, small = master.gradient_like, self._found[0].small
        if small is None or self._found[0].of[master] is not small:
            return torch.empty_like(like, dtype=dtype, device="cpu")
        contiguous = torch.empty(like.shape, dtype=dtype, device="meta")
        return self.norm_memory.tensor_like(contiguous, 2 * small.layout.num_bytes)

    def _advance(self) -> None:
        """Land all items of which the gradients are complete, in the order on which the ranks agree."""
        items, _ = self._found
        order = items.order
        while self._next < len(order):
            waiting = [
                place
                for place, item in enumerate(order[self._next :], self._next)
                if not self._private.keys().isdisjoint(item.masters) and self._is_complete(item)
            ]
            if not waiting or any(each.calls > each.arrivals for each in order[self._next : waiting[0]]):
                return
            for each in order[self._next : waiting[0] + 1]:
                self._land(each)
            self._next = waiting[0] + 1

    def _is_complete(self, item: Item) -> bool:
        if item is self._found[0].small:
            return False  # its parameters come one by one
        return item.arrivals >= (item.calls if item.is_layer else max(1, self._roots))

    def _land(self, item: Item) -> None:
        """Land what this rank has of an item: on the host, or nothing."""
        for point in self._submitted() if self._private else ():
            stream.wait(point, wait_reasons.GRADIENT_DOWNLOADED, host=True)
        found = {m: self._private.pop(m) for m in item.masters if m in self._private}
        slot = self._slot(item)
        with self.lane.entered(), without_interception():
            self._land_from(item, found, None, slot, self.lane)

    def take_added(self) -> Iterator[tuple[list[Master], dict[Master, torch.Tensor]]]:
        """Take sums, item by item, of which this rank has added its share, and which get no more gradients in this
        step: masters and their sums, of all owners. Their `p.grad` is None from now on."""
        reducer = self._found[1]
        while reducer.added:
            masters = reducer.added.popleft()
            self._taken.update(masters)
            with without_interception():
                for master in masters:
                    master.parameter.grad = None
            yield masters, {m: self._sums.of(m) for m in masters}

    def norm_of(self, master: Master) -> torch.Tensor:
        """The norm of the sum of a master that this rank owns (0-dim, host), once it has added its share."""
        assert self.norms is not None, "made with the items"
        return self.norms[self._found[1].numbers[master]].to(master.dtype)

    # ---- at its end

    @torch.no_grad()
    def _publish(self, *, in_backward: bool = False) -> None:
        """Wait until all ranks have added their shares, and let `p.grad` be the sums."""
        if self.items is None:
            return
        with ExitStack() as at_errors:
            at_errors.callback(self._discard)  # torch does not tell of an error of this callback
            self._publish_sums()
            at_errors.pop_all()

    def _publish_sums(self) -> None:
        self._begin()
        items, reducer = self._found
        self._backwards += 1
        self._take_from_program()
        for item in items.order[self._next :]:
            self._land(item)
        self._next = len(items.order)
        self._land_late(items)
        with self._timeline.waiting_for_eps("all ranks have added their share of the gradients"):
            reducer.finish()
        at_sums = self._at_sums() if self._at_sums is not None else None
        if at_sums is not None:
            at_sums()
        content = struct.pack(f"<{len(self._completed)}I", *self._completed)
        why = "all ranks have added their share of the gradients"
        found = self.team.gather(REDUCED, self._backwards, content, why)[0]
        items.reorder(struct.unpack(f"<{len(found) // 4}I", found))
        self._let_go()
        self._set_grads(reducer)
        self._end()

    def _land_late(self, items: Items) -> None:
        """Land gradients that came after their item had landed, on the ranks that have some."""
        mine = sorted({items.of[master].number for master in self._private})
        content = struct.pack(f"<{len(mine)}I", *mine)
        found = self.team.gather(LATE, self._backwards, content, "all ranks are at the end of their backward")
        late = {number for each in found.values() for number in struct.unpack(f"<{len(each) // 4}I", each)}
        if late:
            self._found[1].finish()
            self._continuing = self._continuing | self._found[1].has_sum
        for number in sorted(late):
            self._land(items.all[number])

    def _take_from_program(self) -> None:
        """Take the gradients that autograd has computed for a loss which uses masters directly."""
        added, self._added_at_end = self._added_at_end, []
        with without_interception():
            for master in self.masters.on_host():
                grad = master.parameter.grad
                if grad is not None and grad is not self._sums.get(master):
                    master.parameter.grad = None
                    added.append((master, grad))
            for master, gradient in added:
                refuse_sparse([(master, gradient)])
                before = self._private.get(master)
                share = gradient / self.team.size  # as the gradients of the outputs are
                for point in self._submitted() if before is not None else ():
                    stream.wait(point, wait_reasons.GRADIENT_DOWNLOADED, host=True)
                self._private[master] = share if before is None else before.add_(share)

    def _set_grads(self, reducer: Reducer) -> None:
        assert self.norms is not None, "made with the items"
        norms = of_all_hosts(self.norms.clone(), self.team, self.masters.all())
        with without_interception():
            for master in self._taken:
                master.taken_norm = norms[reducer.numbers[master]].to(master.dtype)
            for master in (reducer.has_sum | self._continuing) - self._taken:
                norm = norms[reducer.numbers[master]].to(master.dtype)
                put_sum(master, self._sums.of(master), norm, self._sums, self.team)

    def _end(self) -> None:
        items, reducer = self._found
        for item in items.all:
            # A graph of a further call may still be there; what has come too often is forgotten.
            item.calls = max(0, item.calls - item.arrivals)
            item.arrivals, item.has_landed = 0, False
        reducer.has_sum = set()
        reducer.added.clear()
        self._private, self._continuing, self._completed, self._taken = {}, set(), {}, set()
        self._next = self._roots = 0
        self._has_begun = False
        self.norm_memory.drop()

    def end_step(self) -> None:
        """A step is over: graphs that were made before it get no backward any more."""
        for item in self.items.all if self.items is not None else ():
            item.calls = 0

    def _discard(self) -> None:
        """A backward of this rank has failed: the others wait for its gradients, and cannot go on either."""
        self._failed = True
        self.team.peers.tell_failure("a backward of it has raised an exception")
        super()._discard()

    def release(self) -> None:
        """End the thread, and give back the memory of the slots."""
        self._close()
        self._sums.clear()

    def _close(self) -> None:
        if self._reducer is not None:
            self._reducer.close()
        if self._landing is not None:
            self._landing.release()
        self.items = self._landing = self._reducer = None
