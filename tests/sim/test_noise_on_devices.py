"""The noise scale on a device of its own: what is waited for, what memory it takes, and several devices."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from accumulated import made, ragged, tiny_llama, train
from hf_l2l import detach_l2l
from hf_l2l.noise.estimate import NoiseScale
from hf_l2l.runtime import stream, wait_reasons
from hf_l2l.testing import enable_simulated_accelerator
from tiers import nightly
from training import l2l_trainer, tiny_bert

ON = {"l2l_noise_scale": True, "l2l_noise_scale_every": "1"}


def found_by(trainer: Any) -> NoiseScale:
    [noise] = [each for each in trainer.callback_handler.callbacks if type(each).__name__ == "L2LNoiseScale"]
    return noise.found


@nightly
def test_two_devices_find_what_the_host_does(tmp_path):
    def noise_of(**options: Any) -> NoiseScale:
        model = tiny_bert(dropout=0.0, layers=2)
        trainer = l2l_trainer(tmp_path, model=model, ubatch_size=2, max_steps=2, **ON, **options)
        train(trainer)
        return found_by(trainer)

    expected = noise_of(use_cpu=True)
    enable_simulated_accelerator(devices=2)
    try:
        found = noise_of(per_device_train_batch_size=4)
    finally:
        enable_simulated_accelerator()
    assert (found.steps, found.items, found.rows) == (expected.steps, expected.items, expected.rows)
    assert found.noise == pytest.approx(expected.noise, rel=1e-3)
    assert found.signal == pytest.approx(expected.signal, rel=1e-3, abs=1e-3 * expected.noise / expected.items)


@nightly
def test_the_device_is_not_waited_for_before_a_log(tmp_path, monkeypatch):
    """Norms wait on the device until somebody reads them: at the third step, and once in a while."""
    waited: list[int] = []
    wait = stream.wait

    def noted(point: Any, why: str, **options: Any) -> None:
        if why == wait_reasons.UBATCH_NORMS_COMPUTED and options.get("host"):
            waited.append(trainer.state.global_step)
        wait(point, why, **options)

    monkeypatch.setattr(stream, "wait", noted)
    model = tiny_bert(dropout=0.0, layers=2)
    trainer = l2l_trainer(tmp_path, model=model, ubatch_size=4, max_steps=6, logging_steps=3, **ON)
    trainer.train()
    assert waited == [3] * 3 + [6] * 3
    assert found_by(trainer).steps == 6 and math.isfinite(found_by(trainer).noise)


def test_the_check_of_the_loss_makes_no_logits_of_all_tokens(tmp_path):
    """A first step takes no more memory than without it."""
    peaks = []
    for measures in ({}, ON):
        options = {"gradient_accumulation_steps": 2, "max_steps": 1, "ubatch_size": 1, **measures}
        model, data = tiny_llama(vocab_size=2000), ragged(longest=16, shortest=16)
        torch.sim.reset_peak_memory_stats()
        train(made(tmp_path, model=model, data=data, **options))
        peaks.append(torch.sim.max_memory_allocated())
        detach_l2l(model)
    assert peaks[1] <= 1.02 * peaks[0]
