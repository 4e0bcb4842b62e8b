"""What a trainer reads of a checkpoint is what it looks like: checked before anything is loaded.

A manifest says that files are as somebody has saved them, not that somebody meant well, and checkpoints of
transformers' Trainer have none. Nothing here follows a link, runs what a file asks for, or reads values of tensors.
"""

from __future__ import annotations

import json
import stat
import struct
import warnings
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.trainer_callback import TrainerState
from transformers.trainer_pt_utils import safe_globals

from hf_l2l.checkpoint.manifest import LINK, DamagedCheckpointError, files_in
from hf_l2l.compat import RefusedPickleError

_DAMAGE = (
    *(ArithmeticError, AssertionError, AttributeError, BufferError, EOFError, LookupError, MemoryError, OSError),
    *(RuntimeError, TypeError, ValueError, struct.error, SafetensorError, RefusedPickleError),
)
"""What the readers of files raise of damaged ones. It is not always an error that tells much."""
_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin", "adapter_model.safetensors", "adapter_model.bin")


def check_form(checkpoint: Path, *, is_known: bool, of: Callable[[str], bool] = lambda name: True) -> None:
    """Raise unless a trainer can read `checkpoint` to its end, and reads nothing that is elsewhere.

    Everything in it is a file or a folder. It has a state and weights, unless it `is_known` that nothing is missing.
    Its state, weights, indexes of weights and what `torch.save` wrote can be read: JSON, the headers of safetensors,
    and archives of which `weights_only=True` lets all pass. Their values are not read, so that large ones take no
    longer. What no trainer reads, `training_args.bin` above all, is not opened. Only files whose names are `of` a kind
    are looked at.

    Raises:
        DamagedCheckpointError: names the first file that is not so.
    """
    names = list(filter(of, files_in(checkpoint)))
    for name in names:
        mode = (checkpoint / name).lstat().st_mode
        if not stat.S_ISREG(mode):
            raise DamagedCheckpointError(checkpoint, name, LINK if stat.S_ISLNK(mode) else "is no file or folder")
    needs: dict[str, tuple[str, ...]] = {"trainer_state.json": ("trainer_state.json",), "model.safetensors": _WEIGHTS}
    for needed, patterns in () if is_known else needs.items():
        # Weights may be in a folder, for a trainer that looks for them there.
        if not any(fnmatchcase(name.rpartition("/")[2], pattern) for name in names for pattern in patterns):
            raise DamagedCheckpointError(checkpoint, needed, "is missing")
    for name in names:
        for patterns, read in _READ:
            if _is_named(name, patterns):
                _check(checkpoint, name, read)


def _is_named(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether it is in the folder, or, as further adapters are, in one of its folders, under one of the names."""
    folder, _, last = name.rpartition("/")
    return (not folder or last.startswith("adapter_")) and any(fnmatchcase(last, pattern) for pattern in patterns)


def _check(checkpoint: Path, name: str, read: Callable[[Path], Any]) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the trainer that reads it gives them
            read(checkpoint / name)
    except _DAMAGE as error:
        reason = (str(error).splitlines() or [""])[0]
        raise DamagedCheckpointError(
            checkpoint, name, f"cannot be read: {type(error).__name__}: {reason:.200}"
        ) from None


def _read_state(path: Path) -> None:
    if type(TrainerState.load_from_json(str(path)).global_step) is not int:
        raise ValueError("global_step is no number of steps")


def _read_object(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_bytes())
    if not isinstance(found, dict):
        raise ValueError("it is no object of JSON")
    return found


def _read_index(path: Path) -> None:
    """transformers would read the weights from wherever the index says that they are."""
    for part in set(_read_object(path)["weight_map"].values()):
        is_plain = part not in ("", ".", "..") and not {"/", "\\", "\0"} & set(part)
        if not is_plain or not stat.S_ISREG((path.parent / part).lstat().st_mode):
            raise ValueError(f"{part!r:.100} is no file beside it")


def _read_safetensors(path: Path) -> None:
    with safe_open(path, framework="pt"):
        pass  # the header has been checked against the size of the file


def _read_archive(path: Path) -> None:
    with path.open("rb") as file:
        is_archive = file.read(4) == b"PK\3\4"  # and no file of torch 1.5, which cannot be mapped into memory
    with safe_globals():
        torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)


_READ: tuple[tuple[tuple[str, ...], Callable[[Path], Any]], ...] = (
    (("trainer_state.json",), _read_state),
    (("*.index.json",), _read_index),
    (("config.json", "adapter_config.json", "l2l_*.json"), _read_object),
    (("*.safetensors",), _read_safetensors),
    (("optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state*.pth", *_WEIGHTS[1::2]), _read_archive),
)
"""Names of files, and what a trainer does with them first."""
