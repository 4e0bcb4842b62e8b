"""The documents of the project: their blocks of code, links and anchors, as GitHub reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES, ROOT / "benchmarks" / "README.md"]
"""All that is written for users and contributors, but for the notebooks."""
README = ROOT / "README.md"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.md"))

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]+`")
_LINK = re.compile(r"\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)|<(?:img|a)\b[^>]*?\b(?:src|href)=\"([^\"]+)\"")
_HEADING = re.compile(r"^#{1,6} (.*)$", re.MULTILINE)
_HERE = re.compile(
    r"https://(?:github\.com/[^/]+/hf_l2l/(?:blob|raw|tree)|raw\.githubusercontent\.com/[^/]+/hf_l2l)/[^/]+/"
)
"""What an address of this project on GitHub begins with, as that of a picture in the README of a package."""


@dataclass(frozen=True)
class Block:
    """A block of code in a document."""

    file: Path
    number: int
    """Among the blocks of its language in the document, from 0."""
    code: str

    @property
    def name(self) -> str:
        """For the names of tests."""
        return f"{self.file.relative_to(ROOT)}-{self.number}"


@cache
def text_of(file: Path) -> str:
    """The text of a document; of a notebook that of its cells of text."""
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".ipynb":
        return text
    return "\n\n".join(
        "".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"
    )


def blocks(file: Path, language: str) -> list[Block]:
    """The blocks of code of a language."""
    found = [code for name, code in _BLOCK.findall(text_of(file)) if name == language]
    return [Block(file, number, code) for number, code in enumerate(found)]


PYTHON = [block for file in DOCUMENTS for block in blocks(file, "python")]
SHORTER = {
    "num_train_epochs=2, per_device_train_batch_size=32, learning_rate=2e-4, logging_steps=5": (
        "max_steps=1, per_device_train_batch_size=8, logging_steps=1"
    ),
    'eval_dataset=data["validation"]': 'eval_dataset=data["validation"].select(range(8))',
}
"""What is put in the place of a setting, so that a block runs in seconds."""


def is_simulated(block: Block) -> bool:
    """Whether it runs on the simulated accelerator, which a process keeps."""
    return "enable_simulated_accelerator(" in block.code


def run(block: Block, names: dict[str, Any]) -> dict[str, Any]:
    """Run a block of Python in this process, shortened; names are those that it does not make. Returns all names."""
    code = block.code
    for setting, other in SHORTER.items():
        code = code.replace(setting, other)
    known = {"__name__": "__main__", **(names if block.file.parent == DOCS else {})}
    exec(compile(code, block.name, "exec"), known)
    return known


def prose(file: Path) -> str:
    """The text without blocks of code."""
    return _BLOCK.sub("", text_of(file))


def links(file: Path) -> Iterator[str]:
    """Where links and pictures lead."""
    for pair in _LINK.findall(_CODE.sub("", prose(file))):
        yield pair[0] or pair[1]


def anchors(file: Path) -> set[str]:
    """What may follow a "#" in links to a document: GitHub's names of its headings."""
    found: set[str] = set()
    for heading in _HEADING.findall(prose(file)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        name = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        count = 0
        while (numbered := f"{name}-{count}" if count else name) in found:
            count += 1
        found.add(numbered)
    return found


def why_it_leads_nowhere(file: Path, link: str) -> str | None:
    """What is wrong with a link of a document; None if nothing is, or it leads to another site."""
    address, _, anchor = _HERE.sub("", link).partition("#")
    if re.match(r"https?://|mailto:", address):
        return None
    target = file if not address else (ROOT if _HERE.match(link) else file.parent) / address
    if not target.exists():
        return "no such file"
    if not target.resolve().is_relative_to(ROOT):
        return "not in the project"
    if anchor and target.suffix != ".md":
        return "an anchor in what is no document"
    return f"no heading {anchor!r}" if anchor and anchor not in anchors(target) else None
