"""What is checked of a family. Each check compares a copy of the tiny model that runs layer to layer with a plain
copy, and none changes the model that it is given."""

from __future__ import annotations

import copy
import importlib.util
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hf_l2l.hf.attach import attach_l2l, detach_l2l
from hf_l2l.model.stacks import find_stacks
from hf_l2l.verify.cases import (
    FEWER_ROWS,
    ROWS,
    UBATCH,
    Case,
    attached,
    gradients_of,
    on_device,
    options,
    train,
    transfers,
)
from hf_l2l.verify.comparisons import compare_gradients, compare_loss, compare_states, compare_tensors
from hf_l2l.verify.family import Batch, Family, class_named
from hf_l2l.verify.mixed import check_bf16
from hf_l2l.verify.results import OK, Caught, Result, note, red, worst
from hf_l2l.verify.splits import check_split

LEARNING_RATE = 0.1
"""Of the step of SGD before a model is saved."""

ADAPTERS = 10.0
"""How many times the tolerance of a family the gradients of adapters have: they are small, and so are the products
that they are made from."""


# ---- the checks


def check_stacks(case: Case) -> Result:
    """Which classes the layers have, and how many there are in each stack."""
    found = [f"{len(stack.layers)} {' + '.join(stack.class_names)}" for stack in find_stacks(case.model)]
    where = " (trains on the CPU only)" if case.family.own_backward else ""
    return note(", ".join(found) + where) if found else note("none")


def check_gradients(case: Case) -> Result:
    """Loss and gradients of the whole device batch at once, without a transfer, and in micro-batches of several device
    batches in turn, with transfers, are those of the plain model."""
    with transfers(real=False):
        whole = _compare_batches(case, None, ROWS)
    return worst(whole, _compare_batches(case, UBATCH, ROWS, *FEWER_ROWS))


def check_boundary(case: Case) -> Result:
    """Loss and gradients in micro-batches, with all that passes between layers in host memory, are those of the plain
    model."""
    return _compare_batches(case, UBATCH, ROWS, *FEWER_ROWS, stash="host", boundary="host")


def _compare_batches(case: Case, ubatch_size: int | None, *rows: int, **given: Any) -> Result:
    """Compare batches of so many rows, which go through one attached model in turn."""
    plain, model = copy.deepcopy(case.model), attached(case.model, ubatch_size=ubatch_size, **given)
    for count in rows:
        batch = case.family.batch(case.model, count)
        compared = _compare_training(case.family, model, plain, batch, case.family.tolerance)
        if compared is not OK:
            return red(f"{count} rows, ubatch_size={ubatch_size}: {compared.text}")
    return OK


def _compare_training(family: Family, model: nn.Module, plain: nn.Module, batch: Batch, tolerance: float) -> Result:
    """Whether one forward and backward of `model` has the loss and gradients of one of `plain`."""
    for each in (model, plain):
        each.zero_grad(set_to_none=True)
    found, expected = train(family, model, batch), train(family, plain, batch)
    return worst(
        compare_loss(found, expected, tolerance),
        compare_gradients(gradients_of(model), gradients_of(plain), tolerance),
    )


def check_evaluation(case: Case) -> Result:
    """All outputs in evaluation mode, in micro-batches, are those of the plain model."""
    original = copy.deepcopy(case.model).eval()
    for module in original.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "use_cache"):
            config.use_cache = False
    found, expected = [_outputs(each, case) for each in (attached(original, ubatch_size=UBATCH), original)]
    return compare_tensors(found, expected, case.family.tolerance, "output")


def _outputs(model: nn.Module, case: Case) -> dict[str, torch.Tensor]:
    """The tensors of floating point that `model` returns, by their place in what it returns."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        leaves = pytree.tree_leaves(model(**copy.deepcopy(case.batch)).to_tuple())
    return {str(i): t for i, t in enumerate(leaves) if isinstance(t, torch.Tensor) and t.is_floating_point()}


def check_generation(case: Case) -> Result:
    """Greedy generation with a key-value cache gives the tokens of the plain model, and its logits for each."""
    if not case.family.generates:
        return note("-")
    batch = {key: value for key, value in case.family.batch(case.model, 3).items() if key != "labels"}
    if "attention_mask" in batch:
        batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    made: list[Any] = []
    for model in (copy.deepcopy(case.model), attached(case.model, ubatch_size=1)):
        caught = Caught(plain=not made, refused=case.family.refused)
        with caught, torch.no_grad():
            generate: Any = model.eval().generate
            given = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
            shown = {"return_dict_in_generate": True, "output_logits": True}
            made.append(generate(**copy.deepcopy(batch), **given, **shown))
        if caught.result is not None:
            return caught.result
    expected, found = made
    if not torch.equal(found.sequences.cpu(), expected.sequences):
        return red(f"generates {found.sequences.tolist()} and should generate {expected.sequences.tolist()}")
    ours, theirs = ({f"of token {i}": t for i, t in enumerate(each.logits)} for each in (found, expected))
    return compare_tensors(ours, theirs, case.family.tolerance, "logits")


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
            train(case.family, plain, case.batch)
    if caught.result is not None:
        return caught.result
    attach_l2l(model, options(ubatch_size=UBATCH))
    compared = _compare_training(case.family, model, plain, case.batch, ADAPTERS * case.family.tolerance)
    if any(p.grad is not None for p in model.parameters() if not p.requires_grad):
        return red("a frozen weight has a gradient")
    layers = [layer for stack in find_stacks(plain) for layer in stack.layers]
    has_adapters = any(p.requires_grad for layer in layers for p in layer.parameters())
    return worst(
        compared, OK if has_adapters else note("no layer has an adapter: peft found its linear modules elsewhere")
    )


def check_saving(case: Case) -> Result:
    """After a step, what is saved while attached loads as what is saved once detached; detached, the model has the
    state, the loss and the gradients of the plain model after the same step."""
    family, plain, model = case.family, copy.deepcopy(case.model), copy.deepcopy(case.model)
    eps = attach_l2l(model, options(eps_update="deferred"))
    for each in (plain, model):
        optimizer: Any = torch.optim.SGD(each.parameters(), lr=LEARNING_RATE)
        optimizer = optimizer if each is plain else eps.wrap(optimizer)
        train(family, each, case.batch)
        optimizer.step()
    loaded = []
    for saved, name in ((plain, "plain"), (model, "attached"), (model, "detached")):
        if name == "detached":
            detach_l2l(model)
        caught = Caught(plain=saved is plain, refused=family.refused)
        with caught:
            loaded.append(_saved_and_loaded(family, saved))
        if caught.result is not None:
            return caught.result
    tolerance = family.tolerance
    return worst(
        compare_states(loaded[1], loaded[2], "loaded"),
        compare_tensors(loaded[1], loaded[0], tolerance, "loaded state"),
        compare_tensors(_state(model), _state(plain), tolerance, "state"),
        _compare_training(family, model, plain, case.batch, tolerance),
    )


def _saved_and_loaded(family: Family, model: nn.Module) -> dict[str, torch.Tensor]:
    save: Any = model.save_pretrained
    with tempfile.TemporaryDirectory() as folder:
        save(folder)
        loaded = class_named(family.model_class).from_pretrained(folder, dtype=family.dtype)
    return dict(loaded.state_dict())


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict, and the buffers that are not in it."""
    return {**model.state_dict(), **dict(model.named_buffers())}


Check = Callable[[Case], Result]
CHECKS: dict[str, Check] = {
    "layers": check_stacks,
    "gradients": check_gradients,
    "micro-batches": check_split,
    "boundary": check_boundary,
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
        """ "green", "refused" (something of it does not run layer to layer, and an error says so), "red", or "not
        run"."""
        if not self.results:
            return "not run"
        found = worst(*self.results.values()).status
        return found if found in ("red", "refused") else "green"


def verify(family: Family, names: Iterable[str] = tuple(CHECKS), device: str = "cpu") -> Report:
    """Run checks of `family`; errors in them are among the results, and no warning leaves.

    Args:
        family: the model and its batches.
        names: the checks; all by default.
        device: the execution device of the model that runs layer to layer; the plain one runs on the CPU.
    """
    with _quiet(), on_device(device):
        case: Case | None = None
        with (caught := Caught(plain=True)):
            case = Case.of(family)
        if case is None:
            return Report(family.name, {}, caught.result.text if caught.result else "")
        return Report(family.name, {name: _outcome(CHECKS[name], case) for name in names})


def _outcome(check: Check, case: Case) -> Result:
    with (caught := Caught(refused=case.family.refused)), transfers(real=not case.family.own_backward):
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
