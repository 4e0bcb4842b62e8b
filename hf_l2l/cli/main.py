"""The entry point of `hf-l2l`, and of `python -m hf_l2l`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Container, Sequence
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
        options = _parser(commands, set(given)).parse_args(given)
    except SystemExit as end:  # of --help, --version, or flags that argparse refuses
        return end.code if isinstance(end.code, int) else BAD_INPUT
    command: Command = options.command
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


def _parser(commands: Sequence[Command], given: Container[str]) -> argparse.ArgumentParser:
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
        its.set_defaults(command=command, flags={word[2:].replace("-", "_") for word in words})
    return parser
