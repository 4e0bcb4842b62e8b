"""What is checked of a family. Each check compares a copy of the tiny model that runs layer to layer with a plain
copy, and none changes the model that it is given."""

from __future__ import annotations

import copy
import importlib.util
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hf_l2l.config import L2LConfig
from hf_l2l.hf.attach import attach_l2l, detach_l2l
from hf_l2l.model.stacks import find_stacks
from hf_l2l.verify.family import Batch, Family, class_named
from hf_l2l.verify.results import (
    OK,
    Caught,
    Gradients,
    Result,
    compare_gradients,
    compare_loss,
    compare_states,
    difference,
    note,
    one_line,
    red,
    worst,
)

ROWS, UBATCH = 8, 2
"""Rows of the device batch and of a micro-batch."""

BF16_TOLERANCE = 0.05
"""The largest relative difference of the loss with cmp="bf16"."""

PACKAGE = Path(__file__).parent.parent
_NO_EFFECT = "has no effect on calls of "


@dataclass
class Case:
    """The model and the batch of a family, and what the plain model makes of them."""

    family: Family
    model: nn.Module
    batch: Batch
    loss: torch.Tensor
    gradients: Gradients = field(repr=False)

    @staticmethod
    def of(family: Family) -> Case:
        """The case of `family`.

        Raises:
            NotInThisTransformers: if the installed transformers lacks the family.
        """
        model = family.build(family.dtype)
        batch = family.batch(model, ROWS)
        plain = copy.deepcopy(model)
        loss = train(family, plain, batch)
        return Case(family, model, batch, loss, gradients_of(plain))


def train(family: Family, model: nn.Module, batch: Batch) -> torch.Tensor:
    """One forward and backward; returns the loss. The generators are left as they were."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        loss = family.loss(model(**copy.deepcopy(batch)))
        loss.backward()
    return loss.detach()


def gradients_of(model: nn.Module) -> Gradients:
    """The gradients by name; None for a parameter without one."""
    return {name: p.grad for name, p in model.named_parameters()}


def attached(model: nn.Module, **options: Any) -> nn.Module:
    """A copy of `model` that runs layer to layer on the CPU."""
    other = copy.deepcopy(model)
    attach_l2l(other, L2LConfig(device="cpu", **options))
    return other


# ---- the checks


def check_stacks(case: Case) -> Result:
    """Which classes the layers have, and how many there are in each stack."""
    found = [f"{len(stack.layers)} {' + '.join(stack.class_names)}" for stack in find_stacks(case.model)]
    return note(", ".join(found)) if found else note("none")


def check_gradients(case: Case) -> Result:
    """Loss and gradients of the whole device batch at once, and in micro-batches, are those of the plain model."""
    results = []
    for ubatch_size in (None, UBATCH):
        model = attached(case.model, ubatch_size=ubatch_size)
        loss = train(case.family, model, case.batch)
        tolerance = case.family.tolerance
        compared = worst(
            compare_loss(loss, case.loss, tolerance),
            compare_gradients(gradients_of(model), case.gradients, tolerance),
        )
        results.append(compared if compared is OK else red(f"ubatch_size={ubatch_size}: {compared.text}"))
    return worst(*results)


def check_split(case: Case) -> Result:
    """Each layer is recomputed micro-batch by micro-batch, or a warning has said why it is not."""
    whole = _recomputes(case.family, case.model, case.batch, ubatch_size=None)[0]
    split, said = _recomputes(case.family, case.model, case.batch, ubatch_size=UBATCH)
    return _compare_splits(whole, split, said)


def _compare_splits(whole: Counter[str], split: Counter[str], said: Mapping[str, str]) -> Result:
    """Whether there are as many recomputes with micro-batches as there should be, given those without."""
    silent = [name for name, count in whole.items() if split[name] < count * (ROWS // UBATCH) and name not in said]
    if silent:
        return red(f"nothing says why the whole device batch runs through {', '.join(silent)} at once")
    if said:
        return note("whole: " + "; ".join(f"{name}: {reason}" for name, reason in said.items()))
    return OK


def _recomputes(family: Family, model: nn.Module, batch: Batch, **options: Any) -> tuple[Counter[str], dict[str, str]]:
    """How often layers are recomputed in a step, by class, and why the batch is not split, by class."""
    model = copy.deepcopy(model)
    counts = _count_recomputes(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attach_l2l(model, L2LConfig(device="cpu", **options))
        train(family, model, batch)
    return counts, dict(_no_effect(str(w.message)) for w in caught if _NO_EFFECT in str(w.message))


def _no_effect(message: str) -> tuple[str, str]:
    """The class and the reason of a warning that micro-batches have no effect."""
    name, _, reason = message.partition(_NO_EFFECT)[2].partition(": ")
    return name, one_line(reason.partition(". They run with")[0], 160)


def _count_recomputes(model: nn.Module) -> Counter[str]:
    """Counts, from now on, the calls of layers that make a graph, by the class of the layer."""
    counts: Counter[str] = Counter()

    def counted(layer: nn.Module) -> Callable[..., Any]:
        forward = layer.forward

        @wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[type(layer).__name__] += torch.is_grad_enabled()
            return forward(*args, **kwargs)

        return call

    for layer in {layer for stack in find_stacks(model) for layer in stack.layers}:
        layer.forward = counted(layer)
    return counts


def check_evaluation(case: Case) -> Result:
    """All outputs in evaluation mode, in micro-batches, are those of the plain model."""
    batch = {**case.batch, "use_cache": False} if case.family.generates else case.batch
    plain, model = copy.deepcopy(case.model).eval(), attached(case.model, ubatch_size=UBATCH).eval()
    outputs = []
    for evaluated in (plain, model):
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            outputs.append(_floats(evaluated(**copy.deepcopy(batch))))
    expected, found = outputs
    if len(found) != len(expected):
        return red(f"{len(found)} outputs in evaluation, and {len(expected)} of the plain model")
    largest = max(float(e.abs().max()) for e in expected)
    errors = [difference(f, e) / largest for f, e in zip(found, expected, strict=True)]
    wrong = [error for error in errors if not error <= case.family.tolerance]
    return red(f"outputs in evaluation are wrong by {wrong[0]:.1e} of the largest") if wrong else OK


def _floats(output: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(output.to_tuple())
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.numel()]


def check_generation(case: Case) -> Result:
    """Greedy generation with a key-value cache gives the tokens of the plain model."""
    if not case.family.generates:
        return note("-")
    batch = {key: value for key, value in case.family.batch(case.model, 3).items() if key != "labels"}
    if "attention_mask" in batch:
        batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    tokens: list[list[list[int]]] = []
    for model in (copy.deepcopy(case.model), attached(case.model, ubatch_size=1)):
        caught = Caught(plain=not tokens)
        with caught, torch.no_grad():
            generate: Any = model.eval().generate
            tokens.append(generate(**copy.deepcopy(batch), max_new_tokens=4, do_sample=False).tolist())
        if caught.result is not None:
            return caught.result
    return OK if tokens[0] == tokens[1] else red(f"generates {tokens[1]} and should generate {tokens[0]}")


def check_lora(case: Case) -> Result:
    """With LoRA on all linear modules, adapters have the gradients of the plain model, and frozen weights none."""
    if importlib.util.find_spec("peft") is None:
        return note("peft is not installed")
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.0)
        caught = Caught(plain=True)
        with caught:
            plain = get_peft_model(copy.deepcopy(case.model), config).to(case.family.dtype)
            model = copy.deepcopy(plain)
            loss = train(case.family, plain, case.batch)
    if caught.result is not None:
        return caught.result
    attach_l2l(model, L2LConfig(device="cpu", ubatch_size=UBATCH))
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    found = train(case.family, model, case.batch)
    # Adapters have smaller gradients than weights, so that the same rounding is a larger part of the largest of them.
    gradients, tolerance = gradients_of(model), 10 * case.family.tolerance
    if any(gradients[name] is not None for name in frozen):
        return red("a frozen weight has a gradient")
    return worst(compare_loss(found, loss, tolerance), compare_gradients(gradients, gradients_of(plain), tolerance))


def check_saving(case: Case) -> Result:
    """What is saved while attached loads as what the plain model saves; detached, the model is the plain one again."""
    model = attached(case.model, ubatch_size=UBATCH)
    loaded: list[dict[str, torch.Tensor]] = []
    for saved in (case.model, model):
        caught = Caught(plain=not loaded)
        with tempfile.TemporaryDirectory() as folder, caught:
            save: Any = saved.save_pretrained
            save(folder)
            kind = class_named(case.family.model_class)
            loaded.append(kind.from_pretrained(folder, dtype=case.family.dtype).state_dict())
        if caught.result is not None:
            return caught.result
    result = worst(
        compare_states(model.state_dict(), case.model.state_dict(), "attached"),
        compare_states(loaded[1], loaded[0], "loaded"),
    )
    loss = train(case.family, detach_l2l(model), case.batch)
    return worst(result, compare_loss(loss, case.loss, 0.0))


def check_bf16(case: Case) -> Result:
    """With cmp="bf16" the loss of a model in fp32 is near the plain one, whatever had a gradient has one, and what is
    split without `cmp` is split."""
    model = case.family.build(torch.float32)
    batch, plain = case.family.batch(model, ROWS), copy.deepcopy(model)
    expected = train(case.family, plain, batch)
    mixed = attached(model, ubatch_size=UBATCH, cmp="bf16")
    with (caught := Caught()):
        found = train(case.family, mixed, batch)
    if caught.result is not None:
        fails_plainly = caught.result.status == "red" and not _trains_in_bf16(case.family, model)
        return note(f"fails in bf16 without L2L, too: {caught.result.text}") if fails_plainly else caught.result
    gradients = gradients_of(mixed)
    missing = [n for n, g in gradients_of(plain).items() if g is not None and gradients[n] is None]
    if missing:
        return red(f"{len(missing)} parameters have no gradient, the first is {missing[0]}")
    said = _recomputes(case.family, model, batch, ubatch_size=UBATCH, cmp="bf16")[1]
    for name in _recomputes(case.family, model, batch, ubatch_size=UBATCH)[1]:
        said.pop(name, None)
    if said:
        return _compare_splits(Counter(), Counter(), said)
    return compare_loss(found, expected, BF16_TOLERANCE)


def _trains_in_bf16(family: Family, model: nn.Module) -> bool:
    """Whether plain transformers trains `model` once it has been saved, and loaded in bf16."""
    save: Any = model.save_pretrained
    with (caught := Caught()), tempfile.TemporaryDirectory() as folder:
        save(folder)
        short = class_named(family.model_class).from_pretrained(folder, dtype=torch.bfloat16).train(model.training)
        train(family, short, family.batch(short, ROWS))
    return caught.result is None


Check = Callable[[Case], Result]
CHECKS: dict[str, Check] = {
    "layers": check_stacks,
    "gradients": check_gradients,
    "micro-batches": check_split,
    "evaluation": check_evaluation,
    "generate": check_generation,
    "LoRA": check_lora,
    "saving": check_saving,
    "bf16": check_bf16,
}
"""The checks by the names of their columns."""


@dataclass(frozen=True)
class Report:
    """What was found of one family."""

    family: str
    results: Mapping[str, Result]
    """By the names of the checks; empty if the family does not train here without L2L."""
    reason: str = ""
    """Why there are no results."""

    @property
    def status(self) -> str:
        """ "green", "refused" (it does not train layer to layer, and is told so), "red", or "not run"."""
        if not self.results:
            return "not run"
        if any(result.status == "red" for result in self.results.values()):
            return "red"
        return "refused" if self.results["gradients"].status == "refused" else "green"


def verify(family: Family) -> Report:
    """Run all checks of `family`; errors in them are among the results, and no warning leaves."""
    with _quiet():
        case: Case | None = None
        with (caught := Caught(plain=True)):
            case = Case.of(family)
        if case is None:
            return Report(family.name, {}, caught.result.text if caught.result else "")
        return Report(family.name, {name: _outcome(check, case) for name, check in CHECKS.items()})


def _outcome(check: Check, case: Case) -> Result:
    with (caught := Caught()):
        return check(case)
    return caught.result or OK


@contextmanager
def _quiet() -> Iterator[None]:
    """Record warnings and drop them; transformers logs errors only, and shows no progress."""
    from transformers.utils import logging

    level, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            yield
    finally:
        logging.set_verbosity(level)
        if has_bars:
            logging.enable_progress_bar()
