"""The entry point of `hf-l2l`, and of `python -m hf_l2l`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Container, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import NoReturn

import hf_l2l
from hf_l2l.cli.command import BAD_INPUT, GOOD, Command
from hf_l2l.glue.said.typed import as_flags

COMMANDS = ("estimate", "inspect", "env", "verify", "checkpoint", "plan", "plot")
"""The modules of this folder that are commands; each has a `COMMAND`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0 if all is good, 1 if the model fails, 2 for bad input.

    Args:
        arguments: those of the command line; None for the process's own.
    """
    try:
        given = sys.argv[1:] if arguments is None else list(arguments)
        commands = [import_module(f"hf_l2l.cli.{name}").COMMAND for name in COMMANDS]
        if given and not given[0].startswith("-") and given[0] not in COMMANDS:
            near = get_close_matches(given[0], COMMANDS, n=1)
            remedy = f"did you mean {near[0]}?" if near else "hf-l2l --help says what each of them does"
            print(f"hf-l2l: a command must be {_listed(COMMANDS)} (got {given[0]!r}); {remedy}", file=sys.stderr)
            return BAD_INPUT
        options, unknown = make_parser(commands, set(given)).parse_known_args(given)
    except SystemExit as end:  # of --help, --version, or flags that argparse refuses
        return end.code if isinstance(end.code, int) else BAD_INPUT
    command: Command = options.command
    if unknown:
        words = (word.lstrip("-").partition("=")[0].replace("-", "_") for word in unknown if word.startswith("--"))
        near = [each for word in words for each in get_close_matches(word, options.words, n=1)]
        meant = f"did you mean {options.words[near[0]]}? " if near else ""
        told = f"unrecognized arguments: {' '.join(unknown)}; {meant}see hf-l2l {command.name} --help"
        print(f"hf-l2l {command.name}: {told}", file=sys.stderr)
        return BAD_INPUT
    try:
        return command.run(options)
    except BrokenPipeError:  # of `| head`, which has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the flush at exit would raise it again
        return GOOD
    except (ValueError, ImportError, OSError) as error:
        told = as_flags(" ".join(str(error).split()), options.flags)
        print(f"hf-l2l {command.name}: {told}", file=sys.stderr)
        return BAD_INPUT


class _Parser(argparse.ArgumentParser):
    """Refuses flags in one sentence, without a list of all."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message}; see {self.prog} --help\n")


def make_parser(commands: Sequence[Command], given: Container[str]) -> argparse.ArgumentParser:
    """The parser; only commands that are `given` have their flags, which may take imports."""
    parser = _Parser(
        prog="hf-l2l",
        description="Look at a model and at this machine before training layer to layer.",
        epilog="examples:\n" + "\n".join(f"  hf-l2l {command.example}" for command in commands),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hf_l2l {hf_l2l.__version__}")
    parsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in commands:
        its = parsers.add_parser(
            command.name,
            help=command.help,
            description=f"{command.help[0].upper()}{command.help[1:]}.",
            epilog=f"example:\n  hf-l2l {command.example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if command.name in given:
            command.add_flags(its)
        words = [word for action in its._actions for word in action.option_strings if word.startswith("--")]
        named = {word[2:].replace("-", "_"): word for word in words}
        its.set_defaults(command=command, flags=set(named), words=named)
    return parser


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
