"""`hf-l2l checkpoint FOLDER TARGET`: the newest whole checkpoint, checked and copied to where it stays."""

from __future__ import annotations

import argparse
from pathlib import Path

from hf_l2l.cli.command import GOOD, Command, add_json, print_json, quiet


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        help="that of l2l_realtime_checkpoint, an output_dir, or one checkpoint; a training may still write there",
    )
    parser.add_argument("target", metavar="TARGET", help="the folder of the copy, which must not exist yet")
    add_json(parser)


def _run(options: argparse.Namespace) -> int:
    from hf_l2l.realtime.copying import copy_newest
    from hf_l2l.runtime.tensors import size_text

    quiet()
    target = Path(options.target)
    source, manifest = copy_newest(Path(options.folder), target)
    num_bytes = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    step = None if manifest is None else manifest.step
    if options.json:
        print_json({"source": str(source), "target": str(target), "step": step, "bytes": num_bytes})
    else:
        known = "has no manifest" if step is None else f"step {step}, all bytes as they were saved"
        print(f"{source} -> {target}: {known}, {size_text(num_bytes)}")
        print(f"go on from it with resume_from_checkpoint={str(target)!r}, with L2LTrainer or Trainer")
    return GOOD


COMMAND = Command(
    "checkpoint",
    "copy the newest whole checkpoint out of a folder in which a training may replace it",
    "checkpoint now kept",
    _add_flags,
    _run,
)
