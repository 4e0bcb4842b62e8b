"""`L2LTrainer` on all visible devices: one device's run with as many rows, and what is said of bad devices."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import pytest
import torch
import transformers as hf
from torch import nn

from budgeted import FIGURES
from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.hf.attach import attachment_of
from hf_l2l.testing import enable_simulated_accelerator
from training import assert_same_run, l2l_trainer, plain_trainer, tiny_bert


@pytest.fixture(autouse=True)
def _two() -> Iterator[None]:
    enable_simulated_accelerator(devices=2)
    yield
    enable_simulated_accelerator()


def run(folder, **options):
    made = l2l_trainer(folder, **{"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, **options})
    made.train()
    return made


@pytest.mark.filterwarnings("ignore:batch . x accumulation 2")
@pytest.mark.one_in(2)
@pytest.mark.parametrize("merges", ["off", "auto"])
def test_two_devices_run_as_one_with_twice_the_rows(tmp_path, merges):
    """Dropout, evaluation, accumulation."""
    common = {
        "max_steps": 2,
        "ubatch_size": 2,
        "gradient_accumulation_steps": 2,
        "l2l_merge_accumulation": merges,
    }
    both = run(tmp_path / "both", per_device_train_batch_size=4, per_device_eval_batch_size=4, **common)
    one = run(tmp_path / "one", l2l_devices="1", **common)
    assert attachment_of(both.model).config.device == (torch.device("sim:0"), torch.device("sim:1"))
    assert both.args.n_gpu == 2 and both.args.train_batch_size == 8 == one.args.train_batch_size
    assert_same_run(both, one)


def test_a_checkpoint_of_two_devices_is_resumed_on_one(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2, "ubatch_size": 2}
    whole = run(tmp_path / "whole", per_device_train_batch_size=4, per_device_eval_batch_size=4, **saving)
    resumed = l2l_trainer(tmp_path / "resumed", max_steps=4, l2l_devices=1, **{**saving, "save_strategy": "no"})
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_a_budget_is_that_of_each_device(tmp_path, monkeypatch):
    """The smallest one that is enough for each; less is refused."""
    (tmp_path / "figures.json").write_text(FIGURES.to_json())
    monkeypatch.setenv("HF_L2L_FIGURES", str(tmp_path / "figures.json"))
    enable_simulated_accelerator("1MB", devices=2)
    made = l2l_trainer(tmp_path, per_device_train_batch_size=4, max_steps=2, device_memory_budget="400KiB")
    for number in range(2):
        torch.accelerator.reset_peak_memory_stats(torch.device("sim", number))
    made.train()
    held = [torch.accelerator.memory_stats(torch.device("sim", n))["allocated_bytes.all.peak"] for n in range(2)]
    assert 0 < max(held) <= 400 * 1024
    plan = attachment_of(made.model).plan
    assert plan is not None and max(held) <= plan.peak_bytes * 1.03
    with pytest.raises(ValueError, match="device_memory_budget"):
        l2l_trainer(tmp_path / "less", per_device_train_batch_size=4, device_memory_budget="10KiB").train()


def test_of_unequal_devices_auto_is_a_share_of_the_smallest(tmp_path, monkeypatch):
    (tmp_path / "figures.json").write_text(FIGURES.to_json())
    monkeypatch.setenv("HF_L2L_FIGURES", str(tmp_path / "figures.json"))
    enable_simulated_accelerator("8MiB", devices=2)
    ask = torch.sim.mem_get_info

    def half_on_the_second(device=None):
        free, total = ask(device)
        return (free - total // 2, total // 2) if torch.device(device).index == 1 else (free, total)

    monkeypatch.setattr(torch.sim, "mem_get_info", half_on_the_second)
    made = l2l_trainer(tmp_path, per_device_train_batch_size=4, max_steps=1, device_memory_budget="auto")
    made.train()
    plan = attachment_of(made.model).plan
    assert plan is not None and plan.budget == int(0.9 * 2**22)


def test_without_a_size_there_are_two_micro_batches_per_device(tmp_path, caplog):
    made = l2l_trainer(tmp_path, per_device_train_batch_size=4, max_steps=1, l2l_resident_layers=2)
    with caplog.at_level(logging.DEBUG, "hf_l2l"):
        made.train()
    assert attachment_of(made.model).cuts.of(8) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert "Device = sim:0, sim:1: layers run on them in turn" in caplog.text
    assert "Micro-batches = 4, two for each device" in caplog.text
    of_all = r"shell .* on sim:0; slots .* and activations on each device; on all devices together the first 2 layers"
    assert re.search(f"Device memory = {of_all} with their state", caplog.text)
    assert re.search("Link = up to .* of gradients back, over 2 links together", caplog.text)


def test_the_search_for_overflows_is_no_matter_of_several_devices(tmp_path, capsys):
    """transformers refuses it for the replicas of `DataParallel`. It looks into each layer on its device."""

    def trainer(**more):
        options = {"debug": "underflow_overflow", "per_device_train_batch_size": 4, "max_steps": 1, "ubatch_size": 2}
        made = l2l_trainer(tmp_path, **options, **more)
        made.train_dataset = [{k: v for k, v in row.items() if k != "attention_mask"} for row in made.train_dataset]
        return made  # it cannot look into the boolean masks that layers get otherwise

    made = trainer()
    made.train()
    assert made.args.n_gpu == 2 and made._train_batch_size == made.state.train_batch_size == 8
    with pytest.raises(ValueError, match="nowhere"):
        made.train(resume_from_checkpoint=str(tmp_path / "nowhere"))
    assert made.args.n_gpu == 2
    broken = tiny_bert()
    with torch.no_grad():
        broken.bert.encoder.layer[1].output.dense.weight.fill_(torch.inf)
    with pytest.raises(ValueError, match="inf/nan"):
        trainer(model=broken).train()
    assert "bert.encoder.layer.1.output" in capsys.readouterr().out


def test_a_loss_of_items_is_that_of_the_whole_batch(tmp_path):
    """transformers divides the items of a batch by the devices, or multiplies the loss, for `DataParallel`."""
    config = hf.GPT2Config(
        n_embd=16, n_layer=3, n_head=2, n_positions=32, vocab_size=60, bos_token_id=1, eos_token_id=1,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip

    def model() -> nn.Module:
        torch.manual_seed(0)
        return hf.GPT2LMHeadModel(config)

    def made(folder, make, **options):
        trainer = make(folder, model=model(), max_steps=2, **options)
        trainer.train_dataset = [{"input_ids": (r := list(range(i, i + 6))), "labels": r} for i in range(40)]
        trainer.model_accepts_loss_kwargs = True
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    two = made(tmp_path / "two", l2l_trainer, per_device_train_batch_size=4, ubatch_size=4)
    one = made(tmp_path / "one", l2l_trainer, per_device_train_batch_size=8, ubatch_size=4, l2l_devices="1")
    assert two == one
    enable_simulated_accelerator()
    plain = made(tmp_path / "plain", plain_trainer, per_device_train_batch_size=8)
    assert two == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("3", r"l2l_devices must name devices that this machine has \(got '3', and 2 of type sim are visible\)"),
        ("0,2", "l2l_devices must name devices that this machine has"),
        ("1,0", r"l2l_devices must begin with the device of the Trainer.*\(got '1,0', and it is sim:0\)"),
        ("0,0", "each execution device is given once"),
    ],
)
def test_devices_that_cannot_be_used_are_refused(tmp_path, asked, says):
    with pytest.raises(ValueError, match=says):
        l2l_trainer(tmp_path, l2l_devices=asked)


@pytest.mark.parametrize("asked", ["all", "", "0,x", 0, -1, True, 1.5, "-1", [0]])
def test_what_names_no_devices_is_refused(tmp_path, asked):
    with pytest.raises(ValueError, match="l2l_devices must be 'auto', a number of devices, or their indexes"):
        l2l_trainer(tmp_path, l2l_devices=asked)


@pytest.mark.parametrize(
    ("devices", "says"),
    [
        (["sim:0", "cpu"], "several execution devices must be of one type"),
        (["sim:0", "sim:1", "sim:0"], "each execution device is given once"),
        (["sim:0", "sim:2"], "the execution device must be one this machine has"),
        ([], "device must name at least one device"),
        (["sim:0", 3.5], "device must name a torch device"),
    ],
)
def test_devices_of_a_config_that_cannot_be_used_are_refused(devices, says):
    with pytest.raises(ValueError, match=says):
        attach_l2l(tiny_bert(), L2LConfig(device=devices))
