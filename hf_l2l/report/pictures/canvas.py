"""Pictures with matplotlib, which only they need: without a display, and without global state."""

from __future__ import annotations

import io
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(asked: str, given: object, width: float, height: float, otherwise: str) -> Figure:
    """An empty picture of so many inches, for what was `asked` with what was `given`. An error says what to do
    `otherwise`, without matplotlib.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    try:
        shown = _figure_class()
    except ImportError as error:
        raise ImportError(
            f"{asked} needs the package matplotlib (got {given!r}, and it is not installed); install it with: pip "
            f"install matplotlib, or {otherwise}"
        ) from error
    return shown(figsize=(width, height), layout="constrained", facecolor="white")


@cache
def _figure_class() -> type[Figure]:
    from matplotlib.figure import Figure

    class ShownFigure(Figure):
        """A figure that notebooks show, as they do those of pyplot once that is imported."""

        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png")
            return file.getvalue()

    return ShownFigure


def save(figure: Any, option: str, file: str) -> None:
    """Write a picture in the form that the ending of the file names.

    Raises:
        ValueError: if that is unknown, or the file cannot be written.
    """
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:  # or an ending that matplotlib does not know
        raise ValueError(
            f"{option} must be a file that can be written, with an ending such as .png (got {file!r}: {error}); give "
            "one in an existing folder"
        ) from error
