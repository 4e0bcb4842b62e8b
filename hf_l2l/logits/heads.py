"""Output embeddings: which modules they are, and the runner that defers their logits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from hf_l2l.log import logger
from hf_l2l.logits import recorded  # noqa: F401  # it registers what can be done with deferred logits
from hf_l2l.logits.chunks import FEWEST_ROWS, Head, rows_per_chunk
from hf_l2l.logits.deferred import Deferred, DeferredLogits
from hf_l2l.logits.places import FIRST, Place
from hf_l2l.runtime.compute_state import AutocastState
from hf_l2l.runtime.tensors import is_quantized, size_text

_loss_alone: ContextVar[bool] = ContextVar("_loss_alone", default=False)


@contextmanager
def loss_alone() -> Iterator[None]:
    """Inside, a forward without gradients is made for its loss, and its logits are deferred, too."""
    before = _loss_alone.set(True)
    try:
        yield
    finally:
        _loss_alone.reset(before)


def output_embedding(module: nn.Module, among: Collection[nn.Module]) -> nn.Module | None:
    """The module that computes the logits of a model `module`, as it says itself, if it is `among` these; or None."""
    ask: Any = getattr(module, "get_output_embeddings", None)
    try:
        output = None if ask is None else ask()
    except (NotImplementedError, AttributeError):  # of a model whose parts have one
        return None
    # FSMT names the embedding that its head is tied to.
    is_one = isinstance(output, nn.Module) and not isinstance(output, nn.Embedding) and output in among
    return output if is_one else None


def output_embeddings(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Those that compute the logits of one of `modules`, and are among them."""
    found = [head for module in modules if (head := output_embedding(module, modules)) is not None]
    return list(dict.fromkeys(found))


def chunk_rows(asked: int | str, heads: Sequence[nn.Module], memory: int | None) -> int | None:
    """Rows of a chunk of logits, the same for all `heads`, as the option `chunked_loss` asks for, on a device with so
    much memory; None if there is no head, or logits of all rows are made at once."""
    if asked == "off" or not heads:
        return None
    if not isinstance(asked, str):
        return asked
    weights = [getattr(head, "weight", None) for head in heads]
    # What is quantized has other shapes, and its logits are not made in chunks.
    plain = [weight for weight in weights if isinstance(weight, torch.Tensor) and not is_quantized(weight)]
    shapes = [weight.shape for weight in plain if weight.dim() == 2]
    return min((rows_per_chunk(width, count, memory) for count, width in shapes), default=FEWEST_ROWS)


class _Runner(Protocol):
    def run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any: ...


class OutputEmbeddings:
    """Runs the calls of output embeddings: as the runner of other modules does, but logits are deferred in a forward
    that trains, or that is made for its loss alone."""

    def __init__(self, runner: _Runner, rows: int, places: tuple[Place, ...] = (FIRST,)) -> None:
        """Chunks of so many rows are computed at the `places` in turn."""
        self._runner = runner
        self._rows = rows
        self._places = places
        self._told: set[nn.Module] = set()

    def run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call `forward`, the original forward of `module`."""
        if torch.is_grad_enabled() or _loss_alone.get():
            forward = partial(self._deferring, module, forward)
        return self._runner.run(module, forward, args, kwargs)

    def _deferring(self, module: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(hidden, torch.Tensor) or hidden.dim() < 2 or isinstance(hidden, DeferredLogits):
            return forward(*args, **kwargs)
        if hidden.shape[:-1].numel() <= self._rows:
            return forward(hidden)  # one chunk, which is made in the same way as by plain torch
        if getattr(forward, "__func__", None) is not nn.Linear.forward or is_quantized(module.weight):
            return self._whole(module, forward(hidden))
        weight, bias = module.weight, module.bias
        head = Head(weight, bias, AutocastState.current(hidden.device), self._rows, places=self._places)
        sample = head.of_none(hidden)
        return DeferredLogits.of(Deferred(head, hidden, sample, lambda: functional.linear(hidden, weight, bias)))

    def _whole(self, module: nn.Module, logits: Any) -> Any:
        """The logits of a head that is no linear function alone; says once that they are not computed in chunks."""
        if isinstance(logits, torch.Tensor) and module not in self._told:
            self._told.add(module)
            logger.warning(
                "logits of a %s are computed for all tokens at once, since it is no plain nn.Linear: %s on the device",
                type(module).__name__,
                size_text(logits.numel() * logits.element_size()),
            )
        return logits
