"""`L2LTrainer` on all visible devices: one device's run with as many rows, and what is said of bad devices."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as hf

from budgeted import FIGURES, plan_of
from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.testing import enable_simulated_accelerator
from models import gpt2
from plain import small_bert
from runs import UNCHECKED, assert_same_run, assert_same_tensors
from tiers import more, nightly
from training import l2l_trainer, logs, plain_trainer, settled_memory, tiny_bert


@pytest.fixture(autouse=True)
def _two() -> Iterator[None]:
    enable_simulated_accelerator(devices=2)
    yield
    enable_simulated_accelerator()


def run(folder, **options: Any) -> hf.Trainer:
    given = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 2, **options}
    made = l2l_trainer(folder, model=tiny_bert(layers=2), **given)
    made.train()
    return made


@pytest.mark.filterwarnings("ignore:batch . x accumulation 2")
@pytest.mark.parametrize("merges", ["auto", *more("off")])
def test_two_devices_run_as_one_with_twice_the_rows_and_one_goes_on(tmp_path, merges):
    """Dropout, evaluation, accumulation; a checkpoint of two devices is resumed on one."""
    common = {"ubatch_size": 4, "gradient_accumulation_steps": 2, "l2l_merge_accumulation": merges}
    common |= {"save_strategy": "steps", "save_steps": 1}
    both = run(tmp_path / "both", per_device_train_batch_size=4, per_device_eval_batch_size=4, **common)
    one = run(tmp_path / "one", l2l_devices="1", **common)
    attach_l2l(both.model, L2LConfig(device=["sim:0", "sim:1"], ubatch_size=4, **UNCHECKED))  # as it is already
    assert both.args.n_gpu == 2 and both.args.train_batch_size == 8 == one.args.train_batch_size
    assert_same_run(both, one)
    resumed = l2l_trainer(tmp_path / "again", model=tiny_bert(layers=2), max_steps=2, l2l_devices=1, **common)
    resumed.train(resume_from_checkpoint=str(tmp_path / "both" / "checkpoint-1"))
    assert_same_tensors(resumed.model.state_dict(), both.model.state_dict())


@nightly
def test_a_budget_is_that_of_each_device(tmp_path, monkeypatch):
    """The smallest one that is enough for each; less is refused. "auto" is a share of the smallest device."""
    (tmp_path / "figures.json").write_text(FIGURES.to_json())
    monkeypatch.setenv("HF_L2L_FIGURES", str(tmp_path / "figures.json"))
    settled_memory()
    before = [torch.sim.memory_allocated(number) for number in range(2)]  # of other modules
    enable_simulated_accelerator(10**6 + max(before), devices=2)
    given = {"per_device_train_batch_size": 4, "max_steps": 1}
    made = l2l_trainer(tmp_path, device_memory_budget="400KiB", **given)
    for number in range(2):
        torch.accelerator.reset_peak_memory_stats(torch.device("sim", number))
    made.train()
    held = [torch.accelerator.memory_stats(torch.device("sim", n))["allocated_bytes.all.peak"] for n in range(2)]
    used = max(after - earlier for after, earlier in zip(held, before, strict=True))
    assert 0 < used <= min(400 * 1024, plan_of(made).peak_bytes * 1.03)
    with pytest.raises(ValueError, match="device_memory_budget"):
        l2l_trainer(tmp_path / "less", device_memory_budget="10KiB", **given).train()
    enable_simulated_accelerator("8MiB", devices=2)
    ask = torch.sim.mem_get_info

    def half_on_the_second(device=None):
        free, total = ask(device)
        return (free - total // 2, total // 2) if torch.device(device).index == 1 else (free, total)

    monkeypatch.setattr(torch.sim, "mem_get_info", half_on_the_second)
    made = l2l_trainer(tmp_path, device_memory_budget="auto", **given)
    made.train()
    assert plan_of(made).budget == int(0.9 * 2**22)


def test_without_a_size_there_are_two_micro_batches_per_device(tmp_path, caplog):
    made = l2l_trainer(tmp_path, per_device_train_batch_size=4, max_steps=1, l2l_resident_layers=2)
    seen: list[int] = []
    made.model.bert.encoder.layer[3].intermediate.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    with caplog.at_level(logging.DEBUG, "hf_l2l"):
        made.train()
    assert seen == 8 * [2], "a forward, and the recompute"
    for part in ("Device = sim:0, sim:1", "two for each device", "the first 2 layers", "over 2 links together"):
        assert part in caplog.text


def test_the_search_for_overflows_is_no_matter_of_several_devices(tmp_path, capsys):
    """transformers refuses it for the replicas of `DataParallel`. It looks into each layer on its device."""
    options = {"debug": "underflow_overflow", "per_device_train_batch_size": 4, "max_steps": 1, "ubatch_size": 4}
    made = l2l_trainer(tmp_path, model=small_bert(), **options)
    # It cannot look into the boolean masks that layers get otherwise.
    made.train_dataset = [{k: v for k, v in row.items() if k != "attention_mask"} for row in made.train_dataset]
    made.train()
    assert made.args.n_gpu == 2 and made.state.train_batch_size == 8
    with pytest.raises(ValueError, match="nowhere"):
        made.train(resume_from_checkpoint=str(tmp_path / "nowhere"))
    assert made.args.n_gpu == 2
    with torch.no_grad():
        made.model.bert.encoder.layer[1].output.dense.weight.fill_(torch.inf)
    with pytest.raises(ValueError, match="inf/nan"):
        made.train()
    assert "bert.encoder.layer.1.output" in capsys.readouterr().out


@nightly
def test_a_loss_of_items_is_that_of_the_whole_batch(tmp_path):
    """transformers divides the items of a batch by the devices, or multiplies the loss, for `DataParallel`."""

    def losses(name, make, **options):
        torch.manual_seed(0)
        trainer = make(tmp_path / name, model=gpt2(), max_steps=2, **options)
        trainer.train_dataset = [{"input_ids": (r := list(range(i, i + 6))), "labels": r} for i in range(40)]
        trainer.model_accepts_loss_kwargs = True
        trainer.train()
        return [entry["loss"] for entry in logs(trainer) if "loss" in entry]

    two = losses("two", l2l_trainer, per_device_train_batch_size=4, ubatch_size=4)
    assert two == losses("one", l2l_trainer, per_device_train_batch_size=8, ubatch_size=4, l2l_devices="1")
    enable_simulated_accelerator()
    assert two == pytest.approx(losses("plain", plain_trainer, per_device_train_batch_size=8), rel=1e-4)
