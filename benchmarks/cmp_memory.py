"""What training holds in fp32 and in cross mixed precision: host bytes per parameter, and peak bytes of the device.

A BERT with random weights makes two steps in each setting. Host bytes are a census of the tensors while gradients are
there, after a first step has made the optimizer's state. Device bytes are the accelerator's own count; without one,
that of the simulated accelerator.

    python benchmarks/cmp_memory.py [--layers 4] [--width 1024] [--rows 32] [--tokens 128] [--ubatch-size N]

A table for people, then one JSON document as the last line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from hf_l2l import L2LConfig, attach_l2l, detach_l2l, estimate
from hf_l2l.report.host_tensors import host_tensors
from hf_l2l.runtime.tensors import size_text, tensor_bytes
from hf_l2l.testing import enable_simulated_accelerator

if not __package__:  # run as a script: the folder above is not where Python looks for modules
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.environment import environment

SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "cmp": {"cmp": "auto"},
    "cmp, grad_dtype 16bit": {"cmp": "auto", "grad_dtype": "16bit"},
    "cmp, grad_dtype 16bit, moment_dtype bf16": {"cmp": "auto", "grad_dtype": "16bit", "moment_dtype": "bf16"},
    "cmp, grad_dtype 16bit, moment_dtype bf16, host_copies per_sweep": {
        "cmp": "auto",
        "grad_dtype": "16bit",
        "moment_dtype": "bf16",
        "host_copies": "per_sweep",
    },
    "cmp, grad_dtype 16bit, moment_dtype 8bit, host_copies per_sweep": {
        "cmp": "auto",
        "grad_dtype": "16bit",
        "moment_dtype": "8bit",
        "host_copies": "per_sweep",
    },
}


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--ubatch-size", type=int, default=None)
    return parser.parse_args(arguments)


def bert(options: argparse.Namespace) -> nn.Module:
    """A BERT of the width asked for, heads of 64."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=max(options.width // 64, 1),
        intermediate_size=4 * options.width,
        vocab_size=1000,
        attn_implementation="eager",  # the host's fused attention, on the simulated accelerator, computes in fp32
    )
    return transformers.BertForSequenceClassification(config)


def measured(setting: dict[str, Any], options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Two steps in one setting."""
    model = bert(options)
    config = L2LConfig(device=device, ubatch_size=options.ubatch_size, eps_update="deferred", **setting)
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    eps = attach_l2l(model, config)
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-5))
    ids = torch.randint(5, 1000, (options.rows, options.tokens))
    labels = torch.zeros(options.rows, dtype=torch.long)
    for _ in range(2):
        torch.accelerator.reset_peak_memory_stats()
        model(input_ids=ids, labels=labels).loss.backward()
        eps.synchronize()
        census = {k: tensor_bytes(held) for k, held in host_tensors(model, [optimizer], eps.copies.kept).items()}
        eps.clip_grad_norm_(1.0)
        optimizer.step()
    eps.synchronize()
    parameters = sum(p.numel() for p in model.parameters())
    need = estimate(model, config)
    found = {
        "host_bytes": census,
        "host_bytes_per_parameter": sum(census.values()) / parameters,
        "device_peak_bytes": torch.accelerator.max_memory_allocated() - before,
        "shell_bytes": need.shell,
        "slot_bytes": need.slots,
    }
    detach_l2l(model)
    return found


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure and print."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parsed(arguments)
    if not torch.accelerator.is_available():
        enable_simulated_accelerator()
    device = torch.accelerator.current_accelerator()
    assert device is not None, "one has just been made sure of"
    rows = {name: measured(setting, options, device) for name, setting in SETTINGS.items()}
    print("| | host: bytes per parameter | device: peak | without shell and slots | of that of fp32 |")
    print("|---|---|---|---|---|")
    rest = {name: row["device_peak_bytes"] - row["shell_bytes"] - row["slot_bytes"] for name, row in rows.items()}
    for name, row in rows.items():
        print(
            f"| {name} | {row['host_bytes_per_parameter']:.2f} | {size_text(row['device_peak_bytes'])} | "
            f"{size_text(rest[name])} | {rest[name] / rest['fp32']:.3f} |"
        )
    result = {"environment": environment("cmp_memory.py", arguments), "rows": rows}
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
