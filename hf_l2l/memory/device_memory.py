"""What the memory of the device holds, by name, now and when it held most.

The engine names what it allocates (`holds`). All other memory belongs to what runs: the embedding, one micro-batch in
a layer, the head, the optimizer, or the program itself. So the parts always add up to what the allocator has counted.

The allocator tells how many bytes it has held at most, but not when. So at the ends of phases this looks whether that
number has grown, and if so keeps what is held, with the rest under the name of the phase. Each look takes about 0.1 ms
with CUDA. It is done in the first calls only, and again when a call has more inputs than any before it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from hf_l2l.memory.held import Held, memory_of
from hf_l2l.runtime import stream

SHELL, SLOTS, STASH, BOUNDARY, MASK, INPUTS = "shell", "slots", "stash", "boundary", "mask", "inputs"
EMBEDDING, WORKSPACE, HEAD, OPTIMIZER = "embedding", "workspace", "head", "optimizer transients"
RESIDENT, KEPT_WEIGHTS, KEPT_GRAPHS = "resident layers", "kept weights", "kept graphs"

Find = Callable[[], Iterable[torch.Tensor]]

DEVICE_NAMES = (
    *(SHELL, RESIDENT, SLOTS, KEPT_WEIGHTS, WORKSPACE, KEPT_GRAPHS, BOUNDARY),
    *(EMBEDDING, STASH, MASK, HEAD, INPUTS, OPTIMIZER),
)
"""The names of all device memory, in the order in which they are shown."""

_HELD = (SLOTS, KEPT_WEIGHTS, RESIDENT, SHELL, MASK, INPUTS, STASH, BOUNDARY)
"""Names that tensors are given. Memory with several counts for the first: an output that is stashed is stash."""

_LEAVES = (INPUTS, EMBEDDING, HEAD, KEPT_GRAPHS)
"""Phases whose memory without a name is theirs until it is freed, also after they have ended."""

_CALLS = 3
"""Calls of the model that are looked at: the first one, in which slots are allocated and the order of the layers is
not known, and two like all later ones."""


class DeviceMemory:
    """The bytes of one device by name. A phase lasts from one `enter` to the next one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.capacity = stream.memory_of(device)
        """Bytes of memory that the device has in all; None if its torch module does not say."""
        self.is_backward = False
        """Whether the layers now run backward: which modules come after them depends on it."""
        self.peak = dict.fromkeys(DEVICE_NAMES, 0)
        """What was held when it was most."""
        self._held = {name: Held(device) for name in _HELD}
        self._finders: list[tuple[str, weakref.WeakMethod[Find]]] = []
        self._phase = INPUTS
        self._left: dict[str, int] = {}
        """Bytes without a name that phases have left behind, as the embedding does with its part of the graph."""
        self._largest: dict[bool, int] = {}
        """The most elements in the inputs of a call so far: with gradients, and without."""
        self._calls_left = 0
        """Calls that are still looked at."""
        usage = stream.memory_in_use(device)
        self._most = 0 if usage is None else usage[1]
        """The most bytes that the allocator has held, at the last look."""

    def holds(self, name: str, tensors: Iterable[torch.Tensor]) -> None:
        """The memory of `tensors` has this name as long as it lives; those on the host are passed over."""
        self._held[name].add(tensors)

    def finds(self, name: str, find: Find) -> None:
        """The bound method `find` returns tensors whose memory has this name, too. It is called at each look, as long
        as its object lives."""
        self._finders.append((name, weakref.WeakMethod(find)))

    # ---- phases

    @property
    def is_looking(self) -> bool:
        """Whether this call is looked at."""
        return self._calls_left > 0

    def begin_call(self, elements: int) -> None:
        """A call of the model begins, whose inputs have so many elements."""
        self.enter(INPUTS)
        trains = torch.is_grad_enabled()
        if elements > self._largest.get(trains, -1):
            self._largest[trains] = elements
            self._calls_left = _CALLS
        elif self._calls_left:
            self._calls_left -= 1
        self.is_backward = False
        self.enter(INPUTS)  # looks at what the program holds, if this is the first call to be looked at

    def enter(self, phase: str) -> None:
        """End the phase, and begin another one."""
        if self._calls_left:
            self.look()
        if phase in (INPUTS, OPTIMIZER):
            # Between calls, all that has no name is the program's. A graph that it keeps is, too.
            self._left.clear()
        self._phase = phase

    @contextmanager
    def in_layer(self) -> Iterator[None]:
        """A layer runs in the block."""
        self.enter(WORKSPACE)
        try:
            yield
        finally:
            self.enter(EMBEDDING if self.is_backward else HEAD)

    def look(self) -> None:
        """Keep what is held if the allocator holds more than ever, or has done so since the last look."""
        usage = stream.memory_in_use(self.device)
        if usage is None:
            return
        live, most = usage
        known = self._known()
        # The program may have reset the allocator's peak, which is lower then: what it says now is new, too.
        highest = most if most != self._most else live
        self._most = most
        if highest > sum(self.peak.values()):
            self.peak = self._named(highest, known)
        if self._phase in _LEAVES:
            others = sum(size for name, size in self._left.items() if name != self._phase)
            self._left[self._phase] = max(0, live - sum(known.values()) - others)

    # ---- reports

    def now(self) -> dict[str, int] | None:
        """Bytes by name; None if the device shares the host's memory, or counts none."""
        usage = stream.memory_in_use(self.device)
        return None if usage is None else self._named(usage[0], self._known())

    @property
    def held_more_before(self) -> int:
        """Bytes that the allocator had held at once before anything here was looked at, if that is more than `peak`:
        then it cannot tell a peak inside a phase. 0 otherwise."""
        return self._most if self._most > sum(self.peak.values()) else 0

    def _known(self) -> dict[str, int]:
        """Bytes of what has a name now."""
        alive = {name: held.alive() for name, held in self._held.items()}
        for name, method in self._finders:
            find = method()
            alive[name].update({} if find is None else memory_of(find(), self.device))
        found, seen = dict.fromkeys(DEVICE_NAMES, 0), set[int]()
        for name, memory in alive.items():
            found[name] = sum(size for address, size in memory.items() if address not in seen)
            seen.update(memory)
        return found

    def _named(self, total: int, known: dict[str, int]) -> dict[str, int]:
        """`known`, and the rest of `total` bytes: what earlier phases have left, and the present one."""
        found = dict(known)
        rest = max(0, total - sum(known.values()))
        for name, size in self._left.items():
            if name != self._phase:
                found[name] += min(size, rest)
                rest -= min(size, rest)
        found[self._phase] += rest
        return found


class DevicesMemory:
    """The bytes of each device that layers run on; the names and phases are those of all of them."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.each = [DeviceMemory(device) for device in devices]
        self._is_counted = any(stream.memory_in_use(device) is not None for device in devices)
        """Whether a report can say what is held: the memory of the CPU has no such counter."""
        self.capacity = self.each[0].capacity
        """Bytes of memory that the first device has in all; None if its torch module does not say."""

    @property
    def is_backward(self) -> bool:
        """Whether the layers now run backward."""
        return self.each[0].is_backward

    @is_backward.setter
    def is_backward(self, is_backward: bool) -> None:
        for memory in self.each:
            memory.is_backward = is_backward

    @property
    def is_looking(self) -> bool:
        """Whether this call is looked at."""
        return self.each[0].is_looking

    @property
    def held_more_before(self) -> int:
        """See `DeviceMemory`; the most of any device."""
        return max(memory.held_more_before for memory in self.each)

    def holds(self, name: str, tensors: Iterable[torch.Tensor]) -> None:
        """See `DeviceMemory`; each device has some of `tensors`."""
        if self._is_counted:
            tensors = list(tensors)
            for memory in self.each:
                memory.holds(name, tensors)

    def finds(self, name: str, find: Find) -> None:
        """See `DeviceMemory`."""
        for memory in self.each:
            memory.finds(name, find)

    def begin_call(self, elements: int) -> None:
        """See `DeviceMemory`."""
        for memory in self.each:
            memory.begin_call(elements)

    def enter(self, phase: str) -> None:
        """See `DeviceMemory`."""
        for memory in self.each:
            memory.enter(phase)

    @contextmanager
    def in_layer(self) -> Iterator[None]:
        """See `DeviceMemory`."""
        with ExitStack() as stack:
            for memory in self.each:
                stack.enter_context(memory.in_layer())
            yield

    def look(self) -> None:
        """See `DeviceMemory`."""
        for memory in self.each:
            memory.look()
