"""Whether layers run micro-batch by micro-batch, which is counted, and why not, which a warning says."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import nn

from hf_l2l.hf.attach import attach_l2l
from hf_l2l.model.stacks import find_stacks
from hf_l2l.verify.cases import ROWS, UBATCH, Case, options, train
from hf_l2l.verify.comparisons import difference, largest_of
from hf_l2l.verify.family import Batch, Family
from hf_l2l.verify.results import OK, Result, note, one_line, red, worst

_NO_EFFECT = "has no effect on calls of "


@dataclass
class Recomputes:
    """What was counted of a step."""

    counts: Mapping[tuple[str, str], int]
    """The calls of layers that made a graph, by the path of the stack and the class of the layer."""
    trained: Set[tuple[str, str]]
    """Those with gradients."""
    reasons: Mapping[str, str]
    """Why the batch was not split, by the class of the layer."""
    buffers: Mapping[str, torch.Tensor]
    """Those of the model after the step."""


def check_split(case: Case) -> Result:
    """Each layer is recomputed micro-batch by micro-batch, or a warning has said why it is not."""
    whole = recomputes(case.family, case.model, case.batch, ubatch_size=None)
    split = recomputes(case.family, case.model, case.batch, ubatch_size=UBATCH)
    idle = ", ".join(f"{kind} at {path}" for path, kind in whole.trained if not whole.counts[path, kind])
    if idle and case.family.own_backward:
        return note("whole: layers that compute their backward themselves get the whole batch there")
    if idle:
        return red(f"no call of {idle} makes a graph, though it has gradients: nothing shows whether it is split")
    return worst(compare_splits(whole, split), _compare_buffers(case.family, whole, split))


def compare_splits(whole: Recomputes, split: Recomputes) -> Result:
    """Whether there are as many recomputes with micro-batches as there should be, given those without."""
    silent = [
        f"{kind} at {path}"
        for (path, kind), count in whole.counts.items()
        if split.counts[path, kind] < count * (ROWS // UBATCH) and kind not in split.reasons
    ]
    if silent:
        return red(f"nothing says why the whole device batch runs through {', '.join(silent)} at once")
    return told(split.reasons)


def _compare_buffers(family: Family, whole: Recomputes, split: Recomputes) -> Result:
    """Say which buffers depend on micro-batches, as a running range of the values of a batch does."""
    pairs = {name: (split.buffers[name], expected) for name, expected in whole.buffers.items()}
    other = [n for n, (found, e) in pairs.items() if not difference(found, e) <= family.tolerance * largest_of(e)]
    return note(f"{len(other)} buffers depend on the micro-batches, the first is {other[0]}") if other else OK


def told(reasons: Mapping[str, str]) -> Result:
    """The reasons why the batch was not split, as a note; ok without any."""
    return note("whole: " + "; ".join(f"{name}: {why}" for name, why in reasons.items())) if reasons else OK


def recomputes(family: Family, model: nn.Module, batch: Batch, **given: Any) -> Recomputes:
    """What is counted of one step of a copy of `model` that is attached with the options `given`."""
    model = copy.deepcopy(model)
    keys = {layer: (stack.path, type(layer).__name__) for stack in find_stacks(model) for layer in stack.layers}
    counts: Counter[tuple[str, str]] = Counter()
    for layer, key in keys.items():
        layer.forward = _counted(layer, key, counts)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attach_l2l(model, options(**given))
        train(family, model, batch)
    trained = {key for layer, key in keys.items() if any(p.grad is not None for p in layer.parameters())}
    reasons = dict(_no_effect(str(w.message)) for w in caught if _NO_EFFECT in str(w.message))
    return Recomputes(counts, trained, reasons, dict(model.named_buffers()))


def _no_effect(message: str) -> tuple[str, str]:
    """The class and the reason of a warning that micro-batches have no effect."""
    name, _, reason = message.partition(_NO_EFFECT)[2].partition(": ")
    return name, one_line(reason.partition(". They run with")[0], 160)


def _counted(layer: nn.Module, key: tuple[str, str], counts: Counter[tuple[str, str]]) -> Callable[..., Any]:
    """The forward of `layer`, which counts its calls that make a graph."""
    forward = layer.forward

    @wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        counts[key] += torch.is_grad_enabled()
        return forward(*args, **kwargs)

    return call
