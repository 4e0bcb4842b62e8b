"""Cross mixed precision under the Trainer: checkpoints, the scheduler, logs, and what the host holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

from hf_l2l.measure import MemoryCallback
from plain import small_bert
from runs import assert_same_run
from tiers import cpu_suffices
from training import SAVING, inner_optimizer, l2l_trainer, stopped_at_two

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")

# So large a scale at first that steps are skipped, on both sides of the checkpoint.
FP16: dict[str, Any] = {"cmp": "fp16", "l2l_loss_scale_init": 2.0**22, "learning_rate": 1e-3, "max_steps": 6}
SHORT: dict[str, Any] = {"l2l_grad_dtype": "16bit", "l2l_moment_dtype": "bf16", "l2l_host_copies": "per_sweep"}


def make(folder: Path, **options: Any) -> Any:
    return l2l_trainer(folder, **{"model": small_bert(0.1), **options})


@cpu_suffices
@pytest.mark.parametrize("options", [{"cmp": "bf16"}, {**FP16, **SHORT}], ids=["bf16", "fp16"])
def test_going_on_is_never_having_stopped(tmp_path, options):
    options = {**SAVING, "ubatch_size": 3, "eps_update": "deferred", **options}
    whole = make(tmp_path / "whole", **options)
    whole.train()
    checkpoint = Path(stopped_at_two(make, tmp_path / "parts", **options))
    resumed = make(tmp_path / "parts", **options)
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


@cpu_suffices
def test_a_skipped_step_is_logged_and_the_scheduler_waits(tmp_path):
    # The first three scales overflow, whatever the last bits of the gradients.
    options = {**SAVING, **FP16, "l2l_loss_scale_init": 2.0**30, "l2l_loss_scale_backoff": 2.0**-5}
    made = make(tmp_path, **options)
    made.train()
    logs = [entry for entry in made.state.log_history if "loss" in entry]
    skipped = [entry["skipped_steps"] for entry in logs]
    assert 0 < skipped[0] <= skipped[-1] < len(logs) == 6
    assert [entry["loss_scale"] for entry in logs] == [2.0 ** (30 - 5 * count) for count in skipped]
    steps = [1 - (count - before) for before, count in zip([0, *skipped], skipped, strict=False)]
    rates = [entry["learning_rate"] for entry in logs]
    # What a step logs is the rate that it was to be made with.
    assert [a != b for a, b in zip(rates, rates[1:], strict=False)] == [bool(each) for each in steps[:-1]]


@cpu_suffices
@pytest.mark.parametrize(("before", "after"), [(FP16, {}), ({}, FP16)], ids=["to fp32", "to fp16"])
def test_a_run_goes_on_in_other_numbers(tmp_path, before, after):
    checkpoint = stopped_at_two(make, tmp_path, **{**SAVING, **before, "max_steps": 3})
    resumed = make(tmp_path, **{**SAVING, **after, "max_steps": 3})
    resumed.train(resume_from_checkpoint=checkpoint)
    assert resumed.state.global_step == 3
    assert (resumed.eps.loss_scale is None) == (not after)


@pytest.mark.parametrize(("asked", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_the_saved_model_has_the_dtype_that_is_asked_for_and_checkpoints_the_masters(tmp_path, asked, dtype):
    """Masters of a model that was loaded in 16 bits are fp32, too."""
    made = make(
        tmp_path, model=small_bert(0.1).bfloat16(), cmp="bf16", l2l_save_dtype=asked, **{**SAVING, "max_steps": 2}
    )
    made.train()
    made.save_model(str(tmp_path / "final"))
    model = made.model
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {s["exp_avg"].dtype for s in inner_optimizer(made).state.values()} == {torch.float32}
    saved, checkpoint = (load_file(tmp_path / name / "model.safetensors") for name in ("final", "checkpoint-2"))
    assert saved.keys() == checkpoint.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(saved[name], value.to(dtype))
        assert torch.equal(checkpoint[name], value)
    loaded = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "final", dtype="auto")
    assert loaded.dtype == dtype
    assert made.model is model


@cpu_suffices
def test_the_host_holds_the_bytes_per_parameter_that_the_summary_says(tmp_path):
    memory = MemoryCallback()
    options = {"cmp": "fp16", "l2l_loss_scale_init": 1.0, **SHORT}
    made = make(tmp_path, eps_update="deferred", max_steps=2, callbacks=[memory], **options)
    assert "(10.0 bytes per parameter)" in made.l2l_summary()
    made.train()
    parameters = list(made.model.parameters())
    counters = 4 * len(parameters)
    assert memory.metrics()["train_host_bytes"] == 10 * sum(p.numel() for p in parameters) + counters
