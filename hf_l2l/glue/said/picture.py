"""The picture of a training that `run_glue_l2l.py` leaves beside the model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME

from hf_l2l.report.pictures.canvas import save
from hf_l2l.report.pictures.run_log import read_run
from hf_l2l.report.pictures.run_picture import draw_run

PICTURE = "training.png"


def draw_training(folder: str) -> dict[str, str]:
    """Draw the run whose state is in `folder`, into a file there.

    Returns:
        the name of the file, and what it has in words; nothing without matplotlib, which the script does not need.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return {}
    file = Path(folder) / PICTURE
    save(
        draw_run(read_run(Path(folder) / TRAINER_STATE_NAME), "the picture", file, "go on without it"),
        PICTURE,
        str(file),
    )
    return {PICTURE: "memory, time and loss as one picture"}
