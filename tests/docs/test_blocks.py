"""What the documents show runs: Python, and commands as far as their parsers. A block of Python on the simulated
accelerator is run by tests/sim/test_document_blocks.py, one with TRL by tests/clients/test_readme_blocks.py."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

import hf_l2l
from documented_commands import YOURS, check, commands
from documents import DOCUMENTS, PYTHON, README, ROOT, SHORTER, blocks, is_simulated, run, text_of
from glue_script import needs_datasets, needs_demo_model
from tiers import nightly
from training import l2l_trainer, rows

MARK = "# Not run by the tests: "
"""The first line of a block that they cannot run begins so, and the reader sees why."""
REASONS = ("it needs a GPU", "it needs the Hub", "it needs several hosts")
AT_MOST_NOT_RUN = 4

MARKED = [block for block in PYTHON if block.code.startswith(MARK)]
RUN = [block for block in PYTHON if block not in MARKED and "from trl import" not in block.code]
WHOLE = [block for block in RUN if is_simulated(block) or any(setting in block.code for setting in SHORTER)]


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


def run_apart(code: str, folder: Path) -> str:
    """What the code prints and logs, in a process of its own, where there is neither a Hub nor an accelerator."""
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "HF_DATASETS_CACHE": str(folder / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout + ran.stderr


@nightly
@needs_datasets
@needs_demo_model
@pytest.mark.parametrize("block", WHOLE, ids=lambda block: block.name)
def test_all_rows_run(block, tmp_path):
    """Each block that is shortened elsewhere, or that asks for the simulated accelerator, as it is."""
    ran = run_apart(block.code, tmp_path)
    assert ("evaluate()" in block.code) == ("'eval_loss'" in ran)
    if block.file == README:
        for line in blocks(README, "text")[0].code.splitlines():
            assert re.search(any_numbers(line), ran), line
        first, *_, last = map(float, re.findall(r"'loss': '([\d.]+)'", ran))
        [evaluated] = map(float, re.findall(r"'eval_loss': ([\d.]+)", ran))
        assert last < first / 2 and evaluated < first / 1.5  # it learns


def any_numbers(line: str) -> str:
    """A pattern for a line that is shown, with other numbers, and with what is left out of it."""
    words = re.split(r"(\.\.\.|[\d.,]*\d)", line)
    return "".join({"...": ".*"}.get(word, r"[\d.,e-]+") if n % 2 else re.escape(word) for n, word in enumerate(words))


@nightly
def test_the_answer_of_the_readme_is_what_estimate_says(tmp_path, monkeypatch, capsys):
    """For a folder that has the configuration of the model on the Hub."""
    [block] = [block for block in blocks(README, "bash") if "hf-l2l estimate" in block.code]
    [words] = commands(block.code)
    assert words[2] == "Qwen/Qwen2.5-7B"
    sizes = {"hidden_size": 3584, "num_hidden_layers": 28, "intermediate_size": 18944, "vocab_size": 152064}
    config = transformers.Qwen2Config(**sizes, num_attention_heads=28, num_key_value_heads=4)
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(tmp_path / words[2])
    monkeypatch.chdir(tmp_path)
    importlib.import_module("hf_l2l.cli.main").main(words[1:])
    printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for shown in blocks(README, "text")[1].code.replace("...\n", "").splitlines():
        pattern = any_numbers(" ".join(shown.split()))
        [line] = [line for line in printed if re.fullmatch(pattern, line)]
        figures, expected = (
            [float(each.replace(",", "")) for each in re.findall(r"[\d,]*\.?\d+", text)] for text in (line, shown)
        )
        assert figures == pytest.approx(expected, rel=0.05)  # host memory has what this process takes


def test_few_blocks_are_not_run_or_shortened_and_say_why():
    assert len(MARKED) <= AT_MOST_NOT_RUN
    assert [block.name for block in MARKED if not block.code.removeprefix(MARK).startswith(REASONS)] == []
    assert all(any(setting in block.code for block in PYTHON) for setting in SHORTER)


def wrong_names(code: str) -> list[str]:
    """Modules and names that are imported and not there, and arguments that functions of this package do not take."""
    tree, wrong = ast.parse(code), []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(("hf_l2l", "transformers")):
            module = importlib.import_module(str(node.module))
            wrong += [alias.name for alias in node.names if not hasattr(module, alias.name)]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in hf_l2l.__all__:
            taken = inspect.signature(getattr(hf_l2l, node.func.id)).parameters
            if not any(each.kind is each.VAR_KEYWORD for each in taken.values()):
                wrong += [word.arg for word in node.keywords if word.arg is not None and word.arg not in taken]
    return wrong


def test_names_are_there_also_where_python_is_not_run():
    assert {block.name: wrong for block in PYTHON if (wrong := wrong_names(block.code))} == {}
    assert wrong_names("from hf_l2l import L2LTrianer") == ["L2LTrianer"]
    assert wrong_names("L2LTrainingArguments('o', stash='host', l2l_bounary='host')") == ["l2l_bounary"]


# ---- commands


def test_commands_are_understood(tmp_path, monkeypatch):
    """Those in blocks of bash; and the programs, targets and scripts of those within sentences, which leave out what
    depends on the reader."""
    monkeypatch.chdir(tmp_path)
    of_program = importlib.import_module("hf_l2l.cli.main").COMMANDS
    has_datasets = importlib.util.find_spec("datasets") is not None
    for file in DOCUMENTS:
        for block in blocks(file, "bash"):
            if "run_glue_l2l.py" in block.code and not has_datasets:
                continue
            found = list(commands(block.code))
            assert found
            for words in found:
                for word in words:
                    if word.endswith(".csv"):
                        (tmp_path / word).write_text("a file of the reader's", encoding="utf-8")
                check(words)
        for code in re.findall(r"`([^`\n]+)`", text_of(file)):
            words = re.sub(r"^(?:[A-Z_]+=\S+ )+", "", code).split()
            if words[0] == "make" and len(words) > 1:
                check(words[:2])
            elif words[0] == "hf-l2l" and len(words) > 1 and words[1].islower():
                assert words[1] in of_program, code
            elif re.fullmatch(r"(\.venv/bin/)?python3?", words[0]) and len(words) > 1 and words[1].endswith(".py"):
                assert words[1] in YOURS or (ROOT / words[1]).is_file(), code


def test_commands_that_are_not_understood_are_found():
    for command in (
        "hf-l2l estimat MODEL",
        "hf-l2l plan X160 --hardwar h200",
        "make tset",
        "make gpu PRATS=bench",
        "python benchmarks/memory.py --quik",
        "python benchmarks/nothing.py",
        "python -m hf_l2l.verify --wirte page.md",
        "pip install .[gleu]",
        "torchrun --nporc_per_node 4 script.py",
        "accelerate launch --multi_gpus script.py",
        "rm -rf .",
    ):
        [words] = commands(command)
        with pytest.raises((AssertionError, SystemExit)):
            check(words)
