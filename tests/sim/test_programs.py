"""Programs on the simulated accelerator: the probe, hf-l2l env and verify, run_glue_l2l.py, traces of memory, blocks
of Python in documents, and the benchmarks of memory and of cross mixed precision, tiny."""

from __future__ import annotations

import json
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers as hf

import run_glue_l2l
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
from cli_models import LLAMA, ran, written
from documents import PYTHON, README, is_simulated, run
from glue_script import ROWS, command, needs_datasets, needs_demo_model, write
from hf_l2l.measure import DeviceMemoryTrace
from hf_l2l.probe import rates
from hf_l2l.probe.figures import LINK, HardwareFigures
from hf_l2l.probe.rates import Sizes, probe
from hf_l2l.runtime import stream, wait_reasons
from hf_l2l.testing import copies_under_way, enable_simulated_accelerator, page_lock_limit, page_locked_bytes
from hf_l2l.verify import checks
from tiers import ALL, nightly
from training import settled_memory

# ---- the probe, whose rates mean nothing here

TINY = Sizes(copied_bytes=2**16, parameters=2**10, most_rows=64, seconds=0.0)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """What a program sets for its process."""
    settled_memory()
    verbosity, threads = hf.logging.get_verbosity(), torch.get_num_threads()
    yield
    enable_simulated_accelerator()
    hf.logging.set_verbosity(verbosity)
    hf.logging.enable_progress_bar()
    torch.set_num_threads(threads)


def test_the_figures(monkeypatch):
    """The second half of the measurement of the link is from or to page-locked memory."""
    pinned, locked = [], []
    copy, lock = torch.Tensor.copy_, stream.page_lock

    def copy_(target, source, non_blocking=False):
        if non_blocking:
            here = source if source.device == stream.HOST else target
            pinned.append(any(here.data_ptr() in range(start, start + 2**16) for start in locked))
        return copy(target, source, non_blocking)

    def page_lock(address, num_bytes, device):
        locked.append(address)
        return lock(address, num_bytes, device)

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    monkeypatch.setattr(stream, "page_lock", page_lock)
    before, figures = page_locked_bytes(), probe(sizes=TINY)
    assert pinned == [False] * 24 + [True] * 24
    assert figures.device_name == "simulated accelerator" and figures.page_locked is True
    assert figures.device_memory_bytes == stream.memory_of(torch.device("sim:0"))
    assert all(getattr(figures, name) > 0 for name in LINK) and figures.flops["fp32"] > 0
    assert figures.pageable.keys() == {"up", "down", "up_both", "down_both"}
    assert page_locked_bytes() == before and copies_under_way() == 0
    assert HardwareFigures.from_json(figures.to_json()) == figures


def test_a_small_device_and_one_that_page_locks_nothing():
    """Whose rates of the link are those of pageable memory."""
    enable_simulated_accelerator("2MiB")
    figures = probe(sizes=Sizes(copied_bytes=2**16, parameters=2**20, most_rows=2048, seconds=0.0))
    assert figures.flops["fp32"] > 0 and figures.link_up > 0
    assert figures.device_adamw is None, "its state has 16 MiB"
    with page_lock_limit(0):
        figures = probe(sizes=TINY)
    stream.forget_refusal(torch.device("sim:0"))
    assert figures.page_locked is False
    assert [getattr(figures, name) for name in LINK] == [figures.pageable[name.removeprefix("link_")] for name in LINK]


def test_lanes_need_the_memory_filled(monkeypatch):
    wait = stream.wait

    def without(point, why, **options):
        if why != wait_reasons.PROBE_FILLED:
            wait(point, why, **options)

    monkeypatch.setattr(stream, "wait", without)
    with pytest.raises(RuntimeError, match="write-after-write race"):
        probe(sizes=TINY)
    torch.sim.synchronize()


def test_env_has_the_device_and_page_locking(capsys, monkeypatch):
    before = page_locked_bytes()
    found = ran(capsys, "env", "--json").json
    [device] = found["devices"]
    assert (device["device"], device["name"]) == ("sim:0", "simulated accelerator")
    assert 0 < device["free_bytes"] <= device["total_bytes"]
    assert found["page_locking"]["works"] is True and page_locked_bytes() == before
    with page_lock_limit(0):
        locking = ran(capsys, "env", "--json").json["page_locking"]
    assert locking["works"] is False and locking["result"].startswith("refused with code ")
    monkeypatch.setattr(rates, "Sizes", lambda: TINY)
    probe = ran(capsys, "env", "--probe", "--json").json["probe"]
    assert probe["device_name"] == "simulated accelerator" and probe["link_up"] > 0
    text = ran(capsys, "env", "--probe").out
    assert "link_up" in text and "devices:\n  device: sim:0, name: simulated accelerator, " in text


def test_verify_runs_the_layers_there_if_asked(tmp_path, capsys, monkeypatch):
    """Two of the checks; all of them, on the CPU: tests/programs."""
    verify, some = checks.verify, ("gradients", "generate")
    monkeypatch.setattr("hf_l2l.cli.verify.COMPARED", some)
    monkeypatch.setattr(checks, "verify", lambda family, names=some, device="cpu": verify(family, names, device))
    source = written(tmp_path, LLAMA, num_hidden_layers=1)
    for device, flags in (("cpu", ()), ("sim:0", ("--device", "sim"))):
        held = settled_memory()
        torch.sim.reset_peak_memory_stats()
        found = ran(capsys, "verify", source, *flags, "--json")
        assert (found.status, found.json["device"], found.json["status"]) == (0, device, "green")
        assert all(each["verdict"] in ("exact", "within tolerance") for each in found.json["checks"].values())
        assert (torch.sim.max_memory_allocated() > held) == (device == "sim:0")


@needs_datasets
@pytest.mark.usefixtures("datasets_cache")
def test_too_small_a_device_is_said_in_one_line(tiny_model, tmp_path, capsys):
    files = {name: write(tmp_path / f"{name}.csv", ROWS) for name in ("train_file", "validation_file")}
    small = {"simulate": "2KiB", "use_cpu": None, "device_memory_budget": "off"}
    with pytest.raises(SystemExit) as stopped:
        run_glue_l2l.main(command(tiny_model, tmp_path, **files, **small))
    assert stopped.value.code == 3
    said = capsys.readouterr().err
    last = said.splitlines()[-1]
    assert last.startswith("run_glue_l2l.py: out of memory: the simulated accelerator is out of memory.")
    assert last.endswith("; try a smaller --ubatch_size, or --stash host")
    assert "Traceback" not in said


def wait_for_samples(trace: DeviceMemoryTrace, count: int) -> None:
    """Until there are so many more."""
    count += len(trace.device_bytes)
    while len(trace.device_bytes) < count:
        time.sleep(0.001)


def test_a_trace_shows_memory_come_and_go():
    """It ends with its block, also when that raises, and can be taken again: peaks are found between samples, and are
    the block's own."""
    before, started = settled_memory(), time.perf_counter()
    with DeviceMemoryTrace(interval_s=0.001) as trace:
        wait_for_samples(trace, 1)
        large = torch.zeros(2**20, device="sim")
        wait_for_samples(trace, 2)
        del large
        wait_for_samples(trace, 2)
    took = time.perf_counter() - started
    assert len(trace.seconds) == len(trace.device_bytes) >= 5
    assert trace.seconds == sorted(trace.seconds) and 0 <= trace.seconds[0] < trace.seconds[-1] <= took
    assert trace.device_bytes[0] == trace.device_bytes[-1] == before
    assert max(trace.device_bytes) == trace.peak_bytes == before + 4 * 2**20
    trace = DeviceMemoryTrace(interval_s=60)
    for count in (2**22, 2**20):
        with pytest.raises(RuntimeError, match="^on purpose$"), trace:
            while not trace.device_bytes:
                time.sleep(0.001)
            short = torch.zeros(count, device="sim")
            del short
            raise RuntimeError("on purpose")
        assert "l2l-memory-trace" not in [thread.name for thread in threading.enumerate()]
        assert trace.device_bytes == [before] and trace.peak_bytes == before + 4 * count


BLOCKS = [block for block in PYTHON if is_simulated(block) and (ALL or block.file == README)]


@needs_datasets
@needs_demo_model
@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("datasets_cache")
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_python_runs_on_the_simulated_accelerator(block, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    names = run(block, {})
    assert ("evaluate()" in block.code) == ("'eval_loss'" in capsys.readouterr().out)
    if block.file == README:  # there are three panels, and none is empty
        assert [len(panel.patches + panel.lines) > 0 for panel in names["trainer"].plot().axes] == [True] * 3
        assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


# ---- benchmarks


@nightly
def test_host_bytes_and_peaks_of_every_setting(capsys):
    rows = cmp_memory.main(["--width", "64", "--layers", "2", "--rows", "4", "--tokens", "16"])["rows"]
    assert [round(row["host_bytes_per_parameter"], 1) for row in rows.values()] == [16.0, 18.0, 16.0, 12.0, 10.0, 8.0]
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
    for precisions in (["fp32"], ["fp32", "fp16"]):
        runs = cmp_glue.main([*options, *precisions])["runs"]
        assert capsys.readouterr().err.count("seed 3: accuracy") == 1
    full, half = runs
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
    assert [parts.run(name, 500.0) for name in ("probe", "1b-whole", "1b-planned", "profile")] == ["ended"] * 4
    parts.forget()
    rows = gpu_rows.read(tmp_path / "gpu.jsonl")
    [whole, planned], [profile] = gpu_report.of_kind(rows, "case"), gpu_report.of_kind(rows, "profile")
    assert planned["plan"].startswith("plan for 57.6 GiB of device memory: ") and planned["tokens"] == 128
    assert planned["expected"]["step_s"] > 0 and planned["expected"]["host_bytes"] > 0 and profile["seconds"] > 0
    text = gpu_report.page([row for row in rows if row is not whole], "python3 benchmarks/gpu.py")
    for case in (planned, whole):
        assert case["device_bytes"] == pytest.approx(case["expected"].pop("device_bytes"), rel=0.1)
    assert not whole["expected"], "the package has no other estimate of `Trainer`"
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
    assert (printed.err.count("depth "), printed.err.count("vocabulary ")) == (0, 6)
    text, last = printed.out.removesuffix("\n").rsplit("\n", 1)
    assert json.loads(last)["rows"] == rows and "The device is simulated" in text
    assert files["out"].read_text() == text and files["picture"].read_bytes().startswith(b"\x89PNG")
    for section in text.split("## ")[3:5]:
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "%" in line]
        assert len(cells) == 2
        for _, plain, checkpointing, l2l, first, weights, formula, off in cells:
            assert float(plain) > float(checkpointing) > float(l2l) >= float(first) > float(weights)
            assert abs(float(l2l) / float(formula) - 1) < 0.02 and abs(float(off.removesuffix(" %"))) < 1


@nightly
def test_the_tables_of_the_papers_have_ours_beside_theirs(tmp_path: Path, capsys):
    document, parts = tmp_path / "papers.md", ["layer", "bert", "giants", "first"]
    options = ["--tiny", "--rows", str(tmp_path / "rows"), "--out", str(document), "--parts", *parts]
    rows = memory_papers.main(options)["rows"]
    text, last = capsys.readouterr().out.removesuffix("\n").rsplit("\n", 1)
    assert json.loads(last)["rows"] == rows and document.read_text() == text
    headings = "".join(line for line in text.splitlines() if line.startswith("## "))
    assert all(section in headings for section in ("One layer", "later text", "first text", "17 and 50"))
    assert all(row["peak"] == row["parts"]["total"] > row["slots"] for row in rows.values() if "peak" in row)
    assert memory_papers.main(options)["rows"] == rows
    assert "rows" not in capsys.readouterr().err, "all of them are in the file"
