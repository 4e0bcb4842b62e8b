"""What ranks take: host memory of 1, 2 and 4 of them on this machine, and the time of a step, beside DDP.

Each rank trains the same BERT on its own rows, for a few steps; the model exists once, in memory that all ranks map,
or, in DistributedDataParallel, once per rank. Memory is the proportional set size of all ranks together, which counts
a page that n processes map once; before the model it is what each process itself takes.

    python benchmarks/ranks.py [--ranks 1 2 4] [--layers 24] [--hidden 512] [--rows 2] [--steps 4]

A table for people, then one JSON document as the last line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

if not __package__:  # run as a script: the folder above is not where Python looks for modules
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import environment
from hf_l2l import L2LConfig, attach_l2l, detach_l2l

MIB = 2**20
KINDS = ("hf_l2l", "ddp")


def pss() -> int:
    """Bytes of this process; pages that several map are divided among them."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))


def bert(args: argparse.Namespace) -> nn.Module:
    """A BERT without dropout, with random weights."""
    torch.manual_seed(0)
    config = hf.BertConfig(
        vocab_size=8000,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        intermediate_size=4 * args.hidden,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return hf.BertForSequenceClassification(config)


@contextmanager
def prepared(kind: str, model: nn.Module) -> Iterator[tuple[Callable[..., Any], torch.optim.Optimizer, Any]]:
    """What is called for a forward, the optimizer, and what clips."""
    if kind == "hf_l2l":
        eps = attach_l2l(model, L2LConfig(eps_update="deferred"))
        optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False))
        yield model, optimizer, eps.clip_grad_norm_
        detach_l2l(model)
        return
    model.gradient_checkpointing_enable()
    wrapped = DistributedDataParallel(model) if distributed.is_initialized() else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    yield wrapped, optimizer, lambda norm: nn.utils.clip_grad_norm_(model.parameters(), norm)


def train(args: argparse.Namespace) -> dict[str, Any]:
    """In one rank: memory before the model and in the training, and seconds of the steps."""
    torch.set_num_threads(1)
    if int(os.environ["WORLD_SIZE"]) > 1:
        distributed.init_process_group("gloo")
    before, seconds = pss(), []
    model = bert(args)
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    with prepared(args.kind, model) as (forward, optimizer, clip):
        for _ in range(args.steps):
            ids = torch.randint(0, 8000, (args.rows, 64), generator=generator)
            began = time.perf_counter()
            forward(input_ids=ids, labels=torch.zeros(args.rows, dtype=torch.long)).loss.backward()
            clip(1.0)
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - began)
        if distributed.is_initialized():
            distributed.barrier()  # so that all are measured in the same state
        inside = pss()
        if distributed.is_initialized():
            distributed.barrier()
    parameters = sum(p.numel() for p in model.parameters())
    return {"before": before, "inside": inside, "step_s": statistics.median(seconds[1:]), "parameters": parameters}


def started(args: argparse.Namespace, kind: str, ranks: int) -> list[dict[str, Any]]:
    """Start so many ranks, and return what each has found."""
    with tempfile.TemporaryDirectory() as folder:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29500 + os.getpid() % 2000), "OMP_NUM_THREADS": "1"}
        sizes = ["--layers", args.layers, "--hidden", args.hidden, "--rows", args.rows, "--steps", args.steps]
        command = [sys.executable, __file__, "--kind", kind, *map(str, sizes), "--out", folder]
        processes = [
            subprocess.Popen(
                command, env={**os.environ, **where, "RANK": str(n), "LOCAL_RANK": str(n), "WORLD_SIZE": str(ranks)}
            )
            for n in range(ranks)
        ]
        if any([process.wait() for process in processes]):
            raise SystemExit("a rank has failed")
        return [json.loads((Path(folder) / f"{n}.json").read_text()) for n in range(ranks)]


def row(args: argparse.Namespace, kind: str, ranks: int) -> dict[str, Any]:
    """Memory and time of a training with so many ranks."""
    found = started(args, kind, ranks)
    own, inside = sum(each["before"] for each in found), sum(each["inside"] for each in found)
    return {
        "kind": kind,
        "ranks": ranks,
        "processes_mib": own / MIB,
        "training_mib": (inside - own) / MIB,
        "state_mib": 16 * found[0]["parameters"] / MIB,
        "step_s": max(each["step_s"] for each in found),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.kind:
        (args.out / f"{os.environ['RANK']}.json").write_text(json.dumps(train(args)))
        return
    rows = [row(args, kind, ranks) for ranks in args.ranks for kind in KINDS]
    print("| ranks | | processes before the model, MiB | model and training, MiB | 16 bytes per parameter | step, s |")
    print("|---|---|---|---|---|---|")
    for each in rows:
        print(
            f"| {each['ranks']} | {each['kind']} | {each['processes_mib']:.0f} | {each['training_mib']:.0f} | "
            f"{each['state_mib']:.0f} | {each['step_s']:.2f} |"
        )
    print(json.dumps({"environment": environment.environment("ranks.py", sys.argv[1:]), "rows": rows}))


if __name__ == "__main__":
    main()
