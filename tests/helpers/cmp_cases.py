"""Cross mixed precision by hand in plain torch, and the same training layer to layer.

`engine/test_cmp.py` compares them on the CPU, `sim/test_cmp.py` on the simulated accelerator.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from transformers.utils import ModelOutput

from hf_l2l import L2LConfig, attach_l2l

CASES = [(cmp, mode) for cmp in ("bf16", "fp16") for mode in ("serial", "deferred", "eager")]
CASES.remove(("fp16", "eager"))
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
VOCAB, WIDTH, LAYERS, ROWS, STEPS = 11, 8, 3, 8, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Classifying(nn.Module):
    """Embedding, layers, and a head whose logits are to be fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.classifier = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> ModelOutput:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return ModelOutput(loss=nn.functional.cross_entropy(self.classifier(x).flatten(0, 1), labels.flatten()))


def made() -> Classifying:
    torch.manual_seed(0)
    return Classifying()


def batch(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids, labels = (torch.randint(VOCAB, (ROWS, 6), generator=generator) for _ in range(2))
    return {"input_ids": ids, "labels": labels}


def by_hand(
    dtype: torch.dtype, rows: int, max_norm: float, steps: int = STEPS, grad_dtype: str = "fp32", device: str = "cpu"
) -> tuple[list[float], nn.Module]:
    """Fp32 masters; a 16-bit model computes, layer by layer, and its gradients are summed over ubatches in fp32."""
    scale = 2.0**16 if dtype == torch.float16 else 1.0
    masters = made()
    optimizer = torch.optim.AdamW(masters.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        ids, labels = (tensor.to(device) for tensor in batch(step).values())
        short = copy.deepcopy(masters).to(dtype).to(device)
        x = short.embed(ids)
        used: list[list[dict[str, torch.Tensor]]] = []  # layer, ubatch: leaves of their own
        for block in short.blocks:
            parts = [x] if rows == ROWS else x.split(rows)
            used.append([{n: p.detach().clone().requires_grad_() for n, p in block.named_parameters()} for _ in parts])
            x = torch.cat(
                [functional_call(block, leaves, (part,)) for leaves, part in zip(used[-1], parts, strict=True)]
            )
        loss = nn.functional.cross_entropy(short.classifier(x).float().flatten(0, 1), labels.flatten())
        (loss * scale).backward()
        for master, p in zip(masters.parameters(), short.parameters(), strict=True):
            master.grad = None if p.grad is None else p.grad.float().cpu()
        for block, leaves in zip(masters.blocks, used, strict=True):
            for name, master in block.named_parameters():
                total = leaves[0][name].grad.float()
                for ubatch in leaves[1:]:
                    total += ubatch[name].grad.float()
                master.grad = total.cpu()
        for master in masters.parameters():
            master.grad *= 1 / scale
            if grad_dtype == "16bit":
                master.grad = master.grad.bfloat16().float()
        losses.append(loss.item())
        if not all(p.grad.isfinite().all() for p in masters.parameters()):
            scale *= 0.5
            continue
        if max_norm:
            torch.nn.utils.clip_grad_norm_(masters.parameters(), max_norm)
        optimizer.step()
    return losses, masters


def layer_to_layer(
    mode: str, rows: int, max_norm: float, device: str = "cpu", steps: int = STEPS, **options: Any
) -> Any:
    model = made()
    config = {"device": device, "eps_update": mode, "ubatch_size": rows, "layer_classes": ("Block",), **options}
    eps = attach_l2l(model, L2LConfig(**config))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []
    for step in range(steps):
        loss = model(**batch(step)).loss
        assert loss.dtype == torch.float32
        loss.backward()
        if max_norm:
            eps.clip_grad_norm_(max_norm)
        losses.append(loss.item())
        optimizer.step()
    eps.synchronize()
    return losses, model


def assert_as_by_hand(by_hand: tuple[list[float], nn.Module], found: tuple[list[float], nn.Module]) -> None:
    assert found[0] == by_hand[0]
    for (name, p), q in zip(found[1].named_parameters(), by_hand[1].parameters(), strict=True):
        assert torch.equal(p, q), name


class Moving(Block):
    """Computes with buffers that it writes to in one way or the other."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.full((WIDTH,), 0.3))
        self.register_buffer("turn", torch.full((WIDTH,), 0.3))
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.dtypes += [self.level.dtype, self.turn.dtype]
        with torch.no_grad():
            self.level.mul_(0.9).add_(0.07)
            self.turn = self.turn * 0.9 + 0.07
        return super().forward(x + self.level) + self.turn


def check_written_buffers(mode: str, device: str) -> None:
    """Buffers that layers write to have one dtype in all calls: results are those of a model in 16 bits."""
    torch.manual_seed(0)
    model = Classifying()
    model.blocks = nn.ModuleList(Moving() for _ in range(LAYERS))
    plain = copy.deepcopy(model).bfloat16().to(device)
    plain.classifier.register_forward_hook(lambda module, args, output: output.float())
    config = L2LConfig(device=device, cmp="bf16", eps_update=mode, layer_classes=("Moving",))
    eps = attach_l2l(model, config)
    optimizer = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.0))
    for step in range(3):
        told = pytest.warns(UserWarning, match=r"_keep_in_fp32_modules_strict") if step == 0 else nullcontext()
        with told as warned:
            loss = model(**batch(step)).loss
        if warned is not None:
            texts = [str(each.message) for each in warned]
            assert all(
                sum(f"{name} of blocks.{n}" in text for text in texts) == 1
                for name in ("level", "turn")
                for n in range(LAYERS)
            )
        expected = plain(**{name: each.to(device) for name, each in batch(step).items()}).loss
        for each in (loss, expected):
            each.backward()
        assert loss.item() == expected.item()
        if mode != "eager":
            for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert torch.equal(p.grad, q.grad.float().cpu()), name
        optimizer.step()
        optimizer.zero_grad()
        plain.zero_grad()
        for (name, b), c in zip(model.named_buffers(), plain.buffers(), strict=True):
            assert b.dtype == torch.float32 and torch.equal(b, c.float().cpu()), name
    assert {dtype for block in model.blocks for dtype in block.dtypes} == {torch.bfloat16}
