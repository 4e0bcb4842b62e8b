"""Names, numbers and sizes that are given as options: what is said of one that cannot be used."""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any, Self

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


class OptionNames:
    """A base of dataclasses whose fields are options: one that it does not have is refused with the nearest name.

    It is checked in `__new__`, since every dataclass derived from another one gets an `__init__` of its own.
    """

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Raise TypeError, as any call of a function does, for an option that `__init__` does not take."""
        if options.keys() <= getattr(cls, "__dataclass_fields__", {}).keys():  # `signature` takes long
            return super().__new__(cls)
        known = signature(cls.__init__).parameters
        takes_all = any(each.kind is Parameter.VAR_KEYWORD for each in known.values())
        for name in () if takes_all else options.keys() - known.keys():
            near = [each for each in (name.removeprefix("l2l_"), f"l2l_{name}") if each in known]
            near = near or get_close_matches(name, known, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"help({cls.__name__}) lists them"
            raise TypeError(f"an option of {cls.__name__} must be one that it has (got {name}); {remedy}")
        return super().__new__(cls)


def is_whole_number(value: object) -> bool:
    """Whether `value` is an int, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_ubatch_size(ubatch_size: int | None) -> None:
    """Raise ValueError unless `ubatch_size` is None or a whole number of at least 1."""
    if ubatch_size is None:
        return
    if not is_whole_number(ubatch_size) or ubatch_size < 1:
        raise ValueError(
            f"ubatch_size must be a whole number of at least 1, or None for the whole device batch (got "
            f"{ubatch_size!r}); set it to the rows that fit through one layer at once"
        )


def check_num_threads(threads: int | None, name: str) -> None:
    """Raise ValueError, which calls the option `name`, unless the machine has so many cores, or `threads` is None."""
    if threads is None:
        return
    cores = os.cpu_count() or 1
    if not is_whole_number(threads) or threads < 1:
        raise ValueError(
            f"{name} must be a whole number of at least 1, or None for all cores but one (got {threads!r}); set it to "
            "the threads of an update in the background, or leave it out"
        )
    if threads > cores:  # torch itself does not survive very many
        raise ValueError(
            f"{name} must be at most the {cores} cores of this machine (got {threads}); leave it out for all cores "
            "but one"
        )


def check_seconds(seconds: float, name: str) -> None:
    """Raise ValueError, which calls the option `name`, unless this is a time from 1 second to a day."""
    is_number = isinstance(seconds, float) or is_whole_number(seconds)
    if not is_number or not 1 <= seconds <= 86400:
        raise ValueError(
            f"{name} must be a number of seconds from 1 to 86400 (got {seconds!r}); leave it out for 10 seconds"
        )


def parsed_devices(value: object, name: str) -> int | list[int] | None:
    """What an option says that names devices: how many, or their indexes; None for "auto".

    Raises:
        ValueError: if it is anything else; it calls the option `name`.
    """
    if value in ("auto", None):
        return None
    text = str(value).strip() if isinstance(value, str) or is_whole_number(value) else ""
    is_count = "," not in text
    words = text.removesuffix(",").split(",")  # "1," is an index alone
    indexes = [int(word) for word in words if word.strip().isdecimal()]
    if len(indexes) < len(words) or (is_count and indexes[0] < 1):
        raise ValueError(
            f"{name} must be 'auto', a number of devices, or their indexes (got {value!r}); write 2 for the first "
            "two, or '0,2' for these"
        )
    return indexes[0] if is_count else indexes


def parsed_chunk(value: object, name: str) -> str | int:
    """What an option says of chunks of logits: "auto", "off", or the tokens of one, which may be text.

    Raises:
        ValueError: if it is anything else; it calls the option `name`.
    """
    if isinstance(value, str) and value in ("auto", "off"):
        return value
    count = int(value) if isinstance(value, str) and value.isdecimal() else value
    if isinstance(count, int) and is_whole_number(count) and count >= 1:
        return count
    raise ValueError(
        f"{name} must be 'auto', 'off', or a whole number of at least 1, the tokens of a chunk (got {value!r}); use "
        "'off' to have the logits of all tokens made at once"
    )


def check_layer_count(count: int, name: str) -> None:
    """Raise ValueError, which calls the option `name`, unless `count` is a whole number of at least 0."""
    if not is_whole_number(count) or count < 0:
        raise ValueError(
            f"{name} must be a whole number of layers, at least 0 (got {count!r}); 0 leaves all layers as they are "
            "without it"
        )


def check_state_window(count: int, name: str) -> None:
    """Raise ValueError, which calls the option `name`, unless `count` is a whole number of at least 3."""
    if not is_whole_number(count) or count < 3:
        raise ValueError(
            f"{name} must be a whole number of layers, at least 3 (got {count!r}): one is used while another is "
            "read, and a third is written; use 4"
        )


def check_prefetch(prefetch: object, name: str) -> None:
    """Raise ValueError, which calls the option `name`, unless `prefetch` is a bool."""
    if not isinstance(prefetch, bool):
        raise ValueError(f"{name} must be True or False (got {prefetch!r}); False is for measuring what it is worth")


def check_gradient_slots(count: object, name: str) -> None:
    """Raise ValueError, which calls the option `name`, unless `count` is 1 or 2."""
    if not (is_whole_number(count) and count in (1, 2)):
        raise ValueError(f"{name} must be 1 or 2 (got {count!r}); use 1 where device memory is short")


def parse_size(text: object) -> int:
    """Bytes of a size such as "8GiB" (2**30 bytes each) or "8GB" (10**9); 0 if it is none."""
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    return 0 if match is None else int(float(match[1]) * _UNITS.get(match[2].upper(), 0))


def check_budget(budget: object, name: str) -> None:
    """Raise ValueError, which calls the option `name`, unless `budget` is a size, "auto", "off" or None."""
    if budget not in (None, "auto", "off") and not parse_size(budget):
        raise ValueError(
            f"{name} must be a size with its unit, such as '8GiB' or '7500MB', or 'auto' for 90 % of the device, or "
            f"'off' (got {budget!r}); give the memory that training may take"
        )


def check_layer_classes(classes: object, name: str) -> None:
    """Raise ValueError, which calls the option `name`, unless `classes` are names of classes."""
    if isinstance(classes, str):
        raise ValueError(
            f"{name} must be a tuple or list of class names (got the string {classes!r}); write ({classes!r},)"
        )
    if not isinstance(classes, tuple | list) or not classes or not all(isinstance(c, str) for c in classes):
        raise ValueError(
            f"{name} must be a tuple or list of class names (got {classes!r}); write ('MyBlock',), or leave it out to "
            "have the stacks found"
        )
