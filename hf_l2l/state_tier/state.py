"""`StateOnDisk`: the masters of a model, and the optimizer's state of them, in mapped files."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from hf_l2l.compat import without_interception
from hf_l2l.eps.host_memory import Progress, movable_parts, move
from hf_l2l.eps.masters import Master, Masters, MasterUnit
from hf_l2l.memory.state_traffic import window_bytes
from hf_l2l.model.kept_state import known_tensors
from hf_l2l.optim.layer_optimizers import parameters_of
from hf_l2l.ranks.shared_pages import return_freed_memory
from hf_l2l.runtime.flat_memory import Layout
from hf_l2l.runtime.tensors import sharing_memory
from hf_l2l.state_tier.disk import Disk
from hf_l2l.state_tier.files import Segment
from hf_l2l.state_tier.window import Order, Window

SMALL = 4096
"""Bytes up to which a tensor of the optimizer's state stays in memory, such as the number of its steps."""

Kept = dict[tuple[torch.Tensor, str], torch.Tensor]
"""Parameter and key -> the tensor of an optimizer's state on disk."""


@dataclass(eq=False)
class DiskPart:
    """Masters that are updated together: those of a layer, a large one by itself, or the small ones in no layer."""

    name: str
    in_layer: bool
    masters: list[Master]
    weights: list[Segment] = field(default_factory=list)
    """What holds those that are trained, if any could be moved."""
    frozen: list[Segment] = field(default_factory=list)
    """What holds the others, which updates do not need."""
    kinds: list[tuple[int, bool]] = field(default_factory=list)
    """Per master, its address after it was moved, and whether it is trained."""
    state: WeakKeyDictionary[torch.optim.Optimizer, list[Segment]] = field(default_factory=WeakKeyDictionary)

    def kinds_now(self) -> list[tuple[int, bool]]:
        """`kinds` as they are."""
        with without_interception():
            return [(m.parts[0].data_ptr(), m.parameter.requires_grad) for m in self.masters]

    def of_update(self, optimizer: torch.optim.Optimizer) -> list[Segment]:
        """What an update by `optimizer` reads and writes."""
        return [*self.weights, *self.state.get(optimizer, ())]

    @property
    def num_bytes(self) -> int:
        """Bytes of masters, and of the state of the optimizer that has most, in whole pages."""
        of_optimizers = [sum(each.num_bytes for each in of) for of in self.state.values()]
        return sum(each.num_bytes for each in (*self.weights, *self.frozen)) + max(of_optimizers, default=0)


class StateOnDisk:
    """Moves masters and optimizer state to disk, and brings them to memory before they are used."""

    def __init__(self, masters: Masters, folder: str, layers: int, progress: Progress) -> None:
        """Files are in `folder`; the window has room for so many `layers`."""
        self._masters = masters
        self._folder = folder
        self._layers = layers
        self._progress = progress
        self.window = Window(Disk())
        self.parts: list[DiskPart] = []
        self._part_of: dict[Master, DiskPart] = {}
        self._kept: WeakKeyDictionary[torch.optim.Optimizer, Kept] = WeakKeyDictionary()
        self._lock = threading.RLock()
        """Several updates at a time make state."""
        self._adopted_at = 0
        """`masters.changes` when masters were last moved."""
        self._parts_of_unit: WeakKeyDictionary[MasterUnit, tuple[DiskPart, ...]] = WeakKeyDictionary()
        self._sweeps: Order[tuple[DiskPart, ...]] = Order()
        self._updates: Order[DiskPart] = Order()

    @property
    def on_disk(self) -> set[torch.Tensor]:
        """The masters on disk."""
        return {
            m.parameter
            for part in self.parts
            for m, then, now in zip(part.masters, part.kinds, part.kinds_now(), strict=True)
            if then[0] == now[0] and (part.weights or part.frozen)
        }

    def kept_of(self, optimizer: torch.optim.Optimizer) -> set[torch.Tensor]:
        """The tensors of the optimizer's state that are on disk."""
        return set(list(self._kept.get(optimizer, {}).values()))  # a list at once: updates add to it

    def adopt(self) -> None:
        """Move masters to disk that are new, or whose part has become another one; they stay the same objects.

        Raises:
            OSError: if the disk has no room.
        """
        # Some programs give a parameter other memory, as transformers does to resize embeddings.
        is_current = self._adopted_at == self._masters.changes
        if is_current and all([part.kinds == part.kinds_now() for part in self.parts]):
            return
        self._adopted_at = self._masters.changes
        before = {part.name: part for part in self.parts}
        sharing = sharing_memory(known_tensors(self._masters.model))
        parts, new = [], []
        for name, masters in self._masters.parts(self._masters.on_host()):
            part = before.get(name)
            if part is None or part.masters != masters or part.kinds != part.kinds_now():
                state = WeakKeyDictionary[torch.optim.Optimizer, list[Segment]]() if part is None else part.state
                part = DiskPart(name, masters[0].layer_number > 0, masters, state=state)
                new.append(part)
            parts.append(part)
        with self._lock:
            self.parts = parts
        for part in self._progress(new, "Moving master weights to disk"):
            self._move(part, sharing)
        self._part_of = {master: part for part in self.parts for master in part.masters}
        self._parts_of_unit.clear()
        if new:
            self._sweeps, self._updates = Order(), Order()  # which refer to parts that are no more
            return_freed_memory()

    def _move(self, part: DiskPart, sharing: set[torch.Tensor]) -> None:
        for segments, trained in ((part.weights, True), (part.frozen, False)):
            masters = [master for master in part.masters if master.parameter.requires_grad == trained]
            for master in masters:
                master.wait()
            tensors = [each for master in masters for each in movable_parts(master.parameter, sharing)]
            layout = Layout(tensors)
            if not layout.num_bytes:
                continue
            segment = self._new_segment(segments, layout, by_rows=not part.in_layer)
            with without_interception():
                for tensor, piece in zip(tensors, layout.pieces, strict=True):
                    move(tensor, segment.room(piece.start, piece.stop).tensor_of(piece))
        part.kinds = part.kinds_now()

    def _new_segment(self, among: list[Segment], layout: Layout, *, by_rows: bool = False) -> Segment:
        """A segment for tensors of this layout, which is in memory, and the window with room for it."""
        segment = Segment(self._folder, layout.num_bytes, by_rows=by_rows)
        with self._lock:
            among.append(segment)
            self._resize()
        self.window.use([segment], changes=True, is_new=True)
        return segment

    def _resize(self) -> None:
        sizes = [part.num_bytes for part in self.parts]
        layer = max([part.num_bytes for part in self.parts if part.in_layer], default=0)
        self.window.resize(*window_bytes(sizes, layer, self._layers))

    # ---- use

    def use_unit(self, unit: MasterUnit) -> None:
        """The weights of `unit` are about to be read, in a sweep: have them in memory, and read ahead what follows."""
        parts = self._parts_of_unit.get(unit)
        if parts is None:
            parts = tuple(dict.fromkeys(self._part_of[m] for m in unit.masters if m in self._part_of))
            self._parts_of_unit[unit] = parts
        self._use(parts)

    def use_one(self, master: Master) -> None:
        """A master in no layer is about to be read."""
        part = self._part_of.get(master)
        self._use(() if part is None else (part,))

    def _use(self, parts: tuple[DiskPart, ...]) -> None:
        if parts:
            used = [each for part in parts for each in (*part.weights, *part.frozen)]
            self.window.use(used)
            following = self._sweeps.next_after(parts)
            ahead = [each for part in following or () for each in (*part.weights, *part.frozen)]
            self.window.read_ahead(ahead, used)

    def around_update(
        self, run: Callable[[], None], optimizer: torch.optim.Optimizer, masters: Sequence[Master]
    ) -> Callable[[], None]:
        """`run`, the update of `masters`, with masters and state in memory. To be called when it is submitted."""
        part = self._part_of.get(masters[0])
        if part is None:
            return run
        following = self._updates.next_after(part)

        def updated() -> None:
            used = part.of_update(optimizer)
            with self.window.held(used):
                if following is not None:
                    self.window.read_ahead(following.of_update(optimizer), used)
                run()

        return updated

    # ---- state

    def keep_updated(self, optimizer: torch.optim.Optimizer, masters: Sequence[Master]) -> None:
        """Move state to disk that an update has made, within `around_update`, before the next one may use it."""
        part = self._part_of.get(masters[0])
        if part is not None:
            self.keep(optimizer, part, masters)

    def keep_all(self, optimizer: torch.optim.Optimizer) -> None:
        """Move all state of an optimizer to disk."""
        of_optimizer = set(parameters_of(optimizer))
        for part in self.parts:
            self.keep(optimizer, part, [m for m in part.masters if m.parameter in of_optimizer])

    @torch.no_grad()
    def keep(self, optimizer: torch.optim.Optimizer, part: DiskPart, masters: Iterable[Master]) -> None:
        """Move state of `masters` to disk, as far as it is not there.

        Raises:
            OSError: if the disk has no room.
        """
        with self._lock:
            kept: Kept = self._kept.setdefault(optimizer, {})
            segments = part.state.setdefault(optimizer, [])
        new: list[tuple[dict[str, Any], tuple[torch.Tensor, str], torch.Tensor]] = []
        with without_interception():
            for master in masters:
                state = optimizer.state.get(master.parameter) or {}
                for key, value in state.items():
                    if not _is_large(value):
                        continue
                    there = kept.get((master.parameter, key))
                    if there is value:
                        continue
                    if there is not None and (there.dtype, there.shape) == (value.dtype, value.shape):
                        self.window.use(segments, changes=True)
                        state[key] = there.copy_(value)  # the step, or the program, has made it anew
                    else:
                        new.append((state, (master.parameter, key), value))
            if not new:
                return
            layout = Layout(value for _, _, value in new)
            segment = self._new_segment(segments, layout)
            for (state, (parameter, key), value), piece in zip(new, layout.pieces, strict=True):
                there = segment.room(piece.start, piece.stop).tensor_of(piece)
                state[key] = kept[parameter, key] = there.copy_(value)
        del new, state, value
        return_freed_memory()  # in which the step has made it

    def release(self) -> None:
        """End the threads. Tensors on disk stay there as long as they live."""
        self.window.disk.close()
        self.window.clear()
        self._part_of, self.parts = {}, []
        self._parts_of_unit.clear()
        self._kept.clear()
        self._sweeps, self._updates = Order(), Order()


def _is_large(value: object) -> bool:
    return (
        type(value) is torch.Tensor  # others, such as quantized ones, have their values elsewhere
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and value.nbytes > SMALL
    )
