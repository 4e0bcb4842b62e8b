"""What the simulated accelerator has no time, no driver and no allocator for: copies that outlast the computation,
page-locked memory, events. `make test-gpu`, with the tests of the engine and the Trainer on any device."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from gpu_machine import DEVICE, IS_CUDA, module, sleep, small_bert
from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from hf_l2l.runtime import stream
from hf_l2l.runtime.flat_memory import Pages
from models import assert_same_bits, attached, batch_for, train_once
from runs import assert_same_run
from training import l2l_trainer


def trained(model: nn.Module, steps: int, **options: Any) -> dict[str, torch.Tensor]:
    """The weights after some steps of AdamW with clipping and accumulation, dropout on."""
    torch.manual_seed(5)
    eps = attach_l2l(model, L2LConfig(device=DEVICE, **options))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))
    for _ in range(steps):
        with eps.accumulate():
            train_once(model, batch_for(model, seed=1))
        train_once(model, batch_for(model, seed=2))
        eps.clip_grad_norm_(1.0)
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_a_trace_has_what_each_lane_does_in_order(tmp_path):
    file = tmp_path / "trace.json"
    model = small_bert()
    trained(model, steps=3, ubatch_size=3, trace=str(file))
    detach_l2l(model)
    events = json.loads(file.read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in rows.values()}
    for e in events:
        if e["ph"] == "X":
            spans[rows[e["tid"]]].append((e["ts"], e["ts"] + e["dur"]))
    assert all(spans[name] for name in ("steps", "compute", "upload", "download", "norm", "host update"))
    assert len(spans["steps"]) == 3
    for name, found in spans.items():
        found.sort()
        # Events of CUDA are exact to half a microsecond, and count from a base that the host knows. What two streams
        # do in one row is kept apart by the time that the host takes to launch it.
        assert all(end <= start + 50.0 for (_, end), (start, _) in zip(found, found[1:], strict=False)), name


WIDTH = 4096 if IS_CUDA else 64


class Wide(nn.Module):
    """Layers of much weight and little work: 64 MiB of weights for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


def test_long_copies_with_short_computation():
    """Every copy outlasts the computation that it travels under. The reference has run before."""
    torch.manual_seed(0)
    model = Wide()
    plain = copy.deepcopy(model).to(DEVICE)
    x = torch.randn(2, WIDTH)
    for each, on in ((plain, DEVICE), (model, torch.device("cpu"))):
        eps = attach_l2l(each, L2LConfig(device=DEVICE, layer_classes=("Linear",))) if each is model else None
        optimizer = torch.optim.SGD(each.parameters(), lr=1.0, momentum=0.9)
        optimizer = eps.wrap(optimizer) if eps is not None else optimizer
        for _ in range(5):
            each(x.to(on)).backward()
            optimizer.step()
            optimizer.zero_grad()
        module().synchronize()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.cpu(), rtol=1e-4, atol=1e-6)


SMALL: dict[str, Any] = {"ubatch_size": 3, "stash": "host"}


@pytest.mark.parametrize(
    "options", [{}, {"ubatch_size": 3}, SMALL, {**SMALL, "gradient_slots": 1, "prefetch": False}], ids=str
)
def test_long_computation_with_short_copies(options):
    """The device is far behind the host, so whatever the host does too early is seen."""
    expected = trained(small_bert(), steps=2, **options)
    model = small_bert()
    for layer in model.bert.encoder.layer:
        layer.output.register_forward_hook(lambda *args: sleep(1e-3))
    assert_same_bits(trained(model, steps=2, **options), expected)


def test_masters_and_gradients_are_page_locked():
    model = attached(small_bert(), device=DEVICE)
    assert all(p.is_pinned() for p in model.parameters())
    train_once(model, batch_for(model))
    assert all(p.grad.is_pinned() for p in model.parameters() if p.grad is not None)
    detach_l2l(model)
    assert not any(p.is_pinned() for p in model.parameters())


def test_a_refused_registration_is_forgotten():
    """The next kernel must not report it."""
    pages = Pages(8192)
    assert pages.lock(DEVICE)
    address = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
    assert not stream.page_lock(address, 8192, DEVICE)  # it is registered already
    torch.ones(3, device=DEVICE).sum().item()
    pages.unlock()


def test_steps_take_no_more_memory_than_the_first():
    model = attached(small_bert(), device=DEVICE, stash="host", ubatch_size=3)
    peaks = []
    for _ in range(6):
        module().reset_peak_memory_stats()
        train_once(model, batch_for(model))
        model.zero_grad()
        peaks.append(module().max_memory_allocated())
    assert len(set(peaks[2:])) == 1


def test_loaders_that_fork_and_pin_change_nothing(tmp_path):
    """Their workers are forked beside page-locked masters, threads of updates, and a device that is in use. The
    simulated accelerator cannot have loaders pin memory."""
    same: dict[str, Any] = {"ubatch_size": 3, "max_steps": 8 if IS_CUDA else 2}
    forking = {"dataloader_num_workers": 2, "dataloader_pin_memory": IS_CUDA}
    runs = []
    for options in ({}, forking):
        made = l2l_trainer(tmp_path / f"{len(runs)}", model=small_bert(), **same, **options)
        made.train()
        assert made.args.device.type == DEVICE.type
        runs.append(made)
    assert_same_run(runs[1], runs[0])


# ---- a layer whose attention has dropout is recomputed with the mask of its forward, whatever kernels torch chooses


@pytest.fixture
def torch_chooses() -> Iterator[None]:
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
@pytest.mark.usefixtures("torch_chooses")
def test_dropout_is_repeated_in_the_recompute(head_dim, dtype, masked):
    """Beside a plain model that keeps its activations. Another mask would make other gradients altogether."""
    model = bert_with(head_dim)
    plain = copy.deepcopy(model).to(DEVICE)
    expected = gradients_of(plain, dtype, masked)
    attach_l2l(model, L2LConfig(device=DEVICE))
    assert difference(gradients_of(model, dtype, masked), expected) <= 5e-2
    plain.zero_grad()
    assert difference(gradients_of(plain, dtype, masked, drawn=7), expected) > 0.2, "the mask does not matter"
