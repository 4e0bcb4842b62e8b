"""Links lead somewhere, all pages are in the site, and what they name, quote and count is that of the code."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
import tomllib
from collections.abc import Iterator

import accelerate
import torch
from accelerate.hooks import remove_hook_from_submodules
from packaging.requirements import Requirement

import hf_l2l
import hf_l2l.glue
import hf_l2l.testing
from cli_models import LLAMA, checks_nothing, ran, written
from documents import (
    DOCS,
    DOCUMENTS,
    NOTEBOOKS,
    PAGES,
    README,
    RESULTS,
    ROOT,
    blocks,
    links,
    prose,
    table_rows,
    text_of,
    why_it_leads_nowhere,
)
from hf_l2l import L2LConfig, L2LTrainingArguments
from hf_l2l.cli.main import COMMANDS
from hf_l2l.glue.options import ScriptArguments
from option_table import option_table, table_in
from training import SAVING, l2l_trainer, rows, tiny_bert

SITE = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
SOURCES = {file: file.read_text(encoding="utf-8") for file in (ROOT / "hf_l2l").rglob("*.py")}


def page(name: str) -> str:
    return text_of(DOCS / name)


# ---- links


def test_links_lead_somewhere():
    files = [*DOCUMENTS, *RESULTS, *NOTEBOOKS]
    nowhere = {(file.name, link): why_it_leads_nowhere(file, link) for file in files for link in links(file)}
    assert {link: why for link, why in nowhere.items() if why} == {}
    # A folder is no page of the site.
    inside = {(file, link.partition("#")[0]) for file in PAGES for link in links(file) if "://" not in link}
    assert [(file.name, link) for file, link in inside if link and (file.parent / link).is_dir()] == []


def test_links_that_lead_nowhere_are_found():
    for link, why in (
        ("memory.md#every-byte-by-name", None),
        ("#page-locking", "no heading 'page-locking'"),
        ("nowhere.md", "no such file"),
        ("../README.md#nowhere", "no heading 'nowhere'"),
        ("how_it_works.svg#nowhere", "an anchor in what is no document"),
        ("https://arxiv.org/abs/2002.05645", None),
        ("https://raw.githubusercontent.com/someone/hf_l2l/main/docs/how_it_works.svg", None),
        ("https://github.com/someone/hf_l2l/blob/main/docs/nowhere.md", "no such file"),
    ):
        assert why_it_leads_nowhere(DOCS / "speed.md", link) == why


def test_every_page_is_in_the_site_once_with_one_title():
    named = re.findall(r"^ *- .*: (\w+\.md)$", SITE, re.MULTILINE)
    assert sorted(named) == [file.name for file in PAGES]
    assert named[0] == "index.md"
    titles = {file.name: re.findall(r"^# ", prose(file), re.MULTILINE) for file in PAGES}
    assert {name: len(found) for name, found in titles.items() if len(found) != 1} == {}
    assert all(prose(file).startswith("# ") for file in PAGES)
    assert "font: false" in SITE and "http" not in SITE  # it fetches nothing


def test_the_packages_of_the_site_are_pinned():
    pins = dict(line.split("==") for line in (ROOT / "constraints-docs.txt").read_text().splitlines()[1:])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for needed in map(Requirement, project["optional-dependencies"]["docs"]):
        assert needed.specifier.contains(pins[needed.name])


# ---- names


def test_names_of_options_and_logs_are_in_the_code():
    """Those that begin with l2l_: arguments, keys of logs, files of checkpoints."""
    known = {name for text in SOURCES.values() for name in re.findall(r"\bl2l_\w+", text)}
    known |= {f"l2l_{field.name}" for field in dataclasses.fields(L2LConfig)} | {"l2l_bounary"}  # wrong on purpose
    for file in (README, *PAGES):
        text = re.sub(r"\bl2l_\w*\*", "", file.read_text(encoding="utf-8"))  # l2l_wait_*_s
        assert set(re.findall(r"(?<![\w/])l2l_\w+", text)) - known == set(), file


def test_the_table_of_options_is_what_their_fields_say():
    """Else run: PYTHONPATH=. python tests/helpers/option_table.py"""
    assert table_in(page("options.md")) == option_table()


def test_what_the_paper_table_names_is_there():
    table = table_rows(page("paper_to_code.md"), "| paper |")
    assert len(table) >= 9
    tests = {str(file.relative_to(ROOT / "tests")) for file in (ROOT / "tests").rglob("test_*.py")}
    known = {*L2LTrainingArguments.__dataclass_fields__, *ScriptArguments.__dataclass_fields__}
    for _, code, options, files in table:
        for module, name in re.findall(r"`(\w+\.\w+)\.(\w+)(?:\.\w+)?`", code):
            assert hasattr(importlib.import_module(f"hf_l2l.{module}"), name)
        assert set(re.findall(r"`(?:--)?(\w+)`", options)) <= known
        assert set(re.findall(r"`(\S+\.py)`", files)) <= tests


def test_every_file_is_in_the_tree():
    named = re.findall(r"^(\S+)", page("files.md").split("```")[1], re.MULTILINE)
    assert [name for name in named if not (ROOT / name).exists()] == []
    modules = {f"hf_l2l/{file.name}" for file in (ROOT / "hf_l2l").glob("*.py")} - {"hf_l2l/__init__.py"}
    folders = {f"hf_l2l/{file.parent.name}/" for file in (ROOT / "hf_l2l").glob("*/__init__.py")}
    assert modules | folders <= set(named)


def test_every_public_name_is_on_the_page_of_the_api_and_there():
    titles = re.findall(r"^### (.*)$", page("api.md"), re.MULTILINE)
    named = {name for title in titles for name in re.findall(r"`(\w+)`", title)}
    shown = re.findall(r"^<!-- api: (\S+)\.(\w+)((?: \([\w ]+\))*) -->$", page("api.md"), re.MULTILINE)
    assert len(shown) == page("api.md").count("<!--")
    for module in (hf_l2l, hf_l2l.testing, hf_l2l.glue):
        assert set(module.__all__) <= named
    public = {(module.__name__, name) for module in (hf_l2l, hf_l2l.testing) for name in module.__all__}
    assert public <= {(path, name) for path, name, _ in shown}
    for path, name, options in shown:
        module = importlib.import_module(path)
        if module is hf_l2l.glue:  # its names load packages that may not be installed
            assert name in module.__all__
            continue
        found = getattr(module, name)
        for each in re.sub(r"\(no signature\)|\(with members\)|[()]", "", options).split():
            source = SOURCES[ROOT / f"{found.__module__.replace('.', '/')}.py"]
            assert hasattr(found, each) or f"self.{each} =" in source, (name, each)


# ---- what hf-l2l prints


def test_the_fields_of_the_json_of_each_command_are_told(tmp_path, capsys, monkeypatch):
    checks_nothing(monkeypatch)
    run = str(tmp_path / "run")
    l2l_trainer(tmp_path / "run", **SAVING).train()
    capsys.readouterr()
    given = {"env": [], "plot": [run], "checkpoint": [run, str(tmp_path / "kept")]}
    for command in COMMANDS:
        found = ran(capsys, command, *given.get(command, [written(tmp_path, LLAMA)]), "--json").json
        section = page("cli.md").split(f"## `hf-l2l {command}")[1].split("\n## ")[0]
        columns = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
        assert sorted(name for column in columns for name in re.findall(r"`(\w+)`", column)) == sorted(found)
        if command in ("inspect", "env"):
            inside = found if command == "inspect" else [found[name] for name in ("page_locking", "host", "devices")]
            told = [name for name in names_inside(inside) if re.search(rf"[`\"]{name}[`\"]", page("cli.md"))]
            assert set(told) == names_inside(inside)


def names_inside(found: object) -> set[str]:
    """The names of fields in objects and lists of objects."""
    if isinstance(found, list):
        return {name for each in found for name in names_inside(each)}
    if not isinstance(found, dict):
        return set()
    return {name for key, value in found.items() for name in {key, *names_inside(value)}}


# ---- messages that are quoted

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
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and id(node) not in parts):
            yield " ".join((_text(node) or "").split())


def is_quoted_from(quote: str, known: list[str]) -> bool:
    """Whether one of the messages begins like the quote, in which "..." stands for values."""
    begins = re.compile(".*?".join(re.escape(part) for part in quote.split("...")))
    return any(begins.match(message) for message in known)


def test_the_messages_that_are_quoted_are_in_the_package_and_explained():
    text = page("troubleshooting.md")
    quotes = re.findall(r"^> (.*)$", text, re.MULTILINE)
    assert len(set(quotes)) == len(quotes) > 30
    assert [quote for quote in quotes if not re.fullmatch(r"`[^`]+`", quote)] == []
    known = [message for source in SOURCES.values() for message in messages_in(source)]
    assert [quote for quote in quotes if not is_quoted_from(quote.strip("`"), known)] == []
    assert [quote for quote in quotes if len(re.sub(r"\.\.\.|\W", "", quote)) < 12] == [], "it says too little"
    after = re.findall(r"^> .*\n\n(.*)$", text, re.MULTILINE)
    assert len(after) == len(quotes) and not any(line.startswith((">", "#")) for line in after)
    errors = ("MemoryError", "EngineFailedError", "NonFiniteError", "RankFailedError")
    assert [name for name in errors if f"`{name}`" not in text] == []


def test_quotes_are_compared():
    known = list(messages_in('f"batch {rows} x {n} moves " f"the weights"\nlog("step %d of %s")'))
    assert all(is_quoted_from(quote, known) for quote in ("batch ... moves", "step ... of"))
    assert not any(is_quoted_from(quote, known) for quote in ("batch 8 moves", "moves the", "batch ... move it"))


# ---- figures, which are those of results


def test_the_figures_of_the_readme_and_of_the_page_of_memory_are_those_of_the_results():
    result = text_of(ROOT / "benchmarks" / "results" / "model_sizes_computed_202611.md")
    lines = re.findall(r"^\| (.*), computed \| (.*) GiB \| (.*) GiB \| (.*) GiB \|$", text_of(README), re.MULTILINE)
    assert len(lines) == 3
    for model, *sizes in lines:  # plain with all rows at once, with one row at a time, and L2L
        line = rf"^\| {re.escape(model)} \([\d.]+ B\) \| {re.escape(' | '.join(sizes))} \|"
        assert re.search(line, result, re.MULTILINE), model
    of_sim = text_of(ROOT / "benchmarks" / "results" / "memory_sim_202611.md").splitlines()
    measured = {row.split(" | ")[0].strip("| "): row.split(" | ")[1:4] for row in of_sim if row.startswith("| ")}
    for first, last in (("6", "384"), ("8", "256")):
        for pair in zip(measured[first], measured[last], strict=True):
            before, after = (float(size.replace(",", "")) for size in pair)
            ends = f"{before:.1f} -> {after:,.1f}" if after < 100 else f"{before:.1f} -> {after:,.0f}"
            assert f"| {ends} |" in page("memory_needs.md")


def test_the_last_run_of_eps_cpu_is_told_as_it_was():
    text = text_of(ROOT / "benchmarks" / "README.md")
    [result] = re.findall(r"\(results/(eps_cpu_\w+\.md)\)", text)
    table = text_of(ROOT / "benchmarks" / "results" / result)
    ratios = re.findall(r"^\| [\w\s-]+ \| ([\d.]+) \|.*\| at most ([\d.]+) \|", table, re.MULTILINE)
    assert len(ratios) == 2 and all(float(ratio) <= float(target) for ratio, target in ratios)
    assert f"met both ({ratios[0][0]} and {ratios[1][0]})" in text.replace("\n", " ")


def test_the_readme_is_short_and_begins_with_a_model_that_does_not_fit():
    first = blocks(README, "python")[0].code
    assert "enable_simulated_accelerator(" in first
    assert len([node for node in ast.parse(first).body if not isinstance(node, ast.Import | ast.ImportFrom)]) <= 11
    assert len(text_of(README).split()) <= 1200
    assert re.findall(r"^[A-Z_]{4,}$", text_of(README), re.MULTILINE) == []  # nothing is left to fill in
    count = re.findall(r"^(\d+) families: ", page("compatibility.md"), re.MULTILINE)
    assert count * 2 == re.findall(r"(\d+) families of models", page("models_and_trainers.md"))


def test_cpu_offload_trains_nothing_and_says_nothing():
    """As the page of migration says."""
    model = tiny_bert(dropout=0.0, layers=2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    accelerate.cpu_offload(model, execution_device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    [row] = rows(1)
    model(input_ids=torch.tensor([row["input_ids"]]), labels=torch.tensor([row["labels"]])).loss.backward()
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert all(p.grad is None for p in model.parameters())
    optimizer.step()
    remove_hook_from_submodules(model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
