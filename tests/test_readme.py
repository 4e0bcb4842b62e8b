"""What the README shows runs, and what it names is there."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import accelerate
import pytest
import torch
from accelerate.hooks import remove_hook_from_submodules

import run_glue_l2l
from glue_script import needs_datasets, needs_demo_model
from hf_l2l import L2LArgumentsMixin, L2LConfig, L2LTrainingArguments
from hf_l2l.glue.options import ScriptArguments
from option_table import option_table, table_in
from training import rows, tiny_bert

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def table_rows(head: str) -> list[list[str]]:
    """The rows of the table whose head line begins with `head`, as cells."""
    lines = README[README.index(head) :].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in iter(lambda: lines.pop(0), "")]


APART = "enable_simulated_accelerator("
"""What is called in a block that must have a process of its own."""


@needs_datasets
@needs_demo_model
@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("datasets_cache")
@pytest.mark.parametrize("number", [n for n, block in enumerate(blocks("python")) if APART not in block])
def test_python_runs_for_a_step(number, tmp_path, monkeypatch, capsys):
    """In this process, and with few rows."""
    monkeypatch.chdir(tmp_path)
    block = blocks("python")[number]
    for setting, other in {"num_train_epochs=1": "max_steps=1", "=32, ubatch_size=8": "=8, ubatch_size=4"}.items():
        assert (setting in block) == (number == 0)
        block = block.replace(setting, other)
    exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})
    assert ("'eval_loss'" in capsys.readouterr().out) == (number == 0)


@needs_datasets
@needs_demo_model
@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=() if APART in b else pytest.mark.slow) for n, b in enumerate(blocks("python"))],
)
def test_all_python_runs(number, tmp_path):
    """Each block by itself, where there is neither a Hub nor an accelerator."""
    ran = subprocess.run(
        [sys.executable, "-c", blocks("python")[number]],
        cwd=tmp_path,
        env={**os.environ, "HF_DATASETS_CACHE": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ("'eval_loss'" in ran.stdout) == (number == 0)


def test_the_first_lines_are_ten():
    tree = compile(blocks("python")[0], "README.md", "exec", flags=0x400)  # ast.PyCF_ONLY_AST
    assert len([node for node in tree.body if type(node).__name__ not in ("Import", "ImportFrom")]) <= 10


def test_the_classic_command_is_understood(tmp_path, monkeypatch, caplog):
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    [line] = [block for block in blocks("bash") if "run_glue_l2l.py" in block]
    words = line.replace("\\\n", " ").split()
    options = run_glue_l2l.parse_options(words[words.index("run_glue_l2l.py") + 1 :])
    assert options.data.task_name == "mrpc"
    assert (options.training.do_train, options.training.do_eval) == (True, True)
    assert "--overwrite_output_dir" in caplog.text


def test_the_table_of_options_is_what_their_fields_say():
    assert table_in(README) == option_table()


def test_the_options_are_all_in_the_table():
    rows = table_rows("| `L2LConfig` |")
    # What `eps.wrap` and `copy_as` take, and what the Trainer logs, needs no option elsewhere.
    names = (
        *("devices", "optimizer", "save_dtype", "async_save"),
        *("realtime_checkpoint", "realtime_every", "realtime_errors", "merge_accumulation"),
        *("noise_scale", "noise_scale_every", "log_times"),
    )
    of_the_trainer = [f"`l2l_{name}`" for name in names]
    assert [row[1] for row in rows if not row[0]] == of_the_trainer
    in_both = [row for row in rows if row[1] not in of_the_trainer]
    assert [row[0].strip("`") for row in in_both] == [field.name for field in dataclasses.fields(L2LConfig)]
    arguments = {row[1].strip("`") for row in rows} - {"from the Trainer"}
    assert arguments == set(L2LArgumentsMixin.__annotations__)


def test_what_the_paper_table_names_is_there():
    rows = table_rows("| paper |")
    assert len(rows) >= 9
    tests = {str(file.relative_to(ROOT / "tests")) for file in (ROOT / "tests").rglob("test_*.py")}
    for _, code, options, files in rows:
        for module, name in re.findall(r"`(\w+\.\w+)\.(\w+)(?:\.\w+)?`", code):
            assert hasattr(importlib.import_module(f"hf_l2l.{module}"), name)
        for option in re.findall(r"`(?:--)?(\w+)`", options):
            known = {**L2LTrainingArguments.__dataclass_fields__, **ScriptArguments.__dataclass_fields__}
            assert option in known
        assert set(re.findall(r"`(\S+\.py)`", files)) <= tests


def test_every_file_is_in_the_tree():
    tree = README[README.index("## Files") :].split("```")[1]
    named = re.findall(r"^(\S+)", tree, re.MULTILINE)
    assert [name for name in named if not (ROOT / name).exists()] == []
    modules = {f"hf_l2l/{file.name}" for file in (ROOT / "hf_l2l").glob("*.py")} - {"hf_l2l/__init__.py"}
    folders = {f"hf_l2l/{file.parent.name}/" for file in (ROOT / "hf_l2l").glob("*/__init__.py")}
    assert modules | folders <= set(named)


def test_the_last_run_of_eps_cpu_is_told_as_it_was():
    text = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    [result] = re.findall(r"\(results/(eps_cpu_\w+\.md)\)", text)
    table = (ROOT / "benchmarks" / "results" / result).read_text(encoding="utf-8")
    ratios = re.findall(r"^\| [\w\s-]+ \| ([\d.]+) \|.*\| at most ([\d.]+) \|", table, re.MULTILINE)
    assert len(ratios) == 2 and all(float(ratio) <= float(target) for ratio, target in ratios)
    assert f"met both ({ratios[0][0]} and {ratios[1][0]})" in text.replace("\n", " ")


def test_links_within_the_project_lead_somewhere():
    for name in ("README.md", "CONTRIBUTING.md"):
        links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / name).read_text(encoding="utf-8"))
        assert [link for link in links if not (ROOT / link).exists()] == []


def test_nothing_is_left_to_fill_in():
    assert re.findall(r"^[A-Z_]{4,}$", README, re.MULTILINE) == []


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
