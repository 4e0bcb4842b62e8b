"""The logger of the package, `logging.getLogger("hf_l2l")`.

Warnings, and the line that a training begins with, are shown by default; details where a program has asked
transformers for its INFO messages (`transformers.logging.set_verbosity_info()`, `log_level="info"`), or this logger
for DEBUG. A program with handlers of its own for the root logger formats them itself; otherwise lines go to stderr,
signed `[hf_l2l]`, and transformers' verbosity holds for them.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

logger = logging.getLogger("hf_l2l")


def _verbosity() -> int:
    """That of transformers, which need not have been imported."""
    of_transformers: Any = sys.modules.get("transformers.utils.logging")
    return logging.WARNING if of_transformers is None else int(of_transformers.get_verbosity())


def tell(message: str, *args: Any) -> None:
    """Log a detail."""
    logger.log(logging.INFO if _verbosity() <= logging.INFO else logging.DEBUG, message, *args)


def details_are_shown() -> bool:
    """Whether `tell` reaches somebody."""
    return _verbosity() <= logging.INFO or logger.isEnabledFor(logging.DEBUG)


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """Shows what no handler of the program does, unless transformers is to be more silent than it is by default."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr  # which a notebook, and others, replace
        super().emit(record)

    def filter(self, record: logging.LogRecord) -> Any:
        least = _verbosity()
        is_wanted = least <= logging.WARNING or record.levelno >= least
        return is_wanted and not logging.getLogger().handlers and super().filter(record)


def _set_up() -> None:
    if any(isinstance(each, _Handler) for each in logger.handlers):
        return
    handler = _Handler()
    handler.setFormatter(logging.Formatter("[hf_l2l] %(message)s"))
    logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


_set_up()
