"""Loops by Lightning Fabric and by Accelerate train layer to layer as they do by themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("lightning_fabric", reason="`make test-clients` has it")

import torch
from accelerate import Accelerator
from lightning_fabric import Fabric
from torch.utils.data import DataLoader

from client_models import bert
from clients import UBATCHES, assert_same_bits, on_sim, start_again
from hf_l2l import L2LConfig, attach_l2l

DEVICE = "sim" if on_sim() else "cpu"
Weights = dict[str, torch.Tensor]


def loader() -> DataLoader:
    ids = torch.randint(10, 40, (32, 7), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row[0] % 2} for row in ids]
    return DataLoader(rows, batch_size=8)


def check(found: Weights, expected: Weights, ubatch_size: int | None) -> None:
    if ubatch_size is None:
        assert_same_bits(found, expected)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def weights(model: torch.nn.Module) -> Weights:
    return {name: p.detach().cpu().clone() for name, p in model.named_parameters()}


def fabric_loop(folder: Path, config: L2LConfig | None) -> tuple[Weights, Weights]:
    """Weights after an epoch, and after the second one of two that is trained again from what was saved."""
    fabric = Fabric(accelerator="cpu", devices=1)  # the simulated accelerator is none of those that Fabric knows
    original = bert()
    adam = torch.optim.AdamW(original.parameters(), lr=1e-2)
    if config is not None:
        attach_l2l(original, config).wrap(adam)
    model, optimizer = fabric.setup(original, adam, move_to_device=config is None)
    batches, after = fabric.setup_dataloaders(loader()), []
    saved = {"model": model, "optimizer": optimizer}
    for epoch in ("first", "second", "second again"):
        if epoch == "second again":
            fabric.load(folder / "saved", saved)
        for batch in batches:
            fabric.backward(model(**batch).loss)
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
        if epoch == "first":
            fabric.save(folder / "saved", saved)
        after.append(weights(original))
    assert_same_bits(after[1], after[2])
    return after[0], after[1]


@pytest.mark.parametrize("ubatch_size", UBATCHES)
def test_fabric(tmp_path, ubatch_size):
    expected = fabric_loop(tmp_path / "plain", None)
    found = fabric_loop(tmp_path / "l2l", L2LConfig(device=DEVICE, ubatch_size=ubatch_size, stash="host"))
    for ours, theirs in zip(found, expected, strict=True):
        check(ours, theirs, ubatch_size)


def test_what_fabric_has_wrapped_is_refused():
    model = Fabric(accelerator="cpu", devices=1).setup(bert())
    with pytest.raises(ValueError, match="a model wrapped by Fabric"):
        attach_l2l(model, L2LConfig(device=DEVICE))


# ---- Accelerate


def accelerate_loop(folder: Path, config: L2LConfig | None, when: str = "before") -> Weights:
    """Weights after accumulated, clipped steps with a schedule, the last of them after all was saved and loaded."""
    start_again()
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if config is not None and when == "before":
        attach_l2l(model, config).wrap(optimizer)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    model, optimizer, batches, schedule = accelerator.prepare(model, optimizer, loader(), schedule)
    if config is not None and when == "after":
        attach_l2l(model, config).wrap(optimizer)
    for epoch in range(2):
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        if epoch == 0:
            accelerator.save_state(str(folder))
            accelerator.load_state(str(folder))
    return weights(model)


# The model is on the accelerator then, from where L2L moves it, and says so.
@pytest.mark.filterwarnings("ignore:the model was on sim:UserWarning")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("ubatch_size", UBATCHES)
def test_accelerate(tmp_path, ubatch_size, when):
    expected = accelerate_loop(tmp_path / "plain", None)
    config = L2LConfig(device=DEVICE, ubatch_size=ubatch_size, stash="host")
    check(accelerate_loop(tmp_path / "l2l", config, when), expected, ubatch_size)
