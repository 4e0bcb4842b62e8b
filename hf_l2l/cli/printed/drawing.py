"""Pictures that commands draw, with matplotlib, which only they need: without a display, and without global state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(file: str, width: float, height: float) -> Figure:
    """An empty picture of so many inches, for the option `--plot FILE`.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    try:
        import matplotlib.figure
    except ImportError as error:
        raise ImportError(
            f"--plot needs the package matplotlib (got {file!r}, and it is not installed); install it with: pip "
            "install matplotlib, or leave --plot out"
        ) from error
    return matplotlib.figure.Figure(figsize=(width, height), layout="constrained", facecolor="white")


def save(figure: Any, file: str) -> None:
    """Write a picture in the form that the ending of the file names.

    Raises:
        ValueError: if that is unknown, or the file cannot be written.
    """
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:  # or an ending that matplotlib does not know
        raise ValueError(
            f"--plot must be a file that can be written, with an ending such as .png (got {file!r}: {error}); give "
            "one in an existing folder"
        ) from error
