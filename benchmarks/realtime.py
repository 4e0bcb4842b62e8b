"""What real-time checkpoints cost a training: steps with and without `l2l_realtime_checkpoint`, in turns.

    python benchmarks/realtime.py [--rounds 4] [--steps 12] [--layers 8] [--hidden 512] [--batch 32] [--every auto]

A line for people, then one JSON document as the last one. The cost of a generation is spread over the steps in which
it is written: what counts is the mean time of a step, the first two left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as hf

if not __package__:  # run as a script: the folder above is not where Python looks for modules
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import environment
from benchmarks.saving import VOCAB, Moments, model_of
from hf_l2l import L2LTrainer, L2LTrainingArguments
from hf_l2l.checkpoint.finding import checkpoints_in
from hf_l2l.probe.disk import write_rate

_WARMUP = 2


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4, help="trainings of each kind; the first is warmup")
    parser.add_argument("--steps", type=int, default=12, help="of each training")
    parser.add_argument("--every", default="auto", help="l2l_realtime_every")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--folder", help="on the disk that is measured; the system's temporary folder without it")
    options = parser.parse_args(arguments)
    if options.steps <= _WARMUP or options.rounds < 2:
        parser.error(f"--steps must be at least 3, and --rounds 2 (got {options.steps} and {options.rounds})")
    return options


class Generations(hf.TrainerCallback):
    """Steps of the whole generations that are there when steps end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: set[str] = set()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.found |= {each.name for each in checkpoints_in(self.folder)}


def one_training(realtime: bool, options: argparse.Namespace) -> dict[str, float]:
    """Seconds of a step, generations that were written, and bytes of one."""
    ids = torch.randint(5, VOCAB, (4 * options.batch, options.tokens))
    moments = Moments()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        now = Path(folder) / "now"
        seen = Generations(now)
        own: dict[str, Any] = {}
        if realtime:
            own = {"l2l_realtime_checkpoint": str(now), "l2l_realtime_every": options.every}
        trainer = L2LTrainer(
            model=model_of(options),
            args=L2LTrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=options.batch,
                max_steps=options.steps,
                report_to="none",
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                dataloader_pin_memory=torch.accelerator.is_available(),
                eps_update="deferred",
                **own,
            ),
            train_dataset=[{"input_ids": row, "labels": row[0] % 2} for row in ids],
            callbacks=[moments, seen],
        )
        trainer.train()
        size = sum(file.stat().st_size for file in now.rglob("checkpoint-*/*"))
    span = moments.ends[-1] - moments.ends[_WARMUP - 1]
    return {"step_s": span / (options.steps - _WARMUP), "generations": len(seen.found), "bytes": size}


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure; returns the document."""
    options = parsed(arguments)
    hf.logging.set_verbosity_error()
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for turn in range(options.rounds):
        for realtime in (False, True):
            measured = one_training(realtime, options)
            if turn:  # the first one loads what later ones find
                found[realtime].append(measured)
    without, with_it = ({name: statistics.median(each[name] for each in v) for name in v[0]} for v in found.values())
    rate = write_rate(Path(options.folder or tempfile.gettempdir()))
    result = {
        "without": without,
        "with": with_it,
        "cost": with_it["step_s"] / without["step_s"] - 1,
        "disk_bytes_per_s": rate,
        "options": {name: str(value) for name, value in vars(options).items()},
        "environment": environment.environment("realtime.py", sys.argv[1:] if arguments is None else arguments),
    }
    print(
        f"step {without['step_s']:.3f} s, with real-time checkpoints {with_it['step_s']:.3f} s "
        f"({result['cost']:+.1%}); "
        f"{with_it['generations']:.0f} generations of {with_it['bytes'] / 2**20:.1f} MiB in {options.steps} steps; "
        f"the disk takes {rate / 2**20:.0f} MiB/s"
    )
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
