"""What `run_glue_l2l.py` says: its log, its one line for bad input or too little memory, its exit codes."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import TrainerCallback

from hf_l2l.glue.said.typed import as_flags
from hf_l2l.log import logger as of_package
from hf_l2l.plan.planner import BudgetError

_PACKAGE = Path(__file__).parents[1]
PROGRAM = "run_glue_l2l"
logger = logging.getLogger(PROGRAM)

REFUSED, NO_MEMORY = 2, 3
"""Exit codes: the input was refused; the device or the host had too little memory."""

NO_MEMORY_FILE = "RUN_GLUE_L2L_OUT_OF_MEMORY"
"""The environment variable that names a file to write when memory was too little: a process may die after that."""


def is_compared() -> bool:
    """Whether this process is one of the two that --compare starts."""
    return NO_MEMORY_FILE in os.environ


def set_up_logging() -> None:
    """Show what the script says at INFO level, and all that the trainer says of what it runs layer to layer; other
    loggers stay as they are."""
    logger.setLevel(logging.INFO)
    of_package.setLevel(logging.DEBUG)
    if not logger.hasHandlers():  # a program that calls main() may have its own
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S"))
        logger.addHandler(handler)


def stop(said: str, code: int) -> NoReturn:
    """End the program with one line on stderr."""
    if code == NO_MEMORY and NO_MEMORY_FILE in os.environ:
        Path(os.environ[NO_MEMORY_FILE]).write_text(said + "\n", encoding="utf-8")
    print(f"{PROGRAM}.py: {' '.join(said.split())}", file=sys.stderr)
    raise SystemExit(code)


@contextmanager
def stops_on_bad_input(options: Collection[str]) -> Iterator[None]:
    """End the program with one line for wrong options or data, a missing package, or too little memory.

    It calls these `options` as they were typed.
    """
    try:
        yield
    except (ValueError, ImportError) as error:
        stop(as_flags(str(error), options), REFUSED)
    except (torch.OutOfMemoryError, MemoryError) as error:
        stop(f"out of memory: {first_line(error)}", NO_MEMORY)
    except RuntimeError as error:
        if "to be installed" not in str(error):
            raise
        stop(first_line(error), REFUSED)  # --report_to names a package


class FirstStep(TrainerCallback):  # type: ignore[misc]  # transformers ships no types
    """Whether training or an evaluation has begun: what the model has to do with the options has been checked then."""

    has_begun = False

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Training begins."""
        self.has_begun = True

    on_prediction_step = on_train_begin


@contextmanager
def stops_without_memory(trainer: str, options: Collection[str], first_step: FirstStep) -> Iterator[None]:
    """End the program with one line for too little memory, with what to try under `--trainer`, or a missing package.

    Before the first step, so do options that this package refuses once it sees the model; it calls `options` as they
    were typed. Errors of other kinds are those of the training loop, and pass.
    """
    try:
        yield
    except ImportError as error:
        stop(str(error), REFUSED)  # --optim names a package
    except BudgetError as error:
        stop(f"out of memory: {as_flags(str(error), options)}", NO_MEMORY)
    except (torch.OutOfMemoryError, MemoryError) as error:
        remedy = "--trainer l2l" if trainer == "hf" else "a smaller --ubatch_size, or --stash host"
        stop(f"out of memory: {first_line(error)}; try {remedy}", NO_MEMORY)
    except ValueError as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        is_ours = Path(frame.f_code.co_filename).is_relative_to(_PACKAGE)
        if first_step.has_begun or not is_ours:
            raise
        stop(as_flags(str(error), options), REFUSED)


@contextmanager
def leaves_no_empty_folder(folder: str) -> Iterator[None]:
    """When the program stops inside, `folder` and those above it are removed if they were made inside, and empty."""
    path = Path(folder).absolute()
    missing = [each for each in (path, *path.parents) if not each.exists()]
    try:
        yield
    except SystemExit:
        with suppress(OSError):  # not made, or something is in it
            for each in missing:
                each.rmdir()
        raise


def listed(values: list[Any]) -> str:
    """The first values, for a message."""
    shown = ", ".join(repr(value) for value in values[:6])
    return shown if len(values) <= 6 else f"{shown}, ... ({len(values)} in all)"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, for a message in one line."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
