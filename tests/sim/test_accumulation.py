"""Accumulated batches that run as one: what travels does not grow with their number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import accumulated
from accumulated import ragged, tiny_llama, train
from hf_l2l.model.stacks import parameter_bytes
from hf_l2l.testing import sim_copies
from tiers import combined
from training import logs

ROWS, LAYERS = 8, 3


class Bytes(hf.TrainerCallback):
    """Counts what is copied to the device and from it in each step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[tuple[int, int]] = []
        self.up = self.down = 0
        copy_ = sim_copies.copy

        def counting(source: torch.Tensor, target: torch.Tensor, *rest: Any) -> None:
            if source.device != target.device and source.device.type == "cpu":
                self.up += source.nbytes
            elif source.device != target.device:
                self.down += source.nbytes
            copy_(source, target, *rest)

        monkeypatch.setattr(sim_copies, "copy", counting)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append((self.up, self.down))
        self.up = self.down = 0


def bytes_of_a_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch, count: int, value: str, **options: Any
) -> tuple[int, int]:
    """Bytes up and down in a later step of the same rows in `count` batches; `value` says whether they are folded."""
    with monkeypatch.context() as patch:
        counted = Bytes(patch)
        made = accumulated.made(
            folder,
            model=tiny_llama(layers=LAYERS),
            data=ragged(longest=6, shortest=6),
            per_device_train_batch_size=ROWS // count,
            gradient_accumulation_steps=count,
            l2l_merge_accumulation=value,
            max_steps=2,
            of_trainer={"callbacks": [counted]},
            **options,
        )
        assert made.args.device.type == "sim"
        said = train(made)
        assert bool(said) == (value == "off" and count > 1)
    return counted.steps[1]


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"stash": "host"}, marks=pytest.mark.slow),
        pytest.param({"stash": "host", "l2l_boundary": "host"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_travels_does_not_grow_with_the_number_of_batches(tmp_path, monkeypatch, options):
    two, eight = (bytes_of_a_step(tmp_path, monkeypatch, count, "auto", **options) for count in (2, 8))
    assert two == eight


def test_one_by_one_each_batch_moves_all_weights_and_gradients(tmp_path, monkeypatch):
    up, down = bytes_of_a_step(tmp_path, monkeypatch, 2, "auto")
    model = tiny_llama(layers=LAYERS)
    weights, layer = parameter_bytes([model]), parameter_bytes([model.model.layers[0]])
    for count in (2, 4):  # the layers but the last two are uploaded in both sweeps
        found_up, found_down = bytes_of_a_step(tmp_path, monkeypatch, count, "off")
        assert found_up - up >= (count - 1) * (weights + (LAYERS - 2) * layer)
        assert found_down - down >= (count - 1) * weights


KEPT = [
    {"l2l_resident": "shell"},
    {"l2l_resident_layers": 1},
    {"l2l_kept_weights": 1},
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("options", KEPT, ids=str)
def test_what_stays_on_the_device_changes_nothing(tmp_path, options):
    test_a_step_is_that_of_its_batches(tmp_path, "deferred", options)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("options", "mode"),
    combined(
        [{}, {"stash": "host", "l2l_boundary": "host"}, {"cmp": "fp16"}], ["serial", "deferred", "eager"], one_in=3
    ),
)
def test_a_step_is_that_of_its_batches(tmp_path, mode, options):
    if mode == "eager" and options.get("cmp") == "fp16":
        options = {"cmp": "bf16"}
    runs = []
    for value in ("off", "auto"):
        made = accumulated.made(tmp_path, eps_update=mode, max_grad_norm=0.0, l2l_merge_accumulation=value, **options)
        said = train(made)
        assert bool(said) == (value == "off")
        runs.append(made)
    apart, folded = runs
    rel = 1e-2 if "cmp" in options else 1e-5
    for found, expected in zip(logs(folded), logs(apart), strict=True):
        assert found == pytest.approx(expected, rel=rel)
    others = apart.model.state_dict()
    for name, value in folded.model.state_dict().items():
        assert (value - others[name]).abs().max() <= (4e-3 if "cmp" in options else 1e-5), name
