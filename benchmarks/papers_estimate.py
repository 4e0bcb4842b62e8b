"""The papers' figures beside the estimate before a run and the cost model: all computed, nothing measured.

python benchmarks/papers_estimate.py > docs/papers.md
"""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch import nn

from hf_l2l import L2LConfig
from hf_l2l.plan.planner import time_of
from hf_l2l.plan.run_shapes import RunShapes
from hf_l2l.plan.step_time import Rates
from hf_l2l.shapes.inputs import example_inputs

BERT_PARAMETERS = 340e6
V100 = Rates(flops=30e12, link_up=16e9, link_down=16e9, update=BERT_PARAMETERS * 3, device_adamw=1e10)
"""The first text, section 3.1.2: 30 TFLOP/s, PCIe 3, and an update of the whole model in a third of a second."""
TOKENS = 512
ON_HOST: dict[str, Any] = {"stash": "host", "boundary": "host", "cmp": "bf16"}


def bert(layers: int) -> nn.Module:
    """BERT-large's width, without dropout in attention, which is then one kernel."""
    sizes = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096, "vocab_size": 30522}
    config = hf.BertConfig(**sizes, num_hidden_layers=layers, attention_probs_dropout_prob=0.0)
    with torch.device("meta"):
        return hf.BertForSequenceClassification(config)


def gpt(layers: int, hidden: int, heads: int) -> nn.Module:
    """A decoder like GPT-2."""
    sizes = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "vocab_size": 50257, "n_positions": 1024}
    with torch.device("meta"):
        return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, attn_pdrop=0.0))


def run_of(model: nn.Module, rows: int, **options: Any) -> RunShapes:
    """On a CUDA device with 16 GB."""
    config = L2LConfig(**options)
    inputs = example_inputs(model, rows, TOKENS)
    return RunShapes(model, config, inputs, device=torch.device("cuda"), device_memory=16 * 10**9)


def device_gb(run: RunShapes) -> float:
    """The peak of the device."""
    return sum(run.peak(run.config)[1].values()) / 1e9


def host_gib(run: RunShapes, each: int) -> float:
    """Masters, gradients, moments and copies, of so many bytes for each parameter."""
    return each * sum(p.numel() for p in run.model.parameters()) / 2**30


def memory_lines() -> list[str]:
    """Rows of the table of memory."""
    found = []
    theirs = {24: "3.69 GB", 48: "-", 96: "3.69 GB", 384: "3.69 GB"}
    for layers, gb in theirs.items():
        run = run_of(bert(layers), 64, ubatch_size=64, **ON_HOST)
        why = "depth adds nothing with the stash on the host; less, since attention is fused and rows are not kept"
        found.append(
            f"| BERT-large, {layers} layers, 64 rows | {gb} | {device_gb(run):.2f} GB | "
            f"{host_gib(run, 18):.1f} GiB | {why} |"
        )
    run = run_of(gpt(78, 4256, 28), 128, ubatch_size=8, **ON_HOST)
    found.append(
        f"| 17 billion, 78 layers, micro-batches of 8 | 6.68 GB | {device_gb(run):.2f} GB | "
        f"{host_gib(run, 18):.0f} GiB | fp32 sums of gradients of two layers and the embedding's are on the "
        "device, and a 16-bit copy of embedding and head |"
    )
    for slots in (2, 1):
        options = {"gradient_slots": slots, "grad_dtype": "16bit", "moment_dtype": "bf16", "host_copies": "per_sweep"}
        run = run_of(gpt(62, 8192, 64), 8, ubatch_size=1, **ON_HOST, **options)
        found.append(
            f"| 50 billion, 62 layers, `gradient_slots={slots}`, 16-bit gradients and moments | 16 GB, 512 GB "
            f"| {device_gb(run):.2f} GB | {host_gib(run, 10):.0f} GiB | the paper gives the machine alone; at "
            "10 bytes per parameter it fits the host |"
        )
    return found


def time_lines() -> list[str]:
    """Rows of the table of times."""
    run = run_of(bert(24), 64, ubatch_size=4, stash="device")
    seconds = time_of(run, run.config, V100).seconds
    found = [
        f"| L2L-p, 64 rows in micro-batches of 4 (first text, equation 7) | 2.45 s | {seconds:.2f} s | attention's "
        "products are counted, and the update of the first layer and of the embedding is not hidden |"
    ]
    for rows, theirs in ((64, 14.57), (128, 18.6), (256, 22.07)):
        run = run_of(bert(24), rows, ubatch_size=64, **ON_HOST)
        seconds = time_of(run, run.config, V100).seconds
        found.append(
            f"| {rows} rows in micro-batches of 64, one GPU (table 4) | {theirs} rows/s | "
            f"{rows / seconds:.1f} rows/s | the model has the transfers and the update of 64 rows hidden, "
            "the paper's run did not; the rates of these runs are not known |"
        )
    return found


def document() -> str:
    """Both tables."""
    return "\n".join(
        [
            "# The papers' figures beside the estimate",
            "",
            "Theirs: arXiv:2002.05645, on V100s with 16 GB. Ours are computed by `hf_l2l.estimate`'s shapes and the "
            "cost model; nothing of this page was measured (what was counted on the simulated accelerator is in",
            "[benchmarks/results](../benchmarks/results/memory_papers_sim_202611.md)). Rows have 512 tokens; "
            '`cmp="bf16"`, stash and boundary on the host. The host has 18 bytes per parameter, or 10 with 16-bit '
            "state.",
            "",
            "| model | the paper's device | device, computed | host, computed | why they differ |",
            "|---|---|---|---|---|",
            *memory_lines(),
            "",
            "Time, with the rates of the first text (30 TFLOP/s, 16 GB/s, an update of all layers in 0.33 s):",
            "",
            "| step | the paper | computed | why they differ |",
            "|---|---|---|---|",
            *time_lines(),
            "",
            "`python benchmarks/papers_estimate.py > docs/papers.md` computes it again.",
        ]
    )


if __name__ == "__main__":
    print(document())
