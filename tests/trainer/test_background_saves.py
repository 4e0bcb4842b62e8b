"""`l2l_async_save`: checkpoints that are written in the background are those of their step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from devices import DEVICE
from hf_l2l import estimate
from models import llama
from runs import assert_same_run
from saving import At, saving, trained
from slow_disk import SlowDisk, assert_same_checkpoints
from tiers import cpu_suffices, more, nightly
from training import rows, tiny_bert

MODES: dict[str, dict[str, Any]] = {
    "deferred": {"eps_update": "deferred"},
    "serial": {"eps_update": "serial"},
    "eager": {"eps_update": "eager", "max_grad_norm": 0.0},
    "bf16 copies": {"eps_update": "deferred", "cmp": "bf16", "bf16": False},
    "bf16 moments": {"eps_update": "deferred", "l2l_moment_dtype": "bf16"},
    "moments of 8 bits": {"eps_update": "deferred", "l2l_moment_dtype": "8bit"},
    "all at once": {"eps_update": "deferred", "optim": "adamw_torch_fused"},
    "momentum": {"eps_update": "deferred", "optim": "sgd", "optim_args": "momentum=0.9"},
}
if DEVICE != "cpu":
    MODES |= {
        "resident layers": {"l2l_resident_layers": 1, "l2l_resident_update": "device"},
        "resident shell": {"l2l_resident": "shell", "l2l_resident_update": "host"},
        "all resident": {"l2l_resident": "all"},
    }


FAST = ["eager", "moments of 8 bits"] if DEVICE == "cpu" else ["resident layers"]


@pytest.mark.parametrize("name", [*FAST, *more(*sorted(MODES.keys() - {*FAST}))])
def test_checkpoints_have_the_values_of_their_step(tmp_path, monkeypatch, name):
    trained(tmp_path / "at once", **MODES[name], max_steps=3)
    SlowDisk(monkeypatch)
    trained(tmp_path / "later", **MODES[name], max_steps=3, l2l_async_save=True)
    assert_same_checkpoints(tmp_path / "later", tmp_path / "at once")


@nightly
@cpu_suffices
def test_copies_take_two_layers_at_most_and_they_are_resumed_from(tmp_path, monkeypatch):
    """As the estimate and the memory report have it."""
    options = {"eps_update": "deferred", "l2l_async_save": True}
    with monkeypatch.context() as patch:
        disk = SlowDisk(patch)
        model = tiny_bert(layers=4)
        whole = trained(tmp_path / "run", model=model, **options)
    parameters = list(model.bert.encoder.layer[0].parameters())
    layer, steps = sum(p.nbytes for p in parameters), 2 * 4 * len(parameters)
    assert 0 < disk.copied_bytes <= 2 * 3 * layer + steps
    assert disk.copied_bytes <= estimate(model).layers_being_saved
    found = whole.eps.memory_report()["host"]["layers being saved"]
    # What the disk has seen when it waited; there may be more copies between its waits.
    assert found["now"] == 0 and found["peak"] >= disk.copied_bytes
    checkpoint = tmp_path / "run" / "checkpoint-2"
    assert_same_run(trained(tmp_path / "l2l", model=tiny_bert(layers=4), resumes=checkpoint), whole)


@cpu_suffices
def test_what_the_program_changes_is_saved_first(tmp_path, monkeypatch):
    """Moments after `synchronize`, then weights, tied ones, too, right after a checkpoint was begun."""

    def run(folder: Path, **options: Any) -> None:
        def change() -> None:
            made.eps.synchronize()
            for moments in getattr(made.optimizer, "optimizer", made.optimizer).state.values():
                moments["exp_avg"].zero_()
            with torch.no_grad():
                for p in made.model.parameters():
                    p.mul_(0.5)

        torch.manual_seed(0)
        model = llama(tie_word_embeddings=True)
        made = saving(folder, model=model, eps_update="deferred", max_steps=3, **options)
        made.add_callback(At("on_step_begin", None, change))
        made.train_dataset = [{**row, "labels": row["input_ids"]} for row in rows()]
        made.train()

    run(tmp_path / "at once")
    SlowDisk(monkeypatch)
    run(tmp_path / "later", l2l_async_save=True)
    assert_same_checkpoints(tmp_path / "later", tmp_path / "at once")
    assert "lm_head.weight" not in load_file(tmp_path / "later" / "checkpoint-1" / "model.safetensors")
