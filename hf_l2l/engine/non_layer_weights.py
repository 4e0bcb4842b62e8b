"""The weights of the non-layer modules on the device, for one call: small ones are uploaded first, large ones by their
first use."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from hf_l2l.compat import is_compiled, version_kept, without_interception
from hf_l2l.device.device_weights import DeviceWeights, OnGradient, as_leaves
from hf_l2l.eps.masters import MasterUnit
from hf_l2l.eps.pending import Pending, hold_all, let_go, settle
from hf_l2l.eps.weight_copies import Copies
from hf_l2l.runtime import stream, wait_reasons
from hf_l2l.runtime.flat_memory import elements
from hf_l2l.runtime.observer import NON_LAYER
from hf_l2l.runtime.tensors import parts_of


class _Uploads:
    """The uploads of the weights of one call. It refers to no device tensor, so each is freed with its last use."""

    def __init__(
        self, unit: MasterUnit, copies: Copies, lane: stream.Lane, *, keeps_copies: bool, makes_graph: bool
    ) -> None:
        self._unit, self._copies, self._lane = unit, copies, lane
        self._keeps_copies, self._makes_graph = keeps_copies, makes_graph
        self._compute = stream.current(lane.device)
        # The allocator may hand out memory that work on the compute stream still uses.
        self._allocated = stream.record(lane.device)
        self._ends: dict[int, stream.Point | None] = {}
        """The number of each weight whose upload has begun -> the end of its upload."""
        self._sources: list[torch.Tensor] = []
        """What is being uploaded; 16-bit copies that are not kept would be freed."""
        self.layer_calls = 0
        """How many layers the call has called so far."""
        self._used: dict[int, int] = {}
        """The number of each weight that was used -> how many layers had been called then."""
        self._is_over = False
        """True after the call; a program may still use a weight that it has kept."""

    def begin(self, number: int, leaf: torch.Tensor) -> None:
        """Upload weight `number` to `leaf`, if that has not begun."""
        if number in self._ends:
            return
        places = parts_of(leaf)
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            without_interception(),
            version_kept(*places),  # for whoever looks, the weight has had its values from the beginning
        ):
            with ExitStack() as at_errors:
                at_errors.callback(self._end_copies)  # those that were submitted before the error
                for place, source in self._copied(number, places):
                    with self._lane.entered(), stream.span(self._lane.device, "upload", NON_LAYER):
                        stream.wait(self._allocated, wait_reasons.WEIGHTS_MEMORY_FREE)
                        place.copy_(source, non_blocking=self._lane.is_stream)
                at_errors.pop_all()
            self._ends[number] = self._lane.record()
            if self._keeps_copies and len(places) == 1:
                self._copies.keep_on_device(self._unit.masters[number], leaf)

    def _end_copies(self) -> None:
        stream.wait(self._lane.record(), wait_reasons.MASTERS_READ, host=True)

    def _copied(self, number: int, places: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Parts of weight `number` on the device, and what is uploaded to them: a weight that is being updated, piece
        by piece. Waits for the update, before the lane gets the work."""
        parts = self._unit.part_numbers[number]
        found = None if len(parts) > 1 or self._keeps_copies else self._copies.being_updated(self._unit, parts[0])
        if found is None:
            sources = [self._copies.of_one(self._unit, part) for part in parts]
            self._sources += sources
            yield from zip(places, sources, strict=True)
            return
        source, update = found
        self._sources.append(source)
        place, source = elements(places[0]), elements(source)
        for piece, (begin, end) in enumerate(itertools.pairwise((0, *update.pieces))):
            update.wait_for_piece(piece)
            yield place[begin:end], source[begin:end]

    def finish(self, number: int, leaf: torch.Tensor) -> None:
        """Make the device wait for weight `number`, which is used now."""
        self.begin(number, leaf)
        end = self._ends[number]
        stream.wait(end, wait_reasons.WEIGHTS_UPLOADED)
        if stream.current(self._lane.device) != self._compute:  # the program uses it in a stream of its own
            with stream.entered(self._lane.device, self._compute):
                stream.wait(end, wait_reasons.WEIGHTS_UPLOADED)
        if self._is_over:
            self.settle()
        else:
            self._used[number] = self.layer_calls

    def settle(self) -> None:
        """The call is over: end all uploads that have begun before anybody writes to what they read."""
        if not self._is_over:
            self._is_over = True
            for number, master in enumerate(self._unit.masters):
                master.first_use = self._used.get(number, math.inf)
        last = next(reversed(self._ends.values()), None)
        # The memory of a weight that was not used after all is freed in the order of the compute stream.
        stream.wait(last, wait_reasons.WEIGHTS_UPLOADED)
        if self._makes_graph:
            self._copies.leave_reading([self._unit.masters[number] for number in self._ends], last, self._sources)
        else:
            stream.wait(last, wait_reasons.MASTERS_READ, host=True)
        self._sources.clear()


class _FirstUse(Pending):
    """What is pending for a large weight of the non-layer modules on the device: its upload."""

    guards_grad = False

    def __init__(self, uploads: _Uploads, number: int) -> None:
        self._uploads, self._number = uploads, number

    def before_look(self, tensor: torch.Tensor) -> None:
        """Reading the version waits for nothing."""

    def before_values(self, tensor: torch.Tensor) -> None:
        """Using the values waits for the upload, on the device."""
        self._uploads.finish(self._number, tensor)
        let_go(tensor, self)


class NonLayerWeights(DeviceWeights):
    """The weights of the non-layer modules of one call, on the lane.

    Small ones are uploaded first, and nothing computes before. A large one (an embedding, a head) is held (see
    `pending`) and uploaded at the latest at its first use, which waits for its upload alone; if the call does not use
    it, it is not uploaded. torch does not see how an extension in C++ uses the weight of a module that is not called:
    a gradient of a large one that was not uploaded is an error.
    """

    def __init__(
        self,
        unit: MasterUnit,
        copies: Copies,
        lane: stream.Lane,
        keeps_copies: bool = False,
        *,
        requires_grad: bool,
        on_gradient: OnGradient,
        on_last_use: Callable[[torch.Tensor], None],
    ) -> None:
        """Allocate device tensors for `unit`, except those that `keeps_copies` has left there. In a backward,
        `on_last_use` is called with those whose memory nothing else has, when they have got their gradients."""
        with torch.inference_mode(False), torch.no_grad(), without_interception():
            there = [copies.on_device(unit, number, kept=keeps_copies) for number in range(len(unit.likes))]
            parts = [
                torch.empty_like(like, device=lane.device, requires_grad=False) if part is None else part
                for part, like in zip(there, unit.likes, strict=True)
            ]
            leaves = as_leaves(unit, parts)
            for number in unit.trained if requires_grad else ():
                leaf = leaves[number].requires_grad_()
                leaf.register_post_accumulate_grad_hook(partial(on_gradient, number))
                if not keeps_copies and there[unit.part_numbers[number][0]] is None:
                    leaf.register_post_accumulate_grad_hook(on_last_use)
        super().__init__(unit, leaves, lane.device, copies.precision)
        self.uploads = _Uploads(unit, copies, lane, keeps_copies=keeps_copies, makes_graph=requires_grad)
        travels = [n for n, parts_of_it in enumerate(unit.part_numbers) if there[parts_of_it[0]] is None]
        self._small = [number for number in travels if not unit.masters[number].is_large]
        self._large = [number for number in travels if unit.masters[number].is_large]
        hold_all([(leaves[number], _FirstUse(self.uploads, number)) for number in self._large])

    def upload_first(self) -> None:
        """See `DeviceWeights`."""
        for number in self._small:
            self.uploads.begin(number, self.leaves[number])
        for number in self._small[-1:]:  # the lane makes uploads in order
            self.uploads.finish(number, self.leaves[number])
        if any(map(is_compiled, self.unit.modules)):  # a compiled function cannot take held tensors
            for number in self._large:
                settle(self.leaves[number])
        self._upload_large(0)

    def upload_ahead(self, layer_calls: int) -> None:
        """See `DeviceWeights`; the last forward tells when each large weight is used."""
        self.uploads.layer_calls = layer_calls
        self._upload_large(layer_calls + 1)

    def _upload_large(self, layer_calls: int) -> None:
        """Begin the uploads of large weights that the last forward used when it had called so many layers."""
        masters = self.unit.masters
        for number in sorted(self._large, key=lambda number: masters[number].first_use):
            master = masters[number]
            # A later use waits for an update itself: first, the device gets the work of the next layer.
            if master.first_use <= layer_calls and (layer_calls == 0 or not master.is_updating):
                self.uploads.begin(number, self.leaves[number])

    def settle(self) -> None:
        """See `DeviceWeights`."""
        self.uploads.settle()
