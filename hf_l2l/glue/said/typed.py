"""Options as they were typed: errors name them as fields of dataclasses, a command line has flags."""

from __future__ import annotations

import re
from collections.abc import Collection

_VALUE = r"""'[^']*'|"[^"]*"|\[[^\]]*\]|[^\s,;:()]*[^\s,;:().]"""
"""What stands after "name=": text in quotes, a list, or a word."""

_NOT_WITHIN = r"(?<![\w./'\"`=-])"
"""A name is not a part of another word, of a path, or of what was given, which stands in quotes."""

_BEFORE, _AFTER = r"(?:leave out|drop|set|use|without|give) ", r" (?:must|cannot|is|are|needs|has)\b"
"""What stands before or after the names of options that are ordinary words, too: stash, optim, seed."""


def as_flags(text: str, names: Collection[str]) -> str:
    """A message in which these options are called as on the command line: "fp16=True" is "--fp16 True".

    Names without an underscore are ordinary words, too: they are options where they have a value, begin the message,
    or are said to be left out, set or used.
    """
    any_name = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    long_name = "|".join(sorted((re.escape(name) for name in names if "_" in name), key=len, reverse=True))
    text = re.sub(rf"{_NOT_WITHIN}({any_name})=({_VALUE})", _flag_with_value, text)
    text = re.sub(r"\bwith no --", "without --", text)
    text = re.sub(rf"^({any_name})(?={_AFTER})", r"--\1", text)
    text = re.sub(rf"\b({_BEFORE})({any_name})(?=$|[,;:)]| and | or )", r"\1--\2", text)
    return re.sub(rf"{_NOT_WITHIN}({long_name})(?![\w/'\"=(-]|\.\w)", r"--\1", text) if long_name else text


def _flag_with_value(found: re.Match[str]) -> str:
    name, value = found.groups()
    if value == "None":
        return f"no --{name}"
    bare = value.strip("'\"")
    is_first_of_several = re.match(r"(,| or) '", found.string[found.end() :]) is not None
    needs_quotes = is_first_of_several or re.fullmatch(r"[\w.,/-]+", bare) is None
    return f"--{name} {value if needs_quotes else bare}"
