"""`LayerDevice`: what one of the devices that run layers has of its own.

Of several devices, layer l of the order in which the model calls them runs on device l mod n (modular pipeline,
arXiv:2106.02679, section 4). Each has slots for its layers alone, so that their weights and gradients pass over its
own link, and a stash for their inputs. Autograd and the code of the model see the first device only: layers compute on
streams that belong to neither, and every tensor that they are given or return is waited for by rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch.utils.weak import WeakIdKeyDictionary

from hf_l2l.config import L2LConfig
from hf_l2l.device.slots import GradientSlots, WeightSlots
from hf_l2l.eps.masters import MasterUnit
from hf_l2l.eps.server import EagerParamServer
from hf_l2l.log import logger, tell
from hf_l2l.logits.places import FIRST, OtherPlace, Place
from hf_l2l.rows.host_rows import HostRows, host_of
from hf_l2l.runtime import compute_state, stream, wait_reasons
from hf_l2l.stash.stash import Stash
from hf_l2l.stash.tiers import Tiers
from hf_l2l.stash.transit import Transit

Cut = Callable[[torch.Tensor], Sequence[torch.Tensor]]
"""Views of a tensor with the rows of each micro-batch."""


class LayerDevice:
    """One device, its compute stream, its slots and its part of the stash."""

    def __init__(
        self,
        device: torch.device,
        config: L2LConfig,
        eps: EagerParamServer,
        stash: Stash,
        transit: Transit,
        compute: stream.Lane,
        upload: stream.Lane,
    ) -> None:
        """Layers compute on the lane `compute`, which for a single device is the program's stream, and their weights
        are uploaded on the lane `upload`."""
        self.device = device
        self.number = transit.devices.index(device)
        self.first = transit.devices[0]
        """The device that the code of the model runs on."""
        self.stash = stash
        self.transit = transit
        self.gradient_slots = GradientSlots(device, config.gradient_slots, eps.masters)
        self.weight_slots: WeightSlots | None = None
        """Allocated when the first layer is uploaded."""
        self.is_told_idle = False
        """Whether it has been said that a forward has no layer for it."""
        self._own_thread: ThreadPoolExecutor | None = None
        """Runs backwards of this device; made for the first one."""
        self._eps = eps
        self._compute = compute
        self._upload = upload
        self._there: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """Tensors of other devices -> the same on this one, None if they are there, and their version."""
        self.ahead: MasterUnit | None = None
        """The layer that this device runs next, as long as its upload has not begun."""

    # ---- running layers

    @contextmanager
    def running(self, *, draws: bool, on_own_stream: bool = True) -> Iterator[None]:
        """A layer runs in the block, on the compute stream, or on that of the program.

        With `draws`, its random numbers are those that the generator of the first device would draw: its state passes
        from layer to layer, in the order in which they are called.
        """
        with self._compute.entered() if on_own_stream else stream.made_current(self.device):
            if not draws or self.device == self.first:
                yield
                return
            own = compute_state.get_rng_state(self.device)
            given = compute_state.get_rng_state(self.first)
            compute_state.set_rng_state(given, self.device)
            try:
                yield
            finally:
                now = compute_state.get_rng_state(self.device)
                compute_state.set_rng_state(own, self.device)
                compute_state.set_rng_state(now, self.first)

    def backward(self, roots: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], *, keep: bool) -> None:
        """Run backward through a graph of this device, inside the backward of the program; `keep` retains it.

        A thread of autograd that waits for an inner backward runs other nodes of the outer one meanwhile, if they are
        of its device: on the first device, those of other layer calls, of a second stack or a second call of the
        model. So the inner backward of another device is called in a thread of its own, and that of the first device
        waits for it outside of autograd. On the first device itself, nodes of the inner backward come first.
        """
        if self.device == self.first:
            torch.autograd.backward(roots, gradients, retain_graph=keep)
            return
        current, autocast = stream.current(self.device), compute_state.AutocastState.current(self.device)

        def run() -> None:
            with stream.entered(self.device, current), autocast.entered():
                torch.autograd.backward(roots, gradients, retain_graph=keep)

        if self._own_thread is None:
            self._own_thread = ThreadPoolExecutor(thread_name_prefix=f"hf_l2l backward on {self.device}")
        self._own_thread.submit(run).result()

    def reserve(self, *, is_needed: bool) -> None:
        """A layer is about to run: allocate memory for what the next one on this device will be sent, if one follows
        in this sweep."""
        if self.transit.has_several and is_needed:
            self.transit.reserve(self.device)
        elif self.transit.has_several:
            self.transit.forget_reserved(self.device)

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Work in the block comes after all that the program's stream has been given, and before what it is given
        next."""
        if not self.transit.has_several:
            yield
            return
        before, after = stream.record(self.first), None
        try:
            with self._compute.entered():
                stream.wait(before, wait_reasons.GIVEN_COMPUTED, on=self.device)
                try:
                    yield
                finally:
                    after = stream.record(self.device)
        finally:
            stream.wait(after, wait_reasons.ROWS_ARRIVED, on=self.first)

    def start_forward(self) -> None:
        """A call of the model begins: forget what layers of earlier ones shared."""
        self.stash.start_forward()
        if self.transit.has_several:
            # The optimizer may update resident weights on the program's streams.
            before = stream.record(self.device)
            with self._compute.entered():
                stream.wait(before, wait_reasons.GIVEN_COMPUTED)

    def finish(self) -> None:
        """Make the host wait for the layers: with one device, they are on the program's stream, in its order."""
        if self.transit.has_several:
            stream.wait(self._compute.record(), wait_reasons.LAYERS_COMPUTED, host=True)

    def slots(self) -> WeightSlots:
        """The slots for weights."""
        if self.weight_slots is None:
            copies = self._eps.copies
            add = self.gradient_slots.add
            units = [
                u for u in self._eps.masters.layer_units if u.place.number % len(self.transit.devices) == self.number
            ]
            self.weight_slots = WeightSlots(self._eps.masters, self.device, copies, add, self._upload, keeping=units)
        return self.weight_slots

    # ---- tensors of the first device

    def given(self, tensor: torch.Tensor, cut: Cut) -> torch.Tensor:
        """A tensor that the program gives to a layer, where the layer finds it: in host memory, if its rows wait
        there, else on this device, to which it is copied micro-batch by micro-batch.

        What several layers share is copied once per call of the model. `cut` gives the rows of each micro-batch.
        """
        if isinstance(tensor, HostRows) and not tensor.is_waiting:
            tensor = tensor.on_device()
        memory = host_of(tensor)
        if not self.transit.has_several or memory.device == stream.HOST:
            return memory
        waits = memory is not tensor
        if waits and memory.device == self.device:
            return memory
        copy, version = self._there.get(memory, (None, -1))
        now = 0 if memory.is_inference() else memory._version
        if version != now or memory.is_inference():  # whose changes are not counted
            copy = self._brought(memory.detach(), cut, None if waits else stream.record(self.first))
            self._there[memory] = copy, now
        return memory if copy is None else copy

    def _brought(self, tensor: torch.Tensor, cut: Cut, computed: stream.Point | None) -> torch.Tensor | None:
        """`tensor` on this device; None if it is there. Another one has it, or computes it until `computed`; None if
        its rows arrive there."""
        if tensor.device == self.device:
            with self._compute.entered():
                stream.wait(computed, wait_reasons.GIVEN_COMPUTED)
                stream.keep_until_done(self.device, [tensor])
            return None
        # What is the same along a dimension stays so: an attention mask that is expanded.
        once = tensor
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if size > 1 and stride == 0:
                once = once.narrow(dim, 0, 1)
        room = self.transit.allocate(once.shape, tensor.dtype, self.device, like=once)
        pieces = zip(cut(once), cut(room), strict=True) if once is tensor else [(once, room)]
        arrivals = self.transit.arrivals
        with self.transit.lane(tensor.device, self.device).entered(), torch.no_grad():
            stream.wait(computed, wait_reasons.GIVEN_COMPUTED)
            for free in arrivals.free(room):
                stream.wait(free, wait_reasons.ROWS_MEMORY_FREE)
            with stream.span(self.device, stream.PEER, "input"):
                for piece, place in pieces:
                    for point in () if computed else arrivals.of(piece):
                        stream.wait(point, wait_reasons.ROWS_ARRIVED, on=tensor.device)
                    place.copy_(piece, non_blocking=True)
                    arrivals.add(place, stream.record(self.device))
            stream.keep_until_done(tensor.device, [tensor, room])
        return room.expand(tensor.shape)

    def gradient_place(self, tensor: torch.Tensor) -> torch.device | None:
        """Where the gradient of an argument of a layer goes: where it came from. None: it stays on the device."""
        waiting = tensor.rows if isinstance(tensor, HostRows) and tensor.is_waiting else None
        if waiting is not None and waiting.host.device == stream.HOST:
            return stream.HOST
        if not self.transit.has_several:
            return None
        return self.first if waiting is None or waiting.made_on is None else waiting.made_on

    def head_place(self) -> Place:
        """Where this device computes its chunks of logits."""
        return FIRST if self.device == self.first else OtherPlace(self.first, self._compute)

    def forget_given(self) -> None:
        """The call of the model is over."""
        self._there = WeakIdKeyDictionary()


def layer_devices(
    config: L2LConfig, devices: Sequence[torch.device], eps: EagerParamServer, tiers: Tiers, upload: stream.Lane
) -> tuple[list[LayerDevice], Stash]:
    """What each of `devices` has; on the first one, weights are uploaded on the lane `upload`. And the stash that
    moves rows for the code of the model, on the stream of the program: with one device, that of the layers."""
    compute = {device: stream.Lane(device, stream.COMPUTE, beside=len(devices) > 1) for device in devices}
    transit = Transit(devices, compute)
    if transit.has_several:
        way = "directly"
        for source, target in sorted(transit.indirect, key=str)[:1]:
            way = f"through memory of the host, since {target} cannot read that of {source}, or reads it wrongly"
        tell("layers run on %s in turn; rows pass between them %s", ", ".join(map(str, devices)), way)
    outside = Stash(tiers, devices[0], transit)
    stashes = [Stash(tiers, device, transit) for device in devices] if len(devices) > 1 else [outside]
    uploads = [upload, *(stream.Lane(device, upload.row, beside=config.prefetch) for device in devices[1:])]
    found = zip(devices, stashes, uploads, strict=True)
    return [
        LayerDevice(device, config, eps, st, transit, compute[device], lane) for device, st, lane in found
    ], outside


def tell_idle(devices: Sequence[LayerDevice], calls: int, layers: int) -> None:
    """Say once of each device that a forward with so many layer calls, of a model with so many layers, has none for
    it."""
    is_whole = calls >= layers  # a part of a model may be called alone
    idle = [each for each in devices[calls:] if is_whole and not each.is_told_idle]
    if not idle:
        return
    for each in idle:
        each.is_told_idle = True
    names = ", ".join(str(each.device) for each in idle)
    logger.warning("%d layers run on %d devices in turn: none on %s", calls, len(devices), names)


def head_places(devices: Sequence[LayerDevice], config: L2LConfig) -> tuple[Place, ...]:
    """The devices that compute chunks of logits, in turn: all of them, or the first one."""
    first = devices[0]
    if len(devices) == 1 or config.head_device == "first":
        return (FIRST,)
    if first.transit.indirect:
        tell("logits are computed on %s alone, since devices cannot read each other's memory", first.device)
        return (FIRST,)
    return tuple(each.head_place() for each in devices)
