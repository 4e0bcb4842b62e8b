"""Numbers that are given as options: what is said of one that cannot be used."""

from __future__ import annotations

import os


def is_whole_number(value: object) -> bool:
    """Whether `value` is an int, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_ubatch_size(ubatch_size: int | None) -> None:
    """Raise ValueError unless `ubatch_size` is None or a whole number of at least 1."""
    if ubatch_size is None:
        return
    if not is_whole_number(ubatch_size) or ubatch_size < 1:
        raise ValueError(
            f"ubatch_size must be a whole number of at least 1, or None for the whole device batch (got "
            f"{ubatch_size!r}); set it to the rows that fit through one layer at once"
        )


def check_num_threads(threads: int | None, name: str) -> None:
    """Raise ValueError, which calls the option `name`, unless the machine has so many cores, or `threads` is None."""
    if threads is None:
        return
    cores = os.cpu_count() or 1
    if not is_whole_number(threads) or threads < 1:
        raise ValueError(
            f"{name} must be a whole number of at least 1, or None for all cores but one (got {threads!r}); it counts "
            "the threads of an update in the background"
        )
    if threads > cores:  # torch itself does not survive very many
        raise ValueError(
            f"{name} must be at most the {cores} cores of this machine (got {threads}); leave it out for all cores "
            "but one"
        )


def check_layer_count(count: int, name: str) -> None:
    """Raise ValueError, which calls the option `name`, unless `count` is a whole number of at least 0."""
    if not is_whole_number(count) or count < 0:
        raise ValueError(
            f"{name} must be a whole number of layers, at least 0 (got {count!r}); 0 leaves all layers as they are "
            "without it"
        )
