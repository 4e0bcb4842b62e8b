"""`Folding`: keeps the batches of an optimizer step until the last one is there, and runs all of them as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from hf_l2l.accumulation.merging import Batch, CannotMerge, merge
from hf_l2l.accumulation.step import NO_ROOM, Step
from hf_l2l.accumulation.trial import disagreement
from hf_l2l.model.batch_dims import NotCut
from hf_l2l.runtime import compute_state


class Folding:
    """Folds gradient accumulation into the inner loop: one forward and one backward over the rows of all batches of a
    step, cut between the batches, so that the weights travel twice a step.

    The loss of each batch must be a sum over its items, divided by those of the whole step: then the loss of all rows
    is the sum of these losses. The first step, and the first whose batches have different lengths, are compared with
    batch by batch.
    """

    def __init__(self) -> None:
        self._reason: str | None = "no training runs"
        """Why batches run one by one; None if they are folded."""
        self._say: Callable[[str], None] = lambda reason: None
        self._compared: set[bool] = set()
        """The kinds of steps that agree with batch by batch: those that were padded, and those that were not."""
        self._kept: list[Batch] = []
        """The batches of the step so far."""
        self._items: Any = None
        """What the Trainer divides their losses by."""
        self._adds = False
        """Whether there are gradients already, of a step that was given up."""

    def start(self, reason: str | None, say: Callable[[str], None]) -> None:
        """A training begins.

        Args:
            reason: why batches run one by one; None if nothing speaks against folding them so far.
            say: tells the user such a reason.
        """
        self.stop()
        self._reason, self._say = reason, say
        if reason is not None:
            say(reason)

    def stop(self) -> None:
        """The training is over, or has failed: forget what it has left."""
        self._reason, self._say = "no training runs", lambda reason: None
        self._compared.clear()
        self._kept, self._items, self._adds = [], None, False

    def step(self, batch: Any, items: Any, count: int, step: Step) -> torch.Tensor:
        """Train with one of the `count` batches of a step, now or with the last of them.

        Args:
            batch: the inputs of the model.
            items: what the Trainer divides the losses of the step by; None if it does not.
            count: how many batches the step has.
            step: the parts of a step.

        Returns:
            the loss, detached, on the device: that of the whole step with its last batch, and 0 with the others; or
            of this batch, if it runs by itself.
        """
        if self._reason is None and items is None and count > 1:
            self._refuse("its losses are means over each batch: without labels there is no num_items_in_batch")
        if self._reason is not None or count == 1:
            self._adds = not step.is_last
            return step.train(batch, items)
        self._kept.append(batch)
        self._items = items
        return torch.zeros((), device=step.device) if len(self._kept) < count else self._all(step)

    def finish(self, step: Step) -> torch.Tensor | None:
        """Train with the batches of a step that has been given up, whose gradients stay; the loss, None without any.

        transformers does the same with a step that a callback ends, or the end of the data.
        """
        return self._all(step) if self._kept else None

    def _all(self, step: Step) -> torch.Tensor:
        batches, items, adds = self._kept, self._items, self._adds
        self._kept, self._items = [], None
        # Without a step, what comes next adds to the gradients.
        self._adds = not step.is_last
        before = compute_state.get_rng_state(step.device)
        try:
            loss = self._at_once(step, batches, items, adds=adds) if len(batches) > 1 else None
            if loss is not None:
                return loss
        except (CannotMerge, NotCut) as reason:
            # A call that cannot be cut is found in the forward, before there are any gradients.
            self._refuse(str(reason))
        except (torch.OutOfMemoryError, MemoryError, OSError) as error:  # of the device, the host, or a stash on disk
            if adds or step.eps.updates.mode == "eager":  # gradients that cannot be made again may be lost, or used
                error.add_note("l2l_merge_accumulation='off' runs accumulated batches one by one")
                raise
            step.model.zero_grad()
            self._refuse(NO_ROOM)
        compute_state.set_rng_state(before, step.device)
        return _one_by_one(step, batches, items)

    def _at_once(self, step: Step, batches: Sequence[Batch], items: Any, *, adds: bool) -> torch.Tensor | None:
        """Train with all batches as one. The loss; None if they must run one by one."""
        merged = merge(batches, step.pad_token)
        if merged.is_padded not in self._compared:
            if adds:
                return None  # the comparison would drop what is there; the next step will tell
            differs = disagreement(step, batches, merged, items)
            if differs:
                self._refuse(differs)
            if differs != "":
                return None
            self._compared.add(merged.is_padded)
        with step.cuts.between(merged.rows):
            return step.train(merged.inputs, items)

    def _refuse(self, reason: str) -> None:
        self._reason = reason
        self._say(reason)


def _one_by_one(step: Step, batches: Sequence[Batch], items: Any) -> torch.Tensor:
    """Train with one batch after the other; the sum of the losses."""
    total = None
    for number, batch in enumerate(batches, start=1):
        with step.eps.accumulate() if number < len(batches) else nullcontext():
            loss = step.train(batch, items)
        total = loss if total is None else total + loss
    assert total is not None
    return total
