"""Pictures for the option `--plot FILE` of commands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_l2l.report.pictures import canvas

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(file: str, width: float, height: float) -> Figure:
    """See `canvas.new_figure`."""
    return canvas.new_figure("--plot", file, width, height, "leave --plot out")


def save(figure: Any, file: str) -> None:
    """See `canvas.save`."""
    canvas.save(figure, "--plot", file)
