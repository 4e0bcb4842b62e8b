"""Cross mixed precision under the Trainer: checkpoints, the scheduler, logs, and what the host holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

from hf_l2l import L2LConfig, L2LTrainingArguments, attach_l2l, estimate
from hf_l2l.measure import MemoryCallback
from hf_l2l.report.host_tensors import host_tensors
from hf_l2l.runtime.tensors import tensor_bytes
from models import batch_for, gpt2
from training import SAVING, arguments, assert_same_run, inner_optimizer, l2l_trainer, stopped_at_two, tiny_bert

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")

# So large a scale at first that steps are skipped, on both sides of the checkpoint.
FP16: dict[str, Any] = {"cmp": "fp16", "l2l_loss_scale_init": 2.0**22, "learning_rate": 1e-3, "max_steps": 8}
SHORT: dict[str, Any] = {"l2l_grad_dtype": "16bit", "l2l_moment_dtype": "bf16", "l2l_host_copies": "per_sweep"}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("mode", [pytest.param("serial", marks=pytest.mark.slow), "deferred"])
@pytest.mark.parametrize("options", [FP16, {"cmp": "bf16"}, {**FP16, **SHORT}], ids=["fp16", "bf16", "fp16 short"])
def test_going_on_is_never_having_stopped(tmp_path, options, mode):
    options = {**SAVING, "ubatch_size": 3, "eps_update": mode, **options}
    whole = l2l_trainer(tmp_path / "whole", **options)
    whole.train()
    checkpoint = Path(stopped_at_two(l2l_trainer, tmp_path / "parts", **options))
    resumed = l2l_trainer(tmp_path / "parts", model=tiny_bert(), **options)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    for entry in (*resumed.state.log_history, *whole.state.log_history):
        entry["grad_norm"] = str(entry.get("grad_norm"))  # one that is no number equals none
    assert_same_run(resumed, whole)
    if options["cmp"] == "fp16":
        assert whole.eps.loss_scale.state_dict() == resumed.eps.loss_scale.state_dict()
        assert torch.load(checkpoint / "scaler.pt", weights_only=True)["skipped"] == 2
        assert whole.eps.loss_scale.skipped > 2
    else:
        assert not (checkpoint / "scaler.pt").exists()
    weights = load_file(checkpoint / "model.safetensors")
    assert {t.dtype for t in weights.values()} == {torch.float32}
    moments = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"]
    kept = torch.bfloat16 if "l2l_moment_dtype" in options else torch.float32
    assert all(state["exp_avg"].dtype == kept for state in moments.values())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mode", ["serial", "deferred"])
def test_a_skipped_step_is_logged_and_the_scheduler_waits(tmp_path, mode):
    # The first three scales overflow, whatever the last bits of the gradients.
    options = {**SAVING, **FP16, "l2l_loss_scale_init": 2.0**30, "l2l_loss_scale_backoff": 2.0**-5, "eps_update": mode}
    trainer = l2l_trainer(tmp_path, **options)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    skipped = [entry["skipped_steps"] for entry in logs]
    assert 0 < skipped[0] <= skipped[-1] < len(logs) == 8
    assert [entry["loss_scale"] for entry in logs] == [2.0 ** (30 - 5 * count) for count in skipped]
    made = [1 - (count - before) for before, count in zip([0, *skipped], skipped, strict=False)]
    rates = [entry["learning_rate"] for entry in logs]
    # What a step logs is the rate that it was to be made with.
    assert [a != b for a, b in zip(rates, rates[1:], strict=False)] == [bool(each) for each in made[:-1]]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("before", "after"), [(FP16, {}), ({}, FP16)], ids=["to fp32", "to fp16"])
def test_a_run_goes_on_in_other_numbers(tmp_path, before, after):
    checkpoint = stopped_at_two(l2l_trainer, tmp_path, **{**SAVING, **before, "max_steps": 4})
    resumed = l2l_trainer(tmp_path, model=tiny_bert(), **{**SAVING, **after, "max_steps": 6})
    resumed.train(resume_from_checkpoint=checkpoint)
    assert resumed.state.global_step == 6
    assert (resumed.eps.loss_scale is None) == (not after)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("asked", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_the_saved_model_has_the_dtype_that_is_asked_for_and_checkpoints_the_masters(tmp_path, asked, dtype):
    trainer = l2l_trainer(tmp_path, cmp="bf16", l2l_save_dtype=asked, **SAVING)
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    model = trainer.model
    saved, checkpoint = (load_file(tmp_path / name / "model.safetensors") for name in ("final", "checkpoint-4"))
    assert saved.keys() == checkpoint.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(saved[name], value.to(dtype))
        assert torch.equal(checkpoint[name], value)
    loaded = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "final", dtype="auto")
    assert loaded.dtype == dtype
    assert trainer.model is model


@pytest.mark.parametrize("option", ["bf16", "fp16"])
def test_two_options_for_one_thing_are_refused(tmp_path, option):
    with pytest.raises(ValueError, match=rf"got cmp='bf16' and {option}=True, which is autocast"):
        arguments(L2LTrainingArguments, tmp_path, cmp="bf16", **{option: True})


@pytest.mark.parametrize("options", [{"cmp": "bf16"}, {}])
def test_mixed_precision_of_accelerate_launch_is_refused(tmp_path, monkeypatch, options):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(ValueError, match="launch with --mixed_precision no"):
        l2l_trainer(tmp_path, **options)
    if "cmp" in options:  # which contradicts it whatever the model
        with pytest.raises(ValueError, match="launch with --mixed_precision no"):
            arguments(L2LTrainingArguments, tmp_path, **options)


def test_an_unknown_dtype_to_save_in_is_refused(tmp_path):
    with pytest.raises(ValueError, match="l2l_save_dtype must be one of 'fp32', 'bf16', 'fp16'"):
        arguments(L2LTrainingArguments, tmp_path, l2l_save_dtype="int8")


def test_a_16_bit_checkpoint_trains_over_fp32_masters(tmp_path):
    trainer = l2l_trainer(tmp_path, model=tiny_bert().bfloat16(), cmp="bf16")
    trainer.train()
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert {s["exp_avg"].dtype for s in inner_optimizer(trainer).state.values()} == {torch.float32}


# ---- what the host holds

HELD = {
    18: {},
    16: {"grad_dtype": "16bit"},
    12: {"grad_dtype": "16bit", "moment_dtype": "bf16"},
    10: {"grad_dtype": "16bit", "moment_dtype": "bf16", "host_copies": "per_sweep"},
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("cmp", ["bf16", "fp16"])
@pytest.mark.parametrize("per_parameter", HELD)
@pytest.mark.parametrize("mode", ["serial", "deferred"])
def test_the_census_finds_the_bytes_per_parameter_that_were_estimated(per_parameter, cmp, mode):
    model = gpt2()
    options: dict[str, Any] = {"loss_scale_init": 1.0} if cmp == "fp16" else {}
    config = L2LConfig(device="cpu", cmp=cmp, eps_update=mode, **HELD[per_parameter], **options)
    eps = attach_l2l(model, config)
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters()))
    for _ in range(2):
        model(**batch_for(model)).loss.backward()
        found = host_tensors(model, [optimizer], eps.copies.kept)
        eps.clip_grad_norm_(1.0)
        optimizer.step()
    eps.synchronize()
    numbers = sum(t.numel() for state in optimizer.state.values() for t in state.values() if t.dim() == 0)
    held = sum(tensor_bytes(tensors) for tensors in found.values()) - 4 * numbers
    parameters = sum(p.numel() for p in model.parameters())
    assert held == per_parameter * parameters
    need = estimate(model, config, optimizer)
    assert {kind: tensor_bytes(tensors) for kind, tensors in found.items()} == {
        kind: getattr(need, kind) for kind in ("masters", "gradients", "moments", "copies")
    }


def test_the_summary_and_the_callback_say_what_is_held(tmp_path):
    memory = MemoryCallback()
    trainer = l2l_trainer(tmp_path, cmp="bf16", l2l_grad_dtype="16bit", callbacks=[memory])
    summary = trainer.l2l_summary()
    assert "Precision = torch.bfloat16, over fp32 masters; gradients wait in 16bit, moments in fp32" in summary
    assert "copies" in summary
    assert "(16.0 bytes per parameter)" in summary
    trainer.train()
    parameters = sum(p.numel() for p in trainer.model.parameters())
    steps = 4 * len(list(trainer.model.parameters()))
    assert memory.metrics()["train_host_bytes"] == 16 * parameters + steps
