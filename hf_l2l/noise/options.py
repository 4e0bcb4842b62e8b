"""The options of the noise scale."""

from __future__ import annotations

from dataclasses import field
from typing import Any

ENOUGH_TOKENS = 3072
"""In a micro-batch, from which on each step is measured: the norms of its gradients then take little of a step."""


def noise_scale_field() -> Any:
    """The field of training arguments that turns it on."""
    return field(
        default=False,
        metadata={
            "help": "Measure the noise scale of the gradient (arXiv:1812.06162; arXiv:2106.02679, section 8.1), from "
            "the gradients of the micro-batches of a step: `l2l_noise_scale`, in what the loss counts (tokens or "
            "rows), and `l2l_critical_batch`, the same in rows, above which more rows save few steps. They are "
            "logged with each training loss, as moving averages over about 100 measured steps, once these tell "
            "them. The gradients are those of the layers. A step needs at least two micro-batches. The loss must be a "
            "sum or a mean over rows or tokens, which is checked at the first step. `L2LBatchGrowth` makes batches "
            "grow with it."
        },
    )


def noise_scale_every_field() -> Any:
    """The field that says how often."""
    return field(
        default="auto",
        metadata={
            "help": 'The noise scale is measured at every so many steps: a number, or "auto", each step if '
            f"micro-batches have {ENOUGH_TOKENS:,} tokens and more, and fewer if they have less, in proportion: so "
            "it takes some hundredths of the time of a training. The first batch decides it."
        },
    )


def every_of(value: object) -> int | None:
    """Steps from one measurement to the next; None for "auto". 0 for what is neither."""
    if value == "auto":
        return None
    if isinstance(value, str) and value.isascii() and value.isdecimal():
        value = int(value)
    return value if type(value) is int and value >= 1 else 0


def check_noise_scale(args: Any) -> None:
    """Raise ValueError for options of training arguments `args` that cannot be honoured."""
    asked, every = getattr(args, "l2l_noise_scale", False), getattr(args, "l2l_noise_scale_every", "auto")
    if not isinstance(asked, bool):
        raise ValueError(
            f"l2l_noise_scale must be True or False (got {asked!r}); True logs the noise scale of the gradient"
        )
    if every_of(every) == 0:
        raise ValueError(
            f"l2l_noise_scale_every must be 'auto' or a number of steps from 1 on (got {every!r}); 1 measures at each "
            "step"
        )
    if every != "auto" and not asked:
        raise ValueError(
            f"l2l_noise_scale_every is for l2l_noise_scale=True (got {every!r} without it); set both, or neither"
        )
