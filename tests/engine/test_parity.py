"""Loss and gradients under L2L are those of the plain model on the CPU, whatever is split, frozen, or asked of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import pytest
import torch
import transformers as hf
from torch import nn

from devices import DEVICE
from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.device.prefetch import fetched_in_backward, fetched_in_forward
from hf_l2l.eps import masters
from hf_l2l.logits import chunks
from memory_switches import forced_copies, poisoned_releases
from models import (
    FAMILIES,
    ROWS,
    TOLERANCE,
    Gradients,
    assert_bits_of_plain,
    assert_same_bits,
    attached,
    batch_for,
    bert,
    gradients,
    has_bits_of_plain,
    llama,
    reference,
    relative_error,
    train_once,
)
from runs import UPDATED_BY, assert_close_tensors, assert_same_run, on_host, train
from tiers import combinations, cpu_suffices, more, on_a_device

FLOAT64, FLOAT32 = torch.float64, torch.float32
MEMORIES = [forced_copies, *([nullcontext] if DEVICE == "cpu" else [])]
"""On the CPU, an upload is a view of the masters, or else a copy as on any other device."""
OPTIONS: tuple[dict[str, Any], ...] = (
    {"stash": "device"},
    {"stash": "host"},
    {"stash": "host", "boundary": "host"},
    {"stash": "host", "boundary": "host", "gradient_slots": 1, "prefetch": False},
    {"resident": "shell"},
    {"resident_layers": 1},
    {"resident": "all"},
    {"resident": "all", "resident_update": "host"},
    {"kept_weights": 1},
    {"kept_graphs": 1},
    {"resident": "all", "kept_graphs": 2},
)


def check_family(
    family: str,
    ubatch_size: int | None,
    options: dict[str, Any],
    *,
    dtype: torch.dtype = FLOAT64,
    masked: bool = True,
    trains: Callable[[str], bool] = lambda name: True,
) -> None:
    model = FAMILIES[family]().to(dtype)
    for name, p in model.named_parameters():
        p.requires_grad_(trains(name))
    batch = batch_for(model, masked=masked)
    loss, expected = reference(model, batch)
    eps = attach_l2l(model, L2LConfig(device=DEVICE, ubatch_size=ubatch_size, **options))
    optimizer = eps.wrap(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    for _ in range(2):  # the first forward does not know which outputs the model computes with
        optimizer.zero_grad()
        assert abs(train_once(model, batch) - loss) <= TOLERANCE[dtype] * abs(loss)
        assert relative_error(on_host(gradients(model)), expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("family", "ubatch_size", "options", "masked", "dtype", "memory"),
    combinations(
        FAMILIES,
        [3, 1, 2, 5],
        OPTIONS,
        [True, False],
        [FLOAT64, FLOAT32],
        MEMORIES,
        together=1,
        at_night=3 if DEVICE == "cpu" else 2,
        # Weights are resident where memory is not that of the host, or nothing changes.
        where=lambda *case: DEVICE != "cpu" or "resident" not in str(case[2]) or case[-1] is nullcontext,
    ),
)
def test_ubatches_give_the_gradients_of_the_whole_batch(family, ubatch_size, options, masked, dtype, memory):
    with memory():
        check_family(family, ubatch_size, options, masked=masked, dtype=dtype)


TRAIN: dict[str, Callable[[str], bool]] = {
    "the first layer is frozen": lambda name: ".0." not in name,
    "the last layer is frozen": lambda name: ".1." not in name,
    "embeddings are frozen": lambda name: not any(part in name for part in ("embed", "shared", "wte", "wpe")),
    # As LoRA does: a few parameters inside layers train, and no input of a layer needs a gradient.
    "a few train": lambda name: ".1." in name and ("bias" in name or "norm" in name),
}
"""Which parameters do, by their names."""


@cpu_suffices
@pytest.mark.parametrize(("family", "trains"), combinations(["bert", "t5", *more(*FAMILIES)], TRAIN, together=1))
def test_frozen_parts(family, trains):
    check_family(family, 3, {"stash": "host"}, trains=TRAIN[trains])


@cpu_suffices
@pytest.mark.parametrize("stash", ["device", "host"])
def test_batches_that_are_discarded_joined_or_accumulated(stash):
    """A forward without a backward and a backward without a step leave nothing; a loss of two forwards, as contrastive
    ones are, and gradients of several backwards are those of the plain model."""
    model = bert().double()
    first, second, third = (batch_for(model, rows=ROWS - 3 * (seed == 7), seed=seed) for seed in (1, 7, 3))

    def discard() -> None:
        model(**second)
        train_once(model, second)
        model.zero_grad()
        train_once(model, first)

    def join() -> None:
        (model.train()(**first).loss + 2 * model(**second).loss).backward()

    def accumulate() -> None:
        for batch in (first, second, third):
            train_once(model, batch)

    programs, expected = (discard, join, accumulate), []
    for program in programs:
        program()
        expected.append(gradients(model))
        model.zero_grad()
    attached(model, device=DEVICE, ubatch_size=3, stash=stash)
    for program, those in zip(programs, expected, strict=True):
        program()
        assert relative_error(gradients(model), those) <= TOLERANCE[FLOAT64], program.__name__
        model.zero_grad()


@pytest.mark.parametrize("family", ["bert", "llama", "vit", *more("roberta", "electra", "gpt2")])
def test_one_ubatch_gives_the_same_bits(family):
    """T5 and DeBERTa-v2 are left out: a tensor goes to several layers, or into a layer and past it, and a node sums
    the gradients inside a layer before those outside are added."""
    model = FAMILIES[family]()
    batch = batch_for(model)
    loss, expected = reference(model, batch)
    with forced_copies():
        attached(model, device=DEVICE)
        assert has_bits_of_plain(train_once(model, batch), loss)
    assert_bits_of_plain(gradients(model), expected)


# ---- what travels ahead of the computation


@on_a_device
@pytest.mark.parametrize(
    ("stash", "mode", "options"),
    combinations(
        ["device", "host"],
        UPDATED_BY,
        [{"prefetch": False}, {"gradient_slots": 1}, {"prefetch": False, "gradient_slots": 1}],
        together=1,
    ),
)
def test_what_travels_ahead_changes_no_bit(stash, mode, options):
    same = {"stash": stash, "eps_update": mode, "accumulation": 2, "steps": 2}
    with forced_copies():
        assert_same_run(train(**same, **options), train(**same))


FETCHED = [
    # called last time, called now -> fetched while each of them computes
    ("abc", "abc", ["b", "c", None]),
    ("abc", "ac", ["b", None]),  # a layer was dropped
    ("ac", "abc", ["c", None, None]),  # and is back
    ("abab", "abab", ["b", "a", "b", None]),  # the same layers, several times
    ("abc", "bc", ["c", None]),  # the model begins elsewhere
]


@cpu_suffices
def test_what_is_fetched_while_a_layer_computes():
    for last_time, now, fetched in FETCHED:
        assert [fetched_in_forward(last_time, number, layer) for number, layer in enumerate(now)] == fetched
    # The backward ends at the lowest call that is trained.
    assert [fetched_in_backward("abc", number, 1) for number in (2, 1)] == ["b", None]
    assert [fetched_in_backward("aa", number, 0) for number in (1, 0)] == ["a", None]


# ---- what passes between layers, on the host

WIDTH = 16
ON_HOST: dict[str, Any] = {"stash": "host", "boundary": "host", "ubatch_size": 3}
Found = TypeVar("Found")


def of_both_boundaries(run: Callable[[dict[str, Any]], Found]) -> list[Found]:
    """What `run` finds with a boundary on the device and on the host; what is read after it was given back is NaN."""
    found = []
    for boundary in ("device", "host"):
        torch.manual_seed(0)
        with poisoned_releases(), forced_copies():
            found.append(run({**ON_HOST, "boundary": boundary}))
    return found


class Stack(nn.Module):
    """The layers of a BERT alone: no sum of theirs has another order."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        sizes = {"hidden_size": WIDTH, "num_attention_heads": 2, "intermediate_size": 2 * WIDTH}
        config = hf.BertConfig(num_hidden_layers=layers, **sizes)
        config._attn_implementation = "sdpa"
        self.encoder = hf.models.bert.modeling_bert.BertEncoder(config)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.encoder(rows, attention_mask=None).last_hidden_state


@pytest.mark.parametrize("options", [{"cmp": "bf16"}, {"gradient_slots": 1, "prefetch": False}], ids=str)
def test_gradients_have_the_bits_of_a_boundary_on_the_device(options):
    def run(where: dict[str, Any]) -> Gradients:
        model = attached(Stack(), device=DEVICE, **where, **options).eval()
        rows = torch.randn(8, 8, WIDTH, generator=torch.Generator().manual_seed(1))
        for _ in range(2):  # the second adds to the first
            model(rows).square().sum().backward()
        return gradients(model)

    assert_same_bits(*of_both_boundaries(run))


@cpu_suffices
@pytest.mark.parametrize(
    ("mode", "options"),
    [("deferred", {"cmp": "bf16", "resident": "shell"}), ("eager", {}), *more(("serial", {"grad_dtype": "16bit"}))],
)
def test_a_final_norm_and_a_tied_head_by_micro_batches_are_trained(mode, options, monkeypatch):
    """As by a loss of whole logits."""
    monkeypatch.setattr(chunks, "FEWEST_ROWS", 8)

    def run(where: dict[str, Any]) -> dict[str, Any]:
        chunked = {"chunked_loss": "off"} if where["boundary"] == "device" else {}
        model = llama(tie_word_embeddings=True)
        return train(model, eps_update=mode, accumulation=2, **where, **options, **chunked).weights

    expected, found = of_both_boundaries(run)
    # AdamW makes much of rounding where a gradient is nearly 0.
    assert_close_tensors(found, expected, 2e-2 if {"cmp", "grad_dtype"} & {*options} else 1e-4)


class Projected(nn.Module):
    """Uses a weight that is in no module that is called, beside what its layers return."""

    def __init__(self, use: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.stack, self.box, self.use = Stack(2), nn.Linear(WIDTH, WIDTH, bias=False), use
        self.scale = nn.Linear(1, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.scale(self.use(self.stack(rows), self.box.weight).square().mean()[None])[0]


USES: dict[str, Callable[..., torch.Tensor]] = {
    "matrix": lambda hidden, weight: hidden @ weight,
    "linear": lambda hidden, weight: nn.functional.linear(hidden, weight),
    "scale": lambda hidden, weight: hidden * weight[0],
    "as many tokens as rows": lambda hidden, weight: hidden + hidden.select(1, 0),
}


@pytest.mark.parametrize(("name", "trains"), combinations(USES, [True, False], together=1))
def test_a_large_weight_beside_rows_on_the_host_is_uploaded_first(name, trains, monkeypatch):
    monkeypatch.setattr(masters, "LARGE", WIDTH)

    def run(where: dict[str, Any]) -> Gradients:
        model = Projected(USES[name]).eval()
        model.box.requires_grad_(trains)
        attached(model, device=DEVICE, **where)
        for _ in range(2):
            model.zero_grad()
            model(torch.randn(8, 8, WIDTH, generator=torch.Generator().manual_seed(1))).backward()
        return gradients(model)

    assert relative_error(*of_both_boundaries(run)) < 1e-5
