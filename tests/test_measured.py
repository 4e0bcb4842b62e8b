"""docs/measured.md is what its command makes of the documents in benchmarks/results."""

from __future__ import annotations

import re

import pytest

import soak_glue
from benchmarks import measured, published

TEXT = """# A title

| name | size |
| --- | --- |
| one | 2 GB |
| two | 3 GB |

After it.
"""


def test_the_page_is_what_the_command_writes(capsys):
    assert measured.main(["--check"]) == 0
    page = measured.PAGE.read_text(encoding="utf-8")
    assert "\n\n\n" not in page
    for figure in ("52.48", "84.91", "22.07", "6.68", "61.18", "74.36", "11.13"):
        assert figure in page
    assert all(claim.source in page for claim in published.CLAIMS)


def test_a_page_that_is_another_one_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(measured, "PAGE", tmp_path / "measured.md")
    measured.PAGE.write_text("old")
    assert measured.main(["--check"]) == 1
    assert measured.main([]) == 0 and measured.main(["--check"]) == 0


def test_rows_are_read_from_a_document():
    found = measured.Result("name.md", TEXT)
    assert found.rows("| name |") == [["one", "2 GB"], ["two", "3 GB"]]
    assert found.row("| name |", "two") == ["two", "3 GB"]
    with pytest.raises(ValueError, match="substring not found"):
        found.rows("| another |")


def test_the_newest_document_of_a_theme_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    assert measured.result("memory_sim") is None
    for name in ("memory_sim_202611.md", "memory_sim_202612.md", "memory_papers_sim_202701.md"):
        (tmp_path / name).write_text(name)
    found = measured.result("memory_sim")
    assert found is not None and found.name == "memory_sim_202612.md"


def test_what_a_gpu_has_measured_is_linked_and_nothing_is_said_without(tmp_path, monkeypatch):
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    assert "Nothing was measured on a GPU yet" in measured.gpu()[0]
    (tmp_path / "gpu_h100").mkdir()
    (tmp_path / "gpu_h100" / "bench.md").write_text("tokens/s")
    assert measured.gpu()[-1] == "- [`gpu_h100/bench.md`](../benchmarks/results/gpu_h100/bench.md)"


def test_seeds_are_as_many_as_the_document_says(tmp_path, monkeypatch):
    same_bits = measured.known("glue_compare_sim")
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    (tmp_path / same_bits.name).write_text(same_bits.text)
    assert "Ours: not measured." in measured.accuracy()
    rows = [
        {"task": "rte", "method": "Trainer, fp32", "draw": draw, "curve": [(1, 0.5 + draw / 10, 0.7)]}
        | {"train_rows": 9, "validation_rows": 9, "steps": 1}
        for draw in range(2)
    ]
    for count, said in ((2, "the mean of 2 seeds, and"), (1, "the mean of 1 seed, and")):
        (tmp_path / "soak_glue_2cores_202611.md").write_text(soak_glue.document(rows[:count]))
        found = "\n".join(measured.accuracy())
        assert said in found and f"| Trainer, fp32 |{' not run |' * 5} 5" in found


def test_what_was_simulated_says_so():
    first, later = "\n".join(measured.first_tables()), "\n".join(measured.later_tables())
    ours = re.findall(r"[\d,.]+ MB \(simulated\)", first)
    assert len(ours) == 8, "7 rows of tables 4 and 5, and table 2"
    assert "Llama, in MiB (simulated, " in later and "micro-batches on (simulated, " in later


def test_the_paper_has_a_figure_for_each_task():
    assert {len(row) for row in (*published.LATER_7, *published.FIRST_3)} == {1 + len(published.TASKS)}
