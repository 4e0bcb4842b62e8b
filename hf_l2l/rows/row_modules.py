"""Which modules outside the layers may be run a few rows at a time, as far as their kind tells."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import nn

from hf_l2l.compat import keeps_statistics, with_forward_hooks


def input_embeddings(modules: Collection[nn.Module], layers: Iterable[nn.Module]) -> set[nn.Module]:
    """Those of `modules`, which are outside the layers, that make of inputs what the first layer takes.

    As far as models say so: their input embeddings, and the modules around them that are called so.
    """
    found: set[nn.Module] = set()
    for module in modules:
        ask: Any = getattr(module, "get_input_embeddings", None)
        try:
            table = None if ask is None else ask()
        except (NotImplementedError, AttributeError):  # of a model whose parts have them
            continue
        if isinstance(table, nn.Module) and table in modules:
            found.add(table)
    parts = [each for each in modules if type(each).__name__.endswith("Embeddings")]
    found.update(each for each in parts if not found.isdisjoint(each.modules()))
    return run_by_rows(found, layers)


def run_by_rows(modules: Iterable[nn.Module], apart: Iterable[nn.Module]) -> set[nn.Module]:
    """Those of `modules` whose rows may be computed one by one: nothing of `apart` is in them, and they keep no
    statistics of their rows."""
    inner = set(apart)
    return {m for m in modules if inner.isdisjoint(m.modules()) and all(map(_runs_by_rows, m.modules()))}


def _runs_by_rows(module: nn.Module) -> bool:
    """Whether rows can be computed, and the gradients of those of a table added, one by one."""
    if isinstance(module, nn.Embedding):
        return not (module.max_norm or module.scale_grad_by_freq or module.sparse)
    return not keeps_statistics(module)


def parts_have_hooks(module: nn.Module) -> bool:
    """Whether hooks run inside a call of `module`; they would be given micro-batches, and once more in a backward."""
    return bool(with_forward_hooks([*module.modules()][1:]))
