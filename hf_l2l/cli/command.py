"""What a command of `hf-l2l` is, and what commands share."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

GOOD, MODEL_FAILS, BAD_INPUT = 0, 1, 2
"""Exit statuses."""


@dataclass(frozen=True)
class Command:
    """One command. Its module imports what it needs inside `run`, so that others do not wait for it."""

    name: str
    help: str
    """What it does, in one sentence."""
    example: str
    """A call of it, without the name of the program."""
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    """Runs it; returns the exit status. A ValueError or ImportError is one sentence for the user."""


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add MODEL and the flags with which a model is made from its config."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a folder with a config.json, the path of one, or a name on the Hub (offline: one that its cache has)",
    )
    parser.add_argument(
        "--class",
        dest="model_class",
        metavar="CLASS",
        help="the class of the model in transformers, such as AutoModelForSequenceClassification; without it, the "
        "architecture that the config names",
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="let code that comes with the model run; look at it before"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the flag `--json`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object (docs/cli.md has its fields)")


def flag(option: str) -> str:
    """What the command line calls an option."""
    return f"--{option.replace('_', '-')}"


def print_json(found: Mapping[str, Any]) -> None:
    """Print one JSON object."""
    print(json.dumps(found, indent=2))


def quiet() -> None:
    """Let this package and transformers log errors only, for this process."""
    from transformers.utils import logging as of_transformers

    logging.getLogger("hf_l2l").setLevel(logging.ERROR)
    of_transformers.set_verbosity_error()
    of_transformers.disable_progress_bar()


def count_text(number: float, billions: str = "B") -> str:
    """A number as text, such as "22.7 M"; `billions` stands for 1e9: "B" for parameters, "G" in a rate."""
    for unit, size in (("T", 1e12), (billions, 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:g}"


def digits_text(number: float) -> str:
    """A number as text with three digits, or with all those before its point."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"
