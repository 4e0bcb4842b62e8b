"""`hf-l2l plot RUN`: the memory, the time and the loss of a run as one picture, from what it logged."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from hf_l2l.cli.command import GOOD, Command, add_json, print_json, quiet

if TYPE_CHECKING:
    from hf_l2l.report.pictures.run_log import RunLog

DEFAULT = "hf_l2l_run.png"


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        metavar="RUN",
        help="an output_dir, of which the newest state is drawn; one checkpoint; or a trainer_state.json",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help=f"the picture (.png, .pdf, .svg); without it, {DEFAULT} here, and none with --json",
    )
    add_json(parser)


def _run(options: argparse.Namespace) -> int:
    from hf_l2l.report.pictures.canvas import save
    from hf_l2l.report.pictures.run_picture import draw_run

    quiet()
    file, log = _found(Path(options.run))
    out = options.out or (None if options.json else DEFAULT)
    if out is not None:
        save(draw_run(log, "a picture", out, "give --json for the figures alone"), "--out", out)
    if options.json:
        print_json({"file": str(file), "picture": out, **log.as_json()})
    else:
        print(f"{file}: {log.steps} steps of {'; '.join(filter(None, log.facts.lines()))} -> {out}")
        for panel, why in log.missing.items():
            print(f"  {panel}: {why}")
    return GOOD


def _found(run: Path) -> tuple[Path, RunLog]:
    """The state of a run, and what it says."""
    from hf_l2l.report.pictures.run_log import read_run

    file: Path | None = run
    try:
        file = run if run.is_file() else _newest_state(run)
        if file is None:
            found = "it has no trainer_state.json, nor has a checkpoint in it" if run.is_dir() else "no such file"
            raise ValueError(found)
        return file, read_run(file)
    except ValueError as error:
        raise ValueError(
            "RUN must be the output_dir of a training, one of its checkpoints, or a trainer_state.json (got "
            f"{str(file or run)!r}: {error}); save a checkpoint, or call trainer.save_state(). A loop without a "
            "Trainer logs no state: print eps.memory_report() and eps.timeline.averages() there"
        ) from error


def _newest_state(folder: Path) -> Path | None:
    """The state in a folder: its own, or that of its newest checkpoint if that is of a later step."""
    from hf_l2l.checkpoint.finding import STATE, newest_whole, step_of
    from hf_l2l.report.pictures.run_log import read_run

    own = folder / STATE if (folder / STATE).is_file() else None
    newest, _ = newest_whole(folder, lambda _: None)  # whoever resumes from it checks its bytes
    if newest is None or not (newest / STATE).is_file():
        return own
    is_newer = own is None or step_of(newest) > read_run(own).steps
    return newest / STATE if is_newer else own


COMMAND = Command(
    "plot",
    "draw the memory by name, the time by cause and the loss of a run, from what it logged",
    "plot output --out run.png",
    _add_flags,
    _run,
)
