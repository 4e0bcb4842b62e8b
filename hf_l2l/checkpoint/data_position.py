"""Where a training is in its data, so that a resumed one makes the batches that the unbroken one would have made.

transformers restores the generators of random numbers after it has fetched the first batches of the resumed epoch. So
an order that is drawn of them, and random changes of rows, are others than in the unbroken training. To have the same:

- The iterator of an epoch draws when it begins: samplers their order, and torch the seed of the loader's workers. So a
  checkpoint has the state of the generators from before the epoch (`DataPosition.began`).
- Accelerate's data loaders fetch one batch ahead. When a checkpoint is saved, the batch that comes next has been made,
  with the state from before the last one was asked for (`DataPosition.ahead`). The one after it is made with the state
  of the checkpoint (`rng_state.pth`).
- Without workers, the rows of a data set that has a length are made in this process, with these generators: batches
  before are left out of the order, and not made again.
- Workers have generators of their own, which go on from batch to batch, and a streamed data set goes on from row to
  row: all batches before are made again, and dropped.

What is not restored is told in a warning: generators that a data set or collator has of its own, those of workers that
live longer than an epoch, and draws that depend on those of the training. A checkpoint without this file, and
`ignore_data_skip`, are resumed as transformers does.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from hf_l2l.log import logger
from hf_l2l.runtime.compute_state import ProgramRng


def position_file(rank: int | None) -> str:
    """The name of the file of a rank in a checkpoint; None is that of one process."""
    return "rng_state_data.pth" if rank is None else f"rng_state_data_{rank}.pth"


@dataclass(frozen=True)
class DataPosition:
    """What of an epoch has been used."""

    epoch: int
    batches: int
    """That the epoch has given."""
    is_complete: bool
    """Whether the epoch makes no further step."""
    is_over: bool
    """Whether what is done at its end, such as an evaluation, has been done, too."""
    began: ProgramRng
    """Before its iterator was made."""
    ahead: ProgramRng
    """Before the last of the batches was asked for."""
    options: Mapping[str, Any]
    """Of the training, by name: those that decide which batches there are, and what is drawn for them."""
    own: tuple[str, ...]
    """Generators of their own that data set and collator have in this process."""
    loss: float
    """Of the steps that have not been logged yet."""
    logged_at: int
    """The step that was logged last."""
    grad_norm: float | None
    """Of the last step, which may be logged at the end of the epoch."""
    learning_rate: float | None
    """Of the last step."""

    def save(self, file: Path) -> None:
        """Write it into a file."""
        content = {**vars(self), "began": tuple(self.began.plain()), "ahead": tuple(self.ahead.plain())}
        torch.save(content, file)


def saved_position(file: Path, options: Mapping[str, Any], *, is_within: bool) -> DataPosition | None:
    """Where a training with these options goes on, as a file of a checkpoint tells; None if there is none, or it has
    other options.

    What that changes is told in a warning, where it is within an epoch.
    """
    if not file.is_file():
        if is_within:
            logger.warning(
                f"{file.parent} has no {file.name}: what is drawn for the rest of this epoch's batches begins anew"
            )
        return None
    found = torch.load(file, weights_only=True)
    states = {name: ProgramRng(*found[name]) for name in ("began", "ahead")}
    position = DataPosition(**{**found, **states})
    changed = [
        f"{name} (got {options.get(name)!r}, and the checkpoint has {value!r})"
        for name, value in position.options.items()
        if options.get(name) != value
    ]
    if changed and is_within:
        logger.warning(
            f"the rest of this epoch's batches are others than without the interruption: {', '.join(changed)}"
        )
    if changed:
        return None
    if position.own:
        logger.warning(
            f"generators of data set and collator are in no checkpoint, and begin anew ({', '.join(position.own)}): "
            "what they draw is something else than without the interruption"
        )
    return position


class BatchFeed:
    """The iterator over the batches of an epoch, which knows where it is."""

    def __init__(self, epoch: int, loader: Any, batches: int, step: int) -> None:
        """The epoch begins after its first `batches`, with those of `loader`; nothing has been drawn for it. `step`
        steps were made before."""
        self.epoch, self.loader = epoch, loader
        self._began = self._ahead = ProgramRng.now()
        self._batches, self._is_exhausted = batches, False
        self._step, self._is_after_steps = step, False
        self._of_step: tuple[int, Any, float | None] = batches, None, None
        """After the last step: the batches that were used, the gradient norm, and the learning rate."""
        self._iterator: Iterator[Any] | None = None
        self._resumed: Callable[[], Iterator[Any]] | None = None
        self._restored: ProgramRng | None = None
        """The generators of the checkpoint, which are restored while the first batch is made."""

    @property
    def is_resumed(self) -> bool:
        """Whether it begins in the middle of the epoch, and restores the generators itself."""
        return self._resumed is not None

    def over(self, batches: Iterator[Any]) -> BatchFeed:
        """Give those of `batches`, which no earlier call has named; or go on in the epoch, without them."""
        if self._iterator is None:
            # Only now: transformers makes an iterator of its own before, which may draw.
            self._iterator = batches if self._resumed is None else self._resumed()
        return self

    def __iter__(self) -> BatchFeed:
        return self

    def __next__(self) -> Any:
        assert self._iterator is not None
        before = ProgramRng.now()
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._is_exhausted = True
            raise
        self._ahead, self._batches = self._restored or before, self._batches + 1
        self._restored = None
        return batch

    def at_step(self, step: int, grad_norm: Any, learning_rate: float | None) -> None:
        """`step` steps have been made, the last one with this gradient norm and learning rate. transformers tells it
        after each step, and once more at the epoch's end."""
        self._is_after_steps = step == self._step
        self._step = step
        self._of_step = self._batches, grad_norm, learning_rate

    def position(
        self, *, step: int, stops: bool, options: Mapping[str, Any], loss: float, logged_at: int
    ) -> DataPosition | None:
        """Where it is after `step` steps; None between the batches of a step. `stops`: whether the epoch is ended
        here, whatever is left; the others are fields."""
        used, grad_norm, learning_rate = self._of_step
        if step == self._step + 1:  # it has been made, and is told of soon
            used, grad_norm, learning_rate = self._batches, None, None
        if used != self._batches:
            return None
        is_complete = stops or self._is_exhausted or self._batches == length_of(self.loader)
        return DataPosition(
            self.epoch,
            self._batches,
            is_complete,
            is_complete and self._is_after_steps and step == self._step,
            self._began,
            self._ahead,
            options,
            () if _workers(self.loader) else tuple(_own_generators(self.loader)),
            loss,
            logged_at,
            None if grad_norm is None else float(grad_norm),
            learning_rate,
        )

    def resume(self, position: DataPosition, skip: Callable[[Any, int], Any], go_on: Callable[[], None]) -> None:
        """Go on after `position`.

        Args:
            position: of the same epoch.
            skip: makes, of a data loader and a number, a data loader without so many batches at the beginning, whose
                batch sampler has that of the first as `batch_sampler`.
            go_on: restores the generators that the checkpoint has.
        """
        self._began, self._ahead, self._batches = position.began, position.ahead, position.batches
        # The first two batches are made one after the other, with no known state between them.
        if position.batches > 1 and _leaves_out(self.loader):
            self._resumed = partial(self._skipping, position, skip, go_on)
        else:
            self._resumed = partial(self._dropping, position, go_on)

    def _skipping(
        self, position: DataPosition, skip: Callable[[Any, int], Any], go_on: Callable[[], None]
    ) -> Iterator[Any]:
        _set_epoch(self.loader, self.epoch)
        position.began.restore()
        watch, skipping = _Watch(position), skip(self.loader, position.batches)
        # What Accelerate has fetched ahead was made before the checkpoint was saved.
        after = position.batches + (1 if _looks_ahead(self.loader) else 0)

        def restore() -> None:
            go_on()
            self._restored = ProgramRng.now()

        cues = ((1, watch.begin), (position.batches, watch.end), (after, restore))
        sampler = skipping.batch_sampler
        sampler.batch_sampler = _CuedBatches(sampler.batch_sampler, cues)
        batches: Iterator[Any] = iter(skipping)
        return batches

    def _dropping(self, position: DataPosition, go_on: Callable[[], None]) -> Iterator[Any]:
        if _workers(self.loader) and position.batches > 1:
            logger.warning(
                f"the workers of the data loader make the first {position.batches} batches of the epoch again, since "
                "they may draw random numbers"
            )
        _set_epoch(self.loader, self.epoch)
        position.began.restore()
        watch = _Watch(position)
        batches: Iterator[Any] = iter(self.loader)
        for number in range(position.batches):
            if number == 1:
                watch.begin()
            if number == position.batches - 1 > 0:
                watch.end()
            next(batches, None)
        go_on()
        return batches


class _Watch:
    """Tells whether what is drawn for the batches before is what was drawn for them."""

    def __init__(self, position: DataPosition) -> None:
        self._position = position
        self._first: ProgramRng | None = None

    def begin(self) -> None:
        """The first batch is there. What is drawn until then was drawn at once."""
        self._first = ProgramRng.now()

    def end(self) -> None:
        """The next batch is the one that the checkpoint had ahead."""
        now, ahead = ProgramRng.now(), self._position.ahead
        assert self._first is not None
        differing = now.moved_since(self._first) & now.moved_since(ahead)
        if differing:
            logger.warning(
                "the data set or its sampler draws random numbers as it goes on, and so does the training "
                f"({', '.join(sorted(differing))}): an order of rows that depends on them is another one from here on"
            )
        ahead.restore()


class _CuedBatches:
    """A batch sampler that calls functions before it draws the rows of the batches with their numbers."""

    def __init__(self, inner: Any, cues: Sequence[tuple[int, Callable[[], None]]]) -> None:
        self._inner, self._cues = inner, cues

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._inner)
        for number in itertools.count():
            for when, call in self._cues:
                if when == number:
                    call()
            try:
                rows = next(batches)
            except StopIteration:
                return
            yield rows

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        """Accelerate looks for the sampler in it, whose epoch it sets."""
        return getattr(self._inner, name)


def _workers(loader: Any) -> int:
    """How many processes make its batches; 0 if this one does."""
    return int(getattr(loader, "num_workers", 0))


def _leaves_out(loader: Any) -> bool:
    """Whether batches can be left out of its order, and those after them are the same."""
    return (
        isinstance(loader, DataLoader)
        and not _workers(loader)
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
    )


def length_of(loader: Any) -> int | None:
    """Batches of an epoch; None if nobody knows."""
    try:
        return len(loader)
    except (NotImplementedError, TypeError):
        return None


def _looks_ahead(loader: Any) -> bool:
    """Whether it is one of Accelerate's, which fetch a batch before they give the one before."""
    return hasattr(loader, "base_dataloader")


def _set_epoch(loader: Any, epoch: int) -> None:
    """As transformers does for a data loader that begins an epoch."""
    inner: Any = getattr(getattr(loader, "batch_sampler", None), "batch_sampler", None)
    for each in (loader, inner):
        if hasattr(each, "set_epoch"):
            each.set_epoch(epoch)


def _own_generators(loader: Any) -> Iterator[str]:
    """What data set and collator have of them, as attributes."""
    numpy: Any = sys.modules.get("numpy")
    kinds = (torch.Generator, random.Random)
    kinds += () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    holders = [getattr(loader, "dataset", None), getattr(loader, "collate_fn", None)]
    holders.append(getattr(holders[-1], "data_collator", None))  # transformers drops columns around it
    for holder in holders:
        for name, value in getattr(holder, "__dict__", {}).items():
            if isinstance(value, kinds):
                yield f"{type(holder).__name__}.{name}"
