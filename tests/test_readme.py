"""The README and the documents beside it say what is there; `tests/docs` runs their blocks and follows their links."""

from __future__ import annotations

import re

from documents import ROOT, blocks

README = ROOT / "README.md"


def test_the_first_lines_are_few():
    tree = compile(blocks(README, "python")[0].code, "README.md", "exec", flags=0x400)  # ast.PyCF_ONLY_AST
    assert len([node for node in tree.body if type(node).__name__ not in ("Import", "ImportFrom")]) <= 11


def test_it_is_read_in_minutes():
    assert 900 <= len(README.read_text(encoding="utf-8").split()) <= 1200


def test_its_first_block_is_a_model_that_does_not_fit():
    assert "enable_simulated_accelerator(" in blocks(README, "python")[0].code


def test_the_sizes_of_models_are_those_of_the_result():
    """Of some of them: plain with all rows at once, with one row at a time, and L2L."""
    result = (ROOT / "benchmarks" / "results" / "model_sizes_computed_202611.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.*), computed \| (.*) GiB \| (.*) GiB \| (.*) GiB \|$", README.read_text("utf-8"), re.M)
    assert len(rows) == 3
    for model, *sizes in rows:
        assert re.search(rf"^\| {re.escape(model)} \([\d.]+ B\) \| {re.escape(' | '.join(sizes))} \|", result, re.M), (
            model
        )


def test_the_figures_of_memory_are_those_of_the_result():
    rows = (ROOT / "benchmarks" / "results" / "memory_sim_202611.md").read_text(encoding="utf-8").splitlines()
    sizes = {row.split(" | ")[0].strip("| "): row.split(" | ")[1:4] for row in rows if row.startswith("| ")}
    text = (ROOT / "docs" / "memory_needs.md").read_text(encoding="utf-8")
    for first, last in (("6", "384"), ("8", "256")):
        for before, after in zip(sizes[first], sizes[last], strict=True):
            before, after = (float(size.replace(",", "")) for size in (before, after))
            ends = f"{before:.1f} -> {after:,.1f}" if after < 100 else f"{before:.1f} -> {after:,.0f}"
            assert f"| {ends} |" in text


def test_nothing_is_left_to_fill_in():
    assert re.findall(r"^[A-Z_]{4,}$", README.read_text(encoding="utf-8"), re.MULTILINE) == []


def test_the_last_run_of_eps_cpu_is_told_as_it_was():
    text = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    [result] = re.findall(r"\(results/(eps_cpu_\w+\.md)\)", text)
    table = (ROOT / "benchmarks" / "results" / result).read_text(encoding="utf-8")
    ratios = re.findall(r"^\| [\w\s-]+ \| ([\d.]+) \|.*\| at most ([\d.]+) \|", table, re.MULTILINE)
    assert len(ratios) == 2 and all(float(ratio) <= float(target) for ratio, target in ratios)
    assert f"met both ({ratios[0][0]} and {ratios[1][0]})" in text.replace("\n", " ")
