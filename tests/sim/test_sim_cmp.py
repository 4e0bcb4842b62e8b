"""Cross mixed precision on a device that has memory of its own and computes beside the host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hf_l2l import stream
from test_cmp import CASES, ROWS, layer_to_layer


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """What is read after it was given back is NaN, in every test here."""
    with stream.poisoned_releases():
        yield


@pytest.mark.parametrize("rows", [ROWS, 2])
@pytest.mark.parametrize(("cmp", "mode"), CASES)
def test_bits_are_those_of_serial_updates_on_the_host(cmp, rows, mode):
    max_norm = 0.0 if mode == "eager" else 0.5
    expected, reference = layer_to_layer("serial", rows, max_norm, "sim" if max_norm else "cpu", cmp=cmp)
    losses, model = layer_to_layer(mode, rows, max_norm, "sim", cmp=cmp)
    assert losses == expected
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, q), name
