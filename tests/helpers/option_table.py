"""The table of docs/options.md, made of the fields of `L2LConfig` and `L2LTrainingArguments`.

    PYTHONPATH=. python tests/helpers/option_table.py

writes it into the page.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from hf_l2l import L2LConfig
from hf_l2l.hf.training_args import OWN_OPTIONS
from hf_l2l.option_names import argument

PAGE = Path(__file__).parents[2] / "docs" / "options.md"
HEAD = "| `L2LConfig` | `L2LTrainingArguments` and flag | default | meaning |"
NOT_TYPED = "device"
"""The option that the Trainer gives."""


def rows() -> Iterator[tuple[str, str, Any, str]]:
    """For each option: its name in `L2LConfig`, its name in the arguments, its default, its description."""
    typed = set()
    for option in fields(L2LConfig):
        flag = "from the Trainer" if option.name == NOT_TYPED else f"`{argument(option.name)}`"
        typed.add(flag.strip("`"))
        default, here = option.default, OWN_OPTIONS.get(argument(option.name), option).default
        if default != here:
            default = f'{default}, or "{here}" with the Trainer'
        yield f"`{option.name}`", flag, default, option.metadata["help"]
    for option in OWN_OPTIONS.values():
        if option.name not in typed:
            yield "", f"`{option.name}`", option.default, option.metadata["help"]


def option_table() -> str:
    """The lines of the table."""
    lines = [HEAD, "|---|---|---|---|"]
    for name, flag, default, text in rows():
        shown = f"{default:g}" if type(default) is float else default
        if isinstance(default, str) and " " not in default:
            shown = f'"{default}"'
        lines.append(f"| {name} | {flag} | {shown} | {text} |".replace("|  |", "| |"))
    return "\n".join(lines)


def table_in(text: str) -> str:
    """The table as it stands in `text`: from its head to the next empty line."""
    start = text.index(HEAD)
    return text[start : text.index("\n\n", start)]


if __name__ == "__main__":
    before = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(before.replace(table_in(before), option_table()), encoding="utf-8")
