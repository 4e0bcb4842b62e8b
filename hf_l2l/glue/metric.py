"""The GLUE tasks and their metrics, without a download.

`run_glue_l2l.py` uses it; so can any script that fine-tunes on GLUE. The metrics are computed by scikit-learn and
scipy and equal those of `evaluate.load("glue", task)`, which needs the Hub. It needs the extra `hf_l2l[glue]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import datasets
import evaluate
import numpy as np
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef, mean_squared_error

HUB_DATASET = "nyu-mll/glue"
"""The Hub's data set with all tasks, one configuration for each."""


@dataclass(frozen=True)
class Task:
    """One task of GLUE, as the Hub's data set has it."""

    texts: tuple[str, ...]
    """The column of the text, or the two of a pair."""
    measures: tuple[str, ...] = ("accuracy",)
    """Names of what the benchmark reports, keys of the metric's result."""
    regression: bool = False
    """Whether labels are numbers to come near to, and not classes."""
    kinds: tuple[str, ...] = ("",)
    """What follows "validation" and "test" in the names of the splits: MNLI has two of each."""


TASKS: Mapping[str, Task] = {
    "cola": Task(("sentence",), ("matthews_correlation",)),
    "mnli": Task(("premise", "hypothesis"), kinds=("_matched", "_mismatched")),
    "mrpc": Task(("sentence1", "sentence2"), ("accuracy", "f1")),
    "qnli": Task(("question", "sentence")),
    "qqp": Task(("question1", "question2"), ("accuracy", "f1")),
    "rte": Task(("sentence1", "sentence2")),
    "sst2": Task(("sentence",)),
    "stsb": Task(("sentence1", "sentence2"), ("pearson", "spearmanr"), regression=True),
    "wnli": Task(("sentence1", "sentence2")),
}
"""The tasks by their names on the Hub."""

OTHER_DATA: Mapping[str, tuple[str, ...]] = {
    "binary": ("accuracy", "f1", "matthews_correlation"),
    "multiclass": ("accuracy", "matthews_correlation"),
    "regression": ("mse", "pearson", "spearmanr"),
}
"""What is computed for data that is no task of GLUE, by kind: all that applies."""


def measures(config_name: str) -> tuple[str, ...]:
    """What `GlueMetric(config_name)` computes.

    Raises:
        ValueError: for a name that is neither a task nor a kind of data.
    """
    name = {"mnli_matched": "mnli", "mnli_mismatched": "mnli"}.get(config_name, config_name)
    if name in TASKS:
        return TASKS[name].measures
    if name in OTHER_DATA:
        return OTHER_DATA[name]
    raise ValueError(
        f"config_name must be a GLUE task or a kind of data (got {config_name!r}); choose one of "
        f"{', '.join((*TASKS, *OTHER_DATA))}"
    )


def _pearson(references: Any, predictions: Any) -> float:
    return _correlation(pearsonr, references, predictions)


def _spearman(references: Any, predictions: Any) -> float:
    return _correlation(spearmanr, references, predictions)


def _correlation(function: Callable[[Any, Any], Any], references: Any, predictions: Any) -> float:
    # scipy refuses a single pair, which is what evaluating a single row gives.
    return float(function(references, predictions).statistic) if len(references) > 1 else float("nan")


def _mse(references: Any, predictions: Any) -> float:
    # scikit-learn refuses what is not finite, which is what a model gives that has diverged.
    finite = np.isfinite(references).all() and np.isfinite(predictions).all()
    return float(mean_squared_error(references, predictions)) if finite else float("nan")


def _f1(references: Any, predictions: Any) -> float:
    # Class 1 is the positive one. Where it is neither there nor predicted, GLUE's F1 is 0.
    return float(f1_score(references, predictions, zero_division=0.0))


def _matthews(references: Any, predictions: Any) -> float:
    # scikit-learn warns, needlessly, where both hold one and the same class: the correlation is 0 there, too.
    if len(np.union1d(references, predictions)) < 2:
        return 0.0
    return float(matthews_corrcoef(references, predictions))


_MEASURES: Mapping[str, Callable[[Any, Any], float]] = {
    "accuracy": lambda references, predictions: float(accuracy_score(references, predictions)),
    "f1": _f1,
    "matthews_correlation": _matthews,
    "mse": _mse,
    "pearson": _pearson,
    "spearmanr": _spearman,
}


class GlueMetric(evaluate.Metric):  # type: ignore[misc]  # evaluate ships no types
    """The metric of one task, under the names that GLUE's metric on the Hub gives.

    `GlueMetric("mrpc").compute(predictions=..., references=...)` returns `{"accuracy": ..., "f1": ...}`. Predictions
    and references are class ids, or numbers for a regression. A correlation of something constant is nan, with
    scipy's warning, and that of a single pair is nan; an F1 or a Matthews correlation that would divide by zero is 0.

    Args:
        config_name: a task of `TASKS`, "mnli_matched", "mnli_mismatched", or a kind of `OTHER_DATA`.

    Raises:
        ValueError: for another name.
    """

    def __init__(self, config_name: str, **kwargs: Any) -> None:
        # In memory: no files are left behind in a cache folder, and processes do not meet there.
        super().__init__(config_name=config_name, **{"keep_in_memory": True, **kwargs})

    def _info(self) -> evaluate.MetricInfo:
        kind = datasets.Value("float64" if self._regression else "int64")
        measures(str(self.config_name))  # an unknown name is said before anything else
        return evaluate.MetricInfo(
            description="The metrics of a GLUE task (Wang et al., arXiv:1804.07461).",
            citation="Wang et al.: GLUE, a multi-task benchmark and analysis platform, arXiv:1804.07461.",
            inputs_description="predictions and references: one class id, or one number, for each example.",
            features=datasets.Features({"predictions": kind, "references": kind}),
            reference_urls=["https://gluebenchmark.com/"],
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {name: _MEASURES[name](references, predictions) for name in measures(str(self.config_name))}

    @property
    def _regression(self) -> bool:
        return self.config_name in ("stsb", "regression")
