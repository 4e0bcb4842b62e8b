"""What the user types to have other options: errors end with it."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hf_l2l.option_names import option

_OF_THE_TRAINER = "--output_dir"
"""The flag that tells a script whose options come from the command line."""


def with_options(changes: Mapping[str, Any]) -> str:
    """What to type for these options of `L2LConfig` (None: leave it out): the command line of this program with them
    changed, if it takes the flags of the Trainer; otherwise the options as they stand in a program."""
    named = {option(name): value for name, value in changes.items()}
    script, *words = sys.argv or [""]
    if script.endswith(".py") and any(word.partition("=")[0] == _OF_THE_TRAINER for word in words):
        flags = [f"--{name}={value}" for name, value in named.items() if value is not None]
        return shlex.join([python(), os.path.relpath(script), *_without(words, named), *flags])
    given = ", ".join(f"{name}={value!r}" for name, value in named.items() if value is not None)
    left_out = ", ".join(name for name, value in named.items() if value is None)
    return ", and ".join(part for part in (given, left_out and f"without {left_out}") if part)


def python() -> str:
    """What the user types for the interpreter that runs this: `python` where the shell finds it, else its path."""
    found = shutil.which("python")
    if found is not None and os.path.abspath(found) == os.path.abspath(sys.executable):
        return "python"
    path = os.path.relpath(sys.executable)
    return sys.executable if path.startswith(os.pardir) else path


def _without(words: Sequence[str], names: Mapping[str, Any]) -> list[str]:
    """The words of a command line without the flags `names` and their values."""
    kept: list[str] = []
    is_value = False
    for word in words:
        if word.startswith("--"):
            name, has_value, _ = word[2:].partition("=")
            is_left_out = name.replace("-", "_") in names
            is_value = is_left_out and not has_value
            if not is_left_out:
                kept.append(word)
        elif is_value:
            continue
        else:
            kept.append(word)
    return kept
