"""`L2LTrainingArguments` by the path that `training_args.bin` of earlier runs names; it lives in `hf_l2l.hf`."""

from __future__ import annotations

from hf_l2l.hf.training_args import L2LTrainingArguments

__all__ = ["L2LTrainingArguments"]
