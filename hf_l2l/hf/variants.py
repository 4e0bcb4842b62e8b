"""`make_l2l_trainer` and `make_l2l_arguments`: other libraries' trainers and arguments, run layer to layer."""

from __future__ import annotations

import copyreg
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from transformers import Trainer, TrainingArguments

from hf_l2l.hf.trainer import L2LTrainer, L2LTrainerMixin
from hf_l2l.hf.training_args import OWN_OPTIONS, L2LArgumentsMixin, L2LTrainingArguments

_made: dict[type[Any], type[Any]] = {Trainer: L2LTrainer, TrainingArguments: L2LTrainingArguments}
"""Class of another library -> what was made of it."""


def make_l2l_trainer(trainer: type[Any]) -> type[Any]:
    """The class of `trainer` that runs layer to layer: `make_l2l_trainer(SFTTrainer)` is `L2LSFTTrainer`.

    It takes the same arguments, and `args` may be of the class that `make_l2l_arguments` returns, or of the library's
    own. The same class is returned for the same argument; classes and their objects can be pickled.

    Args:
        trainer: `Trainer` or a subclass. `Trainer` itself gives `L2LTrainer`.

    Raises:
        ValueError: if `trainer` is no subclass of transformers' `Trainer`.
    """
    _refuse_others("trainer", trainer, Trainer)
    if issubclass(trainer, L2LTrainerMixin):
        return trainer
    members = {"__signature__": inspect.signature(trainer)}
    return _made.get(trainer) or _combined(make_l2l_trainer, L2LTrainerMixin, trainer, members)


def make_l2l_arguments(arguments: type[Any]) -> type[Any]:
    """The class of training arguments with the options of L2L: `make_l2l_arguments(SFTConfig)` is `L2LSFTConfig`.

    It is a dataclass, for code and for `HfArgumentParser`, with the fields of `arguments` first. Activation
    checkpointing, which L2L does itself, is off by default, also where `arguments` has it on. The same class is
    returned for the same argument; classes and their objects can be pickled.

    Args:
        arguments: `TrainingArguments` or a subclass that is a dataclass. `TrainingArguments` itself gives
            `L2LTrainingArguments`.

    Raises:
        ValueError: if `arguments` is no subclass of transformers' `TrainingArguments`, or has a field that is called
            as an option of L2L.
    """
    _refuse_others("arguments", arguments, TrainingArguments)
    if issubclass(arguments, L2LArgumentsMixin):
        return arguments
    if arguments not in _made:
        _refuse_taken_names(arguments)
        dataclass(_combined(make_l2l_arguments, L2LArgumentsMixin, arguments, _without_checkpointing(arguments)))
    return _made[arguments]


def _without_checkpointing(base: type[Any]) -> dict[str, Any]:
    """Members of a dataclass that turn off activation checkpointing by default where `base` has it on, as TRL's do."""
    plain = {f.name: f.default for f in fields(TrainingArguments) if f.name.endswith("_checkpointing")}
    on = [f for f in fields(base) if f.name in plain and f.default is True]
    members: dict[str, Any] = {f.name: field(default=plain[f.name], metadata=f.metadata) for f in on}
    return {**members, "__annotations__": {f.name: f.type for f in on}}


def _refuse_taken_names(base: type[Any]) -> None:
    taken = sorted({f.name for f in fields(base)} & set(OWN_OPTIONS))
    if taken:
        raise ValueError(
            f"the arguments of a trainer must leave the names of the options of L2L free (got a {base.__name__} with "
            f"{', '.join(taken)}); rename them in a subclass"
        )


def _combined(make: Callable[..., Any], mixin: type[Any], base: type[Any], members: dict[str, Any]) -> type[Any]:
    """A subclass of `mixin` and `base`. No module has it as an attribute, so it is pickled as a call of `make`."""
    doc = f"`{base.__name__}`, run layer to layer: see `{mixin.__name__}`."
    about = {"__module__": "hf_l2l", "__doc__": doc, "_made_by": (make, (base,))}
    metaclass: Any = type("Made", (type(base),), {})  # `copyreg` finds how to pickle a class by its metaclass
    copyreg.pickle(metaclass, _reduced)
    _made[base] = metaclass(f"L2L{base.__name__}", (mixin, base), {**about, **members})
    return _made[base]


def _reduced(made: type[Any]) -> str | tuple[Any, ...]:
    how: tuple[Any, ...] | None = vars(made).get("_made_by")
    return made.__qualname__ if how is None else how  # a subclass, made by a class statement, is pickled by its name


def _refuse_others(name: str, given: Any, wanted: type) -> None:
    if not (isinstance(given, type) and issubclass(given, wanted)):
        raise ValueError(
            f"{name} must be transformers' {wanted.__name__} or a subclass of it (got {given!r}); give the class, not "
            "an object"
        )
