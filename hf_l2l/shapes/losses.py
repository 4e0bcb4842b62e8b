"""The loss that a model returns, and the errors of models that return none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_FAILS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError)
"""What models raise for inputs that they are not made for, and torch for values that it would need."""


class Untraceable(ValueError):
    """A model that cannot be run without values, or returns no loss."""


@contextmanager
def told_failures(model: nn.Module) -> Iterator[None]:
    """Inside, a failure of `model` becomes an `Untraceable` of one sentence."""
    try:
        yield
    except _FAILS as error:
        text = " ".join(str(error).split())[:200]
        raise Untraceable(
            "an estimate runs the model on tensors without values, which failed for a "
            f"{type(model).__name__} ({type(error).__name__}: {text}); check the sizes and the class, or give inputs "
            "of your own to hf_l2l.estimate"
        ) from error


def loss_of(outputs: Any) -> torch.Tensor:
    """The loss that a model returns.

    Raises:
        Untraceable: if it returns none.
    """
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
    if not isinstance(loss, torch.Tensor):
        raise Untraceable(
            f"an estimate is made of a model that returns its loss (got a {type(outputs).__name__} without one); name "
            "a class with a head, or give inputs with all labels"
        )
    return loss
