"""Attention masks with an entry for each query and key: which tensors are one, and those that no device could hold.

transformers makes such a mask once per call of a model, for the whole device batch, where its attention is "eager", or
"sdpa" with padding, packed rows or a sliding window that is shorter than the rows; with full and sliding layers, two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hf_l2l.compat import mask_functions
from hf_l2l.runtime.tensors import size_text

_KINDS = ("eager", "sdpa")
"""The kinds of attention whose masks are dense."""
_WIDEST = 8
"""Bytes of an entry, at most."""


def dense_masks(arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those of a layer's tensor arguments that are a dense mask or bias: (rows or 1, heads or 1, queries, keys), where
    other arguments are (rows, queries or keys, width)."""
    lengths = {t.shape[1] for t in arguments if t.dim() == 3}
    return [t for t in arguments if t.dim() == 4 and lengths.issuperset(t.shape[2:])]


@contextmanager
def impossible_masks_refused(inputs: Iterable[Any], device: torch.device, capacity: int | None) -> Iterator[None]:
    """Inside, a model is called with `inputs`. A mask that alone exceeds the memory of `device` (`capacity`; None if
    it is not known) is refused when the model asks for it, before memory is allocated for it.

    Whether a model needs a mask is decided inside of transformers, which gets to know padding and windows. So the
    functions that make masks are replaced, where rows are so long that one could be too large.

    Raises:
        ValueError: in the block, if such a mask is needed.
    """
    shapes = [leaf.shape for leaf in inputs if isinstance(leaf, torch.Tensor) and leaf.dim() > 1]
    masks = mask_functions()
    if capacity is None or masks is None or all(_WIDEST * s[0] * s[1] * s[1] <= capacity for s in shapes):
        yield
        return
    originals = {kind: masks[kind] for kind in _KINDS}
    for kind, make in originals.items():
        masks.register(kind, _refusing(make, kind, device, capacity))
    try:
        yield
    finally:
        for kind, make in originals.items():
            masks.register(kind, make)


def _refusing(make: Callable[..., Any], kind: str, device: torch.device, capacity: int) -> Callable[..., Any]:
    """`make`, a function that makes masks of this kind, but without those that exceed `capacity`."""

    def checked(batch_size: int, q_length: int, kv_length: int, *rest: Any, **given: Any) -> Any:
        # Without padding, one mask may serve all rows, but for "eager" attention each row gets its own.
        rows = batch_size if kind == "eager" or given.get("attention_mask") is not None else 1
        entry = given.get("dtype", torch.float32).itemsize if kind == "eager" else 1
        num_bytes = rows * q_length * kv_length * entry

        def refuse(*indices: Any) -> Any:
            raise ValueError(
                f"the attention mask of a batch must fit the memory of the device (rows {rows} x queries {q_length} x "
                f"keys {kv_length} take {size_text(num_bytes)} with attn_implementation={kind!r}, and {device} has "
                f"{size_text(capacity)}); give the model fewer or shorter rows, or "
                "attn_implementation='flash_attention_2', or 'sdpa' and rows without padding, each of one text"
            )

        if num_bytes > capacity and torch.device(given.get("device", "cpu")).type == device.type:
            # It is called once it is certain that a mask is made.
            given["mask_function"] = refuse
        return make(batch_size, q_length, kv_length, *rest, **given)

    return checked
