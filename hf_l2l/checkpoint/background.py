"""Saving a checkpoint while training goes on: what is written is the moment at which the saving began.

transformers writes the checkpoint as always, at once, but for the values of weights and optimizer state: its files get
room for them. A thread writes the values, layer after layer in the order of the next forward, which is that of the
next updates. An update waits for its layer to be written, unless there is room to copy the layer: two layers, at most.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from transformers import modeling_utils

from hf_l2l.checkpoint.reserved import Region, can_reserve, reserve_safetensors, reserve_torch
from hf_l2l.checkpoint.snapshot import Snapshot
from hf_l2l.compat import without_interception
from hf_l2l.eps.masters import Master
from hf_l2l.eps.pending import hold_all
from hf_l2l.eps.server import EagerParamServer
from hf_l2l.memory.ledger import BEING_SAVED
from hf_l2l.memory.memory_estimate import SAVED_LAYERS
from hf_l2l.optim.rounded_state import Blocks


class WithoutState:
    """Stands for an optimizer whose state is saved by other means."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}


class ReservedFiles:
    """The files of a checkpoint whose values are written later."""

    def __init__(self) -> None:
        self.regions: list[Region] = []
        """What is to be written."""

    def save_torch(self, state: Any, file: Path, blocks: Mapping[int, Blocks] | None = None) -> None:
        """Save `state` as `torch.save` does, but for the values of tensors; see `reserve_torch`."""
        self.regions += reserve_torch(state, file, blocks)

    def write(self) -> None:
        """Write the values now.

        Raises:
            OSError: if a file cannot be written.
        """
        Snapshot([self.regions], room=0).write()

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Inside, files of weights that transformers writes on this thread get no values yet."""
        # `save_pretrained` takes no function that writes: it uses its module's name for the one of safetensors, and
        # the Trainer, for models that are not of transformers, that of safetensors' module.
        thread, own, is_open = threading.get_ident(), safetensors.torch.save_file, True

        def save_file(tensors: dict[str, torch.Tensor], filename: Any, metadata: Any = None) -> None:
            # Another trainer's thread may have taken this function for the one of safetensors, and keep it.
            if is_open and threading.get_ident() == thread and can_reserve(tensors.values()):
                self.regions += reserve_safetensors(tensors, Path(filename), metadata or {})
            else:
                own(tensors, filename, metadata)

        names: Any = ((modeling_utils, "safe_save_file"), (safetensors.torch, "save_file"))
        before = [getattr(module, name) for module, name in names]
        for module, name in names:
            setattr(module, name, save_file)
        try:
            yield
        finally:
            is_open = False
            for (module, name), function in zip(names, before, strict=True):
                setattr(module, name, function)


class BackgroundSave:
    """One checkpoint that is being written."""

    is_generation = False
    """Whether it is one of `l2l_realtime_checkpoint`."""

    def __init__(
        self,
        eps: EagerParamServer,
        regions: Iterable[Region],
        finish: Callable[[], None],
        held: ExitStack,
        num_bytes: int,
        *,
        locks: bool = False,
    ) -> None:
        """Of the present values; all updates must have finished. What is not a master of the EPS that is in host
        memory, or optimizer state of one, is written here.

        Args:
            eps: that of the model.
            regions: what is to be written.
            finish: called on the thread when all is written.
            held: closed there, whatever happens.
            num_bytes: of the checkpoint.
            locks: whether other hosts write to the same files.
        """
        self.num_bytes = num_bytes
        groups = [masters for _, masters in eps.masters.parts(m for m in eps.masters.on_host() if m.can_be_held)]
        self._numbers = {master: number for number, masters in enumerate(groups) for master in masters}
        owners = self._storages(eps)
        regions_of: list[list[Region]] = [[] for _ in groups]
        others: list[Region] = []
        for region in regions:
            owner = owners.get(region.values.untyped_storage().data_ptr())
            (others if owner is None else regions_of[self._numbers[owner]]).append(region)
        sizes = [
            sum(region.values.numel() for region in found)
            for masters, found in zip(groups, regions_of, strict=True)
            if masters[0].layer_number > 0
        ]
        Snapshot([others], room=0, locks=locks).write()
        room = SAVED_LAYERS * max(sizes, default=0)
        self.snapshot = Snapshot(regions_of, room, self._has_secured, locks=locks)
        self._eps = eps
        self._held = held.pop_all()  # from here on, the caller does not close it
        self._future: Future[None] = Future()
        self._may_write = threading.Event()
        with ExitStack() as stack:
            stack.callback(self._may_write.set)  # whatever happens, the thread must not wait for ever
            # At Ctrl-C, or without a thread, nobody must wait for what is not written.
            undo = stack.enter_context(ExitStack())
            for call in (self._held.close, self._end, self._future.cancel):
                undo.callback(call)
            # Not of a pool, whose threads wait for ever if Ctrl-C comes while they start.
            threading.Thread(target=self._run, args=(finish,), name="hf_l2l save").start()
            self._begin()
            undo.pop_all()

    def _storages(self, eps: EagerParamServer) -> dict[int, Master | None]:
        """Address of memory -> the master whose values or state it has; None for memory that several share."""
        found: dict[int, Master | None] = {}
        with without_interception():
            for optimizer in eps.updates.optimizers:
                for p, state in optimizer.state.items():
                    master = eps.masters.of(p)
                    for value in state.values():
                        if isinstance(value, torch.Tensor) and master in self._numbers:
                            address = value.untyped_storage().data_ptr()
                            found[address] = master if found.get(address, master) is master else None
            for master in self._numbers:
                address = master.parameter.untyped_storage().data_ptr()
                found[address] = master if found.get(address, master) is master else None
        return found

    def _begin(self) -> None:
        self._eps.saving = self
        for master in self._numbers:
            master.saving = self
        hold_all((master.parameter, master) for master in self._numbers)

    def _end(self) -> None:
        """Refer to no parameter any more; all values may change."""
        masters, self._numbers = self._numbers, {}
        for master in masters:
            master.saving = None
        self._eps.saving = None
        self._eps.ledger.saw(BEING_SAVED, self.snapshot.most_copied_bytes)

    def _run(self, finish: Callable[[], None]) -> None:
        self._may_write.wait()
        if not self._future.set_running_or_notify_cancel():
            return
        with ExitStack() as stack:
            stack.push(self._has_ended)
            stack.enter_context(self._held)
            self.snapshot.write()
            finish()

    def _has_ended(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        """Keep the outcome of the thread for `result`."""
        if error is None:
            self._future.set_result(None)
        else:
            self._future.set_exception(error)
        return True

    def begin(self) -> None:
        """See `Saving.begin`: it has begun."""

    def _has_secured(self, group: int | None) -> None:
        """A group of values (None: all) may change from now on."""

    def secure(self, masters: Iterable[Master], *, rows: bool = False) -> None:
        """See `Saving.secure`."""
        # Without a number: what `wait_for_values` of another thread has let go since.
        for number in {self._numbers.get(master) for master in masters}:
            if number is not None:
                self.snapshot.secure(number)

    def wait_for_values(self) -> None:
        """Wait until all values may change."""
        self.snapshot.wait()
        self._end()

    @property
    def copied_bytes(self) -> int:
        """Bytes of host memory that copies of values take now."""
        return self.snapshot.copied_bytes

    def poll(self) -> bool:
        """`is_done`. With several ranks, a call is where they tell each other how far they are."""
        return self.is_done

    @property
    def is_done(self) -> bool:
        """Whether the checkpoint is in its place, or has failed."""
        return self._future.done()

    def result(self) -> None:
        """Wait until the checkpoint is in its place.

        Raises:
            CheckpointSaveError: if it could not be written.
        """
        try:
            self._future.result()
        finally:
            if self._future.done():  # else Ctrl-C has ended the wait: changes still wait for their values
                self._end()
