"""What the L2L papers and other projects have published: their figures, as they give them, with the source.

Nothing here was measured by this project, and hardware and settings differ from ours and from each other.
"""

from __future__ import annotations

from typing import NamedTuple

LATER = "arXiv:2002.05645, last version"
FIRST = "arXiv:2002.05645, first version"


class Claim(NamedTuple):
    """A published figure of another project that trains whole models beyond device memory."""

    project: str
    hardware: str
    model: str
    figure: str
    exact: str
    """Whether weights are updated with their own step's gradients, and clipped."""
    source: str


CLAIMS = (
    Claim(
        "DeepSpeed ZeRO-3 offload, measured by SlideFormer's authors",
        "RTX 4090",
        "Llama-3.1-8B, rows of 1,024",
        "914, 1,373, 1,791 tokens/s with 8, 16, 32 rows; 176 GB of host memory",
        "yes, with clipping",
        "bench notes of `RegiaYoung/SlideFormer`",
    ),
    Claim(
        "LLaMA-Factory with DeepSpeed ZeRO-3 offload, measured by LLMQ's authors",
        "1 and 4 x RTX 4090",
        "Qwen2.5-7B; 14B, rows of 1,024, about 524k tokens a step",
        "2,523; 1,135 tokens/s; on four cards 6,929; 2,630",
        "yes, with clipping",
        "README of `IST-DASLab/llmq`",
    ),
    Claim(
        "DeepSpeed SuperOffload",
        "GH200",
        "Qwen3-14B and others",
        "up to 600 TFLOP/s",
        "yes; with clipping the update is not overlapped",
        "DeepSpeed's blog and repository",
    ),
    Claim(
        "FSDP2 with CPU offload, measured by RoundPipe's authors",
        "8 x RTX 4090",
        "Llama-3.1-8B",
        "4,071 tokens/s",
        "yes, with clipping",
        "README of `thustorage/RoundPipe`",
    ),
    Claim(
        "RoundPipe",
        "1 and 8 x RTX 4090",
        "Llama-3.1-8B, 524k tokens a step",
        "3,142 tokens/s; 24,275 (18,888 without staleness)",
        "no: weights are a step old by default; clipping is the user's",
        "arXiv:2604.27085 and README of `thustorage/RoundPipe`",
    ),
    Claim(
        "FlexTrain",
        "RTX 5090",
        "Llama-3.1-8B",
        "3,723 tokens/s",
        "yes; bf16 masters by default; clipping is not documented",
        "README of `als244/flextrain`",
    ),
    Claim(
        "LLMQ",
        "1 and 4 x RTX 4090, all state on the host; RTX 5060 Ti, 16 GB",
        "Qwen2.5-7B; 14B; 32B, bf16, about 524k tokens a step",
        "2,777; 1,348 tokens/s; on four cards 10,897; 5,268; 2,208; on the 5060 Ti 889 with 7B",
        "yes, with clipping; masters and moments are bf16",
        "README of `IST-DASLab/llmq`",
    ),
    Claim(
        "KTransformers, experts computed on the CPU",
        "one GPU; 2 to 4 RTX 4090; a CPU with AMX or AVX-512",
        "Qwen3-30B-A3B, all weights; DeepSeek-V3 671B, LoRA",
        "254 tokens/s; 40 tokens/s with 70 GB of device memory and 1.2 to 1.3 TB of host memory",
        "not read",
        "README of `kvcache-ai/ktransformers`",
    ),
    Claim(
        "MegaTrain",
        "GH200; H200 with 1.5 TB",
        "7B; 120B",
        "284 TFLOP/s; trains",
        "yes; no fp32 masters; the update is not overlapped",
        "arXiv:2604.05091 (the first figure by way of a blog)",
    ),
    Claim(
        "SlideFormer",
        "RTX 4090",
        "up to 123B",
        "more than 95 % of their run without offload",
        "yes, without clipping",
        "arXiv:2603.16428",
    ),
    Claim(
        "GreedySnake",
        "A100, state on SSD",
        "GPT-65B",
        "1.96 x ZeRO-Infinity",
        "yes",
        "arXiv:2512.17570",
    ),
    Claim(
        "TrainStream 0.4.1",
        "RTX 5090 Laptop, 24 GB",
        "Qwen2.5-1.5B",
        "2.85 s a step, 18.7 GiB; tested on Windows, too",
        "yes; with clipping the update is not overlapped",
        "its package on PyPI",
    ),
    Claim(
        "prime-rl, AdamW on the host",
        "8 x H200",
        "Qwen3-30B-A3B",
        "44, 90, 100 % of its speed in device memory at 8K, 16K, 32K tokens",
        "yes, without clipping",
        "pull request 3234 of `PrimeIntellect-ai/prime-rl`",
    ),
)

LATER_2 = (
    ("baseline fp32", "16.52", "10.51"),
    ("baseline AMP", "26.2", "9.2"),
    ("L2L fp32", "22.5", "9.45"),
    ("L2L CMP", "52.48", "4.96"),
)
"""Table 2 of the last version: BERT-large on 4 V100 of 16 GB, 256 rows of 512 tokens: samples/s, GB."""

LATER_3 = ((1, 64, "52.48", "3.69"), (2, 128, "70.97", "3.89"), (4, 256, "84.91", "4.27"))
"""Table 3: micro-batches of 64 rows, device batch, samples/s on 4 GPUs, GB."""

LATER_4 = ((1, 14.57, 52.48), (2, 18.6, 70.97), (4, 22.07, 84.91))
"""Table 4: micro-batches, samples/s on one GPU and on four."""

LATER_5 = (
    ("baseline, 2 rows", "24; 48", "9.23; out of memory"),
    ("stash on the GPU, 64 rows", "24; 48; 96", "5.22; 6.76; 9.83"),
    ("stash on the CPU, 64 rows", "24; 96; 384", "3.69; 3.69; 3.69"),
)
"""Table 5: layers, GB."""

LATER_6 = ("6.68", "0.58")
"""Table 6: 17 billion parameters, 16 micro-batches of 8 rows of 1,024 tokens: GB, samples/s."""

TASKS = ("QNLI", "SST-2", "CoLA", "STS-B", "MRPC", "RTE")
"""In the order of table 7."""

LATER_7 = (
    ("baseline fp32", "91.32", "93.46", "58.08", "89.0", "88.58", "66.06"),
    ("L2L fp32", "91.46", "93.92", "61.05", "88.50", "88.30", "69.67"),
    ("baseline AMP", "91.70", "93.57", "58.98", "none", "87.97", "67.87"),
    ("L2L CMP", "91.45", "94.26", "61.18", "none", "88.50", "72.2"),
)
"""Table 7: BERT-large after 3 epochs, in percent."""

FIRST_2 = (
    ("baseline, 2 rows", "12; 24; 48", "3.89; 10.03; out of memory"),
    ("L2L, 32 rows", "12; 24; 48; 96", "5.75; 6.52; 8.06; 11.13"),
)
"""Table 2 of the first version: layers, GB; rows of 512 tokens, fp32."""

FIRST_3 = (
    ("baseline, batch 2", "50.53", "0", "0", "0", "88.12", "52.7"),
    ("baseline, accumulated to 32", "92.07", "93.57", "59.94", "89.8", "89.89", "71.48"),
    ("L2L, batch 32", "92.29", "93.34", "59.81", "89.5", "90.31", "74.36"),
)
"""Table 3: QNLI, SST-2, CoLA, STS-B, MRPC, RTE, best of three epochs."""
