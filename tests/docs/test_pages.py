"""Links lead somewhere, all pages are in the site, and their tables and names are those of the code."""

from __future__ import annotations

import dataclasses
import importlib
import re
import tomllib
from functools import cache

import accelerate
import pytest
import torch
from accelerate.hooks import remove_hook_from_submodules
from packaging.requirements import Requirement

import hf_l2l
import hf_l2l.glue
import hf_l2l.testing
from documents import DOCS, DOCUMENTS, NOTEBOOKS, PAGES, RESULTS, ROOT, links, prose, table_rows, why_it_leads_nowhere
from hf_l2l import L2LArgumentsMixin, L2LConfig, L2LTrainingArguments
from hf_l2l.glue.options import ScriptArguments
from option_table import option_table, table_in
from training import rows, tiny_bert

SITE = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("file", [*DOCUMENTS, *RESULTS, *NOTEBOOKS], ids=lambda file: str(file.relative_to(ROOT)))
def test_links_lead_somewhere(file):
    found = {link: why_it_leads_nowhere(file, link) for link in links(file)}
    assert {link: why for link, why in found.items() if why} == {}


@pytest.mark.parametrize(
    ("link", "why"),
    [
        ("memory.md#every-byte-by-name", None),
        ("#page-locking", "no heading 'page-locking'"),
        ("nowhere.md", "no such file"),
        ("../README.md#nowhere", "no heading 'nowhere'"),
        ("../../outside", "no such file"),
        ("how_it_works.svg#nowhere", "an anchor in what is no document"),
        ("https://arxiv.org/abs/2002.05645", None),
        ("https://raw.githubusercontent.com/someone/hf_l2l/main/docs/how_it_works.svg", None),
        ("https://github.com/someone/hf_l2l/blob/main/docs/nowhere.md", "no such file"),
    ],
)
def test_links_that_lead_nowhere_are_found(link, why):
    assert why_it_leads_nowhere(DOCS / "speed.md", link) == why


def test_every_page_is_in_the_site_once():
    named = re.findall(r"^ *- .*: (\w+\.md)$", SITE, re.MULTILINE)
    assert sorted(named) == [file.name for file in PAGES]
    assert named[0] == "index.md"


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.name)
def test_a_page_has_one_title(file):
    assert prose(file).startswith("# ")
    assert len(re.findall(r"^# ", prose(file), re.MULTILINE)) == 1


def test_pages_link_to_files_and_not_to_folders():
    """A folder is no page of the site."""
    inside = {(file, link.partition("#")[0]) for file in PAGES for link in links(file) if "://" not in link}
    assert [(file.name, link) for file, link in inside if link and (file.parent / link).is_dir()] == []


def test_the_site_fetches_nothing():
    assert "font: false" in SITE and "http" not in SITE


def test_the_packages_of_the_site_are_pinned():
    pins = dict(line.split("==") for line in (ROOT / "constraints-docs.txt").read_text().splitlines()[1:])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for needed in map(Requirement, project["optional-dependencies"]["docs"]):
        assert needed.specifier.contains(pins[needed.name])


@pytest.mark.parametrize("file", [ROOT / "README.md", *PAGES], ids=lambda file: file.name)
def test_names_of_options_and_logs_are_in_the_code(file):
    """Those that begin with l2l_: arguments, keys of logs, files of checkpoints."""
    allowed = {"l2l_bounary"}  # typed wrong on purpose
    known = {*in_sources(), *(f"l2l_{field.name}" for field in dataclasses.fields(L2LConfig))}
    text = re.sub(r"\bl2l_\w*\*", "", file.read_text(encoding="utf-8"))  # l2l_wait_*_s
    assert sorted(set(re.findall(r"(?<![\w/])l2l_\w+", text)) - known - allowed) == []


@cache
def in_sources() -> set[str]:
    files = (ROOT / "hf_l2l").rglob("*.py")
    return {name for file in files for name in re.findall(r"\bl2l_\w+", file.read_text(encoding="utf-8"))}


# ---- tables


def test_the_table_of_options_is_what_their_fields_say():
    assert table_in(page("options.md")) == option_table()


def test_the_options_are_all_in_the_table():
    table = table_rows(page("options.md"), "| `L2LConfig` |")
    # What `eps.wrap` and `copy_as` take, and what the Trainer logs, needs no option elsewhere.
    names = (
        *("devices", "optimizer", "save_dtype", "async_save"),
        *("realtime_checkpoint", "realtime_every", "realtime_errors", "merge_accumulation"),
        *("noise_scale", "noise_scale_every", "log_times"),
    )
    of_the_trainer = [f"`l2l_{name}`" for name in names]
    assert [row[1] for row in table if not row[0]] == of_the_trainer
    in_both = [row for row in table if row[1] not in of_the_trainer]
    assert [row[0].strip("`") for row in in_both] == [field.name for field in dataclasses.fields(L2LConfig)]
    arguments = {row[1].strip("`") for row in table} - {"from the Trainer"}
    assert arguments == set(L2LArgumentsMixin.__annotations__)


def test_what_the_paper_table_names_is_there():
    table = table_rows(page("paper_to_code.md"), "| paper |")
    assert len(table) >= 9
    tests = {str(file.relative_to(ROOT / "tests")) for file in (ROOT / "tests").rglob("test_*.py")}
    for _, code, options, files in table:
        for module, name in re.findall(r"`(\w+\.\w+)\.(\w+)(?:\.\w+)?`", code):
            assert hasattr(importlib.import_module(f"hf_l2l.{module}"), name)
        for option in re.findall(r"`(?:--)?(\w+)`", options):
            known = {**L2LTrainingArguments.__dataclass_fields__, **ScriptArguments.__dataclass_fields__}
            assert option in known
        assert set(re.findall(r"`(\S+\.py)`", files)) <= tests


def test_every_file_is_in_the_tree():
    tree = page("files.md").split("```")[1]
    named = re.findall(r"^(\S+)", tree, re.MULTILINE)
    assert [name for name in named if not (ROOT / name).exists()] == []
    modules = {f"hf_l2l/{file.name}" for file in (ROOT / "hf_l2l").glob("*.py")} - {"hf_l2l/__init__.py"}
    folders = {f"hf_l2l/{file.parent.name}/" for file in (ROOT / "hf_l2l").glob("*/__init__.py")}
    assert modules | folders <= set(named)


def test_the_number_of_families():
    count = re.findall(r"^(\d+) families: ", page("compatibility.md"), re.MULTILINE)
    assert count * 2 == re.findall(r"(\d+) families of models", page("models_and_trainers.md"))


# ---- the API


@pytest.mark.parametrize("module", [hf_l2l, hf_l2l.testing, hf_l2l.glue], ids=lambda module: module.__name__)
def test_every_public_name_is_on_the_page(module):
    titles = re.findall(r"^### (.*)$", page("api.md"), re.MULTILINE)
    named = {name for title in titles for name in re.findall(r"`(\w+)`", title)}
    assert set(module.__all__) <= named


def test_the_names_on_the_page_are_there():
    shown = re.findall(r"^<!-- api: (\S+)\.(\w+)((?: \([\w ]+\))*) -->$", page("api.md"), re.MULTILINE)
    assert len(shown) == page("api.md").count("<!--")
    for path, name, options in shown:
        module = importlib.import_module(path)
        if module is hf_l2l.glue:  # its names load packages that may not be installed
            assert name in module.__all__
            continue
        members = re.sub(r"\(no signature\)|\(with members\)|[()]", "", options).split()
        found = getattr(module, name)
        assert [
            each for each in members if not hasattr(found, each) and f"self.{each} =" not in source_of(found)
        ] == []
    names = {f"{path}.{name}" for path, name, _ in shown}
    assert {f"{module.__name__}.{name}" for module in (hf_l2l, hf_l2l.testing) for name in module.__all__} <= names


def source_of(found: type) -> str:
    return (ROOT / f"{found.__module__.replace('.', '/')}.py").read_text(encoding="utf-8")


# ---- what the page of migration says of others


def test_cpu_offload_trains_nothing_and_says_nothing():
    model = tiny_bert(dropout=0.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    accelerate.cpu_offload(model, execution_device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    [row, *_] = rows(1)
    model(input_ids=torch.tensor([row["input_ids"]]), labels=torch.tensor([row["labels"]])).loss.backward()
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert all(p.grad is None for p in model.parameters())
    optimizer.step()
    remove_hook_from_submodules(model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
