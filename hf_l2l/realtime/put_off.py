"""Checkpoints in the background beside updates of their own step (`eps_update="deferred"`).

The small files, with the generators and where the training is in its data, are written at the end of the step. Weights
and optimizer state are those after its updates, which go on beside the next forward: their files are made when the
updates are done, and before anything else changes the values, which is the next `optimizer.step()` at the latest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_l2l.checkpoint.background import BackgroundSave, ReservedFiles
from hf_l2l.compat import without_interception
from hf_l2l.eps.masters import Master
from hf_l2l.eps.pending import hold_all
from hf_l2l.eps.server import EagerParamServer

if TYPE_CHECKING:
    from transformers import Trainer as _NextTrainer
else:
    _NextTrainer = object  # the part that saves comes after it


class PutOffSave:
    """A checkpoint whose values are not written yet. Until they are, it is in the place of the `BackgroundSave`."""

    is_generation = False
    """See `BackgroundSave`."""

    def __init__(self, eps: EagerParamServer, begin: Callable[[ExitStack], BackgroundSave], held: ExitStack) -> None:
        """`begin` makes the files, once the updates that are under way have been made; what is written is removed by
        `held`, unless it is in its place."""
        self._eps, self._begin_values, self._held = eps, begin, held.pop_all()
        self._updates_are_made = False
        self._begun: BackgroundSave | None = None
        self._error: BaseException | None = None
        self._masters = [master for master in eps.masters.on_host() if master.can_be_held]
        eps.saving = self
        for master in self._masters:
            master.saving = self
        hold_all((master.parameter, master) for master in self._masters)
        optimizers = eps.updates.optimizers
        self._handles = [each.register_load_state_dict_pre_hook(lambda *_: self.begin()) for each in optimizers]

    def begin(self) -> None:
        """Make the files, if that has not been done. Errors of that are kept for `result`.

        Raises:
            Exception: that of an update that failed; there is no checkpoint then.
        """
        masters, self._masters = self._masters, []
        if self._begun is not None or self._error is not None or self._eps.saving is not self:
            return
        for master in masters:
            master.saving = None
        self._eps.saving = None
        for handle in self._handles:
            handle.remove()
        with ExitStack() as stack:
            stack.push(self._keep)
            with self._held:
                self._eps.synchronize()  # the updates of the step, whose values the checkpoint has
                self._updates_are_made = True
                self._begun = self._begin_values(self._held)

    def _keep(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        self._error = error
        return self._updates_are_made and isinstance(error, Exception)

    def secure(self, masters: Iterable[Master], *, rows: bool = False) -> None:
        """See `Saving.secure`. The updates of the checkpoint's own step change what it will have."""
        if self._eps.updates.worker.is_current:
            return
        self.begin()
        if self._begun is not None:
            self._begun.secure(masters, rows=rows)

    def wait_for_values(self) -> None:
        """See `BackgroundSave.wait_for_values`."""
        self.begin()
        if self._begun is not None:
            self._begun.wait_for_values()

    @property
    def copied_bytes(self) -> int:
        """See `BackgroundSave.copied_bytes`."""
        return 0 if self._begun is None else self._begun.copied_bytes

    @property
    def num_bytes(self) -> int:
        """See `BackgroundSave.num_bytes`; 0 until its files are made."""
        return 0 if self._begun is None else self._begun.num_bytes

    def poll(self) -> bool:
        """See `BackgroundSave.poll`."""
        return self.is_done

    @property
    def is_done(self) -> bool:
        """See `BackgroundSave.is_done`."""
        return self._error is not None or (self._begun is not None and self._begun.is_done)

    def result(self) -> None:
        """See `BackgroundSave.result`."""
        self.begin()
        if self._error is not None:
            raise self._error
        assert self._begun is not None, "begun, or failed"
        self._begun.result()


class PutOffMixin(_NextTrainer):  # type: ignore[misc]  # transformers ships no types
    """The part of `L2LTrainerMixin` that makes the large files of such a checkpoint later."""

    _l2l_reserved: ReservedFiles | None
    _l2l_later: list[Callable[[], object]] | None = None
    """What is put off of the checkpoint that is begun now."""

    def _puts_off(self, eps: EagerParamServer | None) -> bool:
        """Whether updates go on when a step has ended, in this process alone."""
        return eps is not None and eps.team is None and eps.updates.mode == "deferred" and eps.masters.has_streamed

    def _write_files(self, model: Any, trial: Any, staging: Any, reserved: ReservedFiles | None = None) -> str | None:
        """Overridden to know what is put off."""
        self._l2l_later = [] if reserved is not None and self._puts_off(self.eps) else None
        best: str | None = super()._write_files(model, trial, staging, reserved)
        return best

    def _begun(
        self, eps: EagerParamServer, begin: Callable[[ExitStack], BackgroundSave], held: ExitStack
    ) -> BackgroundSave | PutOffSave:
        """Overridden to begin it later."""
        later, self._l2l_later = self._l2l_later, None
        if later is None:
            begun: BackgroundSave = super()._begun(eps, begin, held)
            return begun
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        return PutOffSave(eps, partial(_begin_all, later, begin, buffers), held)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Overridden because weights are saved later."""
        if self._l2l_later is None or self._l2l_reserved is None or output_dir is None or not _internal_call:
            super().save_model(output_dir, _internal_call)
            return
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        save = partial(super().save_model, output_dir, _internal_call)
        self._l2l_later.append(partial(self._save_weights, save, self._l2l_reserved))

    def _save_weights(self, save: Callable[[], None], reserved: ReservedFiles) -> None:
        self._l2l_reserved = reserved
        try:
            save()
        finally:
            self._l2l_reserved = None

    def _save_optimizer(self, reserved: ReservedFiles, output_dir: str) -> None:
        """Overridden because the state is saved later."""
        save = partial(super()._save_optimizer, reserved, output_dir)
        if self._l2l_later is None:
            save()
        else:
            self._l2l_later.append(save)


def _begin_all(
    later: list[Callable[[], object]],
    begin: Callable[[ExitStack], BackgroundSave],
    buffers: list[tuple[torch.Tensor, torch.Tensor]],
    held: ExitStack,
) -> BackgroundSave:
    """What was put off. `buffers` and their values at the end of the step are written here."""
    with _as_they_were(buffers):
        for save in later:
            save()
        return begin(held)


@contextmanager
def _as_they_were(buffers: list[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """Inside, these buffers have other values: those that they had at the end of the step, as the forward since then
    may have changed them."""
    changed = [(buffer, value, buffer.clone()) for buffer, value in buffers if not torch.equal(buffer, value)]
    with torch.no_grad(), without_interception():
        for buffer, value, _ in changed:
            buffer.copy_(value)
    try:
        yield
    finally:
        with torch.no_grad(), without_interception():
            for buffer, _, value in changed:
                buffer.copy_(value)
