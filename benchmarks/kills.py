"""Trainings that are killed while they save, under `Trainer` and `L2LTrainer`: what is resumed, and right.

All train the same tiny BERT with dropout, and save every second of six steps. Each is killed once at every call that
changes its folder, once at the first byte and once in the middle of every file, and at random times. A second process
resumes as a script does that is started again: with `resume_from_checkpoint=True` if there is a checkpoint. Its end is
right if it has the bits of a training that was not killed: weights, moments, schedule and log. Where a new training
writes into the folder of an older one, that of the older one's whole checkpoint is right, too.

    python benchmarks/kills.py [--times 100] [--every 1] [--scenes calls files times again] [--out FILE.md]

A table for people, then one JSON document as the last line.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: the folder above is not where Python looks for modules
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import environment
from benchmarks.kill_points import Fault, Training, cuts, end_of

SCENES = {
    "calls": "at every call that changes its folder",
    "files": "at the first byte and in the middle of every file",
    "times": "at random times",
    "again": "at both, in the folder of an older training",
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "`Trainer`": ("Trainer", {}),
    "`L2LTrainer`": ("L2LTrainer", {}),
    "`L2LTrainer`, `l2l_async_save`": ("L2LTrainer", {"l2l_async_save": True}),
}
"""A trainer as the table names it -> its class, and its options."""
OLDER, NEWER = 7, 0
"""Seeds of the two trainings in one folder."""


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=100, help="kills at random times")
    parser.add_argument("--every", type=int, default=1, help="only every so many of the other kills")
    parser.add_argument("--scenes", nargs="+", choices=SCENES, default=list(SCENES), help="rows of the table")
    parser.add_argument("--out", type=Path, help="file for the document in markdown")
    options = parser.parse_args(arguments)
    if options.times < 1 or options.every < 1:
        parser.error(f"--times and --every must be at least 1 (got {options.times} and {options.every})")
    return options


def kills(training: Training, scene: str, options: argparse.Namespace, folder: Path) -> Iterator[Training]:
    """The training, with all that is to kill it; `folder` is one to run it in unharmed."""
    if scene == "times":
        draw = random.Random(3)
        yield from (replace(training, seconds=draw.uniform(0.001, 0.2)) for _ in range(options.times))
        return
    calls = end_of(replace(training, folder=str(folder))).calls
    at_calls, in_files = [Fault(at) for at in range(1, len(calls) + 1)], cuts(calls, folder / "checkpoint-6")
    faults = {"calls": at_calls, "files": in_files, "again": [*at_calls, *in_files]}[scene]
    yield from (replace(training, fault=fault) for fault in faults[:: options.every])


def outcomes(kind: str, scene: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Kill the trainings of one scene, resume them, and count what became of them."""
    before = folder / "before"
    before.mkdir()
    trainer, own = KINDS[kind]
    unharmed = Training(trainer, str(folder / "unharmed"), seed=NEWER, resumes=False, options=own)
    right = {end_of(unharmed).digest}
    if scene == "again":
        end_of(Training(trainer, str(before), seed=OLDER, stop_at=2, options=own))
        shutil.copytree(before, folder / "older")
        right.add(end_of(replace(unharmed, folder=str(folder / "older"), resumes=True)).digest)
    counted: dict[str, Any] = {"kills": 0, "resumed": 0, "right": 0}
    errors: collections.Counter[str] = collections.Counter()
    run = folder / "run"
    for training in kills(replace(unharmed, folder=str(run)), scene, options, folder / "calls"):
        shutil.copytree(before, run)
        if end_of(training).killed_by is not None:  # else it was over, or the file had ended
            found = end_of(replace(training, fault=None, seconds=None, resumes=True))
            counted["kills"] += 1
            counted["resumed"] += found.error is None
            counted["right"] += found.error is None and found.digest in right
            errors.update([type(found.error).__name__] if found.error is not None else [])
        shutil.rmtree(run)
    return {**counted, "errors": dict(errors)}


def table(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    """A row for each trainer and scene."""
    lines = [
        "| killed | trainer | kills | resumed without help | end as if not killed | wrong without a word | errors |",
        "|---|---|---|---|---|---|---|",
    ]
    for scene, by_kind in found.items():
        for kind, row in by_kind.items():
            errors = ", ".join(f"{count} {name}" for name, count in row["errors"].items()) or "-"
            counts = (row["kills"], row["resumed"], row["right"], row["resumed"] - row["right"])
            lines.append(f"| {SCENES[scene]} | {kind} | {' | '.join(map(str, counts))} | {errors} |")
    return "\n".join(lines)


def document(text: str, where: dict[str, Any]) -> str:
    """The file for `benchmarks/results`."""
    said = str(__doc__).split("\n\n")[1]
    return (
        "# Trainings that are killed while they save: `Trainer` and `L2LTrainer`\n\n"
        f"## Environment\n\n{environment.description(where)}\n\n## Result\n\n{said}\n\n{text}\n\n"
        f"## To reproduce\n\n```bash\n{where['command']}\n```\n"
    )


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure; returns the document."""
    options = parsed(arguments)
    found: dict[str, dict[str, dict[str, Any]]] = {scene: {} for scene in options.scenes}
    for scene in options.scenes:
        for kind in KINDS:
            with tempfile.TemporaryDirectory() as folder:
                found[scene][kind] = outcomes(kind, scene, options, Path(folder))
    where = environment.environment("kills.py", sys.argv[1:] if arguments is None else arguments)
    print(table(found))
    if options.out is not None:
        options.out.write_text(document(table(found), where), encoding="utf-8")
    result = {"scenes": found, "environment": where}
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
