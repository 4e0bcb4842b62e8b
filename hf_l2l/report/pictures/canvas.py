"""Pictures with matplotlib, which only they need: without a display, and without global state."""

from __future__ import annotations

import io
from functools import partial
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
        import matplotlib.figure
    except ImportError as error:
        raise ImportError(
            f"{asked} needs the package matplotlib (got {given!r}, and it is not installed); install it with: pip "
            f"install matplotlib, or {otherwise}"
        ) from error
    figure: Any = matplotlib.figure.Figure(figsize=(width, height), layout="constrained", facecolor="white")
    figure._repr_png_ = partial(_png, figure)  # notebooks show it; without this only where pyplot was imported
    return figure  # type: ignore[no-any-return]


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


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
