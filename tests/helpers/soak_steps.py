"""What a process has after many steps, trainings and checkpoints: memory, threads, files and tensors do not grow.

Each row is a process of its own, which prints what it has measured: `python tests/helpers/soak_steps.py 0`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from soak import ROOT, page
from training import left_in

MOST_BYTES_PER_STEP = 1024
CASES = (
    "3,000 steps on the CPU",
    "3,000 steps on the simulated accelerator",
    "20 trainings of the Trainer",
    "50 checkpoints, of which two are kept",
    "50 checkpoints in the background",
)
"""A seed stands for one of them."""


def run(seed: int) -> dict[str, Any]:
    """Measure in a process of its own."""
    number = seed % len(CASES)
    paths = os.pathsep.join((str(ROOT), str(Path(__file__).parent)))
    with tempfile.TemporaryDirectory() as folder:
        found = subprocess.run(
            [sys.executable, __file__, str(number), folder],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": paths},
        )
    if found.returncode != 0:
        return {"case": CASES[number], "failure": found.stderr.strip().rpartition("\n")[2] or "the process has failed"}
    row: dict[str, Any] = json.loads(found.stdout.rpartition("MEASURED")[2])
    return {"case": CASES[number], **row, "failure": failure_of(row)}


def failure_of(row: dict[str, Any]) -> str | None:
    """What has grown; None if nothing has."""
    first, last, slope = row["first"], row["last"], row["bytes_per_step"]
    grown = [f"{name}: {first[name]} and then {last[name]}" for name in first if last[name] > first[name]]
    grown += [f"{slope:.0f} bytes per step"] if slope is not None and slope > MOST_BYTES_PER_STEP else []
    return "; ".join(grown) or None


def document(rows: list[dict[str, Any]]) -> str:
    """What each process had first and last."""
    words = f"""
Each row is a process. After a warm-up, and at the end, it counts its threads, open files, child
processes, live tensors and their storages (first, last), and its memory in RAM; the slope of the memory
is that of a straight line through readings every 50 steps, and may be {MOST_BYTES_PER_STEP} bytes per
step at most. Updates are deferred; the stash of the simulated accelerator is in host memory."""
    names = ("threads", "files", "children", "tensors", "storages")
    lines = []
    for row in (row for row in rows if "first" in row):
        slope = "" if row["bytes_per_step"] is None else f"{row['bytes_per_step']:.0f}"
        sizes = [f"{row[name] / 2**20:.1f}" for name in ("first_bytes", "last_bytes")]
        both = [f"{row['first'][name]}, {row['last'][name]}" for name in names]
        lines.append((row["case"], row["turns"], *sizes, slope, *both))
    head = ("", "turns", "MiB first", "MiB last", "bytes per step", *names)
    return page("What a process has after many steps, trainings and checkpoints", words, head, lines)


def measured(turn: Any, turns: int, warm_up: int, every: int, *, has_slope: bool) -> dict[str, Any]:
    """Call `turn` so often; readings begin after the warm-up."""
    import left_over

    readings: list[tuple[int, int]] = []
    first: dict[str, Any] = {}
    for number in range(1, turns + 1):
        turn()
        if number == warm_up:
            first = left_over.counts()
        if number >= warm_up and (number - warm_up) % every == 0:
            left_over.live_tensors()  # which collects garbage
            readings.append((number, left_over.resident_bytes()))
    return {
        "turns": turns,
        "first": first,
        "last": left_over.counts(),
        "first_bytes": readings[0][1],
        "last_bytes": readings[-1][1],
        "bytes_per_step": statistics.linear_regression(*zip(*readings, strict=True)).slope if has_slope else None,
    }


def steps(device: str, turns: int = 3000, warm_up: int = 300, every: int = 50) -> dict[str, Any]:
    """Steps of a loop in plain torch."""
    from runs import attach

    options = {} if device == "cpu" else {"stash": "host"}
    model, eps, optimizer, batch = attach(device=device, **options)

    def turn() -> None:
        model(**batch).loss.backward()
        eps.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        eps.synchronize()  # so that every reading is between two steps

    return measured(turn, turns, warm_up, every, has_slope=True)


def trainings(folder: Path, turns: int = 20, warm_up: int = 5) -> dict[str, Any]:
    """Whole trainings of one `L2LTrainer` after the other."""
    from hf_l2l import detach_l2l
    from training import l2l_trainer

    def turn() -> None:
        made = l2l_trainer(folder, eps_update="deferred", max_steps=2)
        made.train()
        detach_l2l(made.model)

    return measured(turn, turns, warm_up, 1, has_slope=False)


def saves(folder: Path, *, in_background: bool, turns: int = 50, warm_up: int = 10) -> dict[str, Any]:
    """Steps of one training, each of which is saved."""
    import transformers as hf

    import left_over
    from training import l2l_trainer

    found: dict[str, Any] = {}

    class Counts(hf.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            moment = {warm_up: "first", turns - 1: "last"}.get(state.global_step)
            if moment is not None:
                for thread in threading.enumerate():  # at each of the two moments, no checkpoint is being written
                    if thread.name == "hf_l2l save":
                        thread.join()
                found[moment], found[f"{moment}_bytes"] = left_over.counts(), left_over.resident_bytes()

    saving = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "l2l_async_save": in_background}
    made = l2l_trainer(folder, eps_update="deferred", max_steps=turns, callbacks=[Counts()], **saving)
    made.train()
    kept = left_in(folder)
    assert kept == [f"checkpoint-{turns - 1}", f"checkpoint-{turns}"], kept
    return {"turns": turns, **found, "bytes_per_step": None}


def main(number: int, folder: Path) -> dict[str, Any]:
    """Measure one case in this process."""
    import torch

    torch.set_num_threads(1)
    if number == 1:
        from hf_l2l.testing import enable_simulated_accelerator

        enable_simulated_accelerator()
    if number < 2:
        return steps(("cpu", "sim")[number])
    return trainings(folder) if number == 2 else saves(folder, in_background=number == 4)


if __name__ == "__main__":
    print("MEASURED" + json.dumps(main(int(sys.argv[1]), Path(sys.argv[2]))))
