"""Results of checks, and the comparisons that give them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from hf_l2l.verify.family import NotInThisTransformers

PACKAGE = Path(__file__).parent.parent


@dataclass(frozen=True)
class Result:
    """What a check has found."""

    status: str
    """"ok"; "note": right, with something to say; "refused": the engine raised a ValueError; "red": wrong."""
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

    def __init__(self, *, plain: bool = False) -> None:
        self.result: Result | None = None
        self.plain = plain
        """Whether the block runs plain transformers, whose errors say nothing about L2L."""

    def __enter__(self) -> Caught:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        text = one_line(str(error))
        if self.plain:
            named = isinstance(error, NotInThisTransformers)
            self.result = note(text if named else f"without L2L: {type(error).__name__}: {text}")
        elif isinstance(error, ValueError) and _raised_by_engine(trace):
            self.result = Result("refused", f"refused: {text}")
        else:
            self.result = red(f"{type(error).__name__}: {text}")
        return True


def _raised_by_engine(trace: TracebackType | None) -> bool:
    """Whether the innermost frame belongs to the package, but not to this folder."""
    file = Path()
    while trace is not None:
        file = Path(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    return file.is_relative_to(PACKAGE) and not file.is_relative_to(PACKAGE / "verify")


def one_line(text: str, most: int = 300) -> str:
    """The text in one line of at most that many characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 3] + "..."


Gradients = dict[str, torch.Tensor | None]


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference of two tensors; nan or inf if one of them is not finite and the other differs there."""
    if found.shape != expected.shape:
        return float("inf")
    if torch.equal(found, expected) or not found.numel():
        return 0.0
    return float((found.double() - expected.double()).abs().max())


def compare_gradients(found: Gradients, expected: Gradients, tolerance: float) -> Result:
    """Whether all gradients are there and equal, within `tolerance` times the largest entry of all."""
    wrong = [name for name, gradient in expected.items() if (gradient is None) != (found[name] is None)]
    if wrong:
        side = "no gradient" if found[wrong[0]] is None else "a gradient that the plain model has not"
        return red(f"{len(wrong)} parameters have {side}, the first is {wrong[0]}")
    pairs = {n: (f, e) for n, e in expected.items() if e is not None and (f := found[n]) is not None}
    largest = max((float(e.abs().max()) for _, e in pairs.values() if e.numel()), default=0.0)
    if not 0.0 < largest < float("inf"):
        return red(f"the largest gradient of the plain model is {largest}")
    errors = {name: difference(f, e) / largest for name, (f, e) in pairs.items()}
    worst = max(errors, key=lambda name: float("inf") if errors[name] != errors[name] else errors[name])
    if not errors[worst] <= tolerance:
        return red(f"the gradient of {worst} is wrong by {errors[worst]:.1e} of the largest gradient")
    return OK


def compare_loss(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> Result:
    """Whether two losses are equal within `tolerance` of the expected one."""
    error = abs(float(found) - float(expected)) / abs(float(expected))
    return OK if error <= tolerance else red(f"the loss is {float(found):.6g} and should be {float(expected):.6g}")


def worst(*results: Result) -> Result:
    """The first of these results that is not ok: red before refused before notes."""
    order = ("red", "refused", "note", "ok")
    return min(results, key=lambda result: order.index(result.status))


def compare_states(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], which: str) -> Result:
    """Whether two state dicts have the same names and the same bits; `which` says which one is compared."""
    if found.keys() != expected.keys():
        return red(f"the {which} state has other names: {sorted(found.keys() ^ expected.keys())[:3]}")
    wrong = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    return red(f"the {which} state differs in {wrong[0]}") if wrong else OK
