"""The commands of blocks of bash in the documents, read by what would read them: parsers, the Makefile, scripts."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser

from documents import ROOT
from hf_l2l.cli.main import COMMANDS, make_parser
from hf_l2l.verify import __main__ as verify_program

YOURS = {"script.py", "train.py"}
"""Scripts of the reader."""
_MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def commands(code: str) -> Iterator[list[str]]:
    """The words of each command of a block."""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


def check(words: list[str]) -> None:
    """Raise, or end as a parser does, for a command that is not understood."""
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    if ">" in words:
        words = words[: words.index(">")]
    program, given = words[0], words[1:]
    if program in ("git", "cd"):
        assert given[0] == "clone" or program == "cd"
    elif program in _CHECKS:
        _CHECKS[program](given)
    elif program.rpartition("/")[2] in ("python", "python3"):
        _check_python(given)
    else:
        raise AssertionError(f"no parser is known for {program!r}")


def _check_hf_l2l(given: list[str]) -> None:
    make_parser([import_module(f"hf_l2l.cli.{name}").COMMAND for name in COMMANDS], COMMANDS).parse_args(given)


def _check_make(given: list[str]) -> None:
    targets = re.findall(r"^([\w-]+):", _MAKEFILE, re.MULTILINE)
    variables = re.findall(r"^(\w+) \?=", _MAKEFILE, re.MULTILINE)
    unknown = [word for word in given if word.partition("=")[0] not in (variables if "=" in word else targets)]
    assert unknown == [], unknown


def _check_pip(given: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert given[0] == "install"
    for word in given[1:]:
        path, _, asked = word.rstrip("]").partition("[")
        assert path in (".", "hf_l2l") or re.fullmatch(r"-\w|--[\w-]+", word) or Path(ROOT / word).is_file(), word
        assert not asked or set(asked.split(",")) <= set(extras), word


def _check_launcher(given: list[str]) -> None:
    """Of torchrun; of `accelerate launch`."""
    is_accelerate = given[0] == "launch"
    parser = launch_command_parser() if is_accelerate else get_args_parser()
    assert parser.parse_args(given[is_accelerate:]).training_script in YOURS


def _check_python(given: list[str]) -> None:
    if given[:2] == ["-m", "hf_l2l.verify"]:
        verify_program.make_parser().parse_args(given[2:])
    elif given[:2] == ["-m", "hf_l2l"]:
        _check_hf_l2l(given[2:])
    elif given[0] == "run_glue_l2l.py":
        import run_glue_l2l  # it needs more than the core

        run_glue_l2l.parse_options(given[1:])
    elif given[0] not in YOURS:
        assert (ROOT / given[0]).is_file(), given[0]
        unknown = {word.partition("=")[0] for word in given[1:] if word.startswith("--")} - _flags(ROOT / given[0])
        assert unknown == set(), unknown


def _flags(script: Path) -> set[str]:
    """The flags that are named in a script, or in another one beside it that it imports."""
    tree = ast.parse(script.read_text(encoding="utf-8"))
    words = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    joined = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    if any(re.match(r"f['\"]--{", text) for text in joined):
        words += [f"--{word}" for word in words]  # a loop adds them
    found = {word for word in words if re.fullmatch(r"--[\w-]+", word)}
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    named = {name for node in imports for name in (str(node.module).rpartition(".")[2], *(a.name for a in node.names))}
    for file in (script.parent / f"{name}.py" for name in named):
        found |= _flags(file) if file.is_file() else set()
    return found


_CHECKS = {"hf-l2l": _check_hf_l2l, "make": _check_make, "pip": _check_pip}
_CHECKS |= {"torchrun": _check_launcher, "accelerate": _check_launcher}
