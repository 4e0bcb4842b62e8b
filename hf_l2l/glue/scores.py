"""From the outputs of a model to metrics, and which metrics there are.

`hf_l2l.glue.metric` needs the packages of the extra `glue`: it is imported when it is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
from transformers import EvalPrediction, TrainingArguments


def glue() -> Any:
    """The module `hf_l2l.glue.metric`.

    Raises:
        ImportError: with the command that installs what is missing.
    """
    try:
        return importlib.import_module("hf_l2l.glue.metric")
    except ModuleNotFoundError as error:
        raise ImportError(
            f"tasks, files and metrics need the package {error.name} (it is not installed); install all that is "
            "needed with: pip install datasets evaluate scikit-learn scipy"
        ) from error


def metrics_for(metric: str, task: bool, ids: list[int]) -> Callable[[EvalPrediction], dict[str, float]]:
    """The metrics of `GlueMetric(metric)`; for a task with several, their mean, too, as GLUE scores it.

    `ids` are the model's ids of the data's classes, in the data's order, which says which class is the positive one.
    """
    glue_metric = glue().GlueMetric(metric)
    places = np.argsort(ids)

    def compute(prediction: EvalPrediction) -> dict[str, float]:
        predictions, references = decided(prediction.predictions), prediction.label_ids
        if ids:
            predictions, references = places[predictions], places[references]
        found: dict[str, float] = glue_metric.compute(predictions=predictions, references=references)
        if task and len(found) > 1:
            found["combined_score"] = float(np.mean(list(found.values())))
        return found

    return compute


def check_best_metric(args: TrainingArguments, metric: str, task: bool) -> None:
    """Raise ValueError unless what says which model is the best one will be there."""
    names = ["loss", *glue().measures(metric)]
    names += ["combined_score"] if task and len(names) > 2 else []
    asked = args.metric_for_best_model
    if asked is not None and asked.removeprefix("eval_") not in names:
        raise ValueError(
            f"--metric_for_best_model must be one of {', '.join(names)} (got {asked}); leave it out for the loss"
        )


def decided(scores: Any) -> Any:
    """Model outputs, one row per text, as class ids; as numbers where there is one output."""
    scores = scores[0] if isinstance(scores, tuple) else scores
    return np.squeeze(scores, axis=1) if scores.shape[1] == 1 else np.argmax(scores, axis=1)
