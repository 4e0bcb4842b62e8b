"""The benchmarks of memory and of cross mixed precision run, tiny."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers as hf

from benchmark_output import columns
from benchmarks import (
    cmp_glue,
    cmp_memory,
    gpu_probe,
    gpu_report,
    gpu_rows,
    gpu_worker,
    memory,
    memory_papers,
    resident,
)
from glue_script import ROWS, write
from hf_l2l.testing import enable_simulated_accelerator, page_lock_limit, page_locked_bytes
from tiers import nightly


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """What a benchmark sets for its process."""
    verbosity, threads = hf.logging.get_verbosity(), torch.get_num_threads()
    yield
    hf.logging.set_verbosity(verbosity)
    hf.logging.enable_progress_bar()
    torch.set_num_threads(threads)


@nightly
def test_host_bytes_and_peaks_of_every_setting(capsys):
    rows = cmp_memory.main(["--width", "64", "--layers", "2", "--rows", "4", "--tokens", "16"])["rows"]
    assert [round(row["host_bytes_per_parameter"], 1) for row in rows.values()] == [16.0, 18.0, 16.0, 12.0, 10.0]
    peaks = [row["device_peak_bytes"] for row in rows.values()]
    assert all(peak < peaks[0] for peak in peaks[1:])
    assert "| fp32 | 16.00 |" in capsys.readouterr().out


@nightly
def test_a_model_that_fits_whole_is_compared_with_the_trainer(tmp_path: Path, capsys):
    asked = "--layers 2 --hidden 64 --batch 2 --tokens 8 --pairs 1 --steps 4".split()
    found = resident.main([*asked, "--rows", str(tmp_path / "rows.jsonl")])
    assert gpu_rows.read(tmp_path / "rows.jsonl", "resident")[0]["ratios"] == found["ratios"] and found["ratio"] > 0
    assert capsys.readouterr().out.splitlines()[-3].startswith("ratio ")


@nightly
def test_precisions_are_compared_and_no_run_is_made_twice(tiny_model: str, tmp_path: Path, capsys):
    pairs = [{"sentence1": row["sentence"], "sentence2": "it is good", "label": row["label"]} for row in ROWS]
    (tmp_path / "rte").mkdir()
    for split in ("train", "validation"):
        write(tmp_path / "rte" / f"{split}.csv", pairs)
    options = ["--data", str(tmp_path), "--model", tiny_model, "--rows", "8", "--seeds", "3", "--tasks", "rte"]
    options += ["--out", str(tmp_path / "result.md"), "--precisions"]
    cmp_glue.main([*options, "fp32"])
    assert capsys.readouterr().err.count("seed 3: accuracy") == 1
    full, half = cmp_glue.main([*options, "fp32", "fp16"])["runs"]
    assert capsys.readouterr().err.count("seed 3: accuracy") == 1
    assert (full["loss_scale"], half["loss_scale"]) == (None, 2.0**16)
    assert half["losses"] != full["losses"]
    assert half["losses"] == pytest.approx(full["losses"], rel=1e-2), "another head, or other rows"
    assert 0 < half["device_bytes"] < full["device_bytes"]
    assert "rte" in (tmp_path / "result.md").read_text()


def test_the_probe_ends_where_memory_cannot_be_page_locked(tmp_path: Path):
    rows, locked = {}, page_locked_bytes()
    with page_lock_limit(locked):
        found = gpu_probe.run(True, tmp_path / "figures.json", lambda name, **values: rows.update({name: values}))
    assert not found and not (tmp_path / "figures.json").exists()
    assert rows.keys() == {"page-locking"} and rows["page-locking"]["code"] == 2
    assert page_locked_bytes() == locked


@nightly
def test_trainings_and_a_profile_are_rehearsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of them all by `make gpu-rehearse`. The peak of the device is what the estimate says; rates mean nothing."""
    monkeypatch.setenv("HF_L2L_FIGURES", "")  # which a part sets for all that its process does
    enable_simulated_accelerator("64GiB")
    parts = gpu_worker.Parts(tmp_path, tiny=True)
    try:
        assert [parts.run(name, 500.0) for name in ("probe", "1b-whole", "1b-planned", "profile")] == ["ended"] * 4
        parts.forget()
    finally:
        enable_simulated_accelerator()
    rows = gpu_rows.read(tmp_path / "gpu.jsonl")
    [whole, planned], [profile] = gpu_report.of_kind(rows, "case"), gpu_report.of_kind(rows, "profile")
    assert planned["plan"].startswith("plan for 57.6 GiB of device memory: ") and planned["tokens"] == 128
    assert planned["expected"]["step_s"] > 0 and planned["expected"]["host_bytes"] > 0
    assert planned["device_bytes"] == pytest.approx(planned["expected"]["device_bytes"], rel=0.1)
    assert whole["device_bytes"] == pytest.approx(whole["expected"].pop("device_bytes"), rel=0.1)
    assert not whole["expected"], "the package has no other estimate of `Trainer`"
    assert profile["seconds"] > 0
    text = gpu_report.page([row for row in rows if row is not whole], "python3 benchmarks/gpu.py")
    [estimated] = columns(text.partition("## What bounds them")[2].partition("\n- ")[0])
    assert all("estimate" in cell for cell in estimated[3:])
    with zipfile.ZipFile(tmp_path / "traces.zip") as packed:
        assert packed.namelist() == ["llama-1b_planned_128.json", "profile_two_layers.json"]


@nightly
def test_device_memory_is_measured_and_no_case_twice(tmp_path: Path, capsys):
    """All three ways, with a document and a picture; a second call measures what the first one has left out."""
    pytest.importorskip("matplotlib")
    files = {name: tmp_path / f"memory.{name}" for name in ("rows", "out", "picture")}
    options = ["--quick", *(word for name, file in files.items() for word in (f"--{name}", str(file)))]
    memory.main([*options, "--questions", "depth"])
    assert capsys.readouterr().err.count("depth ") == 6
    rows = memory.main([*options, "--questions", "depth", "vocabulary"])["rows"]
    printed = capsys.readouterr()
    assert printed.err.count("depth ") == 0 and printed.err.count("vocabulary ") == 6
    text, last = printed.out.removesuffix("\n").rsplit("\n", 1)
    assert json.loads(last)["rows"] == rows
    assert files["out"].read_text() == text and files["picture"].read_bytes().startswith(b"\x89PNG")
    assert "The device is simulated" in text
    for section in text.split("## ")[3:5]:
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "%" in line]
        assert len(cells) == 2
        for _, plain, checkpointing, l2l, first, weights, formula, off in cells:
            assert float(plain) > float(checkpointing) > float(l2l) >= float(first) > float(weights)
            assert abs(float(l2l) / float(formula) - 1) < 0.02 and abs(float(off.removesuffix(" %"))) < 1


@nightly
@pytest.mark.parametrize(
    ("parts", "sections"),
    [(("layer",), ("One layer",)), (("bert", "giants", "first"), ("later text", "first text", "17 and 50"))],
    ids=str,
)
def test_the_tables_of_the_papers_have_ours_beside_theirs(parts, sections, tmp_path: Path, capsys):
    files = [tmp_path / "rows", tmp_path / "papers.md"]
    options = ["--tiny", "--rows", str(files[0]), "--out", str(files[1]), "--parts", *parts]
    rows = memory_papers.main(options)["rows"]
    text, last = capsys.readouterr().out.removesuffix("\n").rsplit("\n", 1)
    assert json.loads(last)["rows"] == rows
    assert files[1].read_text() == text
    headings = [line for line in text.splitlines() if line.startswith("## ")][1:-1]
    assert len(headings) == len(sections)
    assert all(section in heading for section, heading in zip(sections, headings, strict=True))
    assert all(row["peak"] == row["parts"]["total"] > row["slots"] for row in rows.values() if "peak" in row)
    assert memory_papers.main(options)["rows"] == rows
    assert "rows" not in capsys.readouterr().err, "all of them are in the file"
