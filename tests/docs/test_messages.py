"""docs/troubleshooting.md quotes messages that the package has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from documents import DOCS, ROOT

PAGE = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
QUOTES = re.findall(r"^> (.*)$", PAGE, re.MULTILINE)
VALUE = "\0"
"""What stands in a message for a value that is put in."""


def _text(node: ast.expr) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%(?:\.\d+)?[sdrfg]", VALUE, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(VALUE if isinstance(part, ast.FormattedValue) else _text(part) or "" for part in node.values)
    return None


def messages_in(source: str) -> Iterator[str]:
    """All texts of a module, joined where they are written on several lines."""
    tree = ast.parse(source)
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    wholes = (node for node in ast.walk(tree) if isinstance(node, ast.expr))
    for node in wholes:
        text = _text(node) if isinstance(node, ast.JoinedStr) or id(node) not in parts else None
        if text:
            yield " ".join(text.split())


@cache
def messages() -> list[str]:
    sources = sorted((ROOT / "hf_l2l").rglob("*.py"))
    return [message for file in sources for message in messages_in(file.read_text(encoding="utf-8"))]


def is_quoted_from(quote: str, known: list[str]) -> bool:
    """Whether one of the messages begins like the quote, in which "..." stands for values."""
    begins = re.compile(".*?".join(re.escape(part) for part in quote.split("...")))
    return any(begins.match(message) for message in known)


def test_there_are_quotes():
    assert len(QUOTES) > 30
    assert [quote for quote in QUOTES if not re.fullmatch(r"`[^`]+`", quote)] == []
    assert [quote for quote in QUOTES if len(re.sub(r"\.\.\.|\W", "", quote)) < 12] == [], "it says too little"
    assert len(set(QUOTES)) == len(QUOTES)


@pytest.mark.parametrize("quote", QUOTES)
def test_the_message_is_in_the_package(quote):
    assert is_quoted_from(quote.strip("`"), messages())


@pytest.mark.parametrize(
    ("quote", "is_there"),
    [
        ("batch ... moves", True),
        ("batch 8 moves", False),
        ("moves the", False),
        ("batch ... move it", False),
        ("step ... of", True),
    ],
)
def test_quotes_are_compared(quote, is_there):
    source = 'f"batch {rows} x {n} moves "\nf"the weights"\nlog("step %d of %s")'
    source = source.replace('"\nf"', '" f"')
    assert is_quoted_from(quote, list(messages_in(source))) == is_there


@pytest.mark.parametrize("name", ["MemoryError", "EngineFailedError", "NonFiniteError", "RankFailedError"])
def test_every_error_of_its_own_has_a_place(name):
    assert f"`{name}`" in PAGE


def test_each_quote_has_an_explanation():
    after = re.findall(r"^> .*\n\n(.*)$", PAGE, re.MULTILINE)
    assert len(after) == len(QUOTES)
    assert [line for line in after if line.startswith((">", "#"))] == []
