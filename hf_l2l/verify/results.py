"""Results of checks, and the results that errors are."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import TracebackType

from hf_l2l.verify.family import NotInThisTransformers


@dataclass(frozen=True)
class Result:
    """What a check has found."""

    status: str
    """"ok"; "note": right, with something to say; "refused": the engine says in an error, which is the one that
    the family expects (`Family.refused`), that it does not run this model; "red": wrong."""
    text: str
    """One sentence, or "ok"."""


OK = Result("ok", "ok")


def note(text: str) -> Result:
    """A result that is right, with something to say."""
    return Result("note", text)


def red(text: str) -> Result:
    """A result that is wrong."""
    return Result("red", text)


class Caught:
    """Makes a result of every error in the block, but for interrupts."""

    def __init__(self, *, plain: bool = False, refused: str = "") -> None:
        self.result: Result | None = None
        self.error: Exception | None = None
        self.plain = plain
        """Whether the block runs plain transformers, whose errors say nothing about L2L."""
        self.refused = refused
        """What a ValueError says that is a refusal, as a pattern; empty if none is expected."""

    def __enter__(self) -> Caught:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.error = error.with_traceback(None)  # whose frames would keep the model
        text = one_line(str(error))
        if self.plain:
            named = isinstance(error, NotInThisTransformers)
            self.result = note(text if named else f"without L2L: {type(error).__name__}: {text}")
        elif self.refused and isinstance(error, ValueError) and re.search(self.refused, str(error)):
            self.result = Result("refused", f"refused: {text}")
        else:
            self.result = red(f"{type(error).__name__}: {text}")
        return True


def one_line(text: str, most: int = 300) -> str:
    """The text in one line of at most that many characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 3] + "..."


def worst(*results: Result) -> Result:
    """The first of these results that is not ok: red before refused before notes."""
    order = ("red", "refused", "note", "ok")
    return min(results, key=lambda result: order.index(result.status))
