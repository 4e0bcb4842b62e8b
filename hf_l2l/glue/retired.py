"""Options that recipes for run_glue.py carry and transformers 5 has dropped."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from typing import Any

from hf_l2l.glue.messages import logger


@dataclass
class RetiredArguments:
    """Options that transformers 5 has dropped; `modernized` says what becomes of them."""

    evaluation_strategy: str | None = field(default=None, metadata={"help": "Now --eval_strategy."})
    warmup_ratio: float | None = field(default=None, metadata={"help": "Now --warmup_steps, with a number below 1."})
    no_cuda: bool = field(default=False, metadata={"help": "Now --use_cpu."})
    per_gpu_train_batch_size: int | None = field(default=None, metadata={"help": "Now --per_device_train_batch_size."})
    per_gpu_eval_batch_size: int | None = field(default=None, metadata={"help": "Now --per_device_eval_batch_size."})
    group_by_length: bool = field(default=False, metadata={"help": "Now --train_sampling_strategy group_by_length."})
    adafactor: bool = field(default=False, metadata={"help": "Now --optim adafactor."})
    push_to_hub_model_id: str | None = field(default=None, metadata={"help": "Now --hub_model_id."})
    push_to_hub_token: str | None = field(default=None, metadata={"help": "Now --hub_token."})
    logging_dir: str | None = field(
        default=None, metadata={"help": "Now the environment variable TENSORBOARD_LOGGING_DIR."}
    )
    overwrite_output_dir: bool = field(default=False, metadata={"help": "Needless: output_dir is written to."})
    save_safetensors: bool = field(default=False, metadata={"help": "Needless: checkpoints are safetensors."})
    use_auth_token: bool = field(default=False, metadata={"help": "Needless; --token names a token."})
    use_mps_device: bool = field(default=False, metadata={"help": "Needless: mps is used where it is there."})
    evaluate_during_training: bool = field(default=False, metadata={"help": "Refused: use --eval_strategy steps."})
    data_dir: str | None = field(default=None, metadata={"help": "Refused: use --train_file and --validation_file."})
    fp16_opt_level: str | None = field(default=None, metadata={"help": "Refused, as --fp16: use --cmp fp16."})
    fp16_backend: str | None = field(default=None, metadata={"help": "Refused, as --fp16: use --cmp fp16."})
    half_precision_backend: str | None = field(default=None, metadata={"help": "Refused, as --fp16: use --cmp fp16."})


SUCCESSORS = {
    "evaluation_strategy": "eval_strategy",
    "warmup_ratio": "warmup_steps",
    "no_cuda": "use_cpu",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "group_by_length": "train_sampling_strategy",
    "adafactor": "optim",
    "push_to_hub_model_id": "hub_model_id",
    "push_to_hub_token": "hub_token",
}
"""Retired options with a successor that takes the same value, but for `SWITCHES`."""

SWITCHES = {"group_by_length": "group_by_length", "adafactor": "adafactor"}
"""Retired switches -> the value that their successor has when they are on."""

NEEDLESS = {
    "overwrite_output_dir": "output_dir is written to whatever lies in it, and training resumes from a checkpoint in "
    "it only with --resume_from_checkpoint",
    "save_safetensors": "checkpoints are always safetensors",
    "use_mps_device": "mps is used where it is there",
    "use_auth_token": "the token of `hf auth login` is used anyway, and --token names another one",
}
"""Retired options without effect -> why none is needed."""

REPLACED = {
    "evaluate_during_training": "--eval_strategy steps",
    "data_dir": "--train_file and --validation_file",
    "fp16_opt_level": "--cmp fp16",
    "fp16_backend": "--cmp fp16",
    "half_precision_backend": "--cmp fp16",
}
"""Retired options that are refused -> what to use in their place, which differs in more than the name."""


def modernized(given: dict[str, Any]) -> dict[str, Any]:
    """The options without retired ones: translated, dropped with the reason, or refused."""
    given = dict(given)
    for old in [f.name for f in fields(RetiredArguments) if f.name in given]:
        value = given.pop(old)
        if old in SUCCESSORS:
            new = SUCCESSORS[old]
            if new in given:
                raise ValueError(f"--{old} is the former name of --{new} (got both); drop --{old}")
            if old == "warmup_ratio" and not 0 <= value < 1:
                raise ValueError(
                    f"--warmup_ratio must be a share of the steps, at least 0 and below 1 (got {value}); give "
                    "--warmup_steps a number of steps"
                )
            if old in SWITCHES and not value:
                continue
            given[new] = SWITCHES.get(old, value)
            shown = "..." if new == "hub_token" else given[new]
            logger.warning("--%s is gone from transformers 5: it is taken as --%s %s", old, new, shown)
        elif old == "logging_dir":
            os.environ["TENSORBOARD_LOGGING_DIR"] = value
            logger.warning(
                "--logging_dir is gone from transformers 5: it is taken as TENSORBOARD_LOGGING_DIR=%s", value
            )
        elif old == "save_safetensors" and not value:
            raise ValueError("checkpoints are always safetensors (got --save_safetensors False); leave it out")
        elif old in NEEDLESS:
            logger.warning("--%s is gone from transformers 5 and has no effect: %s", old, NEEDLESS[old])
        else:
            raise ValueError(f"--{old} is gone from transformers 5 (got {value!r}); use {REPLACED[old]}")
    return given
