"""Provokes what the package refuses: runs a case against the real code, and says what was raised, where, and whether
anything was allocated or moved before."""

from __future__ import annotations

import ast
import logging
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers as hf
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.utils import logging as of_transformers

import hf_l2l
from hf_l2l import L2LConfig, L2LTrainer, L2LTrainingArguments, attach_l2l
from training import arguments, rows, tiny_bert

PACKAGE = Path(hf_l2l.__file__).parent
LOGGERS = ("hf_l2l", "run_glue_l2l")
WEIGHT_BYTES = 1024
"""The smallest weight matrix of a `tiny_bert`: what is refused early allocates nothing of this size."""


@dataclass
class Scene:
    """Where a case is prepared: what it needs beside what is refused."""

    folder: Path
    patch: pytest.MonkeyPatch
    exits: ExitStack
    """What is undone afterwards, beside what is patched."""
    typed: Mapping[str, Any]
    """The options in what the user types, which a case need not name again."""
    models: list[nn.Module] = field(default_factory=list)
    """Models that must stay where they are."""
    held: list[object] = field(default_factory=list)
    """What must not be collected before."""

    def model(self, made: nn.Module | None = None) -> Any:
        """A small BERT, or the model that was made."""
        self.models.append(tiny_bert(layers=2) if made is None else made)
        return self.models[-1]

    def arguments(self, **options: Any) -> Any:
        """Training arguments without a budget of device memory, and without clipping."""
        usual = {"device_memory_budget": "off", "max_grad_norm": 0.0}
        return arguments(L2LTrainingArguments, self.folder, **{**usual, **self.typed, **options})

    def config(self, **options: Any) -> L2LConfig:
        """The options of `L2LConfig` that are typed, and these."""
        typed = {name: self.typed[name] for name in L2LConfig.__dataclass_fields__ if name in self.typed}
        return L2LConfig(**{"device": "cpu", **typed, **options})


def options_in(typed: str) -> dict[str, Any]:
    """The options in what is typed, wherever in its code: "`a(b=1)`, with `c='d'`" -> {"b": 1, "c": "d"}."""
    found = {}
    for code in typed.split("`")[1::2]:
        with suppress(SyntaxError):
            given = [node for node in ast.walk(ast.parse(f"f({code})")) if isinstance(node, ast.keyword)]
            for each in given:
                with suppress(ValueError):  # no literal
                    found[str(each.arg)] = ast.literal_eval(each.value)
    return found


Act = Callable[[], object]
Prepare = Callable[[Scene], Act]
Change = Callable[[Scene, Any], object]
"""Changes a model, or what is around it; another model that it returns takes its place."""


@dataclass(frozen=True, eq=False)
class Case:
    """Something that is refused, or warned of."""

    typed: str
    """What the user types."""
    prepare: Prepare
    """Makes what is needed, and returns the call that raises."""
    is_early: bool = True
    """Whether nothing of a weight's size is allocated or moved before."""
    varies: str | None = None
    """What of the message is left out of the table: a pattern for bytes that estimates may change."""
    kind: type[BaseException] = ValueError
    """What is raised, of errors."""
    settings: Mapping[str, Any] | None = None
    """If all of it is a call of `L2LConfig`: the arguments."""


Rows = dict[str, Prepare | Case]
"""What the user types -> what makes what is needed, alone or with more that is known of the case."""
row = partial(Case, "")
late = partial(row, is_early=False)


# ---- what cases have in common


def gives(function: str, value: Any) -> Change:
    """A function, named with its module, returns this."""
    return lambda scene, model: scene.patch.setattr(function, lambda *_, **__: value)


def counts(prop: str, value: Any) -> Change:
    """A property of training arguments, such as the number of processes, has this value."""
    return lambda scene, model: scene.patch.setattr(L2LTrainingArguments, prop, property(lambda self: value))


def variable(name: str, value: str | Path) -> Change:
    """A variable of the environment has this value."""
    return lambda scene, model: scene.patch.setenv(name, str(value))


def _changed(scene: Scene, changes: tuple[Change, ...]) -> Any:
    model: nn.Module = tiny_bert(layers=2)
    for change in changes:
        other = change(scene, model)
        model = other if isinstance(other, nn.Module) else model
    return scene.model(model)


def attached(*changes: Change, **options: Any) -> Prepare:
    """A model that was changed before it is attached with what was typed, and these options."""

    def prepare(scene: Scene) -> Act:
        model = _changed(scene, changes)
        return lambda: attach_l2l(model, scene.config(**options))

    return prepare


def used(use: Callable[[Any, Any], Act], *changes: Change, **options: Any) -> Prepare:
    """The same after it is attached: `use` takes the model and its `eps`, and returns what is called."""

    def prepare(scene: Scene) -> Act:
        attach = attached(*changes, **options)(scene)
        return use(scene.models[-1], attach())

    return prepare


def call(function: Callable[..., object], *args: Any, **options: Any) -> Prepare:
    """A call for which nothing is prepared."""
    return lambda scene: partial(function, *args, **options)


def trainer(
    *changes: Change,
    kind: type[hf.Trainer] = L2LTrainer,
    runs: bool = False,
    count: int = 48,
    later: bool = False,
    passed: Mapping[str, Any] | None = None,
    **options: Any,
) -> Prepare:
    """A trainer of a model, with what was typed and these arguments, made or run.

    Args:
        later: what was typed is set after the arguments were made: it asks for packages that this machine has not.
        passed: what is passed to the trainer itself.
    """

    def prepare(scene: Scene) -> Act:
        model, data = _changed(scene, changes), rows(count)
        typed, scene.typed = scene.typed, {} if later else scene.typed

        def act() -> object:
            args = scene.arguments(**{"use_cpu": True, **options})
            for name, value in typed.items() if later else ():
                setattr(args, name, value)
            made = kind(model, args, train_dataset=data, eval_dataset=data, **(passed or {}))
            return made.train() if runs else made

        return act

    return prepare


# ---- running a case


class Found(NamedTuple):
    """What a case has raised. The error itself is not kept: its frames hold models and what is on the device."""

    kind: type[BaseException]
    message: str
    places: list[tuple[str, int]]
    """File, relative to the package, and line of what raised or warned; and of what the error says as its cause."""
    allocated: list[str]
    """What was allocated or moved before."""


class _Allocations(TorchDispatchMode):
    """Records operations that make tensors of a weight's size."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.known: dict[int, Any] = {}
        """Storages by address: they are held, so that nothing new is where they are."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_view = any(each.alias_info is not None for each in func._schema.returns)
        for made in () if is_view else result if isinstance(result, tuple | list) else (result,):
            if type(made) is torch.Tensor and made.device.type != "meta":
                storage = made.untyped_storage()
                if storage.nbytes() >= WEIGHT_BYTES and storage.data_ptr() not in self.known:
                    self.found.append(f"{func} made {list(made.shape)} on {made.device}")
        return result


@contextmanager
def _logged_warnings_raise() -> Iterator[None]:
    """Inside, warnings in the log of the package are raised; afterwards its loggers are as loud as before: the program
    `hf-l2l` makes them quiet."""

    def warning(logger: logging.Logger, text: str, *args: object) -> None:
        if logger.isEnabledFor(logging.WARNING):
            raise UserWarning(text % args if args else text)

    levels = {logging.getLogger(name): logging.getLogger(name).level for name in LOGGERS}
    verbosity = of_transformers.get_verbosity()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for logger in levels:
                patch.setattr(logger, "warning", partial(warning, logger))
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
        of_transformers.set_verbosity(verbosity)
        of_transformers.enable_progress_bar()


def _plain(models: list[nn.Module]) -> dict[str, nn.Parameter]:
    """The parameters that are no quantized weights, by name."""
    found = {f"{n}.{name}": p for n, model in enumerate(models) for name, p in model.named_parameters()}
    return {name: p for name, p in found.items() if type(p) is nn.Parameter}


def _places(models: list[nn.Module]) -> dict[str, Any]:
    return {name: (p.device, 0 if p.is_meta else p.data_ptr()) for name, p in _plain(models).items()}


def provoke(case: Case, folder: Path) -> Found:
    """Run a case, with warnings as errors.

    Raises:
        AssertionError: if nothing was raised, or not by the package itself.
    """
    with pytest.MonkeyPatch.context() as patch, ExitStack() as exits:
        patch.chdir(folder)
        scene = Scene(folder, patch, exits, options_in(case.typed))
        allocations = _Allocations()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                act = case.prepare(scene)
                before = _places(scene.models)
                storages = [p.untyped_storage() for p in _plain(scene.models).values() if not p.is_meta]
                allocations.known = {each.data_ptr(): each for each in storages}
                warnings.simplefilter("error", UserWarning)
                with allocations, _logged_warnings_raise():
                    act()
        except (ValueError, TypeError, MemoryError, UserWarning) as error:
            moved = [name for name, place in _places(scene.models).items() if place != before.get(name)]
            made = [*allocations.found, *(f"{name} moved" for name in moved)]
            return Found(type(error), str(error), _places_of(error), made)
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
    raise AssertionError(f"{case.typed} was accepted")


def _places_of(error: BaseException) -> list[tuple[str, int]]:
    frames = [list(traceback.walk_tb(each.__traceback__)) for each in (error, error.__cause__) if each is not None]
    own, *causes = [[(Path(frame.f_code.co_filename), line) for frame, line in each] for each in frames]
    own = [place for place in own if str(place[0]) != __file__]  # where a warning in the log is raised
    if not own or not own[-1][0].is_relative_to(PACKAGE):
        raise AssertionError(f"it was another one that raised {error!r}") from error
    found = [own[-1], *(each[-1] for each in causes)]
    return [(str(file.relative_to(PACKAGE)), line) for file, line in found if file.is_relative_to(PACKAGE)]


# ---- the parts of a message


class Parts(NamedTuple):
    """A message in its parts."""

    rule: str
    value: str
    remedy: str


def parts_of(message: str) -> Parts:
    """The parts of `rule (got value); remedy`, some of them empty where a message is none of these."""
    opening = max(message.find(" (got "), 0) or message.find(" (")
    if opening < 0:
        return Parts(message, "", "")
    depths = accumulate({"(": 1, ")": -1}.get(letter, 0) for letter in message[opening + 1 :])
    end = next((place for place, depth in enumerate(depths, opening + 1) if depth == 0), len(message))
    value, rest = message[opening + 2 : end], message[end + 1 :]
    if not re.match(r"[;:,.] ", rest):  # the rule goes on after the value
        rule, _, remedy = message.partition("; ")
        return Parts(rule, value, remedy)
    return Parts(message[:opening], value, rest[2:])


# ---- what has to be provoked


@cache
def _refusals_in(file: str) -> Mapping[int, str]:
    """Every statement of a file of the package that raises an error about what was given, or warns: lines -> text."""
    found: dict[int, str] = {}
    for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
        if isinstance(node, ast.Raise | ast.Expr):
            text = ast.unparse(node)
            if re.match(r"raise (Value|Type|Budget|Memory)Error\b|(warnings\.warn|logger\.warning)\(", text):
                found |= dict.fromkeys(range(node.lineno, (node.end_lineno or node.lineno) + 1), text)
    return found


def not_provoked(file: str, places: set[tuple[str, int]]) -> Iterator[str]:
    """The refusals of a file at none of these places."""
    lines = _refusals_in(file)
    reached = {lines[line] for of, line in places if of == file and line in lines}
    yield from dict.fromkeys(text for text in lines.values() if text not in reached)
