"""Links of the documents lead somewhere, and what they show runs: Python, and commands as far as their parsers.

A block of Python on the simulated accelerator is run by tests/sim/test_programs.py, one with TRL by
tests/clients/test_examples.py.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import documents
from documented_commands import YOURS, check, commands
from documents import DOCS, DOCUMENTS, PYTHON, README, ROOT, SHORTER, blocks, is_simulated, run, text_of
from glue_script import needs_datasets, needs_demo_model
from option_table import option_table, table_in
from tiers import nightly
from training import l2l_trainer, rows

MARK = "# Not run by the tests: "
"""The first line of a block that they cannot run begins so, and the reader sees why."""
REASONS = ("it needs a GPU", "it needs the Hub", "it needs several hosts")

MARKED = [block for block in PYTHON if block.code.startswith(MARK)]
RUN = [block for block in PYTHON if block not in MARKED and "from trl import" not in block.code]
WHOLE = [block for block in RUN if is_simulated(block) or any(setting in block.code for setting in SHORTER)]


def test_links_lead_somewhere_and_pages_and_tests_that_are_named_are_there():
    files = [*DOCUMENTS, *documents.RESULTS, *documents.NOTEBOOKS]
    why_not = documents.why_it_leads_nowhere
    nowhere = {(file.name, link): why_not(file, link) for file in files for link in documents.links(file)}
    assert {link: why for link, why in nowhere.items() if why} == {}
    for link, why in (
        ("memory.md#every-byte-by-name", None),
        ("#page-locking", "no heading 'page-locking'"),
        ("nowhere.md", "no such file"),
        ("https://arxiv.org/abs/2002.05645", None),
        ("https://github.com/someone/hf_l2l/blob/main/docs/nowhere.md", "no such file"),
    ):
        assert why_not(DOCS / "speed.md", link) == why
    named = re.findall(r"^ *- .*: (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(named) == [file.name for file in documents.PAGES], "of the site"
    text = "".join(map(text_of, [*DOCUMENTS, *documents.RESULTS]))
    tests = re.findall(r"`(?:tests/)?((?!tests/)\w+/test_\w+\.py)`", text)
    assert [name for name in tests if not (ROOT / "tests" / name).is_file()] == []


def test_the_table_of_options_is_what_their_fields_say():
    """Else run: PYTHONPATH=. python tests/helpers/option_table.py"""
    assert table_in(text_of(DOCS / "options.md")) == option_table()


@needs_datasets
@needs_demo_model
@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("datasets_cache")
@pytest.mark.parametrize("block", [block for block in RUN if not is_simulated(block)], ids=lambda block: block.name)
def test_python_runs(block, tmp_path, monkeypatch, capsys):
    """With few rows. What a block does not make is the reader's: a model, rows, a trainer."""
    monkeypatch.chdir(tmp_path)
    trainer = l2l_trainer(tmp_path / "yours", max_steps=2, l2l_noise_scale=True, ubatch_size=2)
    run(block, {"trainer": trainer, "model": trainer.model, "args": trainer.args, "data": rows(8)})
    assert ("evaluate()" in block.code) == ("'eval_loss'" in capsys.readouterr().out)


@nightly
@needs_datasets
@needs_demo_model
@pytest.mark.parametrize("block", WHOLE, ids=lambda block: block.name)
def test_all_rows_run(block, tmp_path):
    """Each block that is shortened elsewhere, or simulates a device, as it is, in a process of its own."""
    env = {**os.environ, "HF_DATASETS_CACHE": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    call = [sys.executable, "-c", block.code]
    ran = subprocess.run(call, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert ("evaluate()" in block.code) == ("'eval_loss'" in ran.stdout)
    if block.file == README:
        first, *_, last = map(float, re.findall(r"'loss': '([\d.]+)'", ran.stdout))
        assert last < first / 2  # it learns


def test_few_blocks_are_not_run_or_shortened_and_say_why():
    assert len(MARKED) <= 4
    assert [block.name for block in MARKED if not block.code.removeprefix(MARK).startswith(REASONS)] == []
    assert all(any(setting in block.code for block in PYTHON) for setting in SHORTER)


VALUE = "\0"
"""What stands in a message for a value."""


def said_in(file: Path) -> Iterator[str]:
    """All texts of a module, joined where they are written on several lines, with `VALUE` for what is put in."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    parts = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else VALUE for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts:
            yield re.sub(r"%(?:\.\d+)?[sdrfg]", VALUE, node.value)


def test_troubleshooting_quotes_the_beginnings_of_messages():
    quotes = re.findall(r"^> `(.+)`$", text_of(DOCS / "troubleshooting.md"), re.MULTILINE)
    said = [" ".join(text.split()) for file in (ROOT / "hf_l2l").rglob("*.py") for text in said_in(file)]
    begins = {quote: re.compile(".*?".join(map(re.escape, quote.split("...")))) for quote in quotes}
    assert len(quotes) > 30
    assert [quote for quote, begin in begins.items() if not any(map(begin.match, said))] == []


def test_commands_are_understood(tmp_path, monkeypatch):
    """Those in blocks of bash; and the targets and scripts of those within sentences."""
    monkeypatch.chdir(tmp_path)
    has_datasets = importlib.util.find_spec("datasets") is not None
    for file in DOCUMENTS:
        for block in blocks(file, "bash"):
            if "run_glue_l2l.py" in block.code and not has_datasets:
                continue
            for words in commands(block.code):
                for word in words:
                    if word.endswith(".csv"):
                        (tmp_path / word).write_text("a file of the reader's", encoding="utf-8")
                check(words)
        for code in re.findall(r"`([^`\n]+)`", text_of(file)):
            words = re.sub(r"^(?:[A-Z_]+=\S+ )+", "", code).split()
            if words[0] == "make" and len(words) > 1:
                check(words[:2])
            elif re.fullmatch(r"(\.venv/bin/)?python3?", words[0]) and len(words) > 1 and words[1].endswith(".py"):
                assert words[1] in YOURS or (ROOT / words[1]).is_file(), code
    for command in ("hf-l2l plan X160 --hardwar h200", "make tset", "python benchmarks/memory.py --quik", "rm -rf ."):
        with pytest.raises((AssertionError, SystemExit)):
            check(command.split())
