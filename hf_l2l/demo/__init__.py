"""A small sentiment data set for trying the package offline: `run_glue_l2l.py` and the notebooks train on it."""

from __future__ import annotations

from pathlib import Path


def demo_files() -> dict[str, str]:
    """The paths of the demo data set by split: `train` and `validation`."""
    folder = Path(__file__).parent
    return {split: str(folder / f"{split}.csv") for split in ("train", "validation")}
