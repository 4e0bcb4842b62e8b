"""The noise scale is that of a training on the host, whatever waits where, on one device or several."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from accumulated import forwards, made, ragged, tiny_llama, train
from budgeted import FIGURES
from hf_l2l import L2LBatchGrowth, detach_l2l
from hf_l2l.noise import growth, trainer_part
from hf_l2l.noise.estimate import NoiseScale
from hf_l2l.runtime import stream, wait_reasons
from hf_l2l.testing import enable_simulated_accelerator
from training import assert_same_run, l2l_trainer, tiny_bert

ON = {"l2l_noise_scale": True, "l2l_noise_scale_every": "1", "ubatch_size": 2, "max_steps": 3}


def averages(folder: Path, **options: Any) -> NoiseScale:
    trainer = l2l_trainer(folder, model=tiny_bert(dropout=0.0), **{**ON, **options})
    train(trainer)
    return trainer._l2l_noise.found


def assert_close(found: NoiseScale, expected: NoiseScale, rel: float) -> None:
    assert (found.steps, found.items, found.rows) == (expected.steps, expected.items, expected.rows)
    assert found.noise == pytest.approx(expected.noise, rel=rel)
    assert found.signal == pytest.approx(expected.signal, rel=rel, abs=rel * expected.noise / expected.items)


PLAIN: dict[str, Any] = {"gradient_accumulation_steps": 2, "ubatch_size": None}
CASES: dict[str, tuple[dict[str, Any], float]] = {
    "streamed": ({}, 1e-3),
    "a stash on the host": ({"stash": "host"}, 1e-3),
    "resident": ({"l2l_resident": "all"}, 1e-3),
    "as without L2L": ({**PLAIN, "l2l_resident": "all", "l2l_kept_graphs": 4}, 1e-3),
    "resident layers": ({"l2l_resident_layers": 2}, 1e-3),
    "kept graphs": ({"l2l_kept_graphs": 2}, 1e-3),
    "eager": ({"eps_update": "eager", "max_grad_norm": 0.0}, 1e-3),
    "serial": ({"eps_update": "serial"}, 1e-3),
    "state on disk": ({"l2l_state_tier": "disk"}, 1e-3),
    "bf16": ({"cmp": "bf16"}, 0.05),
    "fp16": ({"cmp": "fp16"}, 0.05),
    "fp16 without clipping": ({"cmp": "fp16", "max_grad_norm": 0.0}, 0.05),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("options", "rel"), CASES.values(), ids=CASES)
def test_one_device(tmp_path, options, rel):
    same = {name: options[name] for name in ("max_grad_norm", *PLAIN) if name in options}
    expected = averages(tmp_path, use_cpu=True, **same)
    assert expected.steps == 3
    assert_close(averages(tmp_path, **options), expected, rel)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("cmp", [None, "bf16"])
def test_two_devices(tmp_path, cmp):
    expected = averages(tmp_path, use_cpu=True)
    enable_simulated_accelerator(devices=2)
    try:
        found = averages(tmp_path, per_device_train_batch_size=4, cmp=cmp)
    finally:
        enable_simulated_accelerator()
    assert_close(found, expected, 1e-3 if cmp is None else 0.05)


def test_merged_batches(tmp_path):
    options = {"l2l_noise_scale": True, "l2l_noise_scale_every": "1"}
    found = []
    for more in ({"use_cpu": True}, {}):
        trainer = made(tmp_path, **options, **more)
        train(trainer)
        found.append(trainer._l2l_noise.found)
    assert_close(found[1], found[0], 1e-3)


def test_the_device_is_not_waited_for_before_a_log(tmp_path, monkeypatch):
    """Norms wait on the device until somebody reads them: at the third step, and once in a while."""
    waited: list[int] = []
    wait = stream.wait

    def noted(point: Any, why: str, **options: Any) -> None:
        if why == wait_reasons.UBATCH_NORMS_COMPUTED and options.get("host"):
            waited.append(trainer.state.global_step)
        wait(point, why, **options)

    monkeypatch.setattr(stream, "wait", noted)
    trainer = l2l_trainer(tmp_path, model=tiny_bert(dropout=0.0), **{**ON, "max_steps": 6, "logging_steps": 3})
    trainer.train()
    assert waited == [3] * 3 + [6] * 3
    assert trainer._l2l_noise.found.steps == 6 and math.isfinite(trainer._l2l_noise.found.noise)


def test_the_check_of_the_loss_makes_no_logits_of_all_tokens(tmp_path):
    """A first step takes no more memory than without it."""
    peaks = []
    for more in ({}, {"l2l_noise_scale": True, "l2l_noise_scale_every": "1"}):
        model = tiny_llama(vocab_size=4000)
        trainer = made(tmp_path, model=model, data=ragged(longest=16, shortest=16), max_steps=1, ubatch_size=1, **more)
        torch.accelerator.reset_peak_memory_stats()
        train(trainer)
        peaks.append(torch.accelerator.memory_stats()["allocated_bytes.all.peak"])
        detach_l2l(model)
    assert peaks[1] <= 1.02 * peaks[0]


def test_growing_batches_are_planned_once(tmp_path, monkeypatch):
    """Memory is planned for the largest step, so that a resumed training runs as the unbroken one: to the bit."""
    (tmp_path / "figures.json").write_text(FIGURES.to_json())
    monkeypatch.setenv("HF_L2L_FIGURES", str(tmp_path / "figures.json"))
    monkeypatch.setattr(trainer_part, "LOOKS_EVERY", 1)
    monkeypatch.setattr(growth, "FEWEST_MEASURED", 0)
    monkeypatch.setattr(NoiseScale, "critical_batch", property(lambda self: 1000.0 if self.steps > 1 else 1.0))
    options = {
        "device_memory_budget": "1GiB",
        "gradient_accumulation_steps": 2,
        "max_steps": 12,
        "save_strategy": "steps",
        "save_steps": 1,
        "l2l_log_times": False,
        "l2l_noise_scale": True,
        "l2l_noise_scale_every": "1",
    }
    runs = []
    for checkpoint in (None, str(tmp_path / "checkpoint-5")):
        trainer = made(tmp_path, of_trainer={"callbacks": [L2LBatchGrowth(16)]}, **options)
        seen = forwards(trainer)
        train(trainer, *([] if checkpoint is None else [checkpoint]))
        runs.append((trainer, seen))
        assert trainer._l2l_plan._purpose.accumulated == 8
        assert seen
    (whole, _), (again, _) = runs
    assert whole.args.gradient_accumulation_steps == 2 and whole.state.global_step < 12
    assert_same_run(again, whole)
