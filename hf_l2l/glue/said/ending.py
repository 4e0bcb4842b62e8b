"""The end of a run of `run_glue_l2l.py`: sizes as people read them, where everything is, and what to do next."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, ProgressCallback, Trainer
from transformers.trainer_utils import get_last_checkpoint

from hf_l2l.own_command import python
from hf_l2l.runtime.tensors import size_text

_KEPT = (
    *("task_name", "dataset_name", "dataset_config_name", "train_file", "validation_file", "text_columns"),
    *("label_column", "is_regression", "max_seq_length", "pad_to_max_length", "cache_dir", "trust_remote_code"),
    "use_cpu",
)
"""Options that the next run of the script needs as they were given to this one."""


def with_sizes(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics in which bytes are text, such as "1.5 GiB"."""
    return {
        name: size_text(value) if name.endswith("_bytes") and isinstance(value, int) else value
        for name, value in metrics.items()
    }


class _Progress(ProgressCallback):  # type: ignore[misc]  # transformers ships no types
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        super().on_log(args, state, control, logs=with_sizes(logs or {}), **more)


class _Printer(PrinterCallback):  # type: ignore[misc]  # transformers ships no types
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        super().on_log(args, state, control, logs=with_sizes(logs or {}), **more)


def show_sizes(trainer: Trainer) -> None:
    """Let the trainer print sizes in its logs as text; what is logged remains bytes."""
    for theirs, ours in ((ProgressCallback, _Progress), (PrinterCallback, _Printer)):
        if trainer.pop_callback(theirs) is not None:
            trainer.add_callback(ours)


def last_words(
    folder: str, files: Mapping[str, str], given: Mapping[str, Any], script: str, texts: int, saves: bool, longest: int
) -> str:
    """What a finished training says: where its files are, and what to type to use, evaluate and go on.

    Args:
        folder: with the model and its tokenizer.
        files: names of others in the folder -> what they have, in words.
        given: the options that were given, by name.
        script: the path of the script.
        texts: of each row, one or two.
        saves: whether checkpoints were saved.
        longest: the most tokens that the tokenizer allows.
    """
    width = max(map(len, files), default=0)
    lines = [f"training is done: the model and its tokenizer are in {folder}, with"]
    lines += [f"  {name:<{width}}  {what}" for name, what in files.items()]
    text = {1: '"a text"', 2: '{"text": "a text", "text_pair": "another"}'}[texts]
    lines += [f"to use the model, in Python ({shlex.quote(python())}):", "  from transformers import pipeline"]
    cut = f", max_length={min(given['max_seq_length'], longest)}" if "max_seq_length" in given else ""
    model = f"model={json.dumps(folder)}, truncation=True{cut}"
    lines += [f'  print(pipeline("text-classification", {model})({text}))']
    own_files = {"train_file", "validation_file"} & given.keys()
    missing = {"validation_file": "dev.csv"} if own_files and "validation_file" not in given else {}
    evaluation = {"do_eval": True, **missing, "output_dir": os.path.join(folder, "evaluation")}
    lines += ["to evaluate it:", f"  {_command(script, folder, given, evaluation)}"]
    predicted = {"test_file": "test.csv"} if own_files else {}
    prediction = {"do_predict": True, **predicted, "output_dir": os.path.join(folder, "predictions")}
    lines += ["to predict, for texts without labels:", f"  {_command(script, folder, given, prediction)}"]
    lines += ["to train it for longer:"]
    if saves and get_last_checkpoint(folder) is not None:
        lines += [
            "  the same command with more --num_train_epochs (or --max_steps), and --resume_from_checkpoint True"
        ]
    else:
        lines += [
            "  no checkpoint was saved; with --save_strategy epoch, --resume_from_checkpoint True goes on from one"
        ]
    return "\n".join(lines)


def _command(script: str, folder: str, given: Mapping[str, Any], more: Mapping[str, Any]) -> str:
    """A command line of the script, for the model in `folder`, on the same data."""
    options = {"model_name_or_path": folder, **{name: given[name] for name in _KEPT if name in given}, **more}
    path = os.path.relpath(script)
    words = [python(), *(["-m", Path(script).stem] if Path(path).parts[0] == os.pardir else [path])]
    for name, value in options.items():
        words.append(f"--{name}")
        if name not in more or value is not True:
            words.append(",".join(value) if isinstance(value, list) else str(value))
    return shlex.join(words)
