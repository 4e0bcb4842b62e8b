"""A layer whose attention has dropout is recomputed with the mask of its forward, whatever kernels torch chooses."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import transformers as hf
from torch import nn

from gpu_machine import DEVICE
from hf_l2l import L2LConfig, attach_l2l
from models import batch_for


@pytest.fixture(autouse=True)
def _torch_chooses() -> Iterator[None]:
    """Among all kernels: some are left out where sums must have a fixed order."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(before)


def bert_with(head_dim: int) -> nn.Module:
    """Two layers, two heads, dropout of attention alone, and weights so large that the mask matters."""
    torch.manual_seed(3)
    config = hf.BertConfig(
        hidden_size=2 * head_dim,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=60,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.3,
        initializer_range=0.1,
    )
    return hf.BertForSequenceClassification(config)


def gradients_of(model: nn.Module, dtype: torch.dtype, masked: bool, drawn: int = 0) -> dict[str, torch.Tensor]:
    """Of the attention weights in one step, under autocast in `dtype` unless that is float32. So many random numbers
    are drawn before it."""
    batch = {name: tensor.to(DEVICE) for name, tensor in batch_for(model, masked=masked).items()}
    model.train()
    torch.manual_seed(5)
    if drawn:
        torch.rand(drawn, device=DEVICE)
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=dtype != torch.float32):
        loss = model(**batch).loss
    loss.backward()
    # Without biases: those of keys have no gradient but rounding.
    weights = {name: p for name, p in model.named_parameters() if "attention.self" in name and p.dim() == 2}
    return {name: p.grad.cpu().clone() for name, p in weights.items()}


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest of all tensors, of norms."""
    assert found.keys() == expected.keys() and len(found) == 6
    return max(((found[name] - e).norm() / e.norm()).item() for name, e in expected.items())


@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 256])
def test_dropout_is_repeated_in_the_recompute(head_dim, dtype, masked):
    """Beside a plain model that keeps its activations. Another mask would make other gradients altogether."""
    model = bert_with(head_dim)
    plain = copy.deepcopy(model).to(DEVICE)
    expected = gradients_of(plain, dtype, masked)
    attach_l2l(model, L2LConfig(device=DEVICE))
    assert difference(gradients_of(model, dtype, masked), expected) <= 5e-2
    plain.zero_grad()
    assert difference(gradients_of(plain, dtype, masked, drawn=7), expected) > 0.2, "the mask does not matter"
