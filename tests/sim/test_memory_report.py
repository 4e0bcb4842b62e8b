"""`eps.memory_report()` on a device with memory of its own, where every byte has a name, with sizes of shapes; and
what a training, a generation and kept results take and move."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import accumulated
from accumulated import ragged, tiny_llama
from hf_l2l import L2LConfig, attach_l2l, detach_l2l, estimate
from hf_l2l.runtime import stream
from hf_l2l.testing import page_locked_bytes
from models import FAMILIES, batch_for, bert, llama
from placements import traffic
from tiers import more, nightly
from training import l2l_trainer, measured, settled_memory, tiny_bert

WIDTH, TOKENS, ROWS = 64, 16, 8
A = TOKENS * WIDTH * 4
"""Bytes of one layer output per row."""


def wide_bert(**options: Any) -> nn.Module:
    return bert(**{"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, **options})


class Run:
    """A model, its EPS and optimizer; the device's peak begins with it."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        settled_memory()
        torch.accelerator.reset_peak_memory_stats()
        self.model, self.eps = model, attach_l2l(model, L2LConfig(**{"ubatch_size": 2, **options}))
        self.optimizer = self.eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))

    def forward(self, rows: int = ROWS, tokens: int = TOKENS) -> torch.Tensor:
        ids = torch.randint(5, 60, (rows, tokens), generator=torch.Generator().manual_seed(1))
        labels = ids[:, 0] % 2 if "Sequence" in type(self.model).__name__ else ids
        return self.model(input_ids=ids, labels=labels).loss

    def step(self, rows: int = ROWS) -> None:
        self.forward(rows).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def assert_adds_up(report: Any) -> None:
    """What has a name is all that the allocator has counted, to the byte."""
    assert report["device"]["total"] == {
        "now": torch.accelerator.memory_allocated(),
        "peak": torch.accelerator.max_memory_allocated(),
    }
    for tier in ("device", "host"):
        for when in ("now", "peak"):
            parts = [size[when] for name, size in report[tier].items() if name != "total"]
            assert min(parts) >= 0 and sum(parts) == report[tier]["total"][when]


OPTIONS: list[dict[str, Any]] = [
    {"stash": "host", "boundary": "host", "device_stash": 1},
    {"resident": "shell", "cmp": "bf16", "eps_update": "eager"},
    {"resident_layers": 1, "kept_weights": 1, "kept_graphs": 1, "stash": "host"},
    *more(
        {"stash": "device", "ubatch_size": None},
        {"cmp": "bf16", "grad_dtype": "16bit", "moment_dtype": "bf16"},
        {"cmp": "bf16", "host_copies": "per_sweep"},
        {"resident": "all", "resident_update": "host", "kept_graphs": 2},
        {"eps_update": "serial", "prefetch": False, "gradient_slots": 1},
    ),
]


@pytest.mark.parametrize(
    ("options", "family"),
    list(zip(OPTIONS, [llama, wide_bert, FAMILIES["t5"]] * 4, strict=False)),
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_every_byte_has_a_name(family, options):
    """At each point of a training step, and after an evaluation; after detaching, it is the last report."""
    run = Run(family(), **options)
    for _ in range(2):
        loss = run.forward(tokens=6)
        for act in (lambda: None, loss.backward, run.optimizer.step):
            act()
            torch.sim.synchronize()  # else the last gradients leave while this is looked at
            assert_adds_up(run.eps.memory_report())
        run.optimizer.zero_grad()
    with torch.no_grad():
        run.forward(rows=2 * ROWS, tokens=6)
    run.eps.synchronize()
    before = run.eps.memory_report()
    assert_adds_up(before)
    detach_l2l(run.model)
    after = run.eps.memory_report()
    assert after["device"] == before["device"] and after["host"]["masters"] == before["host"]["masters"]


def test_host_memory_is_that_of_the_shapes():
    run = Run(wide_bert(), cmp="bf16", stash="host", boundary="device")
    run.step()
    run.eps.synchronize()
    need, report = estimate(run.model, L2LConfig(cmp="bf16"), run.optimizer), run.eps.memory_report()
    host = report["host"]
    for name in ("masters", "gradients", "moments", "copies"):
        assert host[name]["now"] == host[name]["peak"] == getattr(need, name), name
    count = sum(p.numel() for p in run.model.parameters())
    assert host["masters"]["now"] == 4 * count and host["copies"]["now"] == 2 * count
    assert host["stash"]["now"] == 2 * ROWS * A // 2
    assert report["of which"]["page-locked"]["now"] == page_locked_bytes()
    assert 0 < host["norm rooms"]["now"] <= 8 * 2 * len(list(run.model.parameters()))
    # Memory of the simulated device is memory of this process, and so are downloads until the host has waited.
    simulated = host["simulated device"]
    assert simulated["now"] >= report["device"]["total"]["now"]
    assert simulated["peak"] >= report["device"]["total"]["peak"] + 2 * count


@nightly
def test_steps_that_are_alike_are_not_looked_at(monkeypatch):
    run = Run(wide_bert())
    counts, ask = [], stream.memory_in_use

    def counted(device: torch.device) -> Any:
        counts[-1] += 1
        return ask(device)

    monkeypatch.setattr(stream, "memory_in_use", counted)
    for rows in (8, 8, 8, 8, 8, 4, 16):
        counts.append(0)
        run.step(rows)
    assert counts[1] == counts[2] > 10 and counts[6] > 10, "the last batch is larger than any before"
    assert counts[4] == counts[5] == 0
    assert_adds_up(run.eps.memory_report())


@nightly
def test_the_program_may_reset_the_peak_of_the_device():
    """And one that was higher before the model was attached is told."""
    run = Run(wide_bert())
    run.step()
    peak = run.eps.memory_report()["device"]["total"]["peak"]
    torch.accelerator.reset_peak_memory_stats()
    report = run.eps.memory_report()
    assert torch.accelerator.max_memory_allocated() < peak == report["device"]["total"]["peak"]
    assert report.note == "" and "workspace" in str(report) and "<th>peak</th>" in report._repr_html_()
    run.step(6 * ROWS)
    assert_adds_up(run.eps.memory_report())
    torch.empty(2**26, device="sim")
    model = wide_bert()
    eps = attach_l2l(model, L2LConfig())
    model(**batch_for(model))
    report = eps.memory_report()
    assert "reset_peak_memory_stats" in report.note and report["device"]["total"]["peak"] < 2**26


def test_the_trainer_tells_the_peak_of_the_device(tmp_path):
    """In its report at each event of a step, the file of the run, the log, which has what is asked first, and the
    picture."""
    pytest.importorskip("matplotlib")
    seen: list[dict[str, Any]] = []

    class Reports(hf.TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            torch.sim.synchronize()  # else the last gradients leave while this is looked at
            assert_adds_up(made.eps.memory_report())

        on_optimizer_step = on_step_end = on_pre_optimizer_step

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            seen.append({name: value for name, value in logs.items() if name.startswith("l2l_")})

    settled_memory()
    torch.accelerator.reset_peak_memory_stats()
    made = l2l_trainer(tmp_path, model=tiny_bert(layers=2), callbacks=[Reports()], ubatch_size=2, max_steps=2)
    made.train()
    peaks = [row["device_peak_bytes"] for row in measured(tmp_path)]
    assert len(peaks) == 2 and peaks[0] <= peaks[1] == torch.accelerator.max_memory_allocated()
    first, second, _ = seen
    assert second["l2l_device_peak_gib"] == pytest.approx(peaks[1] / 2**30)
    assert (
        first.keys() == {"l2l_tokens_per_s", "l2l_device_peak_gib", "l2l_exposed"} and 0 <= first["l2l_exposed"] <= 1
    )
    axes = made.plot().axes
    assert any("at the peak" in text.get_text() for text in axes[0].texts)
    assert "its speed says nothing" in axes[1].get_title()


def test_the_first_line_says_where_layers_run(tmp_path, caplog):
    """With what of the memory does not depend on the batch."""
    options = {"ubatch_size": 2, "stash": "host", "l2l_resident_layers": 1}
    with caplog.at_level("INFO", "hf_l2l"):
        made = l2l_trainer(tmp_path, model=tiny_bert(layers=2), max_steps=1, **options)
        made.train()
    assert "Link = up to " in made.l2l_summary() and "Device memory = shell " in made.l2l_summary()
    [said] = [record.getMessage() for record in caplog.records if "layers" in record.getMessage()]
    assert re.match(r"2 layers streamed.* KiB and activations, ", said), said
    assert "micro-batch 2, stash on the host, 1 layer resident" in said


# ---- accumulated batches that run as one, and generation


def bytes_of(*modules: nn.Module) -> int:
    return sum(p.nbytes for module in modules for p in module.parameters())


ROWS_OF_A_STEP, LAYERS = 8, 3


def bytes_of_a_step(folder: Path, count: int, **options: Any) -> tuple[int, int]:
    """Bytes up and down in a second step of the same rows in `count` batches."""
    options |= {"per_device_train_batch_size": ROWS_OF_A_STEP // count, "gradient_accumulation_steps": count}
    found = []
    for steps in (1, 2):
        model, data = tiny_llama(layers=LAYERS), ragged(longest=6, shortest=6)
        made = accumulated.made(folder, model=model, data=data, max_steps=steps, **options)
        found.append(traffic(lambda made=made: accumulated.train(made)))
    first, both = found
    return both["upload"] - first["upload"], both["download"] - first["download"]


@nightly
@pytest.mark.parametrize("options", [{}, {"stash": "host", "l2l_boundary": "host"}], ids=str)
def test_what_travels_grows_with_the_number_of_batches_only_if_they_run_one_by_one(tmp_path, options):
    merged, count = bytes_of_a_step(tmp_path, 4, **options), 2
    assert bytes_of_a_step(tmp_path, count, **options) == merged
    model = tiny_llama(layers=LAYERS)
    weights, layer = bytes_of(model), bytes_of(model.model.layers[0])
    # The rows of batches that run one by one take fewer ways through the host.
    rows = ROWS_OF_A_STEP * 6 * 16 * 4 * LAYERS if options else 0
    up, down = bytes_of_a_step(tmp_path, count, **options, l2l_merge_accumulation="off")
    # The layers but the last two are uploaded in both sweeps.
    assert up - merged[0] >= (count - 1) * (weights + (LAYERS - 2) * layer)
    assert down - merged[1] >= (count - 1) * weights - rows


@nightly
def test_each_layer_is_uploaded_once_per_forward_of_a_generation():
    """With a key-value cache, and micro-batches."""
    model = tiny_llama(layers=4).eval()
    prompt, calls = torch.randint(5, 60, (2, 5)).to("sim"), []
    attach_l2l(model, L2LConfig(ubatch_size=1))
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    options = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0}
    up = traffic(lambda: model.generate(prompt, **options))["upload"]
    weights, layer = bytes_of(model), bytes_of(model.model.layers[0])
    assert len(calls) == 6
    # The last two layers of a forward are still in their slots when the next one begins.
    assert len(calls) * (weights - 2 * layer) <= up < len(calls) * (weights + layer / 2)


@pytest.mark.parametrize(
    ("options", "family"),
    [
        ({"kept_graphs": 1, "kept_weights": 2}, bert),
        ({"stash": "host", "boundary": "host", "ubatch_size": 3}, llama),
        ({"cmp": "bf16", "ubatch_size": 3}, FAMILIES["t5"]),
        *more(({"resident": "shell"}, bert), ({"eps_update": "eager", "stash": "host"}, bert)),
    ],
)
def test_kept_losses_and_outputs_keep_no_weights(options, family):
    """Beside their own bytes, a step leaves those numbers without which no node is there: an element for each weight
    outside the layers."""
    model, kept, found = family().train(), list[Any](), list[int]()
    eps = attach_l2l(model, L2LConfig(**options))
    optimizer = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(4):
        out = model(**batch_for(model))
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        kept += [out.loss, out.logits, out.loss + sum(kept[::3])]
        del out
        found.append(settled_memory())
    own = sum(each.nbytes for each in kept[-3:])
    # The first steps make the optimizer's state, and what else is made once.
    assert (found[-1] - found[1]) // 2 <= own + 4 * 16 + 8
    detach_l2l(model)


@nightly
@pytest.mark.parametrize(("width", "rows"), [(128, 8), (1024, 32)])
def test_mixed_precision_holds_at_most_six_tenths_of_fp32(width, rows):
    """Apart from the shell and the slots, up to the width of BERT-large."""
    rest = {}
    batch = {"input_ids": torch.randint(5, 1000, (rows, 64)), "labels": torch.zeros(rows, dtype=torch.long)}
    for cmp, grad_dtype in ((None, "fp32"), ("bf16", "16bit")):
        before = settled_memory()
        # The host's fused attention, which stands in for the device's, computes in fp32 where there is dropout.
        sizes = {"hidden_size": width, "num_attention_heads": width // 64, "intermediate_size": 4 * width}
        config = hf.BertConfig(**sizes, num_hidden_layers=4, vocab_size=1000, attn_implementation="eager")
        run = Run(hf.BertForSequenceClassification(config), cmp=cmp, grad_dtype=grad_dtype, ubatch_size=rows // 2)
        for _ in range(2):  # slots for gradients are taken in the first backward
            torch.sim.reset_peak_memory_stats()
            run.model(**batch).loss.backward()
            torch.sim.synchronize()
        need = estimate(run.model, L2LConfig(cmp=cmp, grad_dtype=grad_dtype))
        # Of the shell, the gradients come when the layers are done.
        rest[cmp] = torch.sim.max_memory_allocated() - before - need.shell // 2 - need.slots
        detach_l2l(run.model)
        del run
    assert 0 < rest["bf16"] <= 0.6 * rest[None]
