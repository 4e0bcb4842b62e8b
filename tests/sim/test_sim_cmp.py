"""Cross mixed precision on a device that has memory of its own and computes beside the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hf_l2l import stream
from test_cmp import CASES, DTYPES, ROWS, assert_as_by_hand, by_hand, layer_to_layer
from test_rounding import trained


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """What is read after it was given back is NaN, in every test here."""
    with stream.poisoned_releases():
        yield


def check(cmp: str, rows: int, mode: str, steps: int, **options: Any) -> None:
    # Norms are the device's, which may differ from the host's in the last bit.
    max_norm = 0.0 if mode == "eager" else 0.5
    reference = layer_to_layer("serial", rows, max_norm, "sim", steps, cmp=cmp, **options)
    assert_as_by_hand(reference, layer_to_layer(mode, rows, max_norm, "sim", steps, cmp=cmp, **options))


@pytest.mark.parametrize("options", [{}, {"grad_dtype": "16bit", "host_copies": "per_sweep", "gradient_slots": 1}])
@pytest.mark.parametrize("rows", [ROWS, 2])
@pytest.mark.parametrize(("cmp", "mode"), CASES)
def test_bits_are_those_of_serial_updates(cmp, rows, mode, options):
    check(cmp, rows, mode, 5, **options)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [ROWS, 2])
@pytest.mark.parametrize(("cmp", "mode"), CASES)
def test_bits_over_a_hundred_steps(cmp, rows, mode):
    check(cmp, rows, mode, 100)


@pytest.mark.parametrize("grad_dtype", ["fp32", "16bit"])
@pytest.mark.parametrize(("cmp", "mode"), CASES)
def test_unclipped_bits_are_those_of_plain_torch_on_the_device(cmp, mode, grad_dtype):
    expected = by_hand(DTYPES[cmp], 2, 0.0, grad_dtype=grad_dtype, device="sim")
    assert_as_by_hand(expected, layer_to_layer(mode, 2, 0.0, "sim", cmp=cmp, grad_dtype=grad_dtype))


@pytest.mark.parametrize("mode", ["deferred", "eager"])
def test_moments_in_16_bits_have_the_bits_of_the_host(mode):
    reference, expected = trained("serial")
    model, optimizer = trained(mode, device="sim")
    torch.testing.assert_close(dict(model.named_parameters()), dict(reference.named_parameters()), rtol=0, atol=0)
    torch.testing.assert_close(optimizer.state_dict()["state"], expected.state_dict()["state"], rtol=0, atol=0)
