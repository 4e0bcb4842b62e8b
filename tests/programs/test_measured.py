"""docs/measured.md is what its command makes of the documents in benchmarks/results."""

from __future__ import annotations

from benchmarks import measured, published


def test_the_page_is_what_the_command_writes(tmp_path, monkeypatch):
    assert measured.main(["--check"]) == 0
    page = measured.PAGE.read_text(encoding="utf-8")
    assert all(claim.source in page for claim in published.CLAIMS)
    monkeypatch.setattr(measured, "PAGE", tmp_path / "measured.md")
    measured.PAGE.write_text("old")
    assert measured.main(["--check"]) == 1
    assert measured.main([]) == 0 and measured.main(["--check"]) == 0


def test_the_newest_document_of_a_theme_is_taken(tmp_path, monkeypatch):
    """What a GPU has measured is linked, and nothing is said without."""
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    assert measured.result("memory_sim") is None
    for name in ("memory_sim_202611.md", "memory_sim_202612.md", "memory_papers_sim_202701.md"):
        (tmp_path / name).write_text(name)
    found = measured.result("memory_sim")
    assert found is not None and found.name == "memory_sim_202612.md"
    assert "Nothing was measured on a GPU yet" in measured.gpu()[0]
    (tmp_path / "gpu_h100").mkdir()
    (tmp_path / "gpu_h100" / "bench.md").write_text("tokens/s")
    assert measured.gpu()[-1] == "- [`gpu_h100/bench.md`](../benchmarks/results/gpu_h100/bench.md)"
