"""Trains a stack of large layers and prints a digest of weights and state: `python limited_state.py TIER FOLDER`.

A digest, the most anonymous memory that the process has had, and the bytes of the window.
"""

from __future__ import annotations

import hashlib
import sys
import threading

import torch
from torch import nn

from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.memory.host_limits import own_bytes

WIDTH, LAYERS = 768, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def main(tier: str, folder: str) -> None:
    torch.manual_seed(0)
    model, most, is_over = nn.Sequential(*(Block() for _ in range(LAYERS))), [0], threading.Event()
    options = {"state_tier": "disk", "state_dir": folder} if tier == "disk" else {}
    eps = attach_l2l(model, L2LConfig(layer_classes=("Block",), device="cpu", eps_update="deferred", **options))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), foreach=False))

    def watch() -> None:
        while not is_over.wait(0.005):
            most[0] = max(most[0], own_bytes())

    threading.Thread(target=watch, daemon=True).start()
    for step in range(3):
        torch.manual_seed(step)
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
    eps.synchronize()
    is_over.set()
    digest = hashlib.sha256()
    for p in model.parameters():
        for each in (p, *(optimizer.state[p][key] for key in ("exp_avg", "exp_avg_sq"))):
            digest.update(memoryview(each.detach().numpy()))
    window = eps.state.window.peak if tier == "disk" else 0
    print("RESULT", digest.hexdigest(), most[0], window, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
