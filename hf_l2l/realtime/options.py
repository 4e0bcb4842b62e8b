"""The options of real-time checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hf_l2l.checkpoint import reserved

Every = int | Literal["auto"]
"""Steps from one generation to the next; "auto" begins one at the first step after the last one is in its place."""


class RealtimeOptions(NamedTuple):
    """Those of training arguments; plain `TrainingArguments` have the defaults."""

    folder: Path | None
    every: Every
    stops: bool
    """Whether a generation that cannot be written ends the training."""

    @classmethod
    def of(cls, args: Any) -> RealtimeOptions:
        """Those of `args`, which `check_realtime` has checked."""
        folder = getattr(args, "l2l_realtime_checkpoint", None)
        every = _parsed(getattr(args, "l2l_realtime_every", "auto"))
        assert every is not None, "has been checked"
        stops = getattr(args, "l2l_realtime_errors", "stop") == "stop"
        return cls(None if folder is None else Path(folder), every, stops)


def _parsed(every: object) -> Every | None:
    """A number may come from a command line; None for what is neither a number of steps nor "auto"."""
    if every == "auto":
        return "auto"
    if isinstance(every, str) and every.isascii() and every.isdecimal():
        every = int(every)
    return every if type(every) is int and every >= 1 else None


def _is_uploaded(folder: str, output_dir: str) -> bool:
    path, run = Path(os.path.realpath(folder)), Path(os.path.realpath(output_dir))
    return path.is_relative_to(run) and not path.relative_to(run).parts[0].startswith("_")  # transformers leaves these


def check_realtime(args: Any) -> None:
    """Raise ValueError for options of training arguments `args` that cannot be honoured."""
    folder = getattr(args, "l2l_realtime_checkpoint", None)
    every, errors = getattr(args, "l2l_realtime_every", "auto"), getattr(args, "l2l_realtime_errors", "stop")
    if _parsed(every) is None:
        raise ValueError(
            f"l2l_realtime_every must be 'auto' or a number of steps from 1 on (got {every!r}); 'auto' begins a "
            "checkpoint as soon as the one before is on the disk"
        )
    if errors not in ("stop", "warn"):
        raise ValueError(
            f"l2l_realtime_errors must be 'stop' or 'warn' (got {errors!r}); 'warn' goes on without a checkpoint"
        )
    if folder is None:
        for name, value, default in (("l2l_realtime_every", every, "auto"), ("l2l_realtime_errors", errors, "stop")):
            if value != default:
                raise ValueError(f"{name} needs l2l_realtime_checkpoint='folder' (got {value!r} alone); give both")
        return
    if not isinstance(folder, str) or not folder:
        raise ValueError(f"l2l_realtime_checkpoint must be the path of a folder (got {folder!r}); name one on a disk")
    if args.output_dir is not None and os.path.realpath(folder) == os.path.realpath(args.output_dir):
        raise ValueError(
            "l2l_realtime_checkpoint must be another folder than output_dir, since only the last checkpoint is kept "
            f"there (got {folder!r} for both); name a folder beside it"
        )
    if getattr(args, "auto_find_batch_size", False):
        raise ValueError(
            "l2l_realtime_checkpoint replaces the checkpoint from which auto_find_batch_size=True would begin again "
            "(got both); set per_device_train_batch_size"
        )
    if getattr(args, "push_to_hub", False) and args.output_dir is not None and _is_uploaded(folder, args.output_dir):
        raise ValueError(
            "push_to_hub=True uploads what is in output_dir, which must not have real-time checkpoints (got "
            f"l2l_realtime_checkpoint={folder!r} there); name a folder beside it"
        )
    if args.save_only_model:
        raise ValueError(
            "l2l_realtime_checkpoint is to resume from, which save_only_model=True cannot be (got both); leave out one"
        )
    if not reserved.can_write_places():
        raise ValueError(
            "l2l_realtime_checkpoint needs a system that writes to places in a file (got one without os.pwrite); "
            "leave it out"
        )
