"""A small sentiment set to try the package with: `run_glue_l2l.py` and the notebooks train on it offline."""

from __future__ import annotations

from pathlib import Path


def demo_files() -> dict[str, str]:
    """The paths of the demo set, by split: `train` and `validation`."""
    folder = Path(__file__).parent
    return {split: str(folder / f"{split}.csv") for split in ("train", "validation")}
