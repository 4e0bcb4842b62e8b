"""What a training holds on the device, and what travels to it and back."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import accumulated
from accumulated import ragged, tiny_llama
from hf_l2l import L2LConfig, attach_l2l, detach_l2l, estimate
from hf_l2l.testing import Costs, VirtualClock, virtual_clock
from models import batch_for, bert, llama, t5
from tiers import more, nightly
from training import settled_memory


def on_clock() -> AbstractContextManager[VirtualClock]:
    """A machine whose link takes a second for a byte, and that does all else at once."""
    return virtual_clock(Costs(link_bytes_per_s=1.0, flop_per_s=math.inf, host_bytes_per_s=math.inf))


def travelled(clock: VirtualClock) -> tuple[int, int]:
    """Bytes up and down so far."""
    lanes = {"upload": 0.0, "download": 0.0}
    for task in clock.tasks:
        if task.lane in lanes:
            lanes[task.lane] += task.end - task.start
    return round(lanes["upload"]), round(lanes["download"])


def bytes_of(*modules: nn.Module) -> int:
    return sum(p.nbytes for module in modules for p in module.parameters())


# ---- accumulated batches that run as one

ROWS, LAYERS = 8, 3


class AtSteps(hf.TrainerCallback):
    """What has travelled when each step ends."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock, self.found = clock, list[tuple[int, int]]()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        for p in model.parameters():
            p.detach()  # waits for its update
        self.found.append(travelled(self.clock))


def bytes_of_a_step(folder: Path, count: int, **options: Any) -> tuple[int, int]:
    """Bytes up and down in a second step of the same rows in `count` batches."""
    with on_clock() as clock:
        at_steps = AtSteps(clock)
        made = accumulated.made(
            folder,
            model=tiny_llama(layers=LAYERS),
            data=ragged(longest=6, shortest=6),
            per_device_train_batch_size=ROWS // count,
            gradient_accumulation_steps=count,
            max_steps=2,
            of_trainer={"callbacks": [at_steps]},
            **options,
        )
        accumulated.train(made)
    (up, down), (more_up, more_down) = at_steps.found
    return more_up - up, more_down - down


@nightly
@pytest.mark.parametrize("options", [{}, *more({"stash": "host", "l2l_boundary": "host"})], ids=str)
def test_what_travels_grows_with_the_number_of_batches_only_if_they_run_one_by_one(tmp_path, options):
    merged, count = bytes_of_a_step(tmp_path, 4, **options), 2
    assert bytes_of_a_step(tmp_path, count, **options) == merged
    model = tiny_llama(layers=LAYERS)
    weights, layer = bytes_of(model), bytes_of(model.model.layers[0])
    # The rows of batches that run one by one take fewer ways through the host.
    rows = ROWS * 6 * 16 * 4 * LAYERS if options else 0
    up, down = bytes_of_a_step(tmp_path, count, **options, l2l_merge_accumulation="off")
    # The layers but the last two are uploaded in both sweeps.
    assert up - merged[0] >= (count - 1) * (weights + (LAYERS - 2) * layer)
    assert down - merged[1] >= (count - 1) * weights - rows


# ---- generation


@nightly
def test_each_layer_is_uploaded_once_per_forward():
    """With a key-value cache, and micro-batches."""
    model = tiny_llama(layers=4).eval()
    prompt, calls = torch.randint(5, 60, (2, 5)).to("sim"), []
    attach_l2l(model, L2LConfig(ubatch_size=1))
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    options = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0}
    with on_clock() as clock:
        model.generate(prompt, **options)
    up, _ = travelled(clock)
    weights, layer = bytes_of(model), bytes_of(model.model.layers[0])
    assert len(calls) == 6
    # The last two layers of a forward are still in their slots when the next one begins.
    assert len(calls) * (weights - 2 * layer) <= up < len(calls) * (weights + layer / 2)


# ---- what a program keeps


@nightly
@pytest.mark.parametrize(
    ("options", "family"),
    [
        ({"kept_graphs": 1, "kept_weights": 2}, bert),
        *more(({"stash": "host", "boundary": "host", "ubatch_size": 3}, llama), ({"resident": "shell"}, bert)),
        *more(({"cmp": "bf16", "ubatch_size": 3}, t5), ({"eps_update": "eager", "stash": "host"}, bert)),
    ],
)
def test_kept_losses_and_outputs_keep_no_weights(options, family):
    """Beside their own bytes, a step leaves those numbers without which no node is there: an element for each weight
    outside the layers."""
    model, kept, found = family().train(), list[Any](), list[int]()
    eps = attach_l2l(model, L2LConfig(**options))
    optimizer = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(4):
        out = model(**batch_for(model))
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        kept += [out.loss, out.logits, out.loss + sum(kept[::3])]
        del out
        found.append(settled_memory())
    own = sum(each.nbytes for each in kept[-3:])
    # The first steps make the optimizer's state, and what else is made once.
    assert (found[-1] - found[1]) // 2 <= own + 4 * 16 + 8
    detach_l2l(model)


# ---- mixed precision


@nightly
@pytest.mark.parametrize("width", [128, *more(1024)])
def test_mixed_precision_holds_at_most_six_tenths_of_fp32(width):
    """Apart from the shell and the slots, up to the width of BERT-large."""
    rows, rest = (8, {}) if width == 128 else (32, {})
    for cmp, grad_dtype in ((None, "fp32"), ("bf16", "16bit")):
        before = settled_memory()
        # The host's fused attention, which stands in for the device's, computes in fp32 where there is dropout.
        sizes = {"hidden_size": width, "num_attention_heads": width // 64, "intermediate_size": 4 * width}
        config = hf.BertConfig(**sizes, num_hidden_layers=4, vocab_size=1000, attn_implementation="eager")
        model = hf.BertForSequenceClassification(config)
        settings = L2LConfig(device="sim", cmp=cmp, grad_dtype=grad_dtype, ubatch_size=rows // 2)
        optimizer = attach_l2l(model, settings).wrap(torch.optim.SGD(model.parameters()))
        batch = {"input_ids": torch.randint(5, 1000, (rows, 64)), "labels": torch.zeros(rows, dtype=torch.long)}
        for _ in range(2):  # slots for gradients are taken in the first backward
            torch.sim.reset_peak_memory_stats()
            model(**batch).loss.backward()
            torch.sim.synchronize()
        need = estimate(model, settings)
        # Of the shell, the gradients come when the layers are done.
        rest[cmp] = torch.sim.max_memory_allocated() - before - need.shell // 2 - need.slots
        detach_l2l(model)
        del model, optimizer
    assert 0 < rest["bf16"] <= 0.6 * rest[None]
