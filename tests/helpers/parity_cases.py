"""What must hold for every family, whatever the device: gradients of micro-batches are those of the whole batch.

`test_parity.py` runs these on the CPU, `sim/test_sim_parity.py` on the simulated accelerator.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from models import (
    FAMILIES,
    ROWS,
    TOLERANCE,
    attached,
    batch_for,
    bert,
    gradients,
    reference,
    relative_error,
    train_once,
)

Change = Callable[[nn.Module], None]


def _no_change(model: nn.Module) -> None:
    pass


def check_family(
    family: str,
    device: str,
    ubatch_size: int | None,
    stash: str,
    dtype: torch.dtype,
    *,
    masked: bool = True,
    change: Change = _no_change,
) -> None:
    """Loss and gradients under L2L equal those of the plain model on the CPU."""
    model = FAMILIES[family]().to(dtype)
    change(model)
    batch = batch_for(model, masked=masked)
    loss, expected = reference(model, batch)
    attached(model, device=device, ubatch_size=ubatch_size, stash=stash)
    assert abs(train_once(model, batch) - loss) <= TOLERANCE[dtype] * abs(loss)
    assert relative_error(gradients(model), expected) <= TOLERANCE[dtype]


def freeze_first_layer(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        if ".0." in name:
            p.requires_grad_(False)


def freeze_last_layer(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        if ".1." in name:
            p.requires_grad_(False)


def freeze_embeddings(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        if "embed" in name or "shared" in name or "wte" in name or "wpe" in name:
            p.requires_grad_(False)


def freeze_all_but_biases(model: nn.Module) -> None:
    """As LoRA does: a few parameters inside layers train, and no input of a layer needs a gradient."""
    for name, p in model.named_parameters():
        p.requires_grad_(".1." in name and ("bias" in name or "norm" in name))


CHANGES: dict[str, Change] = {
    "frozen_first_layer": freeze_first_layer,
    "frozen_last_layer": freeze_last_layer,
    "frozen_embeddings": freeze_embeddings,
    "all_but_a_few_frozen": freeze_all_but_biases,
}


def check_unused_parameter(device: str) -> None:
    """A parameter that nothing uses gets no gradient, and keeps its bits through an optimizer step."""
    model = bert()
    model.bert.encoder.layer[0].register_parameter("unused", nn.Parameter(torch.randn(3)))
    before = model.bert.encoder.layer[0].unused.detach().clone()
    attached(model, device=device, ubatch_size=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    train_once(model, batch_for(model))
    assert model.bert.encoder.layer[0].unused.grad is None
    optimizer.step()
    assert torch.equal(model.bert.encoder.layer[0].unused, before)
    assert not torch.equal(model.bert.encoder.layer[0].output.dense.bias, torch.zeros(16))


def check_discarded_batch(device: str, stash: str) -> None:
    """A forward without backward, and a backward without step, leave nothing behind."""
    model = bert().double()
    kept, thrown = batch_for(model), batch_for(model, seed=7)
    _, expected = reference(model, kept)
    attached(model, device=device, ubatch_size=3, stash=stash)
    model(**thrown)
    train_once(model, thrown)
    model.zero_grad()
    train_once(model, kept)
    assert relative_error(gradients(model), expected) <= TOLERANCE[torch.float64]


def check_two_forwards(device: str, stash: str) -> None:
    """Two forwards before one backward, as contrastive losses make them."""
    model = bert().double()
    first, second = batch_for(model), batch_for(model, rows=ROWS - 3, seed=7)

    def both() -> None:
        model.train()
        (model(**first).loss + 2 * model(**second).loss).backward()

    both()
    expected = gradients(model)
    model.zero_grad()
    attached(model, device=device, ubatch_size=3, stash=stash)
    both()
    assert relative_error(gradients(model), expected) <= TOLERANCE[torch.float64]


def check_accumulation(device: str) -> None:
    """Gradients of three backwards sum in `p.grad`, in place of being replaced."""
    model = bert().double()
    batches = [batch_for(model, seed=seed) for seed in (1, 2, 3)]
    for batch in batches:
        train_once(model, batch)
    expected = gradients(model)
    model.zero_grad()
    attached(model, device=device, ubatch_size=5)
    for batch in batches:
        train_once(model, batch)
    assert relative_error(gradients(model), expected) <= TOLERANCE[torch.float64]
