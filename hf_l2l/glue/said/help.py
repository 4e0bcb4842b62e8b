"""The text of `run_glue_l2l.py --help`: examples, then the options in groups, L2L's own first."""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

MOST_COLUMNS = 100
_LONG_LIST = 40
"""Characters: longer lists of choices are told in the description."""

_SWITCHES = (
    "A switch takes nothing, true or false: --do_train is --do_train true. One that is on by default is turned off "
    "with --no_NAME, such as --no_pad_to_max_length. Names may be written with dashes: --ubatch-size."
)


def help_text(description: str, groups: Mapping[str, Sequence[argparse.Action]], columns: int | None = None) -> str:
    """Usage and examples, and each group's options with their descriptions and defaults.

    Args:
        description: what the program does, with examples; shown as it is.
        groups: title -> options. Those that turn another one off are left out.
        columns: of the terminal; at most `MOST_COLUMNS` are used.
    """
    width = max(40, min(MOST_COLUMNS, columns or shutil.get_terminal_size().columns))
    names = [action.dest for actions in groups.values() for action in actions]
    parts = ["usage: run_glue_l2l.py [OPTIONS.json] [--OPTION VALUE ...]", description.strip()]
    parts.append(textwrap.fill(_SWITCHES, width))
    for title, actions in groups.items():
        parts.append(title + ":")
        parts.extend(_entries(actions, names, width))
    return "\n\n".join(parts) + "\n"


def _entries(actions: Sequence[argparse.Action], names: Sequence[str], width: int) -> Iterator[str]:
    for action in actions:
        if action.option_strings[0].startswith("--no_") and action.const is False:
            continue
        text = _described(action, names)
        yield "\n".join(
            [
                f"  {action.option_strings[-1 if action.dest == 'help' else 0]} {_value(action)}".rstrip(),
                textwrap.fill(text, width, initial_indent=" " * 8, subsequent_indent=" " * 8),
            ]
        )


def _value(action: argparse.Action) -> str:
    """What stands for the value of an option."""
    if action.nargs == 0:
        return ""
    listed = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""
    kind = getattr(action.type, "__name__", "")
    of_text = "FILE" if action.dest.endswith("_file") else "FOLDER" if action.dest.endswith("_dir") else "VALUE"
    word = {"int": "N", "float": "X", "string_to_bool": "true|false"}.get(kind, of_text)
    word = listed if 0 < len(listed) <= _LONG_LIST else word
    return {"?": f"[{word}]", "+": f"{word} ..."}.get(str(action.nargs), word)


def _described(action: argparse.Action, names: Sequence[str]) -> str:
    text = " ".join((action.help or "").replace("%%", "%").split())
    text = re.sub(r'`(\w+)(?:="?(\w+)"?)?`', lambda found: _flag(found, names), text)
    text = text if not text or text.endswith((".", "?", "!")) else f"{text}."
    if action.choices and len(",".join(map(str, action.choices))) > _LONG_LIST:
        text += f" One of {', '.join(map(str, action.choices))}."
    default = _plain(action.default)
    if action.required:
        text += " Required."
    elif default not in (None, False, "", argparse.SUPPRESS) and default != []:
        text += f" Default: {default}."
    return text.strip()


def _flag(found: re.Match[str], names: Sequence[str]) -> str:
    """An option in backticks, with or without a value, as it is typed."""
    name, value = found.groups()
    return found[0] if name not in names else f"--{name}" if value is None else f"--{name} {value}"


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value
