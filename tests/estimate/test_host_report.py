"""`eps.memory_report()` where layers run on the CPU, and the parts that it is made of."""

from __future__ import annotations

import gc

import pytest
import torch

from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from hf_l2l.memory.held import Held
from hf_l2l.memory.ledger import Transients
from hf_l2l.memory.memory_report import MemoryReport
from models import attached, batch_for, bert, train_once
from training import l2l_trainer, measured


def test_on_the_cpu_there_is_no_tier_of_a_device():
    model = bert()
    eps = attach_l2l(model, L2LConfig(device="cpu"))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters()))
    for _ in range(2):
        train_once(model, batch_for(model))
        gradients = eps.memory_report()["host"]["gradients"]["now"]
        optimizer.step()
    report = eps.memory_report()
    assert set(report) == {"host", "of which"}
    count = sum(p.numel() for p in model.parameters())
    found = {name: size["now"] for name, size in report["host"].items()}
    assert found["masters"] == 4 * count == gradients and found["gradients"] == 0
    assert report["host"]["gradients"]["peak"] == gradients, "a step begins with all of them"
    assert found["moments"] == 8 * count + 4 * len(list(model.parameters())), "and a step count of each"
    assert found["simulated device"] == found["copies"] == report["of which"]["page-locked"]["now"] == 0
    assert found["Python, libraries and other"] > 2**24
    assert sum(size for name, size in found.items() if name != "total") == found["total"]
    assert detach_l2l(model) is model and eps.memory_report()["host"]["moments"]["now"] == found["moments"]


def test_a_run_that_asks_at_its_end_sees_gradients_of_a_step_of_many_calls():
    model = bert()
    eps = attach_l2l(model, L2LConfig(device="cpu"))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters()))
    for _ in range(6):
        train_once(model, batch_for(model))
    optimizer.step()
    assert eps.memory_report()["host"]["gradients"]["peak"] == 4 * sum(p.numel() for p in model.parameters())


def test_a_model_that_is_not_trained_has_a_report():
    model = attached(bert(), device="cpu")
    with torch.no_grad():
        model(**batch_for(model))
    host = attach_l2l(model, L2LConfig(device="cpu")).memory_report()["host"]
    assert host["gradients"]["peak"] == host["moments"]["peak"] == 0 < host["masters"]["now"]


def test_the_trainer_logs_no_device_peak_and_its_summary_says_what_the_host_holds(tmp_path):
    made = l2l_trainer(tmp_path, use_cpu=True, max_steps=1, cmp="bf16", eps_update="serial")
    made.train()
    [row] = measured(tmp_path)
    assert "l2l_bound" in row and "device_peak_bytes" not in row and "device" not in made.eps.memory_report()
    summary = made.l2l_summary()
    assert "Update = serial" in summary and "16-bit copies" in summary and "nothing travels" in summary


def test_updates_at_once_are_counted_together():
    transients = Transients()
    with transients.of_update() as first:
        first(10)
        with transients.of_update() as second:
            second(5)
            first(1)
        assert transients.now == 11
    with pytest.raises(ValueError), transients.of_update() as third:
        third(7)
        raise ValueError
    assert (transients.now, transients.peak) == (0, 16)


def test_the_note_is_shown_and_names_are_escaped():
    size = {"now": 1, "peak": 2**20}
    report = MemoryReport("a <b>", {}, {"masters": size, "copies": {"now": 0, "peak": 0}}, size, "so & so")
    assert report["host"]["total"] == size and report.note in str(report).splitlines()[-1]
    html = report._repr_html_()
    assert "a &lt;b&gt;" in html and "so &amp; so" in html and "1.0 MiB" in html and "copies" not in html


def test_references_to_memory_do_not_pile_up():
    """Neither to what lives long and is named in every step, nor to what is gone."""
    held, lives = Held(torch.device("cpu")), torch.empty(10)
    for number in range(1000):
        held.add([lives, lives[2:], torch.empty(1000 + number)])
        assert lives.data_ptr() in held.alive()
    assert held.alive() == {lives.data_ptr(): 40}
    kept = gc.get_referents(*(each for each in vars(held).values() if isinstance(each, dict)))
    assert 0 < len(kept) < 400, "an address, and what is known of the memory there, of each"
    held.add([torch.empty(5, device="meta"), torch.empty(0), torch.eye(2).to_sparse()])
    assert len(held.alive()) == 1, "no memory of this device"
