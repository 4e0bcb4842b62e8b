"""Trainings with trainers of other libraries, plain and layer to layer, and what of them is compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from accelerate.state import AcceleratorState, GradientState
from torch import nn

from hf_l2l import make_l2l_arguments, make_l2l_trainer

UBATCHES = [None, 3]
"""The whole device batch, and micro-batches of three of its eight rows, the last one of two."""

Parts = Callable[[], dict[str, Any]]
"""Makes the model, data, and whatever else a trainer takes beside its arguments; anew for each of two trainings."""


@dataclass
class Training:
    """What is left of a training."""

    trainer: hf.Trainer
    logs: list[dict[str, float]]
    weights: dict[str, torch.Tensor]


def options(folder: Path, **more: Any) -> dict[str, Any]:
    """A few steps, for any class of training arguments."""
    few = {"per_device_train_batch_size": 8, "max_steps": 3, "logging_steps": 1, "learning_rate": 1e-2}
    quiet = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False}
    return {"output_dir": str(folder), **few, **quiet, "bf16": False, **more}


def on_sim() -> bool:
    """Whether this process has the simulated accelerator."""
    return torch.accelerator.is_available()


def start_again() -> None:
    """Forget the device and the random numbers of an earlier training."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    hf.set_seed(5)


def run(trainer: type[Any], arguments: type[Any], folder: Path, parts: Parts, **given: Any) -> Training:
    """A training by `trainer`; `given` are its arguments."""
    start_again()
    made = trainer(args=arguments(**options(folder, **given)), **parts())
    made.train()
    weights = {name: p.detach().cpu().clone() for name, p in trained_parameters(made).items()}
    return Training(made, losses(made.state.log_history), weights)


def trained_parameters(of: hf.Trainer) -> dict[str, nn.Parameter]:
    """Those of the model, and those that losses of sentence-transformers have beside it."""
    loss = getattr(of, "loss", None)
    of_loss = dict(loss.named_parameters(prefix="loss")) if isinstance(loss, nn.Module) else {}
    return {**dict(of.model.named_parameters()), **of_loss}


def losses(history: list[dict[str, float]]) -> list[dict[str, float]]:
    """The logs without what a clock says."""
    timed = "runtime", "_per_second", "step_time", "l2l_", "device_peak"
    return [{k: v for k, v in entry.items() if not any(t in k for t in timed)} for entry in history]


def check_trainer(
    trainer: type[Any],
    arguments: type[Any],
    folder: Path,
    parts: Parts,
    ubatch_size: int | None,
    tolerance: float = 1e-4,
    **given: Any,
) -> Training:
    """Train with `trainer`, plain and layer to layer, and compare; returns the second training.

    With the whole batch, logs and weights are the same to the bit. With micro-batches, whose sums are in another
    order, they may differ by `tolerance`: a learning rate of 1e-2 is a hundred times that.
    """
    plain = run(trainer, arguments, folder / "plain", parts, **given)
    kinds = make_l2l_trainer(trainer), make_l2l_arguments(arguments)
    given |= {"ubatch_size": ubatch_size, "stash": "host"}
    found = run(*kinds, folder / "l2l", parts, **given)
    assert found.trainer.eps is not None, "the model was not attached"
    assert_same(found, plain, None if ubatch_size is None else tolerance)
    return found


def assert_same(found: Training, expected: Training, tolerance: float | None) -> None:
    """Logs and weights have the same bits, or are within a `tolerance`, relative and absolute."""
    if tolerance is None:
        assert found.logs == expected.logs
        assert_same_bits(found.weights, expected.weights)
        return
    torch.testing.assert_close(found.logs, expected.logs, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found.weights, expected.weights, rtol=tolerance, atol=tolerance)


def assert_same_bits(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Both have tensors of the same names, with the same bits."""
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []
